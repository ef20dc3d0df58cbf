"""Serve one page with every explanation of a chart: `python app_of_texts.py app --port PORT`."""

import os
import sys

from streamlit import runtime

if runtime.exists():
    import streamlit as st

    from featcal.figures import text

    for name, words in vars(text).items():
        if name.isupper() and isinstance(words, str) and "**" in words:
            st.markdown(words)
elif __name__ == "__main__":
    options = [
        "--server.port",
        sys.argv[sys.argv.index("--port") + 1],
        "--server.address",
        "127.0.0.1",
        "--server.headless",
        "true",
        "--browser.gatherUsageStats",
        "false",
    ]
    os.execv(sys.executable, [sys.executable, "-m", "streamlit", "run", __file__, *options])

"""Serve one page with every explanation of a chart: `python app_of_texts.py app --port PORT`."""

import os
import sys
from pathlib import Path

from streamlit import runtime

if runtime.exists():
    import streamlit as st

    sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))
    from explanations import EXPLANATIONS

    for words in EXPLANATIONS.values():
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

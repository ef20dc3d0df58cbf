"""Start the Streamlit app; what it may and may not do is in `app/.streamlit/config.toml`.

The server runs in this process, so that the libraries which the first page needs are imported while the
server starts and the browser opens, not after.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

FIRST_NEEDED = ("torch", "transformers.models.clip.modeling_clip", "pandas", "plotly.graph_objects", "featcal.family")
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_DISABLE_TELEMETRY": "1"}


def start_app(main: Path, port: int, extra: Sequence[str] = ()) -> int:
    """Run the app until it is stopped; returns the exit status. `extra` are further options of `streamlit run`."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    threading.Thread(target=_warm_up, daemon=True).start()
    from streamlit.web import cli

    print(f"featcal app on http://127.0.0.1:{port} (stop with Ctrl-C)", file=sys.stderr, flush=True)
    arguments = ["run", str(main), f"--server.port={port}", "--server.headless=true", *extra]
    return int(cli.main(arguments, prog_name="featcal app", standalone_mode=False) or 0)


def _warm_up() -> None:
    for name in FIRST_NEEDED:
        import_module(name)

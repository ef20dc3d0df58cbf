"""Start the Streamlit app with safe defaults: local address, no telemetry, no file watcher."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

OPTIONS = {
    "server.address": "127.0.0.1",
    "server.fileWatcherType": "none",
    "browser.gatherUsageStats": "false",
    "server.headless": "true",
}


def start_app(main: Path, port: int, extra: Sequence[str] = ()) -> int:
    """Run the app until it is stopped; returns streamlit's exit status."""
    options = [f"--{name}={value}" for name, value in {**OPTIONS, "server.port": port}.items()]
    environment = {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_DISABLE_TELEMETRY": "1", **os.environ}
    command = [sys.executable, "-m", "streamlit", "run", str(main), *options, *extra]
    print(f"featcal app on http://127.0.0.1:{port} (stop with Ctrl-C)", file=sys.stderr, flush=True)
    try:
        return subprocess.run(command, env=environment, check=False).returncode
    except KeyboardInterrupt:
        return 0

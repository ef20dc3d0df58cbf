"""Start the Streamlit app, whose settings are in `app/.streamlit/config.toml`.

The server runs in this process, so that the libraries which the first page needs are imported while the server starts
and the browser opens, not after.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from featcal.system.environment import let_threads_sleep
from featcal.system.extras import require_packages
from featcal.system.libraries import collect_later
from featcal.system.sandbox import ServerRules

FIRST_NEEDED = ("plotly.graph_objects", "pandas", "featcal.figures.charts", "featcal.models.families.clip")
# For a part of a millisecond: sleeping at once costs half of a slider's time, spinning on costs the browser its core.
SPINS = 30_000
"""Number of times that a thread looks for its next small product before it sleeps, in the app and in its jobs."""
SHARED_OPTIONS = ("--server.address=0.0.0.0", "--server.maxMessageSize=32")
"""Options of streamlit where others use the server too: who may reach it, and the most MB of one message."""
ATTEMPTS = 300
"""Tenths of a second that a server has to answer in before nobody waits any more to open a browser."""
FIRST_VISIT = 3.0
"""Seconds after which libraries are imported though nobody has opened a page yet."""
_warming: list[threading.Thread] = []
_frame_drawn = threading.Event()


def start_app(
    main: Path, port: int, extra: Sequence[str] = (), rules: ServerRules | None = None, opens_browser: bool = False
) -> int:
    """Run the app until it is stopped, and return the exit status.

    Args:
        main: the app's page script; what streamlit is given is `server.py` beside it.
        extra: further options of `streamlit run`.
        rules: of a server that others use too, which listens on every address and works in its first folder.
        opens_browser: show it in this machine's browser as soon as it answers, where there is a screen.
    """
    let_threads_sleep(SPINS)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    require_packages("streamlit", "plotly", "umap", "jinja2")
    from streamlit.web import cli

    address = "127.0.0.1"
    if rules is not None:
        rules.to_environment()
        os.environ["HF_HUB_OFFLINE"] = "1"
        # Relative paths of visitors start in a folder that they may see.
        os.chdir(rules.roots[0])
        address, extra = "0.0.0.0", [*SHARED_OPTIONS, *extra]
    sys.path.insert(0, str(main.parents[1]))
    _warming.append(threading.Thread(target=_warm_up, args=(main.parent.name,), daemon=True))
    _warming[0].start()
    print(f"featcal app on http://{address}:{port} (stop with Ctrl-C)", file=sys.stderr, flush=True)
    if opens_browser and _has_screen():
        threading.Thread(target=_open_browser, args=(address, port), daemon=True).start()
    arguments = ["run", str(main.with_name("server.py")), f"--server.port={port}", "--server.headless=true", *extra]
    return int(cli.main(arguments, prog_name="featcal app", standalone_mode=False) or 0)


def wait_until_warm() -> None:
    """Return when the imports that `start_app` began are done: two threads must not import torch at once."""
    for thread in _warming:
        thread.join()


def release_warm_up() -> None:
    """Say that the frame of a page is drawn, which the imports would have held back."""
    _frame_drawn.set()


def is_warm() -> bool:
    """Say whether the libraries are loaded, so that a page can be drawn at once."""
    return "torch" in sys.modules and not any(thread.is_alive() for thread in _warming)


def _has_screen() -> bool:
    """Say whether a browser has a screen to open on; without one, a browser of text would take the terminal."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _open_browser(address: str, port: int) -> None:
    """Open the app in a browser once it answers."""
    for _ in range(ATTEMPTS):
        with suppress(OSError), socket.create_connection((address, port), timeout=1):
            webbrowser.open(f"http://{address}:{port}")
            return
        time.sleep(0.1)


def _warm_up(app: str) -> None:
    """Import everything that the first chart needs; the app's module `opening` prepares what the app opens on."""
    _frame_drawn.wait(FIRST_VISIT)
    with collect_later():
        for name in (*FIRST_NEEDED, f"{app}.opening"):
            import_module(name)
    import_module(f"{app}.opening").prepare()

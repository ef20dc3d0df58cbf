"""Start the Streamlit app, whose settings are in `app/.streamlit/config.toml`.

The server runs in this process, so that the libraries of the first page are imported while the server starts and the
browser opens.
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
"""Number of times that a thread checks for its next small product before it sleeps, in the app and in its jobs."""
SHARED_OPTIONS = ("--server.address=0.0.0.0", "--server.maxMessageSize=32")
"""Options of streamlit for a shared server: its address, and the largest message in MB."""
ATTEMPTS = 300
"""Tenths of a second to wait for the server before opening a browser is given up."""
FIRST_VISIT = 3.0
"""Seconds after which libraries are imported even without a visitor."""
_warming: list[threading.Thread] = []
_frame_drawn = threading.Event()


def start_app(
    main: Path,
    port: int,
    extra: Sequence[str] = (),
    rules: ServerRules | None = None,
    opens_browser: bool = False,
    base: str = "",
) -> int:
    """Run the app until it is stopped, and return the exit status.

    Args:
        main: the app's page script; streamlit runs `server.py` beside it.
        extra: further options of `streamlit run`.
        rules: of a shared server, which listens on every address and works in its first folder.
        opens_browser: open this machine's browser as soon as the server answers, if there is a screen.
        base: path below which everything is served, such as "/featcal"; "" for the root.
    """
    let_threads_sleep(SPINS)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    require_packages("streamlit", "plotly", "umap", "jinja2")
    from streamlit.web import cli

    if rules is not None:
        rules.to_environment()
        os.environ["HF_HUB_OFFLINE"] = "1"
        # Relative paths of visitors start in a folder that they may see.
        os.chdir(rules.roots[0])
        extra = [*SHARED_OPTIONS, *extra]
    address = _chosen_address(extra)
    sys.path.insert(0, str(main.parents[1]))
    _warming.append(threading.Thread(target=_warm_up, args=(main.parent.name,), daemon=True))
    _warming[0].start()
    print(f"featcal app on {_url(address, port, base)} (stop with Ctrl-C)", file=sys.stderr, flush=True)
    if opens_browser and _has_screen():
        threading.Thread(target=_open_browser, args=(address, port, base), daemon=True).start()
    served = (f"--server.port={port}", f"--server.baseUrlPath={base}", "--server.headless=true")
    arguments = ["run", str(main.with_name("server.py")), *served, *extra]
    return int(cli.main(arguments, prog_name="featcal app", standalone_mode=False) or 0)


def _chosen_address(options: Sequence[str]) -> str:
    """Return the address that streamlit listens on under these options, the last of which counts.

    >>> _chosen_address(["--server.address=0.0.0.0", "--server.address", "::1"])
    '::1'
    >>> _chosen_address([])
    '127.0.0.1'
    """
    address = "127.0.0.1"  # as app/.streamlit/config.toml says
    for place, option in enumerate(options, 1):
        name, _, value = option.partition("=")
        if name == "--server.address":
            address = value or "".join(options[place : place + 1])
    return address


def wait_until_warm() -> None:
    """Wait until the imports of `start_app` are finished, because two threads must not import torch at once."""
    for thread in _warming:
        thread.join()


def release_warm_up() -> None:
    """Signal that the frame of a page is drawn, so that the imports may begin."""
    _frame_drawn.set()


def is_warm() -> bool:
    """Say whether the libraries are loaded, so that a page can be drawn at once."""
    return "torch" in sys.modules and not any(thread.is_alive() for thread in _warming)


def _has_screen() -> bool:
    """Say whether a browser has a screen; without one, a text browser would take over the terminal."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _url(address: str, port: int, base: str) -> str:
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{port}{base}"


def _open_browser(address: str, port: int, base: str) -> None:
    """Open the app in a browser once it answers."""
    for _ in range(ATTEMPTS):
        with suppress(OSError), socket.create_connection((address, port), timeout=1):
            webbrowser.open(_url(address, port, base))
            return
        time.sleep(0.1)


def _warm_up(app: str) -> None:
    """Import everything that the first chart needs; the app's module `opening` prepares the first page."""
    _frame_drawn.wait(FIRST_VISIT)
    with collect_later():
        for name in (*FIRST_NEEDED, f"{app}.opening"):
            import_module(name)
    import_module(f"{app}.opening").prepare()

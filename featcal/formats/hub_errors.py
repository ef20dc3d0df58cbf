"""Explain failures between the Hub's clients and the Hub, and what to do."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

T = TypeVar("T")
_WAITS = (1.0, 2.0, 4.0, 8.0)
"""Seconds between attempts, if the Hub does not ask for another wait."""
_LONGEST_WAIT = 60.0
"""Longest wait in seconds that featcal accepts from the Hub; longer ones are reported instead."""
_PATIENCE = 20.0
"""Seconds of a first attempt after which it is not repeated, because the clients have already repeated it."""
_TRANSPORTS = ("httpx", "httpx2", "httpcore", "httpcore2", "h11", "requests", "urllib3", "aiohttp", "socket", "ssl")
_BROKEN = ("ProtocolError", "ReadError", "IncompleteRead", "ChunkedEncodingError", "ClientPayloadError")
_AGAIN = "start again later: files that are whole are kept"


@dataclass(frozen=True)
class Trouble:
    """One reason why content of the Hub is not available."""

    why: str
    """The failure of the Hub or of this machine, as the end of a sentence."""
    remedy: str
    passes: bool = False
    """True if the same request may soon succeed."""
    wait: float | None = None
    """Seconds that the Hub asks to wait."""


_OFFLINE = Trouble(
    "is not asked, since HF_HUB_OFFLINE is set, and its local cache does not have it whole",
    "unset HF_HUB_OFFLINE, or give a local folder",
)


class Unreachable(Exception):
    """The Hub does not answer, so nothing is known about an id."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(trouble.why)
        self.trouble = trouble


def find_trouble(error: BaseException) -> Trouble | None:
    """Return the reason of an error of the Hub's clients, or behind its cause; None for another error."""
    return next((trouble for one in causes(error) if (trouble := _read(one)) is not None), None)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, outermost first, because clients wrap one error in another."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _read(error: BaseException) -> Trouble | None:
    name, module = type(error).__name__, type(error).__module__.split(".")[0]
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return _read_status(status, error)
    if name in ("OfflineModeIsEnabled", "LocalEntryNotFoundError") and error.__cause__ is None:
        return _OFFLINE
    if module in _TRANSPORTS or isinstance(error, (ConnectionError, TimeoutError)):
        return _read_transport(name, error)
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        place = f" ({error.filename})" if error.filename else ""
        return Trouble(
            f"was asked, but its local cache cannot be written{place}",
            "set HF_HOME, and HF_DATASETS_CACHE for data sets, to a folder that can be written",
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Trouble("was asked, but the disk of its local cache is full", "free space, or set HF_HOME elsewhere")
    return None


def _read_status(status: int, error: BaseException) -> Trouble | None:
    file = _name_file(error)
    if status == 401:
        return Trouble("refuses your token (401)", "renew the token in HF_TOKEN or of `hf auth login`, or take it away")
    if status == 403:
        return Trouble(f"forbids to read{file} (403)", "use a token that may read it, or ask its owner")
    if status == 429:
        wait = _asked_wait(error)
        after = "later" if wait is None else f"in {wait:.0f} s"
        return Trouble(
            "limits how often it is asked (429)", f"start again {after}, with HF_TOKEN for a higher limit", True, wait
        )
    if status == 408 or status >= 500:
        return Trouble(f"fails with{file or ' the request'} ({status})", _AGAIN, True)
    return None


def _read_transport(name: str, error: BaseException) -> Trouble:
    from huggingface_hub import constants

    file = _name_file(error)
    if "timeout" in name.lower():
        more = f"{_AGAIN}, or set HF_HUB_DOWNLOAD_TIMEOUT to more seconds"
        return Trouble(f"does not answer in time{f' for{file}' if file else ''}", more, True)
    if any(one in name for one in _BROKEN):
        return Trouble(f"broke off in the middle of{file or ' an answer'}", _AGAIN, True)
    if constants.HF_HUB_OFFLINE:  # `datasets` says so by an error of its own
        return _OFFLINE
    return Trouble(f"cannot be reached ({name})", "connect, or give a local folder")


def _name_file(error: BaseException) -> str:
    """Return the requested file, after a blank; "" if the address does not name it."""
    asked: Any = getattr(error, "response", None)
    try:
        address = urlsplit(str((error.request if asked is None else asked).url))  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):  # an error of another client, or before a request was made
        return ""
    name = PurePosixPath(unquote(address.path)).name
    return f" {name}" if "." in name and not address.path.startswith("/api/") else ""


def _asked_wait(error: BaseException) -> float | None:
    try:
        return float(error.response.headers["Retry-After"])  # type: ignore[attr-defined]
    except (AttributeError, KeyError, ValueError):  # none, or a date
        return None


def limit_waits() -> None:
    """Limit the time that the Hub's client waits for any answer to the time-out for files
    (`HF_HUB_DOWNLOAD_TIMEOUT`); without this, the client sends most requests without a limit.
    """
    from huggingface_hub import get_session

    hooks = get_session().event_hooks["request"]
    if _limit_wait not in hooks:
        hooks.append(_limit_wait)


def _limit_wait(request: Any) -> None:
    """Set a time-out for a request that has none, unless it uploads content, which needs an unknown time."""
    from huggingface_hub import constants

    asks = request.method in ("GET", "HEAD") or "/paths-info/" in request.url.path
    if asks and not any(request.extensions.get("timeout", {}).values()):
        seconds = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), seconds)


def try_again(question: Callable[[], T]) -> T:
    """Return the answer to a request, with retries after temporary failures."""
    started = time.monotonic()
    for pause in _WAITS:
        try:
            return question()
        except Exception as error:
            trouble: Any = find_trouble(error)
            wait = pause if trouble is None or trouble.wait is None else trouble.wait
            spent = time.monotonic() - started
            if trouble is None or not trouble.passes or wait > _LONGEST_WAIT or spent > _PATIENCE:
                raise
        time.sleep(wait)
    return question()

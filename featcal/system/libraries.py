"""Import the large libraries with the garbage collector off, in a process that is featcal's own."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module


def load_libraries() -> None:
    """Import the libraries that every command on models needs.

    For the owner of a process, since it sets the collector: the command line calls it, functions of the library never
    do.
    """
    with collect_later():
        import_module("transformers.modeling_utils")


@contextmanager
def collect_later() -> Iterator[None]:
    """Import in the `with` without the collector, which would walk a million new objects that are here to stay."""
    gc.disable()
    try:
        yield
    finally:
        # Nor are they walked later, in the middle of a slider's move or when the process ends, for most of a second.
        gc.freeze()
        gc.enable()
        atexit.register(_unfreeze)


def _unfreeze() -> None:
    """Undo the freeze when the process ends, if a library would report the remaining objects as leaks."""
    if "triton" in sys.modules:
        gc.unfreeze()

"""Hold the sessions of suites that visitors share, within limits of number and memory."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from featcal.session.session import Session
from featcal.system.errors import InputError
from featcal.system.formatting import readable
from featcal.system.progress import release_memory
from featcal.system.sandbox import ServerRules

MOST = 4
"""Largest number of suites that are open at once."""


@dataclass
class _Open:
    session: Session
    needs: int
    used: float


class Held:
    """Open suites; the least recently viewed one is closed for another.

    Args:
        rules: of a shared server, which limit the memory of all suites together and close idle ones; None has neither
            limit.
        clock: function that returns seconds.
    """

    def __init__(self, rules: ServerRules | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rules, self._clock = rules, clock
        self._open: OrderedDict[Hashable, _Open] = OrderedDict()
        self._lock, self._opening = threading.Lock(), threading.Lock()
        if rules is not None:
            threading.Thread(target=_look, args=(weakref.ref(self), rules.idle / 4), daemon=True).start()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, key: Hashable, opened: Callable[[], Session], needs: Callable[[], int]) -> Session:
        """Return the session of a suite; it is opened if necessary.

        Args:
            key: identifies the suite with the current state of its files.
            needs: estimate of its bytes by its headers; called only on a shared server, before the suite is opened.

        Raises:
            InputError: it needs more than all suites together may use, or it cannot be opened.
        """
        found = self._find(key)
        if found is not None:
            return found
        # One suite is opened at a time, as two would need their memory together; nobody waits here whose suite is open.
        with self._opening:
            # Somebody else may have opened it while this visitor waited.
            found = self._find(key)
            if found is not None:
                return found
            wanted = 0 if self._rules is None else needs()
            self._make_room(wanted)
            session = opened()
            with self._lock:
                # The same one under an earlier key, before the Hub was asked for its models, would release it.
                for other in [other for other, one in self._open.items() if one.session is session]:
                    del self._open[other]
                self._open[key] = _Open(session, wanted, self._clock())
            return session

    def let_go(self) -> None:
        """Close suites that have been idle for too long."""
        if self._rules is None:
            return
        with self._lock:
            late = self._clock() - self._rules.idle
            idle = [self._open.pop(key) for key, one in list(self._open.items()) if one.used < late]
        _release(idle)

    def _find(self, key: Hashable) -> Session | None:
        with self._lock:
            one = self._open.get(key)
            if one is None:
                return None
            one.used = self._clock()
            self._open.move_to_end(key)
            return one.session

    def _make_room(self, wanted: int) -> None:
        limit = None if self._rules is None else self._rules.max_memory
        if limit is not None and wanted > limit:
            raise InputError(
                f"this suite needs about {readable(wanted)} of memory, and this server allows {readable(limit)} for "
                "all suites; "
                "use it on a machine of your own (pip install 'featcal[app]')"
            )
        out: list[_Open] = []
        with self._lock:
            while self._open and (
                len(self._open) >= MOST
                or (limit is not None and sum(one.needs for one in self._open.values()) + wanted > limit)
            ):
                # Released outside the lock: freeing memory takes long, and others ask for their suites meanwhile.
                out.append(self._open.popitem(last=False)[1])
        _release(out)


def _release(suites: Sequence[_Open]) -> None:
    """Release closed sessions and their memory."""
    for one in suites:
        # A page that is open in a browser still refers to its session, so dropping it would not do.
        one.session.release()
    if suites:
        gc.collect()  # results refer to each other
        release_memory()


def _look(held: weakref.ref[Held], seconds: float) -> None:
    """Close idle suites from time to time, as long as the holder exists."""
    # A weak reference: the thread itself must not keep the suites alive.
    while (one := held()) is not None:
        one.let_go()
        # Nor may this name, while it sleeps.
        del one
        time.sleep(seconds)

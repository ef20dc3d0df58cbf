"""Open a suite once and compute everything of it once, for app, command line, public functions and studies."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from pathlib import Path
from weakref import WeakValueDictionary

from featcal.family.opening import Family, ensure_family, open_family
from featcal.session.fingerprint import suite_stamp
from featcal.session.fits import Fits
from featcal.session.measurements import Measurements
from featcal.session.open_suite import OpenSuite
from featcal.suite.schema import Suite, load_suite
from featcal.system.errors import InputError


class Session(OpenSuite):
    """One opened suite and what was computed of it: `measure` measures its models, `fit` makes models of them.

    Results are told by names and options, never by the content of arrays; a model that is given as an object is told by
    that very object, a checkpoint by its files. Moving lam, rho or alpha computes the model anew and nothing of the
    experts. One lock guards the whole of it: whoever asks while something is computed waits, and then finds it.
    A failure, and work that `progress` ends, keep nothing. What samples and models are read from must stay as it was
    when the session was opened: `open_session` gives another one for files that have changed.

    Args:
        family: the suite with its models; `Family.resident` of it where they are to stay in memory.
        budget: bytes that results may take; left out, an eighth of what the machine has to spare now. The least
            recently used goes first, and is computed again when it is asked for.
        one_shot: nothing is asked of the same samples again. Otherwise what experts compute on them stays for the next
            model, as far as there is room, and small splits stay.
        max_memory: bytes of resident memory of the process that measurements of drift stay within: token states beyond
            it lie in files meanwhile, and as many samples are taken through together as there is room for. Nothing
            that experts compute is kept then.
        shared: expert passes and models that are there for several sessions of the family; left out, its own alone.
    """

    # Both are made anew at every access: kept here, they and the session would hold each other, and the memory of a
    # session that nobody holds would wait for the collector.
    @property
    def measure(self) -> Measurements:
        """Return the measurements of the suite's models: drift, features and scores."""
        return Measurements(self)

    @property
    def fit(self) -> Fits:
        """Return the fits of the suite: calibrations, baselines, and the tensors of any model."""
        return Fits(self)


def open_session(suite: str | Path | Suite, device: str = "auto", *, resident: bool = False) -> Session:
    """Return a suite's session: the very same one while somebody holds it and no file of the suite has changed.

    Args:
        suite: opened, or an embedded name or the path of a suite file.
        resident: every tensor stays in memory, for interactive work.

    Raises:
        InputError: the suite file is not valid, or its models do not fit together.
    """
    loaded = suite if isinstance(suite, Suite) else load_suite(suite)
    stamp = suite_stamp(loaded)  # before anything is read, so that a change meanwhile shows
    key = stamp, device, resident
    with _guard:
        turn = _turns.setdefault(key, threading.Lock())
    with turn:  # who wants the same suite waits; others need not
        session = _open.get(key)
        if session is None or session.released:
            family = open_family(loaded, device)
            # The Hub may have been asked since.
            key = stamp._replace(commits=family.commits), device, resident
            session = _open[key] = Session(family.resident() if resident else family)
        return session


def ensure_session(
    suite: Suite | Family | Session, device: str = "auto", *, one_shot: bool = False, max_memory: int | None = None
) -> Session:
    """Return the session itself, or a new one of a suite; the other arguments are those of a new one.

    Raises:
        InputError: it is none of these, its models do not fit together, or a memory limit is asked for of a session
            that is open.
    """
    if not isinstance(suite, Session):
        return Session(ensure_family(suite, device), one_shot=one_shot, max_memory=max_memory)
    if max_memory is not None:
        raise InputError("max_memory: an open session has a limit of its own; open it with one")
    return suite


# Weak, so that a session goes with the last page that holds it, and a turn with the last that waits for it.
_open: WeakValueDictionary[Hashable, Session] = WeakValueDictionary()
_turns: WeakValueDictionary[Hashable, threading.Lock] = WeakValueDictionary()
_guard = threading.Lock()

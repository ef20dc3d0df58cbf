"""Open a suite once and compute every result once, for app, command line, public functions and studies."""

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
    """One open suite with its cached results: `measure` measures its models, `fit` makes models.

    The key of a result are names and options, never the content of arrays; the key of a model given as an object is
    that very object, and of a checkpoint its files. A change of lam, rho or alpha recomputes the model but nothing of
    the experts. One lock guards all of it: a caller waits while a result is computed, and then finds it in the cache. A
    failure, or work that `progress` ends, caches nothing. The files of models and samples must not change while the
    session is open: `open_session` returns another one for files that have changed.

    Args:
        family: the suite with its models; `Family.resident` if they should stay in memory.
        budget: bytes for cached results; by default an eighth of the free memory. The least recently used is evicted
            first, and computed again when needed.
        one_shot: the same samples are not needed again. Otherwise the experts' activations on them are cached for the
            next model, as far as there is room, and so are small splits.
        max_memory: bytes of resident memory that measurements of drift stay within: token states beyond it go to files,
            and as many samples are walked together as fit. The experts' activations are then not cached.
        shared: expert passes and models that several sessions of the family share; by default it shares none.

    >>> import featcal
    >>> session = featcal.open_session("lm-mini")
    >>> merged = featcal.measure_drift(session, "merged", samples=8)
    >>> featcal.measure_drift(session, "merged", samples=8) is merged
    True
    >>> session.tasks
    ['sentiment', 'entailment', 'correct', 'rewrite']
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
    """Return a suite's session: the very same one while it is in use and no file of the suite has changed.

    Args:
        suite: opened, or an embedded name or the path of a suite file.
        resident: every tensor stays in memory, for interactive work.

    Raises:
        InputError: the suite file is not valid, or its models do not fit together.

    >>> import featcal
    >>> session = featcal.open_session("lm-mini")
    >>> session is featcal.open_session("lm-mini")  # while it is in use
    True
    >>> featcal.measure_drift(session, "anchor:rho=0.5", samples=8).model
    'anchor:rho=0.5'
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
    """Return the given session, or a new one of a suite; the other arguments are for a new one.

    Raises:
        InputError: it is none of these, its models do not fit together, or a memory limit is given for an open session.
    """
    if not isinstance(suite, Session):
        return Session(ensure_family(suite, device), one_shot=one_shot, max_memory=max_memory)
    if max_memory is not None:
        raise InputError("max_memory: an open session keeps its own limit; open a new one with max_memory")
    return suite


# Weak, so that a session goes with the last page that holds it, and a turn with the last that waits for it.
_open: WeakValueDictionary[Hashable, Session] = WeakValueDictionary()
_turns: WeakValueDictionary[Hashable, threading.Lock] = WeakValueDictionary()
_guard = threading.Lock()

"""Make the models of a study; shared work is done once, and its cost counts for every model that uses it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from featcal.formats.weights import Overlay, Weights, is_in_memory
from featcal.models.compute import use_threads
from featcal.models.lane import WalkCache
from featcal.models.model import Model
from featcal.session.cache import Results, nbytes
from featcal.session.model_ref import ModelRef
from featcal.session.open_suite import SharedResults
from featcal.session.session import Session
from featcal.suite.calibration_options import CalibrationConfig
from featcal.system.progress import Timing, peak_rss_bytes, release_memory, rss_bytes

T = TypeVar("T")
Make = Callable[[Session, CalibrationConfig], Weights]
SETS = 2
"""Number of sets of expert passes that are cached at a time: for calibration samples, and for another split."""
SHARED = "shared"
"""Name of the stage with shared work, counted with the time that it originally took."""
_OF_ALL = ("total", "samples")
"""Stages of a record that are not part of the model's cost, or that a session has removed from it."""


@dataclass
class Cost(Timing):
    """Cost of a piece of work: seconds of clock and processor, memory; known when the work is done."""

    peak_bytes: int | None = None
    """Largest growth of the process's resident memory; None if the system cannot reset its peak."""


@dataclass(frozen=True)
class MadeModel:
    """A model that other models of the study start from."""

    weights: Weights
    cost: Cost
    passes: frozenset[Hashable]
    """Sets of expert passes in its cost."""


class Maker:
    """Make models of a study, each from those made before, and measure the cost of each by itself.

    Args:
        needed: session and model of every point that will be made.
    """

    def __init__(self, needed: Iterable[tuple[Session, ModelRef]]) -> None:
        self._needed = Counter((id(of), key) for of, named in needed for key in _list_starts(named))
        """Number of remaining points that start from a model, by model and session."""
        self._of: Session | None = None
        self._passes = Passes()
        self._made: dict[Hashable, MadeModel] = {}

    def make(self, of: Session, named: ModelRef, way: Make | None) -> tuple[ModelRef, Cost, dict[str, float]]:
        """Make a model with all its tensors in memory; return it with its cost, in total and by stage. The cost is that
        of the model by itself, as if nothing were cached.

        Args:
            way: name of the way to make it, if it is not the usual one.
        """
        if named.is_every_expert:
            return named, Cost(), {}
        if of is not self._of:  # the memory holds what is shared of one suite
            self._of, self._passes, self._made = of, Passes(), {}
        start = next((self._made[key] for key in _list_starts(named) if key in self._made), None)
        shared = SharedResults(self._passes, {key: one.weights for key, one in self._made.items()})
        maker = Session(of.family, one_shot=True, shared=shared)  # which finds nothing but what is shared
        self._passes.begin(frozenset() if start is None else start.passes)
        # Two threads take up to twice the processor's time of one, and as long.
        with use_threads(1 if of.family.is_tiny else None), measure_cost() as cost:
            weights, stages = _weights(maker, named, way)
            # Read here, inside the measurement: a lazy merge would do its work when it is scored.
            held = _hold(weights, of.family.adapter.tower)
        found = self._passes.sum_found()
        _add_held(cost, found, self._passes.bytes_found)
        shared_seconds = found.wall
        if start is not None:
            before = start.cost.peak_bytes
            _add_held(cost, start.cost, nbytes(start.weights.read(of.family.adapter.tower)))
            # Alone, it would be made first.
            cost.peak_bytes = None if cost.peak_bytes is None or before is None else max(before, cost.peak_bytes)
            shared_seconds += start.cost.wall
        if self._needed[id(of), named.key]:
            self._made[named.key] = MadeModel(held, cost, self._passes.used)
        seconds = {name: float(value) for name, value in stages.items() if name not in _OF_ALL}
        return of.resolve(held), cost, seconds | ({SHARED: shared_seconds} if shared_seconds else {})

    def forget(self, of: Session, named: ModelRef) -> None:
        """Mark a point as done; release the models that it started from and that no other point needs."""
        for key in _list_starts(named):
            self._needed[id(of), key] -= 1
            if of is self._of and not self._needed[id(of), key]:
                self._made.pop(key, None)


class Passes(Results[Hashable]):
    """Expert passes that several models of one suite share, and the cost of making them."""

    def __init__(self) -> None:
        super().__init__(SETS, lambda _: 1)
        self._took: dict[Hashable, Timing] = {}
        self._paid: frozenset[Hashable] = frozenset()
        self._found = Timing()
        self._before: list[tuple[WalkCache, Timing, int]] = []
        self.bytes_found = 0
        """Memory of reused shared work; complete after `sum_found`."""
        self.used: frozenset[Hashable] = frozenset()
        """Passes that the current model uses, including those of the models that it starts from."""

    def begin(self, paid: frozenset[Hashable]) -> None:
        """Begin the account of the next model.

        Args:
            paid: passes whose cost the model already includes.
        """
        self.used = self._paid = paid
        self._found, self._before, self.bytes_found = Timing(), [], 0

    def get_or_make(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the cached passes, or call `make` and cache its result."""
        there, effort = key in self, Timing()
        with effort.measure():
            found = super().get_or_make(key, make)
        if not there:
            self._took[key] = effort
        if there and key not in self._paid and key not in self.used:
            self._find(key, found)
        self.used |= {key}
        return found

    def _find(self, key: Hashable, found: Any) -> None:
        self._found.add(self._took[key])
        self.bytes_found += nbytes([one.batches for one in found.values()])
        for room in {id(one.kept): one.kept for one in found.values()}.values():
            self._before.append((room, replace(room.spared), room.spared_bytes))

    def sum_found(self) -> Timing:
        """Return the cost of shared work that the current model reuses from earlier ones,
        as if it had done the work itself.
        """
        for room, before, held in self._before:
            self._found.add(Timing(room.spared.wall - before.wall, room.spared.cpu - before.cpu))
            self.bytes_found += room.spared_bytes - held
        self._before = []
        return self._found


def _list_starts(named: ModelRef) -> list[Hashable]:
    """Return the keys of the models that a model starts from, nearest first."""
    keys: list[Hashable] = []
    one: ModelRef | None = named
    while one is not None and one.of is not None and (one.baseline is None or one.baseline.on_another):
        keys.append(one.of.key)
        one = one.of
    return keys


def _weights(maker: Session, named: ModelRef, way: Make | None) -> tuple[Weights, Mapping[str, Any]]:
    if way is not None:
        assert named.calibration is not None
        return way(maker, named.calibration), {}
    if named.config is not None:
        result = maker.fit.calibrate(named)
        return result.weights, result.record["seconds"]
    if named.baseline is not None:
        fitted = maker.fit.baseline(named)
        return fitted.weights, fitted.record["seconds"]
    return maker.fit.weights(named), {}


def _hold(weights: Weights, names: Iterable[str]) -> Weights:
    """Return a model with these tensors in memory; tensors that are in memory already stay the same objects."""
    if isinstance(weights, Model):
        return replace(weights, under=_hold(weights.under, names))
    return weights if is_in_memory(weights, names) else Overlay(weights.label, weights, weights.read(names))


def _add_held(cost: Cost, found: Timing, held: int) -> None:
    """Add the cost of reused shared work, and its bytes."""
    cost.add(found)
    if cost.peak_bytes is not None:
        cost.peak_bytes += held


@contextmanager
def measure_cost() -> Iterator[Cost]:
    """Measure wall and CPU time and peak-memory growth of the body of the `with`; the allocator is trimmed first."""
    cost = Cost()
    release_memory()
    # The system's peak counts from the start of the process unless it is told to begin anew.
    held, counts = rss_bytes(), _forget_peak()
    try:
        with cost.measure():
            yield cost
    finally:
        peak = peak_rss_bytes()
        cost.peak_bytes = max(0, peak - held) if counts and peak is not None else None


def _forget_peak() -> bool:
    """Reset the system's peak-memory counter of this process, and say whether that works (only on Linux)."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return False
    return True

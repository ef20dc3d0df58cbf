"""Make the models of a study; what several of them need is made once, and its cost is a part of the cost of each."""

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
"""Sets of expert passes that are there at a time: of calibration samples, and of another split."""
SHARED = "shared"
"""Stage of a model's making: what was there already, as long as it took when it was made."""
_OF_ALL = ("total", "samples")
"""Stages of a record that are not a part of it, or that a session has taken out of it."""


@dataclass
class Cost(Timing):
    """Cost of a piece of work: seconds of clock and processor, memory; known when the work is done."""

    peak_bytes: int | None = None
    """By how much the process's resident memory grew at most, above what it held before; None where the system cannot
    count a peak anew."""


@dataclass(frozen=True)
class MadeModel:
    """A model that others of the study act on."""

    weights: Weights
    cost: Cost
    passes: frozenset[Hashable]
    """Sets of expert passes that its cost includes."""


class Maker:
    """Make models of a study, each of what the study has made before it, and say what each costs by itself.

    Args:
        needed: for every point that will be made, its session and the model it stands for.
    """

    def __init__(self, needed: Iterable[tuple[Session, ModelRef]]) -> None:
        self._needed = Counter((id(of), key) for of, named in needed for key in _list_starts(named))
        """How many points still act on a model of a session."""
        self._of: Session | None = None
        self._passes = Passes()
        self._made: dict[Hashable, MadeModel] = {}

    def make(self, of: Session, named: ModelRef, way: Make | None) -> tuple[ModelRef, Cost, dict[str, float]]:
        """Make a model with every tensor that is computed with in memory; return it with its cost, in all and by stage.

        The cost is that of the model alone, as if nothing were there yet.

        Args:
            way: how it is made, if not as everywhere.
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
        """Keep what a point acts on no longer, unless another one does too; the point is done."""
        for key in _list_starts(named):
            self._needed[id(of), key] -= 1
            if of is self._of and not self._needed[id(of), key]:
                self._made.pop(key, None)


class Passes(Results[Hashable]):
    """Expert passes that several models of one suite are made of, and what making them took."""

    def __init__(self) -> None:
        super().__init__(SETS, lambda _: 1)
        self._took: dict[Hashable, Timing] = {}
        self._paid: frozenset[Hashable] = frozenset()
        self._found = Timing()
        self._before: list[tuple[WalkCache, Timing, int]] = []
        self.bytes_found = 0
        """Memory of what was there already, complete with `sum_found`."""
        self.used: frozenset[Hashable] = frozenset()
        """Those that the model in hand is made of, with what it acts on."""

    def begin(self, paid: frozenset[Hashable]) -> None:
        """Count anew, for the next model.

        Args:
            paid: those whose cost the model has a part of already.
        """
        self.used = self._paid = paid
        self._found, self._before, self.bytes_found = Timing(), [], 0

    def get_or_make(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the kept passes, or else what `make` gives, to be kept."""
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
        """Return what the model in hand would have taken beside its own work, had nothing been there."""
        for room, before, held in self._before:
            self._found.add(Timing(room.spared.wall - before.wall, room.spared.cpu - before.cpu))
            self.bytes_found += room.spared_bytes - held
        self._before = []
        return self._found


def _list_starts(named: ModelRef) -> list[Hashable]:
    """Return the keys of the models that a model acts on, the nearest first."""
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
    """Return a model with these tensors in memory; what is there already stays the very same object."""
    if isinstance(weights, Model):
        return replace(weights, under=_hold(weights.under, names))
    return weights if is_in_memory(weights, names) else Overlay(weights.label, weights, weights.read(names))


def _add_held(cost: Cost, found: Timing, held: int) -> None:
    """Add to the cost of work what it found, and the bytes of that."""
    cost.add(found)
    if cost.peak_bytes is not None:
        cost.peak_bytes += held


@contextmanager
def measure_cost() -> Iterator[Cost]:
    """Measure the body of the `with`; freed memory is given back before it."""
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
    """Let the system count this process's peak from now on, and say whether it does (Linux alone)."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return False
    return True

"""Hold the models and samples of one suite that is open, and the cache and the lock of everything computed of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from featcal.calibration.block_statistics import FirstBlock
from featcal.calibration.calibrate import expert_passes
from featcal.family.opening import Family, ensure_family
from featcal.formats.weights import Weights
from featcal.models.lane import ExpertPass, WalkCache
from featcal.samples.sources import Samples
from featcal.session.cache import Results, nbytes
from featcal.session.model_ref import MERGED, ModelId, ModelRef, resolve_model
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.views import EvaluationSamples
from featcal.system.progress import available_bytes

T = TypeVar("T")
BATCH_SIZE = 64
"""Samples per forward pass of a measurement."""
PASSES = 3
"""Sets of expert passes that are kept, each with its own room (`Kept`): samples to calibrate on, and to measure on."""
SHARE = 8
"""One part in so many of the memory to spare is for the results of a session: the app has several open."""
SMALL_SPLIT = 2**26
"""Bytes of model inputs of one task's whole split that are worth keeping."""


@dataclass(frozen=True, eq=False)
class ResultKind(Generic[T]):
    """One kind of result that is kept of a suite. It equals itself alone, so its module alone finds the results.

    Args:
        name: for people who debug; it tells nothing from anything.
    """

    name: str


@dataclass(frozen=True)
class SharedResults:
    """Hold what several sessions of one family have together: each finds what another has left."""

    passes: Results[Hashable]
    """Expert passes, by what decides them."""
    made: Mapping[Hashable, Weights]
    """Models, by key."""


_SAMPLES = ResultKind[dict[str, Samples]]("samples")
_COUNTS = ResultKind[dict[str, int]]("counts")
_VIEWABLE = ResultKind[Samples]("viewable samples")
_SPLIT = ResultKind[Samples]("split")


class OpenSuite:
    """The family and the samples of one suite, and the results that are kept of it: the base of `Session`.

    One lock guards the whole of it: whoever asks while something is computed waits, and then finds it.

    Args:
        family, budget, one_shot, max_memory: those of `Session`.
        shared: what several sessions of the family have together.
    """

    def __init__(
        self,
        family: Family,
        *,
        budget: int | None = None,
        one_shot: bool = False,
        max_memory: int | None = None,
        shared: SharedResults | None = None,
    ) -> None:
        self.family, self.max_memory = family, max_memory
        held = (family, family.adapter, family.origin, family.container)
        models = (family.base, family.merged, *family.experts.values())
        share = min(available_bytes() or 2**32, max_memory or 2**63) // SHARE
        self._results: Results[tuple[ResultKind[Any], Hashable]] = Results(
            share if budget is None else budget, partial(nbytes, beside=(*held, *models))
        )
        self._one_shot = one_shot or max_memory is not None
        own = Results[Hashable](0 if self._one_shot else PASSES, lambda _: 1)
        self._passes = own if shared is None else shared.passes
        self.made: Mapping[Hashable, Weights] = {} if shared is None else shared.made
        """Models that are there already, by key."""
        self.first_block = None if self._one_shot else FirstBlock()
        self.released = False
        # Reentrant: what makes one result asks for others.
        self._lock = threading.RLock()

    @property
    def tasks(self) -> list[str]:
        return list(self.family.suite.tasks)

    @property
    def split(self) -> str:
        """Return the split that models are measured on unless a view says otherwise."""
        return self.family.suite.measured_split

    @property
    def is_text(self) -> bool:
        """Say whether the models read text and answer in words."""
        return self.family.adapter.answers == "text"

    def resolve(self, model: ModelId, of: ModelId = MERGED) -> ModelRef:
        """Return the model that is meant by a name, options, weights or a calibration's result.

        Args:
            of: what is calibrated, where options of a calibration are given.

        Raises:
            InputError: an option that is unknown or outside its range.
        """
        return resolve_model(model, self.family, of)

    def key(self, view: EvaluationSamples) -> tuple[int | None, str, int]:
        """Return count, split and seed of a view."""
        return view.samples, view.split or self.split, view.seed

    def samples(self, view: EvaluationSamples) -> dict[str, Samples]:
        """Return the samples of every task."""
        count, split, seed = self.key(view)

        def make() -> dict[str, Samples]:
            return {task: self.family.samples(task, split, count, seed) for task in self.tasks}

        return make() if self._one_shot else self.get_or_make(_SAMPLES, (count, split, seed), make)

    def counts(self, view: EvaluationSamples) -> dict[str, int]:
        """Return the number of samples of every task; tasks can have fewer than a view asks for."""

        def make() -> dict[str, int]:
            return {task: len(self.viewable_samples(task, view)) for task in self.tasks}

        return self.get_or_make(_COUNTS, self.key(view), make)

    def viewable_samples(self, task: str, view: EvaluationSamples) -> Samples:
        """Return a task's samples as people see them: no inputs, and pictures that are read when they are asked for."""
        count, split, seed = self.key(view)
        key = task, count, split, seed
        return self.get_or_make(_VIEWABLE, key, lambda: self.family.viewable_samples(task, split, count, seed))

    def parts(self, task: str, view: EvaluationSamples) -> Iterator[Samples]:
        """Yield a task's samples part by part, to be scored; a split that is small enough stays for the next model."""
        count, split, seed = self.key(view)
        key = task, count, split, seed
        if self.has(_SAMPLES, (count, split, seed)):
            yield self.samples(view)[task]
        elif self.has(_SPLIT, key):
            yield self.get_or_make(_SPLIT, key, lambda: self.family.samples(task, split, count, seed))
        else:
            for part in self.family.parts(task, split, count, seed):
                whole = len(part) == part.total and not self._one_shot
                if whole and sum(one.nbytes for one in part.inputs.values()) <= SMALL_SPLIT:
                    self._results.keep((_SPLIT, key), part)
                yield part

    def calibration_passes(self, config: CalibrationConfig, split: str = "calibration") -> Mapping[str, ExpertPass]:
        """Return the pass of every expert over the samples that its task is calibrated on with these options."""
        key = (split, config.samples, config.augment, config.seed, config.batch_size, config.precision)
        # Of all tasks, so that a calibration on some finds the passes of one on all.
        family, of_all = ensure_family(self.family, precision=config.precision), replace(config, tasks=None)
        with self._lock:
            return self._passes.get_or_make(
                key, lambda: expert_passes(family, of_all, WalkCache.from_device(family.compute.device), split)
            )

    def measured_passes(self, view: EvaluationSamples, drawn: Mapping[str, Samples]) -> Mapping[str, ExpertPass]:
        """Return the pass of every expert over the samples that models are measured on.

        Args:
            drawn: the samples of the view, by task.
        """

        def make() -> dict[str, ExpertPass]:
            room = None if self._one_shot else WalkCache.from_device(self.family.compute.device)
            return {task: self.family.expert_pass(drawn[task], BATCH_SIZE, room) for task in self.tasks}

        with self._lock:
            return self._passes.get_or_make(("measured", *self.key(view)), make)

    def get_or_make(self, kind: ResultKind[T], key: Hashable, make: Callable[[], T]) -> T:
        """Return the kept result of a kind with this key, or what `make` gives of this suite and the key alone."""
        with self._lock:
            return self._results.get_or_make((kind, key), make)

    def get_or_replace(self, kind: ResultKind[T], key: Hashable, make: Callable[[], T]) -> T:
        """Return what `get_or_make` does, for a kind of which one result alone is kept: another key's goes first."""
        with self._lock:
            for one in [one for one in self._results if one[0] is kind and one[1] != key]:
                self._results.drop(one)
            return self.get_or_make(kind, key, make)

    def has(self, kind: ResultKind[T], key: Hashable) -> bool:
        """Say whether a result of a kind is kept."""
        return (kind, key) in self._results

    def has_room(self, size: int) -> bool:
        """Say whether a result of so many bytes would be kept."""
        return size <= self._results.budget

    def forget(self, kind: ResultKind[T], key: Hashable) -> None:
        """Keep a result no longer."""
        with self._lock:
            self._results.drop((kind, key))

    def release(self) -> None:
        """Give back the memory of everything that is kept, tensors of models included, once nothing is being computed,
        and keep nothing from now on. `open_session` opens another session."""
        with self._lock:
            self.released = True
            # Whoever still holds the session reads the same numbers from the files.
            self.family = self.family.with_stored_tensors()
            for kept in (self._results, self._passes):
                kept.clear()
                kept.budget = 0
            self.first_block = None

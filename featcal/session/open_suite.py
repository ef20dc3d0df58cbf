"""Hold the models and samples of an open suite, with the cache and the lock for everything computed of it."""

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
"""Number of sets of expert passes that are cached, each with its own `Kept`: for calibration, and for measurements."""
SHARE = 8
"""Fraction of the free memory for the results of a session is one over this: the app has several sessions open."""
SMALL_SPLIT = 2**26
"""Largest size of the model inputs of one task's whole split that is cached, in bytes."""


@dataclass(frozen=True, eq=False)
class ResultKind(Generic[T]):
    """One kind of cached results. It equals only itself, so only its module finds the results.

    Args:
        name: for debugging only.
    """

    name: str


@dataclass(frozen=True)
class SharedResults:
    """Cache that several sessions of one family share."""

    passes: Results[Hashable]
    """Expert passes by their key."""
    made: Mapping[Hashable, Weights]
    """Models that were made, by key."""


_SAMPLES = ResultKind[dict[str, Samples]]("samples")
_COUNTS = ResultKind[dict[str, int]]("counts")
_VIEWABLE = ResultKind[Samples]("viewable samples")
_SPLIT = ResultKind[Samples]("split")


class OpenSuite:
    """The family and the samples of one suite, and the cached results: the base of `Session`.

    One lock guards all of it: a caller waits while a result is computed, and then finds it in the cache.

    Args:
        family, budget, one_shot, max_memory: those of `Session`.
        shared: cache that several sessions of the family share.
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
        """Models that exist already, by key."""
        self.first_block = None if self._one_shot else FirstBlock()
        self.released = False
        # Reentrant: what makes one result asks for others.
        self._lock = threading.RLock()

    @property
    def tasks(self) -> list[str]:
        return list(self.family.suite.tasks)

    @property
    def split(self) -> str:
        """Return the default split to measure models on."""
        return self.family.suite.measured_split

    @property
    def is_text(self) -> bool:
        """Say whether the models read text and answer in words."""
        return self.family.adapter.answers == "text"

    @property
    def scores_apart(self) -> bool:
        """Say whether scores need forwards of their own, because the final features of the drift measurement do not
        hold them: generated answers, and the likeness of two sentences."""
        return self.is_text or self.family.adapter.embeds

    def resolve(self, model: ModelId, of: ModelId = MERGED) -> ModelRef:
        """Resolve a model from a name, options, weights or a calibration's result.

        Args:
            of: the model to calibrate, if options of a calibration are given.

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
        """Return the number of samples of every task; a task may have fewer than requested."""

        def make() -> dict[str, int]:
            return {task: len(self.viewable_samples(task, view)) for task in self.tasks}

        return self.get_or_make(_COUNTS, self.key(view), make)

    def viewable_samples(self, task: str, view: EvaluationSamples) -> Samples:
        """Return a task's raw samples: no inputs, and pictures that are read when needed."""
        count, split, seed = self.key(view)
        key = task, count, split, seed
        return self.get_or_make(_VIEWABLE, key, lambda: self.family.viewable_samples(task, split, count, seed))

    def parts(self, task: str, view: EvaluationSamples) -> Iterator[Samples]:
        """Yield a task's samples part by part, for scoring; a small split is cached for the next model."""
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

    def calibration_passes(
        self, config: CalibrationConfig, split: str = "calibration", *, once: bool = False
    ) -> Mapping[str, ExpertPass]:
        """Return the pass of every expert over its calibration samples under these options.

        Args:
            once: the caller walks them a single time, so that they hold nothing for a second one unless a later caller
                may find them here.
        """
        key = (split, config.samples, config.augment, config.seed, config.batch_size, config.precision)
        # Of all tasks, so that a calibration on some finds the passes of one on all.
        family, of_all = ensure_family(self.family, precision=config.precision), replace(config, tasks=None)

        def make() -> Mapping[str, ExpertPass]:
            room = None if once and not self._passes.budget else WalkCache.from_device(family.compute.device)
            return expert_passes(family, of_all, room, split)

        with self._lock:
            return self._passes.get_or_make(key, make)

    def measured_passes(self, view: EvaluationSamples, drawn: Mapping[str, Samples]) -> Mapping[str, ExpertPass]:
        """Return the pass of every expert over the samples of a measurement.

        Args:
            drawn: the samples of the view, by task.
        """

        def make() -> dict[str, ExpertPass]:
            room = None if self._one_shot else WalkCache.from_device(self.family.compute.device)
            return {task: self.family.expert_pass(drawn[task], BATCH_SIZE, room) for task in self.tasks}

        with self._lock:
            return self._passes.get_or_make(("measured", *self.key(view)), make)

    def get_or_make(self, kind: ResultKind[T], key: Hashable, make: Callable[[], T]) -> T:
        """Return the cached result of a kind with this key, or the result of `make`, which depends only on this suite
        and the key."""
        with self._lock:
            return self._results.get_or_make((kind, key), make)

    def get_or_replace(self, kind: ResultKind[T], key: Hashable, make: Callable[[], T]) -> T:
        """Do as `get_or_make` for a kind with a single cached result: the result of another key is evicted first."""
        with self._lock:
            for one in [one for one in self._results if one[0] is kind and one[1] != key]:
                self._results.drop(one)
            return self.get_or_make(kind, key, make)

    def has(self, kind: ResultKind[T], key: Hashable) -> bool:
        """Say whether a result of a kind is cached."""
        return (kind, key) in self._results

    def find(self, kind: ResultKind[T], key: Hashable) -> T | None:
        """Return the cached result of a kind with this key; None if there is none."""
        with self._lock:
            found: T | None = self._results[kind, key] if self.has(kind, key) else None
            return found

    def has_room(self, size: int) -> bool:
        """Say whether a result of so many bytes would be cached."""
        return size <= self._results.budget

    def forget(self, kind: ResultKind[T], key: Hashable) -> None:
        """Remove a result from the cache."""
        with self._lock:
            self._results.drop((kind, key))

    def release(self) -> None:
        """Release the memory of all cached results, including tensors of models, when no computation runs, and cache
        nothing from now on. `open_session` opens another session."""
        with self._lock:
            self.released = True
            # Whoever still holds the session reads the same numbers from the files.
            self.family = self.family.with_stored_tensors()
            for kept in (self._results, self._passes):
                kept.clear()
                kept.budget = 0
            self.first_block = None

"""Everything the pages compute about one suite, each thing once; no streamlit in here.

Lookups are by ids (split, number of samples, options), never by the content of arrays. One lock guards the
whole of it: expert passes are walked by one caller at a time, however many sessions look at the suite.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor

from app import preview, tables
from app.preview import HOME_SUITE, SAMPLES
from app.selection import TURNED
from featcal.calibration.calibrate import CalibrationResult, calibrate, config_for, expert_passes
from featcal.calibration.config import CalibrationConfig, idle_options
from featcal.calibration.moments import FirstBlock
from featcal.drift.decomposition import decompose, follow
from featcal.drift.ledger import DriftLedger, Features, TaskDrift
from featcal.drift.output import output_drift
from featcal.drift.source import SourceExcess, measure_sources
from featcal.drift.task_vectors import task_vector_cosines
from featcal.errors import FeatcalError, InputError
from featcal.evaluation.evaluate import Scores, TaskScore, score, scoring_heads
from featcal.evaluation.judges import judges
from featcal.family import Family, as_family, batches_of, open_family
from featcal.formats.weights import Weights
from featcal.models.features import pooled_features
from featcal.models.lane import ExpertPass, Kept
from featcal.models.model import Head
from featcal.models.run import Run
from featcal.progress import Progress, silent
from featcal.suite import load_suite
from featcal.tasks.sources import Samples, look

T = TypeVar("T")
Judges = dict[str, tuple[Head, Head, Tensor]]
"""Task → the expert's head, the model's head and the right class or first token of every sample."""
ModelId = str | CalibrationConfig
"""A model of the suite: "base", "merged", "expert", or the options it was calibrated with."""
FIRST_TOKEN = "first_token"
"""Metric of `quick_scores` for language models: the first token of the answer is the right one."""
SEED = 42
_MEASURE_BATCH = 256
SMALL_SPLIT = 2**25
"""Bytes of model inputs of one task's whole split that are worth keeping."""
_MOST = {
    "samples": 6,
    "split": 20,
    "seen": 8,
    "passes": 3,
    "result": 6,
    "features": 8,
    "drift": 8,
    "ledger": 8,
    "sources": 4,
    "scores": 12,
    "vectors": 8,
    "heads": 2,
    "judges": 8,
    "pooled": 24,
    "map": 8,
}
"""How many results of each kind stay in memory."""


@dataclass
class Workspace:
    """One opened suite and what was computed about it."""

    family: Family
    _first_block: FirstBlock = field(default_factory=FirstBlock)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _kept: dict[str, OrderedDict[Hashable, Any]] = field(default_factory=dict)

    @property
    def tasks(self) -> list[str]:
        return list(self.family.suite.tasks)

    @property
    def split(self) -> str:
        """Where models are measured."""
        return self.family.suite.measured_split

    @property
    def is_text(self) -> bool:
        """Whether the models read text and answer in words."""
        return self.family.adapter.modality != "pixels"

    @property
    def defaults(self) -> CalibrationConfig:
        """What a calibration of this suite starts from; as many samples as a slider can answer for quickly."""
        return config_for(self.family, samples=self.family.suite.calibration.samples or SAMPLES)

    @property
    def switches(self) -> tuple[str, ...]:
        """The options of a calibration that are on or off and mean something for this architecture."""
        idle = idle_options(self.family.adapter)
        return tuple(name for name in TURNED if name not in idle)

    @property
    def block_layers(self) -> dict[str, str]:
        """Prefix of a block's tensors → what charts call its layer."""
        adapter = self.family.adapter
        return dict(zip((block.name for block in adapter.blocks()), adapter.block_layers(), strict=True))

    def samples(self, split: str, n: int | None) -> dict[str, Samples]:
        """`n` samples of every task (all with None)."""

        def draw() -> dict[str, Samples]:
            return {task: self.family.samples(task, split, n, SEED) for task in self.tasks}

        return self.once("samples", (split, n), draw)

    def calibrated(self, config: CalibrationConfig, progress: Progress = silent) -> CalibrationResult:
        """The suite's merged model, calibrated with these options."""

        def run() -> CalibrationResult:
            passes, first = self._calibration_passes(config), self._first_block
            return calibrate(self.family, config, experts=passes, first=first, progress=progress)

        return self.once("result", config, run)

    def features(self, model: ModelId, n: int, progress: Progress = silent) -> Features:
        """How far the features of "merged", "base" or a calibrated model drift on `n` samples per task."""

        def measure() -> Features:
            apart: DriftLedger | None = self._kept.get("drift", OrderedDict()).get((model, n))
            if apart is not None:
                return apart
            tasks = follow(*self._both(model, n, progress))
            return Features(self.family.suite.name, label_of(model), self.split, tasks)

        return self.once("features", (model, n), measure)

    def drift(self, model: ModelId, n: int, progress: Progress = silent) -> DriftLedger:
        """The drift of these features, taken apart into local mismatch and propagation."""

        def measure() -> DriftLedger:
            return self._ledger(model, decompose(*self._both(model, n, progress)))

        return self.once("drift", (model, n), measure)

    def ledger(
        self, model: ModelId, n: int, class_token: bool = False, sublayers: bool = False, progress: Progress = silent
    ) -> DriftLedger:
        """The drift with its attribution and, where the suite has labels and a head, its effect on scores."""

        def measure() -> DriftLedger:
            tasks = decompose(
                *self._both(model, n, progress), class_token=class_token, sublayers=sublayers, attribution=True
            )
            ledger = self._ledger(model, tasks)
            with suppress(InputError):  # no labels or no head: the layers are still worth showing
                judged = self.judges(model, n)
                scored = {
                    task: replace(one, output=output_drift(one.expert_features, one.model_features, *judged[task]))
                    for task, one in ledger.tasks.items()
                }
                ledger = replace(ledger, tasks=scored)
            return ledger

        return self.once("ledger", (model, n, class_token, sublayers), measure)

    def sources(self, config: CalibrationConfig, progress: Progress = silent) -> list[SourceExcess]:
        """What fitting the calibrated blocks on other feature sources would have cost (Prop. 8)."""

        def measure() -> list[SourceExcess]:
            weights = self.calibrated(config).weights
            return measure_sources(self.family, weights, config, self._calibration_passes(config), progress)

        return self.once("sources", config, measure)

    def judges(self, model: ModelId, n: int) -> Judges:
        """What turns features into scores; one for all models of pictures, whose head is the base's text tower.

        Raises:
            InputError: labels, answers, class names or a text tower are missing.
        """

        def build() -> Judges:
            return judges(self.family, self._weights(model), self.samples(self.split, n))

        return self.once("judges", (model if self.is_text else "any", n), build)

    def quick_scores(self, model: ModelId, n: int) -> Scores:
        """Scores on the samples that drift is measured on: their features are known, so it costs nothing.

        Accuracy of pictures; of text how often the first token of the answer is right.
        """
        measured: ModelId = "merged" if model == "expert" else model
        features, judged = self.features(measured, n), self.judges(measured, n)
        tasks = {}
        for task, found in features.tasks.items():
            expert_head, model_head, labels = judged[task]
            if model == "expert":
                predictions = expert_head.scores(found.expert_features.float()).argmax(1)
            else:
                predictions = model_head.scores(found.model_features.float()).argmax(1)
            right = float((predictions == labels).double().mean())
            tasks[task] = TaskScore(FIRST_TOKEN if self.is_text else "accuracy", right, predictions, labels)
        return Scores(self.family.suite.name, label_of(model), self.split, tasks)

    def scores(self, model: ModelId, split: str, n: int | None = None, progress: Progress = silent) -> Scores:
        """Scores on `n` samples per task of a split, all with None: accuracy of pictures, generated answers of text."""

        def evaluate() -> Scores:
            tasks = {}
            heads = self.once("heads", split, lambda: scoring_heads(self.family, split))
            for done, task in enumerate(self.tasks):
                progress(f"scoring {label_of(model)}", done, len(self.tasks))
                weights = self.family.experts[task] if model == "expert" else self._weights(model)
                tasks[task] = score(self.family, weights, self._parts(task, split, n), heads.get(task))
            progress(f"scoring {label_of(model)}", len(self.tasks), len(self.tasks))
            return Scores(self.family.suite.name, label_of(model), split, tasks)

        return self.once("scores", (model, split, n), evaluate)

    def _parts(self, task: str, split: str, n: int | None) -> Iterator[Samples]:
        """Samples to be scored. A whole split passes by in parts; one that is small enough stays for the next model."""
        if n is not None:
            yield self.samples(split, n)[task]
            return
        small = self._kept.get("split", OrderedDict())
        if (task, split) in small:
            yield small[task, split]
            return
        for part in self.family.parts(task, split, None, SEED):
            if len(part) == part.total and sum(one.nbytes for one in part.inputs.values()) <= SMALL_SPLIT:
                self._keep("split", (task, split), part)
            yield part

    def seen(self, split: str, task: str) -> Samples:
        """A whole split as people see it: no inputs, and pictures that are read when they are asked for."""
        return self.once("seen", (split, task), lambda: look(self.family.suite, task, split, None, SEED))

    def has_scores(self, model: ModelId, split: str) -> bool:
        """Whether `scores` would cost nothing."""
        return (model, split, None) in self._kept.get("scores", {})

    def pooled(self, model: ModelId, task: str, n: int) -> Tensor:
        """`[n, d]` on the CPU: the first stage's last state (of T5 the encoder's), mean over tokens but padding."""

        def walk() -> Tensor:
            weights = self.family.experts[task] if model == "expert" else self._weights(model)
            compute = self.family.compute
            batches = batches_of(self.samples(self.split, n)[task], _MEASURE_BATCH, compute.device)
            return pooled_features(self.family.adapter, weights, batches, compute).cpu()

        return self.once("pooled", (model, task, n), walk)

    def vector_cosines(self, model: ModelId) -> dict[str, float]:
        """Cosine of the model's task vector to each expert's."""
        return self.once("vectors", model, lambda: task_vector_cosines(self.family, self._weights(model)))

    def _weights(self, model: ModelId) -> Weights:
        return self.calibrated(model).weights if isinstance(model, CalibrationConfig) else self.family.model(model)

    def _ledger(self, model: ModelId, tasks: Mapping[str, TaskDrift]) -> DriftLedger:
        return DriftLedger(self.family.suite.name, label_of(model), self.split, tasks)

    def _both(self, model: ModelId, n: int, progress: Progress) -> tuple[Run, Weights, Mapping[str, ExpertPass]]:
        """A model and the experts, as a measurement takes them."""
        return self.family.run(progress), self._weights(model), self._measured_passes(n)

    def _calibration_passes(self, config: CalibrationConfig) -> Mapping[str, ExpertPass]:
        key = ("calibration", config.samples, config.seed, config.batch_size, config.precision)
        family = as_family(self.family, precision=config.precision)

        def build() -> dict[str, ExpertPass]:
            return expert_passes(family, config, Kept.on(family.compute.device))

        return self.once("passes", key, build)

    def _measured_passes(self, n: int) -> Mapping[str, ExpertPass]:
        def build() -> dict[str, ExpertPass]:
            data, kept = self.samples(self.split, n), Kept.on(self.family.compute.device)
            return {task: self.family.expert_pass(data[task], _MEASURE_BATCH, kept) for task in self.tasks}

        return self.once("passes", (self.split, n), build)

    def once(self, kind: str, key: Hashable, make: Callable[[], T]) -> T:
        """The kept result of `make`; the least recently used of its kind makes room. Failures are not kept."""
        with self._lock:
            if key not in self._kept.get(kind, OrderedDict()):
                self._keep(kind, key, make())
            self._kept[kind].move_to_end(key)
            found: T = self._kept[kind][key]
            return found

    def _keep(self, kind: str, key: Hashable, thing: object) -> None:
        kept = self._kept.setdefault(kind, OrderedDict())
        kept[key] = thing
        while len(kept) > _MOST[kind]:
            kept.popitem(last=False)


def open_workspace(reference: str) -> Workspace:
    """The suite called `reference` (an embedded name or a path) with every tensor in memory."""
    return _prepared.pop(reference, None) or Workspace(open_family(load_suite(reference)).resident())


def prepare(reference: str) -> None:
    """Open a suite and measure what the first page shows, for the next `open_workspace`; errors wait until then."""
    with suppress(FeatcalError):
        ws = open_workspace(reference)
        ledger = ws.drift("merged", SAMPLES)
        _prepared[reference] = ws
        if reference == HOME_SUITE:
            preview.keep(tables.drift_table(ledger))


_prepared: dict[str, Workspace] = {}


def label_of(model: ModelId) -> str:
    """What charts and tables call a model."""
    return "calibrated" if isinstance(model, CalibrationConfig) else model

"""A suite opened once and everything computed of it once, for app, command line, public functions and studies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from torch import Tensor

from featcal.baselines.shared.baseline import Sampled
from featcal.baselines.shared.fit import fit
from featcal.baselines.shared.fitted import Fitted
from featcal.calibration.block_preview import Preview, hold
from featcal.calibration.block_statistics import FirstBlock
from featcal.calibration.calibrate import CalibrationResult, calibrate, expert_passes, select_tasks
from featcal.calibration.conditioning import Conditioning, measure_conditioning
from featcal.calibration.config import CalibrationConfig
from featcal.drift.decomposition import decompose, follow
from featcal.drift.ledger import DriftLedger, Features
from featcal.drift.memory import measuring_store
from featcal.drift.output import lead, output_drift
from featcal.drift.source import SourceExcess, measure_sources
from featcal.drift.task_vectors import task_vector_cosines
from featcal.evaluation.evaluate import Scores, TaskScore, score, scoring_heads
from featcal.evaluation.generation_check import Canary
from featcal.evaluation.generation_check import canary as measure_canary
from featcal.evaluation.paired import Comparison, compare_scores
from featcal.evaluation.scoring_heads import answers_of, judges
from featcal.export.write import require_weights_alone
from featcal.family.opening import Family, ensure_family, open_family
from featcal.formats.weights import Weights
from featcal.models.context import Run
from featcal.models.features import layer_features
from featcal.models.lane import ExpertPass, Kept
from featcal.models.model import Head, own_head
from featcal.samples.sources import Samples
from featcal.session.cache import Results, nbytes
from featcal.session.fingerprint import suite_stamp
from featcal.session.model_names import (
    ModelId,
    baseline_of,
    calibration_of,
    full_name,
    label_of,
    model_key,
    recorded_calibration,
    resolve_model,
    weights_of,
)
from featcal.suite.methods import is_baseline
from featcal.suite.name_grammar import REFERENCE, model_name
from featcal.suite.schema import Suite, load_suite
from featcal.suite.views import DriftOptions, View
from featcal.system.errors import InputError
from featcal.system.progress import Progress, available_bytes, silent

T = TypeVar("T")
Judges = Mapping[str, tuple[Head, Head, Tensor]]
"""Task → the expert's head, the model's head and the right class or first token of every sample."""
FIRST_TOKEN = "first_token"
"""Metric of `quick_scores` for language models: the first token of the answer is the right one."""
BATCH_SIZE = 64
"""Samples per forward pass of a measurement."""
PASSES = 3
"""Sets of expert passes that are kept, each with its own room (`Kept`): samples to calibrate on, and to measure on."""
SHARE = 8
"""One part in so many of the memory to spare is for the results of a session: the app has several open."""
SMALL_SPLIT = 2**25
"""Bytes of model inputs of one task's whole split that are worth keeping."""
_DRIFT, _WHOLE_TEST = DriftOptions(), View(None, "test")


class Session:
    """One opened suite and what was computed of it.

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
    """

    def __init__(
        self, family: Family, *, budget: int | None = None, one_shot: bool = False, max_memory: int | None = None
    ) -> None:
        self.family, self._max_memory = family, max_memory
        held = (family, family.adapter, family.origin, family.container)
        models = (family.base, family.merged, *family.experts.values())
        share = min(available_bytes() or 2**32, max_memory or 2**63) // SHARE
        self._results = Results(share if budget is None else budget, partial(nbytes, beside=(*held, *models)))
        self._one_shot = one_shot or max_memory is not None
        self._passes = Results(0 if self._one_shot else PASSES, lambda _: 1)
        self._first_block = None if self._one_shot else FirstBlock()
        self._previewed: Hashable = None
        self.released = False
        self._lock = threading.RLock()

    @property
    def tasks(self) -> list[str]:
        return list(self.family.suite.tasks)

    @property
    def split(self) -> str:
        """Where models are measured unless a view says otherwise."""
        return self.family.suite.measured_split

    @property
    def is_text(self) -> bool:
        """Whether the models read text and answer in words."""
        return self.family.adapter.answers == "text"

    def resolve(self, model: ModelId) -> ModelId:
        """A model by its name: of "calibrated:lam=0.1" the options that it stands for, of any other model itself.

        Raises:
            InputError: an option that is unknown or outside its range.
        """
        return resolve_model(model, self.family)

    def samples(self, view: View) -> dict[str, Samples]:
        """The samples of every task."""
        count, split, seed = self._key(view)

        def make() -> dict[str, Samples]:
            return {task: self.family.samples(task, split, count, seed) for task in self.tasks}

        return make() if self._one_shot else self.get_or_make("samples", (count, split, seed), make)

    def counts(self, view: View) -> dict[str, int]:
        """How many samples of every task there are; tasks can have fewer than a view asks for."""

        def make() -> dict[str, int]:
            return {task: len(self.viewable_samples(task, view)) for task in self.tasks}

        return self.get_or_make("counts", self._key(view), make)

    def viewable_samples(self, task: str, view: View) -> Samples:
        """A task's samples as people see them: no inputs, and pictures that are read when they are asked for."""
        count, split, seed = self._key(view)
        key = task, count, split, seed
        return self.get_or_make("seen", key, lambda: self.family.viewable_samples(task, split, count, seed))

    def calibrate(self, model: CalibrationConfig | str, progress: Progress = silent) -> CalibrationResult:
        """The suite's merged model, calibrated with these options; or a calibration by its name, which may be of
        another model (`calibrated:rho=1@tsv-m`).

        Raises:
            InputError: a name of another kind, or an option that is unknown or outside its range.
        """
        if isinstance(model, CalibrationConfig):
            return self._calibrate(model, lambda: self._calibration_passes(model), progress)
        config, below = calibration_of(model, self.family)
        if below == "merged":
            return self.calibrate(config, progress)

        def make() -> CalibrationResult:
            return calibrate(
                self.family_with(below), config, experts=self._calibration_passes(config), progress=progress
            )

        return self.get_or_make("calibrated", (config, model_key(below)), make)

    def family_with(self, model: str) -> Family:
        """The suite with a model, by its name, in the place of its merged one: what is calibrated then.

        Raises:
            InputError: no such model, or one that is more than its weights.
        """
        name = full_name(self.resolve(model), self.family)
        if name == "merged":
            return self.family
        weights = self.weights(self.resolve(name))
        require_weights_alone(weights)
        return self.family.with_merged(weights, name)

    def fit(self, model: str, progress: Progress = silent) -> Fitted:
        """The model that a baseline makes of the suite, by its name.

        Raises:
            InputError: a name of another kind, or an option that is unknown or outside its range.
            NumericalError: as `fit`.
        """
        options, below = baseline_of(model, self.family)

        def make() -> Fitted:
            family, passes = self.family, None
            if below != "merged":
                family = family.with_merged(self.weights(self.resolve(below)), full_name(self.resolve(below), family))
            if isinstance(options, Sampled):
                passes = self._calibration_passes(options.counting, options.split)
            found = fit(family, options, experts=passes, progress=progress)
            return replace(found, record={**found.record, "model": self.resolve(model)})

        return self.get_or_make("fitted", (options, model_key(self.resolve(below))), make)

    def features(self, model: ModelId, view: View = _DRIFT, progress: Progress = silent) -> Features:
        """How far a model's features drift from the experts', not why: half the cost of `ledger`. For "expert", whose
        own features stand beside any model's, those of the merged one."""
        model = _walked_model(model)
        count, split, seed = self._key(view)
        apart = DriftOptions(count, split, seed)

        if ("ledger", (model_key(model), apart)) in self._results:
            return self.ledger(model, apart)

        def make() -> Features:
            weights = self.weights(model)
            passes = self._measured_passes(view, self.samples(view))
            tasks = follow(self._run(weights, progress), weights, passes)
            return Features(self.family.suite.name, label_of(model), split, tasks)

        return self.get_or_make("features", (model_key(model), count, split, seed), make)

    def ledger(self, model: ModelId, options: DriftOptions = _DRIFT, progress: Progress = silent) -> DriftLedger:
        """A model's drift from the experts, layer by layer and task by task.

        Raises:
            InputError: a model that does not fit the suite, samples that are missing or not finite, no labels or heads
                where their output is asked for, or a class token that the architecture does not have.
            NumericalError: final features that are not finite.
        """
        split = options.split or self.split
        options = replace(options, split=split)

        def make() -> DriftLedger:
            weights = self.weights(model)
            if options.tokens == "class" and not self.family.adapter.class_token:
                raise InputError(f"tokens: a {self.family.adapter.family} model has no class token; take 'all'")
            drawn = self.samples(options)
            judged = self._judges(weights, options, lambda: drawn) if options.output else {}
            passes = self._measured_passes(options, drawn)
            del drawn  # the passes let inputs go that were read
            tasks = decompose(
                self._run(weights, progress),
                weights,
                passes,
                class_token=options.tokens == "class",
                sublayers=options.sublayers,
                attribution=options.attribution,
            )
            for task, judge in judged.items():
                found = output_drift(tasks[task].expert_features, tasks[task].model_features, *judge)
                tasks[task] = replace(tasks[task], output=found)
            return DriftLedger(self.family.suite.name, label_of(model), split, tasks)

        return self.get_or_make("ledger", (model_key(model), options), make)

    def sources(self, model: ModelId, progress: Progress = silent) -> list[SourceExcess]:
        """What fitting the calibrated blocks on other feature sources would have cost (Prop. 8).

        Args:
            model: options to calibrate with, a calibration by its name, or the folder of a calibrated checkpoint, whose
                own options are used. What was calibrated stands in the place of the merged model.

        Raises:
            InputError: a model that is neither: a folder that holds no record of a calibration among them.
        """

        def make() -> list[SourceExcess]:
            config, below = self._calibration(model)
            passes = self._calibration_passes(config)
            if isinstance(model, CalibrationConfig):
                weights = self._calibrate(model, lambda: passes, progress).weights
            else:
                weights = self.weights(model)
            return measure_sources(self.family_with(below), weights, config, passes, progress)

        return self.get_or_make("sources", model_key(model), make)

    def conditioning(self, model: ModelId, progress: Progress = silent) -> list[Conditioning]:
        """How well every linear system of a calibration is posed; takes a calibration and its decompositions.

        Args:
            model: as in `sources`.

        Raises:
            InputError: a model that is none of a calibration, or as `calibrate`.
        """

        def make() -> list[Conditioning]:
            config, below = self._calibration(model)
            passes, first = self._calibration_passes(config), self._first_block if below == "merged" else None
            return measure_conditioning(self.family_with(below), config, passes, first, progress)

        return self.get_or_make("conditioning", model_key(model), make)

    def _calibration(self, model: ModelId) -> tuple[CalibrationConfig, str]:
        """The options of a calibration, and the name of the model that is calibrated.

        Raises:
            InputError: a model that is none, or a folder that holds no record of one.
        """
        if isinstance(model, CalibrationConfig):
            return model, "merged"
        if not isinstance(model, str):
            raise InputError(
                f"'{label_of(model)}' is an object; give the options of a calibration, its name or its folder"
            )
        kind = model_name(model).kind
        if kind == "calibrated":
            return calibration_of(model, self.family)
        if kind != REFERENCE:
            raise InputError(f"'{model}' is no calibration; give its options, as calibrated:lam=0.05,rho=2@{model}")
        return recorded_calibration(Path(model))

    def canary(
        self, model: ModelId, against: ModelId = "merged", seed: int = 42, progress: Progress = silent
    ) -> Canary:
        """Whether a model still generates; as `featcal.evaluation.generation_check.canary`."""

        def make() -> Canary:
            held, weights = self.weights(against), self.weights(model)
            return measure_canary(self.family, weights, held, seed=seed, progress=progress)

        return self.get_or_make("canary", (model_key(model), model_key(against), seed), make)

    def preview(self, of: CalibrationConfig, layer: str, view: View = _DRIFT, progress: Progress = silent) -> Preview:
        """What previews of one block of a calibration need; that of the last one alone is kept.

        Args:
            of: the exact run that everything in front of the block is left as.
            layer: the block, as tables name it.
            view: the samples that drift is measured on.

        Raises:
            InputError: no such block, one that `of` leaves as merged, or another precision than "exact".
        """
        key = (of, layer, *self._key(view))
        if of.precision != "exact":
            raise InputError(f"previews are of exact calibrations; this one has precision '{of.precision}'")

        def make() -> Preview:
            run = self.family.run(progress)
            fitted = select_tasks(of, self._calibration_passes(of))
            weights = self._calibrate(of, lambda: fitted, progress).weights
            return hold(run, of, weights, layer, fitted, self._measured_passes(view, self.samples(view)))

        with self._lock:
            if self._previewed != key:
                self._results.drop(("preview", self._previewed))
                self._previewed = key
            return self.get_or_make("preview", key, make)

    def has_preview(self, of: CalibrationConfig, layer: str, view: View) -> bool:
        """Whether `preview` would cost nothing."""
        return ("preview", (of, layer, *self._key(view))) in self._results

    def judges(self, model: ModelId, view: View) -> Judges:
        """What turns features into scores; one for all models that bring no heads, where the base's text tower makes
        them of class names.

        Raises:
            InputError: labels, answers, class names, a text tower or a head are missing.
        """
        return self._judges(self.weights(model), view, lambda: self.samples(view))

    def quick_scores(self, model: ModelId, view: View) -> Scores:
        """Scores off the features that drift is measured on, so that they cost nothing.

        Accuracy of pictures; of text how often the first token of the answer is right.
        """

        def make() -> Scores:
            tasks, weights = {}, self.weights(_walked_model(model))
            for task, scores, labels in self._iterate_scores(model, view):
                predictions = scores.argmax(1)
                right = float((predictions == labels).double().mean())
                metric = FIRST_TOKEN if answers_of(self.family, weights, task) == "text" else "accuracy"
                tasks[task] = TaskScore(metric, right, predictions, labels)
            return Scores(self.family.suite.name, label_of(model), view.split or self.split, tasks)

        return self.get_or_make("quick scores", (model_key(model), *self._key(view)), make)

    def margins(self, model: ModelId, view: View) -> dict[str, Tensor]:
        """Task → `[n]`: the lead of a model's first over its second class, or first token of an answer, sample by
        sample (mu of Eq. (44)); off the features that drift is measured on, as `quick_scores`."""

        def make() -> dict[str, Tensor]:
            return {task: lead(scores) for task, scores, _ in self._iterate_scores(model, view)}

        return self.get_or_make("margins", (model_key(model), *self._key(view)), make)

    def _iterate_scores(self, model: ModelId, view: View) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Task, scores `[n, c]` and the right class or first token of every sample; "expert" is each task's own."""
        features, judged = self.features(model, view), self.judges(_walked_model(model), view)
        for task, found in features.tasks.items():
            expert_head, model_head, labels = judged[task]
            of_expert = model == "expert"
            head, own = (expert_head, found.expert_features) if of_expert else (model_head, found.model_features)
            yield task, head.scores(own.float()), labels

    def scores(self, model: ModelId, view: View = _WHOLE_TEST, progress: Progress = silent) -> Scores:
        """Scores on every task: accuracy of pictures, generated answers of text.

        Raises:
            InputError: no such split, no labels, answers or class names, or a base without a text tower.
            NumericalError: features that are not finite.
        """
        split = view.split or self.split
        said = f"scoring {label_of(model)}"

        def make() -> Scores:
            own = None if model == "expert" else self.weights(model)
            models = {task: own or self.family.experts[task] for task in self.tasks}
            needed = {task: one for task, one in models.items() if own_head(one, task) is None}
            whose = model_key(model) if self.family.adapter.reads_prompts else None
            key = split, tuple(needed), whose
            heads = self.get_or_make("heads", key, lambda: scoring_heads(self.family, split, needed))
            tasks = {}
            for done, task in enumerate(self.tasks):
                progress(said, done, len(self.tasks))
                tasks[task] = score(self.family, models[task], self._parts(task, view), heads.get(task))
            progress(said, len(self.tasks), len(self.tasks))
            return Scores(self.family.suite.name, label_of(model), split, tasks)

        return self.get_or_make("scores", (model_key(model), *self._key(view)), make)

    def adopt_scores(self, model: ModelId, view: View, scores: Scores) -> Scores:
        """Keep what another process has scored as this model's scores, which `scores` gives from then on.

        Raises:
            InputError: scores of another split or of other tasks.
        """
        split, tasks = view.split or self.split, list(self.tasks)
        if (scores.split, list(scores.tasks)) != (split, tasks):
            raise InputError(
                f"scores of the {scores.split} split for {', '.join(scores.tasks)} are none of the {split} split for "
                f"{', '.join(tasks)}"
            )
        own = replace(scores, model=label_of(model))
        return self.get_or_make("scores", (model_key(model), *self._key(view)), lambda: own)

    def compare(self, a: ModelId, b: ModelId, view: View = _WHOLE_TEST, progress: Progress = silent) -> Comparison:
        """What B is better or worse than A on the same samples, with intervals, tests and flips.

        Raises:
            InputError, NumericalError: as `scores`.
        """

        def named_scores(model: ModelId) -> Scores:
            return replace(self.scores(model, view, progress), model=full_name(model, self.family))

        key = model_key(a), model_key(b), *self._key(view)
        return self.get_or_make("compared", key, lambda: compare_scores(named_scores(a), named_scores(b)))

    def has_scores(self, model: ModelId, view: View) -> bool:
        """Whether `scores` would cost nothing."""
        return ("scores", (model_key(model), *self._key(view))) in self._results

    def has_features(self, model: ModelId, view: View) -> bool:
        """Whether `features`, and so `quick_scores` and `margins`, would cost no walk."""
        count, split, seed = self._key(view)
        kept = (model_key(_walked_model(model)), count, split, seed)
        apart = (kept[0], DriftOptions(count, split, seed))
        return ("features", kept) in self._results or ("ledger", apart) in self._results

    def layer_features(
        self, model: ModelId, task: str, view: View = _DRIFT, progress: Progress = silent
    ) -> dict[str, Tensor]:
        """A model's features behind every layer, `[n, d]` by layer in forward order, on the CPU: state of the class
        token or mean over tokens but padding, and last the final features."""

        def make() -> dict[str, Tensor]:
            one = self._measured_passes(view, self.samples(view))[task]
            if model != "expert":
                one = replace(one, weights=self.weights(model), batches=list(one.batches), kept=None)
            return layer_features(self._run(one.weights, progress), one)

        return self.get_or_make("layers", (model_key(model), task, *self._key(view)), make)

    def vector_cosines(self, model: ModelId) -> dict[str, float]:
        """Cosine of the model's task vector to each expert's."""
        key = model_key(model)
        return self.get_or_make("vectors", key, lambda: task_vector_cosines(self.family, self.weights(model)))

    def weights(self, model: ModelId) -> Weights:
        """The tensors of a model; calibrated, if options are given.

        Raises:
            InputError: as `Family.model`.
        """
        if isinstance(model, CalibrationConfig):
            return self.calibrate(model).weights
        if not isinstance(model, str):
            return self.family.model(model)
        kind = model_name(model).kind
        if is_baseline(kind):
            return self.fit(model).weights
        if kind == "calibrated":
            return self.calibrate(model).weights
        return self.get_or_make("weights", model_key(model), lambda: weights_of(model, self.family))

    def get_or_make(self, kind: str, key: Hashable, make: Callable[[], T]) -> T:
        """The kept result of `make`, called if there is none; for whatever else depends on nothing but this suite."""
        with self._lock:
            return self._results.get_or_make((kind, key), make)

    def forget(self, kind: str, key: Hashable) -> None:
        """Keep a result of `get_or_make` no longer."""
        with self._lock:
            self._results.drop((kind, key))

    def release(self) -> None:
        """Give back the memory of everything that is kept, tensors of models included, once nothing is being computed,
        and keep nothing from now on. Whoever still holds the session gets the same numbers from it, from the files;
        `open_session` opens another."""
        with self._lock:
            self.released = True
            self.family = self.family.with_stored_tensors()
            for kept in (self._results, self._passes):
                kept.clear()
                kept.budget = 0
            self._first_block = None

    def _run(self, model: Weights, progress: Progress) -> Run:
        """For a measurement of a model, once its samples are there: they count as well.

        Raises:
            InputError: one block of expert and model needs more than `max_memory`.
        """
        limit, adapter = self._max_memory, self.family.adapter
        return self.family.run(progress, None if limit is None else measuring_store(adapter, model, limit))

    def _key(self, view: View) -> tuple[int | None, str, int]:
        """Count, split and seed of a view."""
        return view.samples, view.split or self.split, view.seed

    def _parts(self, task: str, view: View) -> Iterator[Samples]:
        """Samples to be scored. They pass by in parts; a split that is small enough stays for the next model."""
        count, split, seed = self._key(view)
        drawn, small = ("samples", (count, split, seed)), ("split", (task, count, split, seed))
        if drawn in self._results:
            yield self.samples(view)[task]
        elif small in self._results:
            yield self.get_or_make(*small, lambda: self.family.samples(task, split, count, seed))
        else:
            for part in self.family.parts(task, split, count, seed):
                whole = len(part) == part.total and not self._one_shot
                if whole and sum(one.nbytes for one in part.inputs.values()) <= SMALL_SPLIT:
                    self._results.keep(small, part)
                yield part

    def _calibrate(
        self, config: CalibrationConfig, passes: Callable[[], Mapping[str, ExpertPass]], progress: Progress
    ) -> CalibrationResult:
        def make() -> CalibrationResult:
            return calibrate(self.family, config, experts=passes(), first=self._first_block, progress=progress)

        return self.get_or_make("calibrated", config, make)

    def _calibration_passes(self, config: CalibrationConfig, split: str = "calibration") -> Mapping[str, ExpertPass]:
        key = (split, config.samples, config.augment, config.seed, config.batch_size, config.precision)
        family, of_all = ensure_family(self.family, precision=config.precision), replace(config, tasks=None)
        with self._lock:
            return self._passes.get_or_make(
                key, lambda: expert_passes(family, of_all, Kept.from_device(family.compute.device), split)
            )

    def _measured_passes(self, view: View, drawn: Mapping[str, Samples]) -> Mapping[str, ExpertPass]:
        def make() -> dict[str, ExpertPass]:
            room = None if self._one_shot else Kept.from_device(self.family.compute.device)
            return {task: self.family.expert_pass(drawn[task], BATCH_SIZE, room) for task in self.tasks}

        with self._lock:
            return self._passes.get_or_make(("measured", *self._key(view)), make)

    def _judges(self, model: Weights, view: View, drawn: Callable[[], Mapping[str, Samples]]) -> Judges:
        models = model, *self.family.experts.values()

        def make() -> Judges:
            return judges(self.family, model, drawn())

        shared = self.family.adapter.scores_with == "prompts" and not self.family.adapter.reads_prompts
        if shared and not any(own_head(one, task) for one in models for task in self.tasks):
            return self.get_or_make("judges", self._key(view), make)
        return make()  # nothing to keep but the models, which read their heads when they are asked


def _walked_model(model: ModelId) -> ModelId:
    """Whose walk has a model's features: that of any model has those of "expert" too, so the merged one's."""
    return "merged" if model == "expert" else model


def open_session(suite: str | Path | Suite, device: str = "auto", *, resident: bool = False) -> Session:
    """A suite's session: the very same one as long as somebody holds it and every file of the suite is as it was.

    Args:
        suite: opened, or an embedded name or the path of a suite file.
        resident: every tensor stays in memory, for interactive work.

    Raises:
        InputError: what `load_suite` says of the file and `open_family` of the models.
    """
    loaded = suite if isinstance(suite, Suite) else load_suite(suite)
    key = suite_stamp(loaded), device, resident  # before anything is read, so that a change meanwhile shows
    with _guard:
        turn = _turns.setdefault(key, threading.Lock())
    with turn:  # who wants the same suite waits; others need not
        session = _open.get(key)
        if session is None or session.released:
            family = open_family(loaded, device)
            session = _open[key] = Session(family.resident() if resident else family)
        return session


_open: WeakValueDictionary[Hashable, Session] = WeakValueDictionary()
_turns: WeakValueDictionary[Hashable, threading.Lock] = WeakValueDictionary()
_guard = threading.Lock()

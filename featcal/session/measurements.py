"""Measure the models of an open suite: drift, features, scores, and values derived from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from torch import Tensor

from featcal.drift.decomposition import decompose, map_last_layer, measure_total_drift
from featcal.drift.depth import DepthDecisions, read_decisions
from featcal.drift.inside import MapMismatch, map_mismatches
from featcal.drift.ledger import DriftLedger, Features, TaskDrift
from featcal.drift.memory import measuring_store
from featcal.drift.output import output_drift, top1_margin
from featcal.drift.task_vectors import WeightChange, join_layers, measure_weight_changes
from featcal.drift.tokens import TokenDrift, token_drift
from featcal.evaluation.comparison import Comparison, compare_scores
from featcal.evaluation.evaluate import Scores, TaskScore, reach_features, score_model, scoring_heads
from featcal.evaluation.generation_check import Canary
from featcal.evaluation.generation_check import compare_generation as measure_canary
from featcal.evaluation.language import name_answers, name_tokens
from featcal.evaluation.scoring_heads import answers_of, judges, require_one_scale
from featcal.family.opening import Family
from featcal.formats.weights import Overlay, Weights
from featcal.mergers.common.engine import RecipeWeights
from featcal.models.context import Run
from featcal.models.features import depth_features, layer_features
from featcal.models.lane import ExpertPass, WalkCache
from featcal.models.model import Head, own_head, strip_maps
from featcal.samples.sources import Samples
from featcal.session.fits import Fits
from featcal.session.model_ref import MERGED, IdentityKey, ModelId, ModelRef
from featcal.session.open_suite import OpenSuite, ResultKind
from featcal.suite.views import DriftOptions, EvaluationSamples
from featcal.system.errors import InputError
from featcal.system.progress import Progress, part_of, silent

Judges = Mapping[str, tuple[Head, Head, Tensor]]
"""Task → the expert's head, the model's head and the right class or first token of every sample."""
FIRST_TOKEN = "first_token"
"""Metric of `quick_scores` for language models: the first token of the answer is the right one."""
_DRIFT, _WHOLE_TEST = DriftOptions(), EvaluationSamples(None, "test")
_FEATURES = ResultKind[Features]("features")
_DRIFTS = ResultKind[DriftLedger]("drift")
_TASK_DRIFTS = ResultKind[TaskDrift]("drift on one task")
_LAYERS = ResultKind[dict[str, Tensor]]("features after layers")
_MAPS = ResultKind[dict[str, list[MapMismatch]]]("linear maps")
_DEPTH = ResultKind[DepthDecisions]("decisions through depth")
_TOKENS = ResultKind[TokenDrift]("drift by token")
_CHANGES = ResultKind[dict[str, list[WeightChange]]]("changes of weights")
_SCORES = ResultKind[Scores]("scores")
_REACHED = ResultKind[Tensor]("features that are scored")
_CHECKED = ResultKind[WalkCache]("inputs that were checked")
_MERGED = ResultKind[Weights]("merged")
_HEADS = ResultKind[Mapping[str, Head]]("heads")
_QUICK = ResultKind[Scores]("quick scores")
_MARGINS = ResultKind[dict[str, Tensor]]("margins")
_COMPARED = ResultKind[Comparison]("compared")
_CANARY = ResultKind[Canary]("canary")
_JUDGES = ResultKind[Judges]("judges")


@dataclass(frozen=True)
class Measurements:
    """Measure models of an open suite, each thing once; reached by `Session.measure`."""

    suite: OpenSuite

    @property
    def fit(self) -> Fits:
        """Return the object that makes the measured models."""
        return Fits(self.suite)

    def features(self, model: ModelId, view: EvaluationSamples = _DRIFT, progress: Progress = silent) -> Features:
        """Measure the total drift of a model's features, without splitting it: half the cost of `drift`. For "expert"
        the result is that of the merged model, which includes the experts' features."""
        one = _walked_model(self.suite.resolve(model))
        count, split, seed = self.suite.key(view)
        walked = self._find_walk(one, DriftOptions(count, split, seed))
        if walked is not None:
            return walked

        def make() -> Features:
            weights = self.fit.weights(one)
            below = strip_maps(weights)
            if below is not weights:  # whose walk is the same up to the maps
                found = self.features(below, view, progress).tasks
                mapped = {task: map_last_layer(features, weights) for task, features in found.items()}
                return Features(self.suite.family.suite.name, one.label, split, mapped)
            passes = self.suite.measured_passes(view, self.suite.samples(view))
            tasks = measure_total_drift(self._run(weights, progress), weights, passes)
            return Features(self.suite.family.suite.name, one.label, split, tasks)

        return self.suite.get_or_make(_FEATURES, (one.key, count, split, seed), make)

    def drift(self, model: ModelId, options: DriftOptions = _DRIFT, progress: Progress = silent) -> DriftLedger:
        """Measure a model's drift from the experts, layer by layer and task by task; without another walk where one on
        the same samples has measured it already together with more.

        Raises:
            InputError: a model that does not fit the suite, samples that are missing or not finite, no labels or heads
                if output is requested, or heads of two scales, or a class token that the architecture does not have.
            NumericalError: final features that are not finite.
        """
        one, options = self.suite.resolve(model), self._complete(options)

        def make() -> DriftLedger:
            weights, walked = self.fit.weights(one), self._find_walk(one, options)
            drawn = self.suite.samples(options) if options.output or walked is None else {}
            judged = self._judges(weights, options, lambda: drawn) if options.output else {}
            if walked is not None:
                tasks = {
                    task: replace(found, output=None, attribution=found.attribution if options.attribution else None)
                    for task, found in walked.tasks.items()
                }
            else:
                passes = self.suite.measured_passes(options, drawn)
                del drawn  # the passes let inputs go that were read
                tasks = decompose(self._run(weights, progress), weights, passes, **_walk_options(options))
            for task, judge in judged.items():
                require_one_scale(task, *judge[:2])
                found = output_drift(tasks[task].expert_features, tasks[task].model_features, *judge)
                tasks[task] = replace(tasks[task], output=found)
            return self._ledger(one, options, tasks)

        return self.suite.get_or_make(_DRIFTS, (one.key, options), make)

    def drift_by_task(
        self, model: ModelId, options: DriftOptions = _DRIFT, progress: Progress = silent
    ) -> Iterator[DriftLedger]:
        """Measure what `drift` measures one task after the other, and yield the drift on the tasks so far, last of all
        the whole, which is cached. Tasks that were measured stay cached if the iteration ends before. With scores, or
        if a walk has measured it, only the whole is yielded.

        Use it for models in memory: others are read anew for every task.

        Raises:
            InputError, NumericalError: as `drift`.
        """
        one, options = self.suite.resolve(model), self._complete(options)
        if options.output or self._find_walk(one, options) is not None:
            yield self.drift(one, options, progress)
            return
        tasks: dict[str, TaskDrift] = {}
        for done, task in enumerate(self.suite.tasks):

            def make(task: str = task, before: int = done) -> TaskDrift:
                weights, drawn = self.fit.weights(one), self.suite.samples(options)
                walk = {task: self.suite.measured_passes(options, drawn)[task]}
                run = self._run(weights, part_of(progress, before, len(self.suite.tasks)))
                return decompose(run, weights, walk, **_walk_options(options))[task]

            tasks[task] = self.suite.get_or_make(_TASK_DRIFTS, (one.key, options, task), make)
            if len(tasks) < len(self.suite.tasks):
                yield self._ledger(one, options, tasks)
        whole = self.suite.get_or_make(_DRIFTS, (one.key, options), lambda: self._ledger(one, options, tasks))
        for task in tasks:  # which the whole holds
            self.suite.forget(_TASK_DRIFTS, (one.key, options, task))
        yield whole

    def layer_features(
        self, model: ModelId, task: str, view: EvaluationSamples = _DRIFT, progress: Progress = silent
    ) -> dict[str, Tensor]:
        """Return a model's features after every layer, `[n, d]` by layer in forward order, on the CPU: state of the
        class token or mean over tokens without padding, and last the final features."""
        one = self.suite.resolve(model)

        def make() -> dict[str, Tensor]:
            walk = self._pass_of(one, task, view)
            return layer_features(self._run(walk.weights, progress), walk)

        return self.suite.get_or_make(_LAYERS, (one.key, task, *self.suite.key(view)), make)

    def depth(
        self, model: ModelId, task: str, view: EvaluationSamples = _DRIFT, progress: Progress = silent
    ) -> DepthDecisions:
        """Read a model's decisions on a task after every block, through its own final norm and head, for comparison
        with the expert's final decisions. Heads are trained for the last layer; earlier readouts only indicate where a
        decision turns.

        Raises:
            InputError: no such task, or a missing head or labels (`judges`).
        """
        self._require_task(task)
        one = self.suite.resolve(model)

        def make() -> DepthDecisions:
            expert_head, model_head, _ = self.judges(_walked_model(one), view)[task]
            head = expert_head if one.is_every_expert else model_head
            walk = self._pass_of(one, task, view)
            features = depth_features(self._run(walk.weights, progress), walk)
            found = read_decisions(features, head, lambda answers: name_answers(self.suite.family, head, answers))
            return found if one.is_every_expert else replace(found, beside=self.depth("expert", task, view, progress))

        return self.suite.get_or_make(_DEPTH, (one.key, task, *self.suite.key(view)), make)

    def maps(
        self, model: ModelId, view: EvaluationSamples = _DRIFT, progress: Progress = silent
    ) -> dict[str, list[MapMismatch]]:
        """Measure the mismatch of every linear map inside the blocks, by task, blocks in forward order, and, of a
        calibrated model, the share of each map in the change by calibration."""
        one = self.suite.resolve(model)

        def make() -> dict[str, list[MapMismatch]]:
            weights = self.fit.weights(one)
            made = self.fit.find_calibration(one)
            before = None if made is None else self.fit.weights(made[1])
            return map_mismatches(self._run(weights, progress), weights, self._own_passes(view), before)

        return self.suite.get_or_make(_MAPS, (one.key, *self.suite.key(view)), make)

    def tokens(
        self, model: ModelId, task: str, view: EvaluationSamples = _DRIFT, progress: Progress = silent
    ) -> TokenDrift:
        """Measure a model's drift from a task's expert token by token, after every layer: of every patch of a picture
        and its class token, or of every token of a text. For "expert" the result is that of the merged model.

        Raises:
            InputError: no such task, or a model that does not fit the suite.
        """
        self._require_task(task)
        one = _walked_model(self.suite.resolve(model))

        def make() -> TokenDrift:
            weights = self.fit.weights(one)
            walk = {task: self.suite.measured_passes(view, self.suite.samples(view))[task]}
            named = partial(name_tokens, self.suite.family)
            return token_drift(self._run(weights, progress), weights, walk, named)[task]

        return self.suite.get_or_make(_TOKENS, (one.key, task, *self.suite.key(view)), make)

    def vector_cosines(self, model: ModelId) -> dict[str, float]:
        """Return the cosine of the model's task vector to each expert's."""
        return join_layers(self.weight_changes(model))

    def weight_changes(self, model: ModelId) -> dict[str, list[WeightChange]]:
        """Measure by task, layer by layer, how far the model's and the expert's weights are from the base's.

        Raises:
            InputError: the base is not known.
        """
        one = self.suite.resolve(model)
        return self.suite.get_or_make(
            _CHANGES, one.key, lambda: measure_weight_changes(self.suite.family, self.fit.weights(one))
        )

    def scores(self, model: ModelId, view: EvaluationSamples = _WHOLE_TEST, progress: Progress = silent) -> Scores:
        """Score a model on every task: accuracy of pictures, generated answers of text.

        Raises:
            InputError: no such split, no labels, answers or class names, or a base without a text tower.
            NumericalError: features that are not finite.
        """
        one, split = self.suite.resolve(model), view.split or self.suite.split
        step = f"scoring {one.label}"

        def make() -> Scores:
            own = None if one.is_every_expert else self.fit.weights(one)
            models = {task: own or self.suite.family.experts[task] for task in self.suite.tasks}
            needed = {task: weights for task, weights in models.items() if own_head(weights, task) is None}
            # A model that reads prompts makes the heads itself; otherwise they are the base's, the same for all models.
            whose = one.key if self.suite.family.adapter.reads_prompts else None
            key = split, tuple(needed), whose
            heads = self.suite.get_or_make(_HEADS, key, lambda: scoring_heads(self.suite.family, split, needed))
            tasks = {}
            for done, task in enumerate(self.suite.tasks):
                progress(step, done, len(self.suite.tasks))
                parts = self.suite.parts(task, view)
                tasks[task] = score_model(self.suite.family, models[task], parts, heads.get(task), self._reach)
            progress(step, len(self.suite.tasks), len(self.suite.tasks))
            return Scores(self.suite.family.suite.name, one.label, split, tasks)

        return self.suite.get_or_make(_SCORES, (one.key, *self.suite.key(view)), make)

    def quick_scores(self, model: ModelId, view: EvaluationSamples) -> Scores:
        """Score a model on the features of the drift measurement, at no further cost.

        Accuracy for pictures; for text the share of answers with a right first token.
        """
        one = self.suite.resolve(model)

        def make() -> Scores:
            tasks, weights = {}, self.fit.weights(_walked_model(one))
            for task, scores, labels in self._iterate_scores(one, view):
                predictions = scores.argmax(1)
                right = float((predictions == labels).double().mean())
                metric = FIRST_TOKEN if answers_of(self.suite.family, weights, task) == "text" else "accuracy"
                tasks[task] = TaskScore(metric, right, predictions, labels)
            return Scores(self.suite.family.suite.name, one.label, view.split or self.suite.split, tasks)

        return self.suite.get_or_make(_QUICK, (one.key, *self.suite.key(view)), make)

    def answer_scores(self, model: ModelId, view: EvaluationSamples, progress: Progress = silent) -> Scores:
        """Score a model by its answers, for the choice between models: whole answers of text, because an answer can be
        wrong although its first token is right, and the likeness of sentences; classes on the features of the drift
        measurement.

        Raises:
            InputError: there is no head, no labels or no answers.
        """
        return self.scores(model, view, progress) if self.suite.scores_apart else self.quick_scores(model, view)

    def margins(self, model: ModelId, view: EvaluationSamples) -> dict[str, Tensor]:
        """Return, by task, `[n]`: the lead of a model's first over its second class, or first token of an answer,
        sample by sample (mu of Eq. (44)), from the features of the drift measurement."""
        one = self.suite.resolve(model)

        def make() -> dict[str, Tensor]:
            return {task: top1_margin(scores) for task, scores, _ in self._iterate_scores(one, view)}

        return self.suite.get_or_make(_MARGINS, (one.key, *self.suite.key(view)), make)

    def judges(self, model: ModelId, view: EvaluationSamples) -> Judges:
        """Return the heads and the right answers.

        Raises:
            InputError: labels, answers, class names, a text tower or a head are missing.
        """
        return self._judges(self.fit.weights(model), view, lambda: self.suite.samples(view))

    def compare(
        self, a: ModelId, b: ModelId, view: EvaluationSamples = _WHOLE_TEST, progress: Progress = silent
    ) -> Comparison:
        """Compare B with A on the same samples, with intervals, tests and flips.

        Raises:
            InputError, NumericalError: a model cannot be scored; `scores` lists the reasons.
        """

        one, other = self.suite.resolve(a), self.suite.resolve(b)

        def named_scores(model: ModelRef) -> Scores:
            return replace(self.scores(model, view, progress), model=model.name)

        key = one.key, other.key, *self.suite.key(view)
        return self.suite.get_or_make(_COMPARED, key, lambda: compare_scores(named_scores(one), named_scores(other)))

    def canary(
        self, model: ModelId, against: ModelId = "merged", seed: int = 42, progress: Progress = silent
    ) -> Canary:
        """Check whether a model still generates (`featcal.evaluation.generation_check.compare_generation`)."""
        one, other = self.suite.resolve(model), self.suite.resolve(against)

        def make() -> Canary:
            held, weights = self.fit.weights(other), self.fit.weights(one)
            return measure_canary(self.suite.family, weights, held, seed=seed, progress=progress)

        return self.suite.get_or_make(_CANARY, (one.key, other.key, seed), make)

    def adopt_scores(self, model: ModelId, view: EvaluationSamples, scores: Scores) -> Scores:
        """Cache the scores of another process as this model's, which `scores` then returns.

        Raises:
            InputError: scores of another split or of other tasks.
        """
        split, tasks = view.split or self.suite.split, list(self.suite.tasks)
        if (scores.split, list(scores.tasks)) != (split, tasks):
            raise InputError(
                f"scores of the {scores.split} split for {', '.join(scores.tasks)} are not those of the {split} split "
                f"for {', '.join(tasks)}"
            )
        one = self.suite.resolve(model)
        own = replace(scores, model=one.label)
        return self.suite.get_or_make(_SCORES, (one.key, *self.suite.key(view)), lambda: own)

    def has_scores(self, model: ModelId, view: EvaluationSamples) -> bool:
        """Say whether `scores` is cached."""
        return self.suite.has(_SCORES, (self.suite.resolve(model).key, *self.suite.key(view)))

    def has_quick_scores(self, model: ModelId, view: EvaluationSamples) -> bool:
        """Say whether `quick_scores` is cached; otherwise heads may have to be made from class names."""
        return self.suite.has(_QUICK, (self.suite.resolve(model).key, *self.suite.key(view)))

    def has_features(self, model: ModelId, view: EvaluationSamples) -> bool:
        """Say whether `features`, and so `quick_scores` and `margins`, need no walk."""
        one, drawn = _walked_model(self.suite.resolve(model)), self.suite.key(view)
        return self.has_drift(one, DriftOptions(*drawn)) or self.suite.has(_FEATURES, (one.key, *drawn))

    def has_drift(self, model: ModelId, options: DriftOptions) -> bool:
        """Say whether `drift` needs no walk."""
        return self._find_walk(self.suite.resolve(model), self._complete(options)) is not None

    def _reach(self, family: Family, weights: Weights, drawn: Samples) -> Tensor:
        """Return the final features of weights on samples to score; computed once for models that differ only in
        maps."""
        below = strip_maps(weights)
        # No room: steps of a model that is scored once are worth nothing, and inputs are checked once for all models.
        checked = self.suite.get_or_make(_CHECKED, None, lambda: WalkCache(0))
        key = IdentityKey(below), drawn.task, drawn.split, drawn.indices
        return self.suite.get_or_make(
            _REACHED, key, lambda: reach_features(family, self._merge_once(below), drawn, checked)
        )

    def _merge_once(self, weights: Weights) -> Weights:
        """Return a merge that is computed on reading with its tensors in memory, if there is room for them, because
        every task and part of a split reads the whole model again; any other model is returned unchanged."""
        names = self.suite.family.adapter.tower
        size = sum(weights.info[name].nbytes for name in names)
        if not (isinstance(weights, RecipeWeights) and self.suite.has_room(size)):
            return weights
        return self.suite.get_or_make(
            _MERGED, IdentityKey(weights), lambda: Overlay(weights.label, weights, weights.read(names))
        )

    def _require_task(self, task: str) -> None:
        if task not in self.suite.tasks:
            raise InputError(f"task '{task}': the suite has {', '.join(self.suite.tasks)}")

    def _pass_of(self, model: ModelRef, task: str, view: EvaluationSamples) -> ExpertPass:
        """Return a model's own pass over the samples of a task; the expert's uses its cache."""
        walk = self.suite.measured_passes(view, self.suite.samples(view))[task]
        if model.is_every_expert:
            return walk
        return walk.copy_for_one_walk(self.fit.weights(model))

    def _own_passes(self, view: EvaluationSamples) -> dict[str, ExpertPass]:
        """Return the passes of all experts for a walk that must leave their caches alone: it looks inside the blocks,
        and its token-wise results would displace those of the next measurement."""
        passes = self.suite.measured_passes(view, self.suite.samples(view))
        return {task: one.copy_for_one_walk() for task, one in passes.items()}

    def _run(self, model: Weights, progress: Progress) -> Run:
        """Return the resources for a measurement of a model, after its samples are drawn.

        Raises:
            InputError: one block of expert and model needs more than `max_memory`.
        """
        # Asked for late: resident memory, which the samples have a part in by now, decides how much room is left.
        limit, adapter = self.suite.max_memory, self.suite.family.adapter
        return self.suite.family.run(progress, None if limit is None else measuring_store(adapter, model, limit))

    def _complete(self, options: DriftOptions) -> DriftOptions:
        """Name the split, so that equal measurements have equal options.

        Raises:
            InputError: the class token is asked for and the architecture has none.
        """
        if options.tokens == "class" and not self.suite.family.adapter.class_token:
            raise InputError(f"tokens: a {self.suite.family.adapter.family} model has no class token; take 'all'")
        return replace(options, split=options.split or self.suite.split)

    def _ledger(self, model: ModelRef, options: DriftOptions, tasks: Mapping[str, TaskDrift]) -> DriftLedger:
        assert options.split is not None
        return DriftLedger(self.suite.family.suite.name, model.label, options.split, dict(tasks))

    def _find_walk(self, model: ModelRef, options: DriftOptions) -> DriftLedger | None:
        """Return the cached result of a walk through a model's layers that has measured what these options ask for, at
        least up to scores, which need no walk; None if there is none."""
        more = product({options.attribution, True}, (False, True))
        found = (self.suite.find(_DRIFTS, (model.key, replace(options, attribution=a, output=o))) for a, o in more)
        return next((one for one in found if one is not None), None)

    def _judges(self, model: Weights, view: EvaluationSamples, drawn: Callable[[], Mapping[str, Samples]]) -> Judges:
        models = model, *self.suite.family.experts.values()

        def make() -> Judges:
            return judges(self.suite.family, model, drawn())

        shared = self.suite.family.adapter.scores_with == "prompts" and not self.suite.family.adapter.reads_prompts
        # The base's text tower makes heads of class names alone, so models that bring none share them.
        if shared and not any(own_head(one, task) for one in models for task in self.suite.tasks):
            return self.suite.get_or_make(_JUDGES, self.suite.key(view), make)
        return make()  # nothing to keep but the models, which read their heads when they are asked

    def _iterate_scores(self, model: ModelRef, view: EvaluationSamples) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield task, scores `[n, c]` and the right class or first token of every sample."""
        features, judged = self.features(model, view), self.judges(_walked_model(model), view)
        for task, found in features.tasks.items():
            expert_head, model_head, labels = judged[task]
            own = found.expert_features if model.is_every_expert else found.model_features
            head = expert_head if model.is_every_expert else model_head
            yield task, head.scores(own.float()), labels


def _walked_model(model: ModelRef) -> ModelRef:
    """Return the model whose walk has a model's features."""
    # Every walk has the experts' features beside the model's; the merged one's is the likeliest to be kept.
    return MERGED if model.is_every_expert else model


def _walk_options(options: DriftOptions) -> dict[str, bool]:
    """Return the keywords of `decompose` for the options of a measurement."""
    first = options.tokens == "class"
    return {"class_token": first, "sublayers": options.sublayers, "attribution": options.attribution}

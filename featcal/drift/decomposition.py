"""Propositions 1, 2 and 4: the drift of a model from its experts, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from featcal.drift.ledger import DriftLedger, FeatureDrift, TaskDrift, TaskFeatures
from featcal.drift.output import output_drift
from featcal.drift.parts import take_apart
from featcal.drift.record import Record, final_features, joined
from featcal.drift.room import Room
from featcal.drift.second_run import SecondRun
from featcal.drift.streams import LAST_LAYER, cross
from featcal.errors import InputError
from featcal.evaluation.judges import judges
from featcal.family import Calibrated, Family, as_family
from featcal.formats.weights import Weights
from featcal.models.adapter import walking
from featcal.models.lane import ExpertPass
from featcal.models.run import Run
from featcal.progress import Progress, silent
from featcal.suite import Suite

BATCH_SIZE = 64
TOKENS = ("all", "class")


def measure_drift(
    suite: Suite | Family,
    model: str | Weights | Calibrated = "merged",
    *,
    samples: int = 64,
    split: str | None = None,
    seed: int = 42,
    tokens: str = "all",
    sublayers: bool = False,
    attribution: bool = False,
    output: bool = False,
    device: str = "auto",
    progress: Progress = silent,
) -> DriftLedger:
    """Decompose the drift of a model of the suite, layer by layer and task by task.

    Args:
        model: "merged", "base", a checkpoint folder, a `CalibrationResult`, or weights.
        samples: per task; a task that has fewer gives all it has.
        split: "calibration", "validation" or "test"; None takes validation where every task has it, since
            calibrated models have seen the calibration samples.
        tokens: "all", or "class" to take every norm over the class token alone.
        sublayers: measure attention and MLP of every block as layers of their own (Prop. 4 per sublayer).
        attribution: also book the final drift to the layers (Prop. 2), at several times the cost.
        output: also measure scores, losses and margins (Props. 3 and 7, Eq. 44); needs labels and a head.

    Raises:
        InputError: a model that does not fit the suite, or samples that are missing or not finite.
    """
    if tokens not in TOKENS:
        raise InputError(f"tokens is one of {', '.join(TOKENS)}, not '{tokens}'")
    family = as_family(suite, device)
    weights = family.model(model)
    split = split or family.suite.measured_split
    drawn = {task: family.samples(task, split, samples, seed) for task in family.suite.tasks}
    judged = judges(family, weights, drawn) if output else {}
    passes = {task: family.expert_pass(one, BATCH_SIZE) for task, one in drawn.items()}
    label = model if isinstance(model, str) else weights.label
    if tokens == "class" and not family.adapter.class_token:
        raise InputError(f"tokens: a {family.adapter.family} model has no class token; take 'all'")
    tasks = decompose(
        family.run(progress),
        weights,
        passes,
        class_token=tokens == "class",
        sublayers=sublayers,
        attribution=attribution,
    )
    for task, judge in judged.items():
        found = output_drift(tasks[task].expert_features, tasks[task].model_features, *judge)
        tasks[task] = replace(tasks[task], output=found)
    return DriftLedger(family.suite.name, label, split, tasks)


def decompose(
    run: Run,
    model: Weights,
    experts: Mapping[str, ExpertPass],
    *,
    class_token: bool = False,
    sublayers: bool = False,
    attribution: bool = False,
) -> dict[str, TaskDrift]:
    """The measurement behind `measure_drift`, on expert passes at hand.

    Each layer runs three times per task: the expert on its own features, the model on its own, and the model
    on the expert's, which is what separates mismatch from propagation. One sample per task does so a second time,
    in float64 and by other means (`SecondRun`): the residuals say how far the two computations are apart.
    """
    records = {task: Record(class_token, attribution) for task in experts}
    layers = len(run.adapter.blocks()) * (2 if sublayers else 1) + len(run.adapter.stages) + 1
    room = Room.of(run, experts, layers, attribution)
    with walking(run.adapter):
        for part in room.parts(experts):
            second = SecondRun(run, model, part, sublayers)
            for crossing in cross(run, model, part, sublayers):
                record, on_expert, (expert, reached) = records[crossing.task], crossing.on_expert(), crossing.after
                parts = take_apart((expert, on_expert, reached), crossing.incoming, class_token)
                record.add(crossing, parts, on_expert, room.tangents)
                if crossing.position == 0 and crossing.layer not in record.residuals:
                    record.check(crossing, parts, second.states(crossing))
    return {task: record.result(task, experts[task].indices) for task, record in records.items()}


def follow(run: Run, model: Weights, experts: Mapping[str, ExpertPass]) -> dict[str, TaskFeatures]:
    """How far the features drift, and the final ones, not why: the numbers of `decompose` over all tokens and whole
    blocks, without its run of the model on the expert's features."""
    norms: dict[str, dict[str, list[tuple[Tensor, Tensor]]]] = {task: {} for task in experts}
    final: dict[str, list[tuple[Tensor, Tensor]]] = {task: [] for task in experts}
    with walking(run.adapter):
        for crossing in cross(run, model, experts):
            expert, reached = (state.flatten(1).double() for state in crossing.after)
            measured = (reached - expert).norm(dim=1), expert.norm(dim=1)
            norms[crossing.task].setdefault(crossing.layer, []).append(measured)
            if crossing.layer == LAST_LAYER:
                final[crossing.task].append(crossing.after)
    found = {}
    for task, layers in norms.items():
        drifts = tuple(FeatureDrift(layer, *joined(batches)) for layer, batches in layers.items())
        own, reached = final_features(task, final[task])
        found[task] = TaskFeatures(task, drifts, own, reached, experts[task].indices)
    return found

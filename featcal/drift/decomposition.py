"""Measure the drift of a model from its experts, layer by layer (Props. 1, 2 and 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from featcal.drift.accumulator import Record, book_contributions, checked_features, concat_batches
from featcal.drift.crosscheck import SecondRun
from featcal.drift.ledger import FeatureDrift, TaskDrift, TaskFeatures
from featcal.drift.memory import SampleChunks
from featcal.drift.split import split_drift
from featcal.drift.streams import cross
from featcal.formats.weights import Weights
from featcal.models.adapter import LAST_LAYER, walking
from featcal.models.compute import widen
from featcal.models.context import Run
from featcal.models.lane import ExpertPass
from featcal.models.model import map_features


def decompose(
    run: Run,
    model: Weights,
    experts: Mapping[str, ExpertPass],
    *,
    class_token: bool = False,
    sublayers: bool = False,
    attribution: bool = False,
) -> dict[str, TaskDrift]:
    """Split the drift of a model from the experts into mismatch and propagation, layer by layer (Prop. 1).

    Each layer runs three times per task: the expert on its own features, the model on its own, and the model on the
    expert's, which separates mismatch from propagation. One sample per task runs a second time, in float64 and in
    another way (`SecondRun`); the residuals are the distance of the two computations.
    """
    records = {task: Record(attribution) for task in experts}
    layers = len(run.adapter.blocks()) * (2 if sublayers else 1) + len(run.adapter.stages) + 1
    room = SampleChunks.plan(run, experts, layers, attribution)
    with walking(run.adapter):
        for part in room.parts(experts):
            second = SecondRun(run, model, part, sublayers)
            for crossing in cross(run, model, part, sublayers):
                record, on_expert, (expert, reached) = records[crossing.task], crossing.run_on_expert(), crossing.after
                first = class_token and run.adapter.class_token_at(crossing.place.stage)
                parts = split_drift((expert, on_expert, reached), crossing.incoming, first)
                record.add(crossing, parts, on_expert)
                # Samples may be walked through in parts: each part has a first batch, one of them is checked.
                if crossing.position == 0 and crossing.layer not in record.residuals:
                    record.check(crossing, parts, second.states(crossing), first)
            if attribution:
                book_contributions(records.values())
    return {task: record.result(task, experts[task].indices) for task, record in records.items()}


def map_last_layer(features: TaskFeatures, model: Weights) -> TaskFeatures:
    """Apply a model's maps of final features, which follow all other layers, to the features of the model below."""
    expert = features.expert_features
    pair = expert, map_features(model, features.task, features.model_features)
    expert, reached = checked_features(features.task, [pair])
    far = (widen(reached) - widen(expert)).norm(dim=1)
    last = FeatureDrift(LAST_LAYER, far, features.layers[-1].expert_norm)
    return replace(features, layers=(*features.layers[:-1], last), model_features=reached)


def measure_total_drift(run: Run, model: Weights, experts: Mapping[str, ExpertPass]) -> dict[str, TaskFeatures]:
    """Return the drift of all layers and the final features, without splitting the drift. Use it where the parts are
    not needed: the numbers equal those of `decompose` over all tokens and whole blocks, without the model's run on the
    expert's features.
    """
    norms: dict[str, dict[str, list[tuple[Tensor, Tensor]]]] = {task: {} for task in experts}
    final: dict[str, list[tuple[Tensor, Tensor]]] = {task: [] for task in experts}
    with walking(run.adapter):
        for crossing in cross(run, model, experts):
            expert, reached = (widen(state.flatten(1)) for state in crossing.after)
            measured = (reached - expert).norm(dim=1), expert.norm(dim=1)
            norms[crossing.task].setdefault(crossing.layer, []).append(measured)
            if crossing.layer == LAST_LAYER:
                final[crossing.task].append(crossing.after)
    found = {}
    for task, layers in norms.items():
        drifts = tuple(FeatureDrift(layer, *concat_batches(batches)) for layer, batches in layers.items())
        own, reached = checked_features(task, final[task])
        found[task] = TaskFeatures(task, drifts, own, reached, experts[task].indices)
    return found

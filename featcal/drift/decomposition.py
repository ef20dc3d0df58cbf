"""Proposition 1, measured: feature drift per layer, split into local mismatch and upstream propagation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.family import Family, as_family
from featcal.models.adapter import Adapter, Call
from featcal.models.expert_pass import ExpertPass, first_calls
from featcal.models.weights import Compute, Weights
from featcal.progress import Progress, silent
from featcal.suite import Suite

if TYPE_CHECKING:
    import pandas as pd

FIRST_LAYER, LAST_LAYER = "embeddings", "head"


@dataclass(frozen=True)
class LayerDrift:
    """One layer on one task; every array holds one number per sample, norms taken over the whole token state."""

    layer: str
    drift: Float[Tensor, " n"]
    """||e||, e = h_model - h_expert (Eq. 2)."""
    mismatch: Float[Tensor, " n"]
    """||m||, m = f_model(h_expert before) - h_expert (Eq. 3)."""
    propagation: Float[Tensor, " n"]
    """||p||, p = h_model - f_model(h_expert before) (Eq. 3); 0 in the first layer."""
    expert_norm: Float[Tensor, " n"]
    """||h_expert||."""
    alignment: Float[Tensor, " n"]
    """Cosine of m and p: below 0 they cancel. 0 where either vanishes."""
    residual: float
    """Largest ||e - (m + p)|| / ||e|| over the samples; the identity of Prop. 1 holds up to rounding."""

    @property
    def relative_drift(self) -> float:
        """Mean drift over the mean norm of the expert feature."""
        return float(self.drift.mean() / self.expert_norm.mean())


@dataclass(frozen=True)
class TaskDrift:
    """One task's layers in forward order and its final features."""

    task: str
    layers: tuple[LayerDrift, ...]
    expert_features: Float[Tensor, "n k"]
    """Final projected features of the expert, before normalisation."""
    model_features: Float[Tensor, "n k"]

    @property
    def cosine(self) -> Float[Tensor, " n"]:
        """Cosine of the final features to the expert's, per sample."""
        return torch.nn.functional.cosine_similarity(self.expert_features, self.model_features)

    @property
    def identity_residual(self) -> float:
        return max(layer.residual for layer in self.layers)


@dataclass(frozen=True)
class DriftLedger:
    """The drift of one model from every expert of its suite."""

    suite: str
    model: str
    split: str
    tasks: Mapping[str, TaskDrift]

    def to_json(self) -> dict[str, Any]:
        """The public document of `featcal drift --json`; norms are means over samples."""
        return {
            "suite": self.suite,
            "model": self.model,
            "split": self.split,
            "tasks": {name: _task_json(task) for name, task in self.tasks.items()},
        }

    def to_frame(self) -> pd.DataFrame:
        """One row per task and layer: task, layer, drift, relative_drift, mismatch, propagation, alignment."""
        import pandas as pd

        return pd.DataFrame(
            [
                {"task": name, **_layer_json(layer), "alignment": float(layer.alignment.mean())}
                for name, task in self.tasks.items()
                for layer in task.layers
            ]
        ).drop(columns="share")

    @property
    def macro_cosine(self) -> float:
        """Mean over tasks of the mean cosine of final features."""
        return float(torch.stack([task.cosine.mean() for task in self.tasks.values()]).mean())


def measure_drift(
    suite: Suite | Family,
    model: str | Weights = "merged",
    *,
    samples: int = 64,
    split: str | None = None,
    seed: int = 42,
    device: str = "auto",
    progress: Progress = silent,
) -> DriftLedger:
    """Decompose the drift of a model of the suite, layer by layer and task by task (Prop. 1).

    Args:
        model: "merged", "base", a checkpoint folder, or weights such as `CalibrationResult.weights`.
        samples: per task; a task that has fewer gives all it has.
        split: "calibration", "validation" or "test"; None takes validation where every task has it, since
            calibrated models have seen the calibration samples.

    Raises:
        InputError: a model that does not fit the suite, or samples that are missing or not finite.
    """
    family = as_family(suite, device)
    weights = family.model(model) if isinstance(model, str) else model
    split = split or ("validation" if "validation" in family.suite.splits() else "calibration")
    passes = {
        task: family.expert_pass(family.samples(task, split, samples, seed), BATCH_SIZE) for task in family.suite.tasks
    }
    label = model if isinstance(model, str) else weights.label
    tasks = decompose(family.adapter, weights, family.head(), passes, family.compute, progress)
    return DriftLedger(family.suite.name, label, split, tasks)


BATCH_SIZE = 64


@torch.no_grad()
def decompose(
    adapter: Adapter,
    model: Weights,
    head: Mapping[str, Tensor],
    experts: Mapping[str, ExpertPass],
    compute: Compute,
    progress: Progress = silent,
) -> dict[str, TaskDrift]:
    """One walk over the layers: embeddings, every block, final norm and projection.

    Each block runs three times per task: the expert on its own features, the model on its own, and the model
    on the expert's, which is what separates mismatch from propagation.
    """
    records = {task: _Record() for task in experts}
    streams: dict[str, list[Call]] = {task: [] for task in experts}
    names = iter(adapter.block_layers())
    total, done = sum(len(stage.blocks) for stage in adapter.stages), 0
    for stage in adapter.stages:
        outer = compute.place(model.read(stage.outer))
        for task, expert in experts.items():
            expert_calls = expert.start(stage)
            streams[task] = first_calls(stage, outer, expert.batches, streams[task])
            records[task].entry(_first_layer(adapter, stage.name), expert_calls, streams[task])
        for block in stage.blocks:
            progress("measuring drift", done, total)
            tensors, layer, done = block.local(compute.place(model.read(block.names))), next(names), done + 1
            for task, expert in experts.items():
                for position, trace in enumerate(expert.walk(stage, block, expert.tensors(block))):
                    on_expert = stage.advance(trace.call, block.run(tensors, trace.call)).hidden
                    call = stage.advance(streams[task][position], block.run(tensors, streams[task][position]))
                    records[task].batch(layer, trace.after.hidden, on_expert, call.hidden)
                    streams[task][position] = call
    closing = compute.place(model.read(adapter.closing)) | dict(head)
    for task, expert in experts.items():
        own = compute.place(expert.weights.read(adapter.closing)) | dict(head)
        records[task].close(adapter, own, closing, expert.last_calls(), streams[task])
    progress("measuring drift", total, total)
    return {task: record.result(task) for task, record in records.items()}


def _first_layer(adapter: Adapter, stage: str) -> str:
    return FIRST_LAYER if len(adapter.stages) == 1 else f"{stage} {FIRST_LAYER}"


@dataclass
class _Record:
    """Collects one task's layers batch by batch."""

    parts: dict[str, list[tuple[Tensor, ...]]] = field(default_factory=dict)
    expert_features: list[Tensor] = field(default_factory=list)
    model_features: list[Tensor] = field(default_factory=list)

    def entry(self, layer: str, expert: Sequence[Call], model: Sequence[Call]) -> None:
        """The first layer has no drift before it: all of it is local mismatch."""
        for own, call in zip(expert, model, strict=True):
            self.batch(layer, own.hidden, call.hidden, call.hidden)

    def batch(self, layer: str, expert: Tensor, on_expert: Tensor, model: Tensor) -> None:
        """Expert output, the model's output on the expert's input, and the model's own output."""
        e, m, p = ((a - b).flatten(1).double() for a, b in ((model, expert), (on_expert, expert), (model, on_expert)))
        drift, mismatch, propagation = e.norm(dim=1), m.norm(dim=1), p.norm(dim=1)
        scale = (mismatch * propagation).clamp_min(torch.finfo(torch.float64).tiny)
        alignment = (m * p).sum(1) / scale
        residual = (e - (m + p)).norm(dim=1) / drift.clamp_min(torch.finfo(torch.float64).tiny)
        numbers = (drift, mismatch, propagation, expert.flatten(1).double().norm(dim=1), alignment, residual)
        self.parts.setdefault(layer, []).append(numbers)

    def close(
        self,
        adapter: Adapter,
        own: Mapping[str, Tensor],
        model: Mapping[str, Tensor],
        expert_calls: Sequence[Call],
        calls: Sequence[Call],
    ) -> None:
        """The last layer: final norm and projection."""
        for expert_call, call in zip(expert_calls, calls, strict=True):
            expert = adapter.final(own, expert_call.hidden)
            features = adapter.final(model, call.hidden)
            self.batch(LAST_LAYER, expert, adapter.final(model, expert_call.hidden), features)
            self.expert_features.append(expert)
            self.model_features.append(features)

    def result(self, task: str) -> TaskDrift:
        layers = []
        for layer, batches in self.parts.items():
            drift, mismatch, propagation, norm, alignment, residual = (
                torch.cat(column).cpu() for column in zip(*batches, strict=True)
            )
            layers.append(LayerDrift(layer, drift, mismatch, propagation, norm, alignment, float(residual.max())))
        expert, model = torch.cat(self.expert_features).cpu(), torch.cat(self.model_features).cpu()
        return TaskDrift(task, tuple(layers), expert, model)


def _layer_json(layer: LayerDrift) -> dict[str, Any]:
    return {
        "layer": layer.layer,
        "drift": float(layer.drift.mean()),
        "relative_drift": layer.relative_drift,
        "mismatch": float(layer.mismatch.mean()),
        "propagation": float(layer.propagation.mean()),
        "share": None,
    }


def _task_json(task: TaskDrift) -> dict[str, Any]:
    return {
        "samples": len(task.expert_features),
        "layers": [_layer_json(layer) for layer in task.layers],
        "final": {"drift": float(task.layers[-1].drift.mean()), "cosine": float(task.cosine.mean())},
        "identity_residual": task.identity_residual,
    }

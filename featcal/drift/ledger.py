"""Define the results of a drift measurement and the public documents made from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.drift.growth import Growth, certified_run, layer_growth
from featcal.drift.output import OutputDrift
from featcal.models.compute import widen
from featcal.system.drawing import Drawable

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class FeatureDrift:
    """The drift of one layer's features on one task; one number per sample, with norms over the whole token state."""

    layer: str
    drift: Float[Tensor, " n"]
    """||e||, e = h_model - h_expert (Eq. 2)."""
    expert_norm: Float[Tensor, " n"]
    """Norm of the expert's features, ||h_expert||."""

    @cached_property
    def relative_drift(self) -> float:
        """Return the mean drift over the mean norm of the expert feature."""
        return float(self.drift.mean() / self.expert_norm.mean())


@dataclass(frozen=True)
class LayerDrift(FeatureDrift):
    """The drift of one layer, split into mismatch and propagation.

    >>> import featcal
    >>> ledger = featcal.measure_drift(featcal.load_suite("lm-mini"), "merged", samples=8)
    >>> layer = ledger.tasks["sentiment"].layers[1]
    >>> layer.layer, round(layer.relative_drift, 2), tuple(layer.drift.shape)
    ('block 0', 0.24, (8,))
    >>> bool((layer.drift <= layer.mismatch + layer.propagation + 1e-6).all())  # e = m + p
    True
    """

    mismatch: Float[Tensor, " n"]
    """||m||, m = f_model(h_expert before) - h_expert (Eq. 3)."""
    propagation: Float[Tensor, " n"]
    """||p||, p = h_model - f_model(h_expert before) (Eq. 3); 0 in the first layer."""
    alignment: Float[Tensor, " n"]
    """Cosine of m and p: below 0 they cancel. 0 where either vanishes."""
    residual: Float[Tensor, " k"]
    """max(||m - m'||, ||p - p'||) / ||e|| for the samples that run a second time: m' and p' are computed in float64 and
    in another way (`SecondRun`). A residual above rounding means that one of the two computations is wrong.
    """
    response: Float[Tensor, " n"] | None
    """Cosine of r = p - e_before and e_before: below 0 the residual branch compensates the incoming drift, above 0 it
    amplifies it (Prop. 4). None if the layer has no skip connection."""
    skip_residual: Float[Tensor, " k"] | None
    """||r - r'|| / ||e|| for the same samples (Eq. 29); None if the layer has no skip connection."""


@dataclass(frozen=True)
class Attribution:
    """The final drift divided among the layers that caused it; rows are layers in forward order (Prop. 2)."""

    inner: Float[Tensor, "layers n"]
    """<c_l, e_L>: layer l's local mismatch, propagated through all later layers, along the final drift."""
    quality: Float[Tensor, "steps n"]
    """|<r, v>| / (||p|| ||v||) of every layer after the first, where v is the final drift propagated back to the layer:
    the quadrature's relative error before the secant correction.
    """
    final_square: Float[Tensor, " n"]
    """Squared norm of the final drift, ||e_L||^2."""

    @property
    def shares(self) -> Float[Tensor, " layers"]:
        """Return the signed share of every layer in the final drift, samples weighted by ||e_L||^2; they sum to 1."""
        return self.inner.sum(1) / self.final_square.sum()


@dataclass(frozen=True)
class TaskFeatures:
    """The drift of the layers of one task, in forward order, and its final features."""

    task: str
    layers: tuple[FeatureDrift, ...]
    expert_features: Float[Tensor, "n k"]
    """Final projected features of the expert, before normalisation."""
    model_features: Float[Tensor, "n k"]
    indices: tuple[int, ...]
    """Position of every sample in its source."""

    @property
    def cosine(self) -> Float[Tensor, " n"]:
        """Return the cosine of the final features to the expert's, per sample."""
        return torch.nn.functional.cosine_similarity(self.expert_features, self.model_features)

    def sample_rows(self) -> list[dict[str, Any]]:
        """Return one row per sample: index, drift of the last layer, and cosine and distance of the final features,
        each divided by its norm, to the expert's."""
        expert, model = (
            torch.nn.functional.normalize(widen(one), dim=1) for one in (self.expert_features, self.model_features)
        )
        columns = self.layers[-1].drift, self.cosine, (model - expert).norm(dim=1)
        rows = zip(self.indices, *(column.tolist() for column in columns), strict=True)
        return [dict(zip(("index", "drift", "cosine", "distance"), row, strict=True)) for row in rows]


@dataclass(frozen=True)
class TaskDrift(TaskFeatures):
    """The features of one task with their drift split layer by layer.

    >>> import featcal
    >>> ledger = featcal.measure_drift(featcal.load_suite("lm-mini"), "merged", samples=8)
    >>> task = ledger.tasks["sentiment"]
    >>> {layer.layer: round(layer.relative_drift, 2) for layer in task.layers}
    {'embeddings': 0.0, 'block 0': 0.24, 'block 1': 0.32, 'block 2': 0.33, 'block 3': 0.31, 'head': 0.59}
    """

    layers: tuple[LayerDrift, ...]
    attribution: Attribution | None = None
    output: OutputDrift | None = None

    @property
    def identity_residual(self) -> float:
        """Return the largest residual of Prop. 1 over layers and the samples that were computed a second time."""
        return max(float(layer.residual.max()) for layer in self.layers)

    def growth(self) -> dict[str, Growth]:
        """Return the growth through every layer with a skip connection (Prop. 5), in forward order."""
        pairs = zip(self.layers[:-1], self.layers[1:], strict=True)
        return {
            layer.layer: layer_growth(before.drift, layer.drift, layer.mismatch, layer.propagation)
            for before, layer in pairs
            if layer.response is not None
        }

    def last_run(self) -> list[Growth]:
        """Return the growth through the residual layers that end the chain of blocks, in forward order."""
        grown = self.growth()
        # In an encoder-decoder only those of the decoder: what leads over to it has no skip connection.
        tail = list(takewhile(lambda layer: layer.layer in grown, reversed(self.layers[:-1])))
        return [grown[layer.layer] for layer in reversed(tail)]

    def margins(self) -> list[dict[str, Any]]:
        """Return one row per sample: index, the expert's margin mu, the model's margin, largest score change,
        certified, agrees, correct (Eq. 44); no rows if scores were not measured.
        """
        if self.output is None:
            return []
        change = (self.output.model_scores - self.output.expert_scores).abs().amax(1)
        columns = {
            "margin": self.output.margin,
            "model_margin": self.output.model_margin,
            "score_change": change,
            "certified": self.output.is_certified,
            "agrees": self.output.agrees,
            "correct": self.output.correct,
        }
        rows = zip(self.indices, *(column.tolist() for column in columns.values()), strict=True)
        return [dict(zip(("index", *columns), row, strict=True)) for row in rows]

    def to_json(self) -> dict[str, Any]:
        """Return the task's part of the public document; norms are means over samples."""
        grown = self.growth()
        booked = self.attribution
        shared = booked is not None and bool(booked.final_square.sum() > 0)  # without drift there is nothing to share
        layers = []
        for position, layer in enumerate(self.layers):
            entry = layer_json(layer)
            entry["share"] = float(booked.shares[position]) if booked is not None and shared else None
            if layer.layer in grown:
                entry |= _growth_json(layer, grown[layer.layer])
            layers.append(entry)
        document = {
            "samples": len(self.expert_features),
            "layers": layers,
            "final": {"drift": float(self.layers[-1].drift.mean()), "cosine": float(self.cosine.mean())},
            "identity_residual": self.identity_residual,
        }
        if self.attribution is not None:
            document["quadrature_residual"] = float(self.attribution.quality.max())
        if grown:
            document["certified_growth"] = float(certified_run(self.last_run()).mean())
        if self.output is not None:
            document["output"] = _output_json(self.output)
        return document


@dataclass(frozen=True)
class Features:
    """The features of one model next to those of every expert of its suite."""

    suite: str
    model: str
    split: str
    tasks: Mapping[str, TaskFeatures]

    @property
    def macro_cosine(self) -> float:
        """Return the mean over tasks of the mean cosine of final features."""
        return float(torch.stack([task.cosine.mean() for task in self.tasks.values()]).mean())


@dataclass(frozen=True, repr=False)
class DriftLedger(Drawable, Features):
    """The drift of one model from every expert of its suite, split layer by layer.

    >>> import featcal
    >>> ledger = featcal.measure_drift(featcal.load_suite("lm-mini"), "merged", samples=8)
    >>> ledger.to_frame()[["task", "layer", "relative_drift"]].round(2).head(3)
            task       layer  relative_drift
    0  sentiment  embeddings            0.00
    1  sentiment     block 0            0.24
    2  sentiment     block 1            0.32
    >>> round(ledger.macro_cosine, 2)
    0.86
    """

    tasks: Mapping[str, TaskDrift]

    def to_json(self) -> dict[str, Any]:
        """Return the public document of `featcal drift --json`."""
        tasks = {name: task.to_json() for name, task in self.tasks.items()}
        return {"suite": self.suite, "model": self.model, "split": self.split, "tasks": tasks}

    def to_frame(self) -> pd.DataFrame:
        """Return one row per task and layer with every number of the document."""
        import pandas as pd

        return pd.DataFrame(
            [{"task": name, **layer} for name, task in self.tasks.items() for layer in task.to_json()["layers"]]
        )


def layer_json(layer: LayerDrift) -> dict[str, Any]:
    """Return the means over samples of one layer's numbers."""
    return {
        "layer": layer.layer,
        "drift": float(layer.drift.mean()),
        "relative_drift": layer.relative_drift,
        "mismatch": float(layer.mismatch.mean()),
        "propagation": float(layer.propagation.mean()),
        "alignment": float(layer.alignment.mean()),
        "expert_norm": float(layer.expert_norm.mean()),
    }


def _growth_json(layer: LayerDrift, grown: Growth) -> dict[str, Any]:
    """Return means over the samples with incoming drift; null if there are none."""
    assert layer.response is not None
    drifting = grown.gamma.isfinite()
    columns = {
        "response": layer.response,
        "gamma": grown.gamma,
        "eta": grown.eta,
        "certified_growth": grown.is_certified,
    }
    return {
        name: float(column[drifting].double().mean()) if bool(drifting.any()) else None
        for name, column in columns.items()
    }


def _output_json(output: OutputDrift) -> dict[str, Any]:
    return {
        "score_drift": float(output.score_drift.mean()),
        "bound": float(output.bound.mean()),
        "head_mismatch": float(output.head_mismatch.mean()),
        "tightness": float(output.tightness.mean()),
        "loss_change": float(output.loss_change.mean()),
        "margin": float(output.margin.mean()),
        "certified": float(output.is_certified.double().mean()),
        "agreement": float(output.agrees.double().mean()),
        "accuracy": float(output.correct.double().mean()),
        "expert_accuracy": float((output.expert_scores.argmax(1) == output.labels).double().mean()),
    }

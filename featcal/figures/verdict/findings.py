"""Hold the numbers of a verdict, as far as they are measured. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from featcal.evaluation.comparison import Comparison


@dataclass(frozen=True)
class LayerFinding:
    """A layer's part in the drift, means over tasks; norms are relative to that of the experts' features."""

    layer: str
    share: float
    """Share of the final drift that the layer caused (Prop. 2)."""
    mismatch: float
    propagation: float


@dataclass(frozen=True)
class Findings:
    """The measurements of one model; a None is not measured (yet), and has no sentence.

    Args:
        model: its name at the beginning of sentences: "The merge".
        on: the samples in words: "64 validation samples per task".
        metric: in words: "accuracy".
        lost: from the experts to the model.
        gained: from the base to the model.
        taught: from the base to the experts.
        no_scores: why there are none, where that is known.
        layers: in forward order.
        final: norm of the final drift, relative to that of the experts' features, mean over tasks.
        repaired: from the model to the calibrated one.
        repaired_final: `final` of the calibrated model.
        repair_samples: that calibration saw per task, in words: "64", "40 to 64".
        repairable: False for base, expert, anchor and calibrated models.
        no_repair: why there is no calibrated model, where that is known.
        whole: nothing more is going to be measured, so it can be said what to do next.
    """

    model: str
    on: str = ""
    metric: str = "score"
    lost: Comparison | None = None
    gained: Comparison | None = None
    taught: Comparison | None = None
    no_scores: str = ""
    layers: tuple[LayerFinding, ...] = ()
    final: float | None = None
    repaired: Comparison | None = None
    repaired_final: float | None = None
    repair_samples: str = ""
    repairable: bool = True
    no_repair: str = ""
    whole: bool = True

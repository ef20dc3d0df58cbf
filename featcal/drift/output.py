"""Relate feature drift to scores, losses and decisions (Props. 3, 6 and 7, Corollary 2, Eq. 44).

All functions are pure functions of final features and heads of any kind, computed in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from featcal.models.compute import widen
from featcal.models.model import Head

LOSS_NODES = 64
"""Gauss-Legendre nodes of the loss integral; CLIP-sized logits need 32 to 64 for an error below 1e-3."""


@dataclass(frozen=True, kw_only=True)
class OutputDrift:
    """Comparison of one model with one expert on n samples with C classes."""

    expert_scores: Float[Tensor, "n c"]
    model_scores: Float[Tensor, "n c"]
    feature_drift: Float[Tensor, " n"]
    """||e_L|| of the final features, before normalisation."""
    lipschitz: Float[Tensor, " n"]
    """B of Prop. 3: an upper bound of how fast a score map changes on the segment between the two features."""
    head_mismatch: Float[Tensor, " n"]
    """delta of Eq. (7): ||psi_model(h_expert) - psi_expert(h_expert)||, 0 if both share the head."""
    loss_change: Float[Tensor, " n"]
    """Cross-entropy of the model minus the expert's, as the path integral of Eq. (41)."""
    gradient_norm: Float[Tensor, " n"]
    """||g||, the norm of the path-averaged loss gradient (Prop. 7)."""
    labels: Int[Tensor, " n"]

    @property
    def score_drift(self) -> Float[Tensor, " n"]:
        """Return ||dz|| (Eq. 6)."""
        drift: Tensor = (self.model_scores - self.expert_scores).norm(dim=1)
        return drift

    @property
    def bound(self) -> Float[Tensor, " n"]:
        """Return the right side of Eq. (7)."""
        return self.lipschitz * self.feature_drift + self.head_mismatch

    @property
    def tightness(self) -> Float[Tensor, " n"]:
        """Return ||dz|| over its bound, in [0, 1]; 1 if both vanish."""
        ones = torch.ones_like(self.bound)
        return torch.where(self.bound > 0, self.score_drift / self.bound, ones)

    @property
    def margin(self) -> Float[Tensor, " n"]:
        """Return mu, the expert's largest score minus its second largest."""
        return top1_margin(self.expert_scores)

    @property
    def model_margin(self) -> Float[Tensor, " n"]:
        """Return the model's largest score minus its second largest."""
        return top1_margin(self.model_scores)

    @property
    def is_certified(self) -> Bool[Tensor, " n"]:
        """Say whether all scores changed by less than half the margin, so that the decision
        is certainly the same (Eq. 44).
        """
        return (self.model_scores - self.expert_scores).abs().amax(1) < self.margin / 2

    @property
    def agrees(self) -> Bool[Tensor, " n"]:
        """Say whether the model decides like the expert."""
        return self.model_scores.argmax(1) == self.expert_scores.argmax(1)

    @property
    def correct(self) -> Bool[Tensor, " n"]:
        """Say whether the model decides like the label."""
        return self.model_scores.argmax(1) == self.labels


def top1_margin(scores: Float[Tensor, "n c"]) -> Float[Tensor, " n"]:
    """Return the margin of a decision, mu of Eq. (44): its score minus the runner-up's."""
    first, second = scores.topk(2, dim=1).values.unbind(1)
    return first - second


def output_drift(
    expert: Float[Tensor, "n k"],
    model: Float[Tensor, "n k"],
    expert_head: Head,
    model_head: Head,
    labels: Int[Tensor, " n"],
    nodes: int = LOSS_NODES,
) -> OutputDrift:
    """Return the drift of scores, losses and decisions between two final features, each through its own head.

    Args:
        expert, model: final features, before any normalisation by a head.
        labels: the right class or token of every sample.
    """
    # In float64: CLIP's scores are a hundred times its cosines, and losses are small differences of them.
    expert, model = widen(expert), widen(model)
    before, after = expert_head.scores(expert), model_head.scores(model)
    gradient = mean_loss_gradient(before, after, labels, nodes)
    return OutputDrift(
        expert_scores=before,
        model_scores=after,
        feature_drift=(model - expert).norm(dim=1),
        lipschitz=model_head.lipschitz(expert, model),
        head_mismatch=(model_head.scores(expert) - before).norm(dim=1),
        loss_change=(gradient * (after - before)).sum(1),
        gradient_norm=gradient.norm(dim=1),
        labels=labels,
    )


def mean_loss_gradient(
    before: Float[Tensor, "n c"], after: Float[Tensor, "n c"], labels: Int[Tensor, " n"], nodes: int
) -> Float[Tensor, "n c"]:
    """Return the cross-entropy gradient softmax(z) - onehot, averaged between two score vectors (Prop. 7)."""
    mean = -torch.nn.functional.one_hot(labels, before.shape[1]).to(before.dtype)
    for t, weight in gauss_legendre(nodes):
        mean = mean + weight * torch.softmax(before + t * (after - before), dim=1)
    return mean


def gauss_legendre(nodes: int) -> list[tuple[float, float]]:
    """Return (node, weight) pairs on [0, 1]; the weights sum to 1."""
    x, w = np.polynomial.legendre.leggauss(nodes)
    return [(float(t), float(v)) for t, v in zip((x + 1) / 2, w / 2, strict=True)]

"""From feature drift to scores, losses and decisions: Propositions 3, 6 and 7, Corollary 2 and Eq. (44).

Pure functions of final features, for a head that the merged model and the expert share (the score map
mismatch of Eq. 7 is then 0). Everything is computed in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

LOSS_NODES = 64
"""Gauss-Legendre nodes of the loss integral; CLIP-sized logits need 32 to 64 for an error below 1e-3."""


@dataclass(frozen=True)
class OutputDrift:
    """One model against one expert on n samples with C classes."""

    expert_scores: Float[Tensor, "n c"]
    model_scores: Float[Tensor, "n c"]
    feature_drift: Float[Tensor, " n"]
    """||e_L|| of the final features, before normalisation."""
    lipschitz: Float[Tensor, " n"]
    """B of Prop. 3: no score map moves faster anywhere on the segment between the two features."""
    loss_change: Float[Tensor, " n"]
    """Cross-entropy of the model minus the expert's, as the path integral of Eq. (41)."""
    gradient_norm: Float[Tensor, " n"]
    """||g||, the norm of the path-averaged loss gradient (Prop. 7)."""
    labels: Int[Tensor, " n"]

    @property
    def score_drift(self) -> Float[Tensor, " n"]:
        """||dz||, Eq. (6)."""
        drift: Tensor = (self.model_scores - self.expert_scores).norm(dim=1)
        return drift

    @property
    def bound(self) -> Float[Tensor, " n"]:
        """Right side of Eq. (7)."""
        return self.lipschitz * self.feature_drift

    @property
    def tightness(self) -> Float[Tensor, " n"]:
        """||dz|| over its bound, in [0, 1]; 1 where both vanish."""
        ones = torch.ones_like(self.bound)
        return torch.where(self.bound > 0, self.score_drift / self.bound, ones)

    @property
    def loss_bound(self) -> Float[Tensor, " n"]:
        """Right side of Eq. (43) with G = sqrt(2), which no cross-entropy gradient exceeds."""
        return sqrt(2) * self.bound

    @property
    def margin(self) -> Float[Tensor, " n"]:
        """mu, the expert's lead of its first over its second class."""
        first, second = self.expert_scores.topk(2, dim=1).values.unbind(1)
        return first - second

    @property
    def certified(self) -> Bool[Tensor, " n"]:
        """Eq. (44): the largest score change is below half the margin, so the decision cannot have changed."""
        return (self.model_scores - self.expert_scores).abs().amax(1) < self.margin / 2

    @property
    def agrees(self) -> Bool[Tensor, " n"]:
        """The model decides as the expert does."""
        return self.model_scores.argmax(1) == self.expert_scores.argmax(1)

    @property
    def correct(self) -> Bool[Tensor, " n"]:
        """The model decides as the label says."""
        return self.model_scores.argmax(1) == self.labels


def output_drift(
    expert: Float[Tensor, "n k"],
    model: Float[Tensor, "n k"],
    prompts: Float[Tensor, "c k"],
    scale: float,
    labels: Int[Tensor, " n"],
    nodes: int = LOSS_NODES,
) -> OutputDrift:
    """Scores of a cosine head, z = scale * prompts @ h / ||h||, on both final features.

    Args:
        expert, model: final features before normalisation.
        prompts: unit rows, one per class; at least two.
        scale: CLIP's exp(logit_scale).
    """
    expert, model, prompts = expert.double(), model.double(), prompts.double()

    def scores(features: Tensor) -> Tensor:
        return scale * torch.nn.functional.normalize(features, dim=1) @ prompts.mT

    before, after = scores(expert), scores(model)
    gradient = mean_loss_gradient(before, after, labels, nodes)
    return OutputDrift(
        before,
        after,
        (model - expert).norm(dim=1),
        cosine_head_lipschitz(expert, model, prompts, scale),
        (gradient * (after - before)).sum(1),
        gradient.norm(dim=1),
        labels,
    )


def cosine_head_lipschitz(
    expert: Float[Tensor, "n k"], model: Float[Tensor, "n k"], prompts: Float[Tensor, "c k"], scale: float
) -> Float[Tensor, " n"]:
    """B = scale * sigma_max(prompts) / d_min, d_min the distance of the segment expert-model from the origin.

    The Jacobian of h / ||h|| has norm 1 / ||h||, so this is a true upper bound; infinite for a segment
    through the origin.
    """
    e = model - expert
    square = e.square().sum(1)
    t = (-(expert * e).sum(1) / square.clamp_min(torch.finfo(square.dtype).tiny)).clamp(0, 1)
    nearest = (expert + t[:, None] * e).norm(dim=1)
    bound: Tensor = scale * torch.linalg.matrix_norm(prompts, ord=2) / nearest
    return bound


def mean_loss_gradient(
    before: Float[Tensor, "n c"], after: Float[Tensor, "n c"], labels: Int[Tensor, " n"], nodes: int
) -> Float[Tensor, "n c"]:
    """Path average of the cross-entropy gradient, softmax(z) - onehot, between two score vectors (Prop. 7)."""
    mean = -torch.nn.functional.one_hot(labels, before.shape[1]).to(before.dtype)
    for t, weight in gauss_legendre(nodes):
        mean = mean + weight * torch.softmax(before + t * (after - before), dim=1)
    return mean


def gauss_legendre(nodes: int) -> list[tuple[float, float]]:
    """(node, weight) pairs on [0, 1]; the weights sum to 1."""
    x, w = np.polynomial.legendre.leggauss(nodes)
    return [(float(t), float(v)) for t, v in zip((x + 1) / 2, w / 2, strict=True)]

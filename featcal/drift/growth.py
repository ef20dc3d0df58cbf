"""Certify where drift grows along residual layers (Props. 4 and 5, Corollary 1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Growth:
    """Growth of the incoming drift through one residual layer; one number per sample."""

    gamma: Float[Tensor, " n"]
    """||p|| / ||e_before|| - 1, by which the layer itself increases the incoming drift (Eq. 34)."""
    eta: Float[Tensor, " n"]
    """||m|| / ||e_before||: the new mismatch on the same scale (Eq. 35)."""
    ratio: Float[Tensor, " n"]
    """||e|| / ||e_before||, never below `bound`."""

    @property
    def bound(self) -> Float[Tensor, " n"]:
        """Return 1 + gamma - eta, a lower bound of the ratio for any layer (reverse triangle inequality, Eq. 36)."""
        return 1 + self.gamma - self.eta

    @property
    def is_certified(self) -> Bool[Tensor, " n"]:
        """Say whether growth is certain: gamma > 0 and eta < gamma (Prop. 5)."""
        # Strictly less, unlike Eq. 35 as printed: with equality the drift is only certain not to shrink.
        return (self.gamma > 0) & (self.eta < self.gamma)


def layer_growth(
    before: Float[Tensor, " n"],
    drift: Float[Tensor, " n"],
    mismatch: Float[Tensor, " n"],
    propagation: Float[Tensor, " n"],
) -> Growth:
    """Return the growth through one layer from norms: incoming drift, drift, local mismatch and propagation.

    Samples without incoming drift have no ratio: all three numbers are NaN there, and nothing is certified.
    """
    scale = torch.where(before > 0, before, torch.full_like(before, torch.nan))
    return Growth(propagation / scale - 1, mismatch / scale, drift / scale)


def certified_run(layers: list[Growth]) -> Float[Tensor, " n"]:
    """Return the product of 1 + gamma - eta over the longest certified run that ends at the last layer (Corollary 1).

    It never exceeds the growth of the drift over that run; it is 1 if the last layer is not certified.
    """
    product = torch.ones_like(layers[-1].gamma)
    running = torch.ones_like(product, dtype=torch.bool)
    for layer in reversed(layers):
        running = running & layer.is_certified
        product = torch.where(running, product * layer.bound, product)
    return product

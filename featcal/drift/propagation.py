"""Measure the contribution of every layer's local mismatch to the final drift (Prop. 2).

The part of layer l is <c_l, e_L>, with c_l its mismatch m_l propagated through all later layers by the path-averaged
operators A_k of Eq. (19). featcal computes it backwards, by propagating the final drift back through the layers: v_L =
e_L and v_{k-1} = A_k^T v_k, and <c_l, e_L> = <m_l, v_l>, so that one derivative per layer serves all layers before it.
A_k is computed by Gauss-Legendre nodes, vector-Jacobian products, and a rank-one secant correction, which makes A_k
e_{k-1} = p_k hold exactly and the parts add up to the drift.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.drift.output import gauss_legendre

Layer = Callable[[Tensor], Tensor]
"""One layer of the model as a function of a batch of states, with all other arguments fixed."""

NODES = 2
"""Quadrature nodes. The secant correction makes the sum exact for any number; more nodes make the split more accurate:
on clip-mini 2 differ from 8 by at most 6e-4 in any share, 3 by 1e-4, at half as much cost again.
"""
TINY = 1e-30


@dataclass(frozen=True)
class LayerRecord:
    """A layer of the model after one batch passed it, stored for the backward pass."""

    layer: Layer
    before: tuple[Tensor, Tensor]
    """Expert's and model's states before the layer."""
    mismatch: Tensor
    """Local mismatch m_k of the layer."""


@dataclass
class Contributions:
    """States and mismatches of one batch at every layer of the model, for the backward pass along its final drift."""

    first: Tensor
    """m of the first layer, where all drift is its own mismatch, `[batch, ...]`."""
    drift: Tensor
    """e of the last layer so far, `[batch, ...]`."""
    steps: list[LayerRecord] = field(default_factory=list)

    @classmethod
    def begin(cls, expert: Tensor, model: Tensor) -> Contributions:
        """Return the contributions of a batch after the first layer, given the states there."""
        return cls(model - expert, model - expert)

    def step(self, layer: Layer, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor, Tensor]) -> None:
        """Record the way of the batch through one layer of the model.

        Args:
            before: expert's and model's states before the layer.
            after: expert's state after it, the model's layer on the expert's state, the model's own state.
        """
        own, on_expert, reached = after
        self.steps.append(LayerRecord(layer, before, on_expert - own))
        self.drift = reached - own

    def book(self) -> Iterator[tuple[Tensor, Tensor] | None]:
        """Go backwards through the layers, and release each one; yield None after each, and finally <c_l, e_L>,
        `[layers, batch]`, and the quadrature's error, `[layers - 1, batch]`.
        """
        along, drift = self.drift, self.drift  # v_k and e_k
        inner: list[Tensor] = []
        errors: list[Tensor] = []
        while self.steps:
            one = self.steps.pop()
            inner.append(_inner(one.mismatch, along))
            expert, model = one.before
            propagation, drift = drift - one.mismatch, model - expert
            along, error = pull_back(one.layer, expert, drift, propagation, along)
            errors.append(error)
            yield None
        yield torch.stack([_inner(self.first, along), *reversed(inner)]), torch.stack([*reversed(errors)])


def pull_back(
    layer: Layer, expert: Tensor, drift: Tensor, propagation: Tensor, along: Tensor, nodes: int = NODES
) -> tuple[Tensor, Float[Tensor, " batch"]]:
    """Apply the transpose of the secant-corrected path-averaged operator of one layer to a direction.

    Args:
        layer: the model's layer.
        expert: h_{k-1} of the expert, `[batch, ...]`.
        drift: e_{k-1}.
        propagation: p_k = layer(h + e) - layer(h).
        along: v_k, a direction after the layer.

    Returns:
        v_{k-1}, whose inner product with e_{k-1} is that of v_k with p_k; and the error of the quadrature alone in this
        product, over ||p_k|| ||v_k||, per sample.
    """
    averaged = torch.zeros_like(drift)
    for t, weight in gauss_legendre(nodes):
        with torch.enable_grad():
            point = (expert + t * drift).requires_grad_()
            output = layer(point)
            if not output.requires_grad:  # a second tower starts anew: nothing of the first one's drift is in it
                continue
            (gradient,) = torch.autograd.grad(output, point, along, materialize_grads=True)
        averaged += weight * gradient
    # A = Q + r e^T / ||e||^2 with r = p - Q e, which makes A e = p for any number of nodes.
    missed = _inner(propagation, along) - _inner(drift, averaged)
    square = drift.flatten(1).square().sum(1).clamp_min(TINY)
    scale = (propagation.flatten(1).norm(dim=1) * along.flatten(1).norm(dim=1)).clamp_min(TINY)
    return averaged + _column(missed / square, drift) * drift, missed.abs() / scale


def _inner(left: Tensor, right: Tensor) -> Float[Tensor, " batch"]:
    return (left.flatten(1) * right.flatten(1)).sum(1)


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.ndim - 1))

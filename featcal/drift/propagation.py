"""Measure the contribution of every layer's local mismatch to the final drift (Prop. 2).

Contributions are carried through the layers together with the states. At layer k the path-averaged operator A_k of Eq.
(19) is applied to all of them: Gauss-Legendre nodes, Jacobian-vector products, and a rank-one secant correction, so
that A_k e_{k-1} = p_k holds exactly and the contributions add up to the drift.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jvp, vmap

from featcal.drift.output import gauss_legendre
from featcal.models.attention import plain_attention

Layer = Callable[[Tensor], Tensor]
"""One layer of the model on a batch of states, with the rest of its call held fixed."""

NODES = 2
"""Quadrature nodes. The secant correction closes the sum for any number, more make the split finer: on clip-mini
2 differ from 8 by at most 6e-4 in any share, 3 by 1e-4, at half as much cost again."""
TINY = 1e-30


@dataclass
class Contributions:
    """The contributions of all layers so far on one batch, and the telescoping allocation."""

    propagated: list[Tensor]
    """c_l pushed to the current layer, `[batch, ...]` each (Eq. 5)."""
    replayed: list[Tensor]
    """u_l: output of the model's layers since l on the expert's state after layer l; u_0 is the model's own state."""
    quality: list[Float[Tensor, " batch"]] = field(default_factory=list)
    """||r_k|| / ||p_k|| of every layer after the first."""

    @classmethod
    def first(cls, expert: Tensor, model: Tensor) -> Contributions:
        """Return the contributions after the first layer, where all drift is the layer's own mismatch."""
        return cls([model - expert], [model, expert])

    def step(
        self,
        layer: Layer,
        before: tuple[Tensor, Tensor],
        after: tuple[Tensor, Tensor, Tensor],
        tangents: int | None = None,
    ) -> None:
        """Propagate all contributions through one layer of the model.

        Args:
            before: expert's and model's states before the layer.
            after: expert's state after it, the model's layer on the expert's state, the model's own state.
            tangents: number of derivatives taken side by side; None for all.
        """
        expert, model = before
        own, on_expert, reached = after
        carried, quality = propagate(
            layer, expert, model - expert, reached - on_expert, self.propagated, together=tangents
        )
        self.propagated = [*carried, on_expert - own]
        self.quality.append(quality)
        # u_0 is the model's own state and u of the last layer the model on the expert's: both are known
        inner = [layer(state) for state in self.replayed[1:-1]]
        self.replayed = [reached, *inner, on_expert, own]

    def book(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return <c_l, e_L>, ||c_l||, <u_{l-1} - u_l, e_L>, each `[layers, batch]`; quality `[layers - 1, batch]`."""
        drift = self.replayed[0] - self.replayed[-1]
        pairs = zip(self.replayed[:-1], self.replayed[1:], strict=True)
        return (
            torch.stack([_inner(part, drift) for part in self.propagated]),
            torch.stack([part.flatten(1).norm(dim=1) for part in self.propagated]),
            torch.stack([_inner(upper - lower, drift) for upper, lower in pairs]),
            torch.stack(self.quality),
        )


def propagate(
    layer: Layer,
    expert: Tensor,
    drift: Tensor,
    propagation: Tensor,
    contributions: list[Tensor],
    nodes: int = NODES,
    together: int | None = None,
) -> tuple[list[Tensor], Float[Tensor, " batch"]]:
    """Apply the secant-corrected path-averaged operator of one layer to every contribution.

    Args:
        layer: the model's layer.
        expert: h_{k-1} of the expert, `[batch, ...]`.
        drift: e_{k-1}, to which the contributions sum.
        propagation: p_k = layer(h + e) - layer(h).
        contributions: c_l before the layer.
        together: number of derivatives taken side by side; None for all.

    Returns:
        The contributions after the layer, which sum to `propagation`, and ||r|| / ||p|| per sample.
    """
    averaged = torch.zeros(len(contributions), *propagation.shape, dtype=propagation.dtype, device=propagation.device)
    moving = [i for i, part in enumerate(contributions) if bool(part.any())]  # a linear map keeps 0 at 0
    most = together or max(1, len(moving))
    for some in (moving[start : start + most] for start in range(0, len(moving), most)):
        tangents = torch.stack([contributions[i] for i in some])
        averaged[some] = _path_average(layer, expert, drift, tangents, nodes)
    # By linearity the sum is Q e, so the rest is what the quadrature missed. The correction below hands it to the
    # contributions by their inner products with e, which makes the sum exact for any number of nodes.
    missed = propagation - averaged.sum(0)
    square = drift.flatten(1).square().sum(1).clamp_min(TINY)
    corrected = [
        part + _column(_inner(drift, tangent) / square, missed) * missed
        for part, tangent in zip(averaged, contributions, strict=True)
    ]
    scale = propagation.flatten(1).norm(dim=1).clamp_min(TINY)
    return corrected, missed.flatten(1).norm(dim=1) / scale


def _path_average(
    layer: Layer, expert: Tensor, drift: Tensor, tangents: Float[Tensor, "parts *state"], nodes: int
) -> Float[Tensor, "parts *after"]:
    """Return the Jacobian-vector products of all tangents, averaged from `expert` to `expert + drift`."""
    total = torch.zeros(())
    with _differentiating, plain_attention():  # fused attention has no forward-mode derivative
        for t, weight in gauss_legendre(nodes):
            # The derivative at a node is linear, so one linearisation serves all tangents.
            along = partial(_derivative, layer, expert + t * drift)
            total = total + weight * vmap(along)(tangents)
    return total


def _derivative(layer: Layer, point: Tensor, tangent: Tensor) -> Tensor:
    derivative: Tensor = jvp(layer, (point,), (tangent,))[1]
    return derivative


_differentiating = threading.Lock()
"""Lock for derivatives: the levels of torch's forward mode belong to the process, so another thread would end ours."""


def _inner(left: Tensor, right: Tensor) -> Float[Tensor, " batch"]:
    return (left.flatten(1) * right.flatten(1)).sum(1)


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.ndim - 1))

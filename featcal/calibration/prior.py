"""Compute the prior of the recipe "informed": an estimate, from the experts' weights, of the inputs that they were
trained on.

The gradient of a linear map is a sum of outer products with its inputs, so the rows of a task vector tau_i = W_i - W_0
lie in the span of the inputs that expert i was trained on, all of its training data, and most strongly along the inputs
that changed the weights most. K_i = tau_i^T tau_i / ||tau_i^T tau_i||_F therefore replaces a Gram matrix of data that
is not available, and

    mu sum_i ||(W - W_0 - rho tau_i) K_i^(1/2)||_F^2

pulls the merged map, on those inputs, towards expert i's map moved rho times as far from the base. With rho = 1, K_i
divided by its trace, and no other term, this is the objective of WUDI (arXiv 2503.08099); that task vectors hold the
covariance of their inputs is also said by ACE (arXiv 2603.02945), and BMM (arXiv 2605.12843, appendix F) mixes such an
estimate with Gram matrices of few samples. The combination with FeatCal's forward order and targets is new in featcal.

The update of an adapter (LoRA) can be larger than what the base's own map gives on these inputs, and is then followed
but not extrapolated: with q_i = ||tau_i K_i^(1/2)|| / ||W_0 K_i^(1/2)||, rho above 1 becomes

    rho_i = 1 + (rho - 1) s_i,  s_i = min(1, max(0, 1 / q_i - 1)),

so that rho = 2 moves no further than to an update as large as the base's own output, nor less far than to the expert.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.calibration.gram import Gram, add_alike
from featcal.calibration.token_rows import Named
from featcal.formats.weights import Weights, all_finite, factors_of
from featcal.models.adapter import Block
from featcal.models.compute import cast, find_device, widen
from featcal.models.linear_maps import LinearMap, orient_weight
from featcal.system.errors import NumericalError
from featcal.system.progress import Timing

Factors = tuple[Float[Tensor, "m r"], Float[Tensor, "r d"]]
"""B and A of a map whose task vector is B A."""
_SAME = 1e-5
"""Relative distance, compared with the map's own size, below which a dense task vector equals the product of its
factors."""


@dataclass
class Prior:
    """Sums over tasks for one linear map W `[m, d]`."""

    gram: Gram
    """Sum of K_i, `[d, d]`."""
    pull: Float[Tensor, "m d"]
    """Right-hand side of the prior: sum of s_i tau_i K_i, s_i = 1 for whole experts."""
    held: Float[Tensor, "k d"]
    """The rest of the sum, which rho does not extrapolate: sum of (1 - s_i) tau_i K_i; no rows without adapters."""

    @classmethod
    def zeros(cls, outputs: int, inputs: int, device: torch.device, dtype: torch.dtype) -> Prior:
        """Make a prior without any task: sums that are 0."""
        zeros = partial(torch.zeros, device=device, dtype=dtype)
        return cls(Gram.zeros(inputs, device, dtype), zeros(outputs, inputs), zeros(0, inputs))

    def add(self, tau: Float[Tensor, "m d"] | Factors, base: Float[Tensor, "m d"]) -> None:
        """Add the task vector of one task; a zero vector adds nothing.

        Products are computed in the dtype of the argument. A task vector in factors of rank r costs r / m of a dense
        one.

        Args:
            base: W_0.

        Raises:
            NumericalError: the task vector is not finite.
        """
        rows, turn = spanning_rows(tau)
        size = torch.linalg.matrix_norm(rows)
        if not all_finite(size):
            raise NumericalError("the task vector is not finite; look for NaN in the expert's weights and the base's")
        if not bool(size > 0):
            return
        rows = rows / size  # squares of small task vectors would be below what float32 holds
        own, wide = Gram.from_rows(rows), len(rows) < rows.shape[1]
        share = 1 / own.norm()
        # The cheaper order of the same product. The smaller factor is scaled, and in place: a pass over a map takes as
        # long as a product of small ones.
        side = (Gram.from_rows(rows.mT) if wide else own).full(rows.dtype).mul_(share * widen(size))
        pull = side @ rows if wide else rows @ side
        self.gram.add(own, share)
        if turn is None:
            self.pull.add_(pull.to(self.pull.device))
            return
        pull, extrapolated = turn @ pull, _extrapolated_share(rows * size, base.to(rows))
        self.pull.add_((extrapolated * pull).to(self.pull.device))
        if not len(self.held):
            self.held = torch.zeros_like(self.pull)
        self.held.add_(((1 - extrapolated) * pull).to(self.held.device))

    def merge(self, other: Prior) -> None:
        """Add the sums over other tasks; raise InputError if shapes or dtypes differ."""
        self.gram.merge(other.gram)
        add_alike(self.pull, other.pull)
        if len(other.held) and not len(self.held):
            self.held = torch.zeros_like(self.pull)
        if len(other.held):
            add_alike(self.held, other.held)

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the sums."""
        return [*self.gram.strips, self.pull, self.held]

    def target(self, base: Float[Tensor, "m d"], rho: float) -> Float[Tensor, "m d"]:
        """Return sum_i (W_0 + rho_i tau_i) K_i, in the dtype of the sums.

        Args:
            base: W_0; its product with the sum of K_i is formed in this dtype.
        """
        product = base @ self.gram.full(base.dtype)
        found = torch.add(product.to(self.pull.dtype), self.pull, alpha=rho)
        return found.add_(self.held, alpha=min(rho, 1.0)) if len(self.held) else found


def _extrapolated_share(rows: Float[Tensor, "r d"], base: Float[Tensor, "m d"]) -> Float[Tensor, ""]:
    """Return s_i of an adapter.

    Args:
        rows: R with R^T R = tau^T tau.
        base: W_0.
    """
    # tr(tau K tau^T) is ||R R^T||^2 and tr(W_0 K W_0^T) is ||W_0 R^T||^2, both over the same number.
    own, given = (torch.linalg.matrix_norm(one @ rows.mT) for one in (rows, base))
    share: Tensor = given / own - 1
    return share.clamp(0, 1)


def spanning_rows(tau: Float[Tensor, "m d"] | Factors) -> tuple[Float[Tensor, "k d"], Float[Tensor, "m k"] | None]:
    """Return few rows R with R^T R = tau^T tau, and the Q with tau = Q R; None for Q if R is tau itself."""
    if isinstance(tau, Tensor):
        return tau, None
    # With B = Q R, tau^T tau is (R A)^T (R A): no `[m, d]` product of full rank is formed.
    turn, small = torch.linalg.qr(tau[0])
    return small @ tau[1], turn


@dataclass(frozen=True)
class TaskVectors:
    """Task vectors of one expert in one block: its weights less the base's."""

    block: Block
    expert: Named
    """Tensors of the block by name inside it."""
    base: Named
    """Tensors of the base, on the same device."""
    weights: Weights
    """The expert as a model, which knows the factors of a task vector if it is an adapter (LoRA)."""
    effort: Timing = field(default_factory=Timing)
    """Time taken by the sums over these task vectors."""

    def base_map(self, name: str, module: LinearMap, dtype: torch.dtype) -> Float[Tensor, "m d"]:
        """Return W_0 of the map with this name in the block."""
        return cast(orient_weight(module, self.base[f"{name}.weight"]), dtype)

    def map_vector(self, name: str, module: LinearMap, dtype: torch.dtype) -> Tensor | Factors:
        """Return tau of the map with this name in the block, `[m, d]`, or its factors in float64 if the expert is an
        adapter over this very base.

        For an expert with less precision than the base, the difference is taken in its own precision: otherwise the
        task vector of an untrained map would be its rounding, with the same weight as any other.
        """
        stored = self.expert[f"{name}.weight"]
        pair = stored, self.base[f"{name}.weight"].to(stored.dtype)
        own, base = (orient_weight(module, cast(one, dtype)) for one in pair)
        tau = own - base
        for factors in factors_of(self.weights, [f"{self.block.stored_name(name)}.weight"]).values():
            left, right = (factor.to(find_device(tau.device, torch.float64), torch.float64) for factor in factors)
            # An adapter may lie over another base, and then its factors are not this task vector.
            apart = torch.linalg.matrix_norm((left @ right).to(tau) - tau)
            if bool(apart <= _SAME * torch.linalg.matrix_norm(own)):
                return left, right
        return tau

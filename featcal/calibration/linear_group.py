"""Statistics of linear maps that share their input: per task (Eq. 13), then summed over tasks (Eqs. 17 and 55)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from featcal.calibration import closed_form
from featcal.calibration.closed_form import SolveError
from featcal.calibration.config import CalibrationConfig
from featcal.calibration.gram import Gram, add_product
from featcal.calibration.token_rows import Named, TokenRows
from featcal.errors import InputError, NumericalError
from featcal.formats.weights import all_finite
from featcal.models.lane import Step

FLOAT64_BELOW = 1e-3
"""Ridge strength below which products are formed in float64."""


@dataclass
class LinearMoments:
    """One task's moments: x are deployed inputs, r whatever rows the right-hand side is made of."""

    weight: float
    """Sum of the token weights."""
    gram: Gram
    """Sum of x x^T."""
    cross: Float[Tensor, "r d"]
    """Sum of r x^T."""
    mean: Float[Tensor, " d"]
    """Sum of x."""
    row_mean: Float[Tensor, " r"]
    """Sum of r."""

    @classmethod
    def zeros(cls, rows: int, inputs: int, device: torch.device, dtype: torch.dtype) -> LinearMoments:
        zero = partial(torch.zeros, dtype=dtype, device=device)
        return cls(0.0, Gram.zeros(inputs, device, dtype), zero(rows, inputs), zero(inputs), zero(rows))

    def update(self, x: Float[Tensor, "n d"], r: Float[Tensor, "n r"], tokens: TokenRows) -> None:
        """Count n tokens, rows of `tokens.take`. Sums are kept in the dtype of the moments."""
        self.weight += tokens.total
        self.mean += tokens.sum(x)
        self.row_mean += tokens.sum(r)
        if tokens.weights is not None:
            root = tokens.weights.sqrt().to(x.dtype)[:, None]
            x, r = x * root, r * root
        self.gram.add_rows(x)
        add_product(self.cross, r, x)

    def replayed(self, weight: Float[Tensor, "m d"], alpha: float) -> Float[Tensor, "m d"]:
        """Sum of W_i (alpha x_exp + (1 - alpha) x) x^T where r are the expert's outputs W_i x_exp (Eqs. 10 and 13)."""
        dtype = self.cross.dtype
        if alpha == 1:
            return self.cross
        return torch.addmm(self.cross, weight.to(dtype), self.gram.full(dtype), beta=alpha, alpha=1 - alpha)


@dataclass
class LinearSums:
    """Sums over tasks of Eqs. (17) and (55), each task weighted by its omega."""

    omega: Float[Tensor, ""]
    gram: Gram
    target: Float[Tensor, "m d"]
    mean: Float[Tensor, " d"]
    target_mean: Float[Tensor, " m"]

    @classmethod
    def zeros(cls, target: Float[Tensor, "m d"]) -> LinearSums:
        """Empty sums for targets like this one; means are summed in float64."""
        zero = partial(torch.zeros, dtype=torch.float64, device=target.device)
        m, d = target.shape
        return cls(zero(()), Gram.zeros(d, target.device, target.dtype), torch.zeros_like(target), zero(d), zero(m))

    def add(self, omega: Float[Tensor, ""], task: LinearMoments, target: Tensor, target_mean: Tensor) -> None:
        """One task: its sums become means and count omega times."""
        factor = omega / task.weight
        self.omega += omega
        self.gram.add(task.gram, factor.to(target.dtype))
        self.target.addcmul_(target, factor.to(target.dtype))
        self.mean.addcmul_(task.mean.double(), factor)
        self.target_mean.addcmul_(target_mean.double(), factor)


class LinearGroup:
    """Linear maps with the same input and the same token weighting: one Gram matrix, one Cholesky factor.

    All of them have biases, or none. Their m output rows are stacked. The target T_i = W_i C_i of a task (Eqs. 10 and
    13) is formed in one of three ways, all the same up to rounding; `route` names the one with the fewest operations.
    """

    def __init__(self, names: Sequence[str], weighting: str, modules: Mapping[str, nn.Linear]) -> None:
        self.names = tuple(names)
        self.weighting = weighting
        biased = {name for name in names if modules[name].bias is not None}
        if biased and len(biased) < len(names):
            raise InputError(f"{', '.join(names)}: maps with and without bias in one group; featcal solves them apart")
        self._biased = bool(biased)
        self._rows = [modules[name].out_features for name in names]
        self.inputs = modules[names[0]].in_features
        self.outputs = sum(self._rows)
        self._route, self._products = "", torch.float32
        self._task: LinearMoments | None = None
        self._sums: LinearSums | None = None

    def route(self, tokens: int) -> str:
        """How the target of a task with so many tokens is formed.

        - "inputs": W_i (sum of x_mix x^T) with x_mix = alpha x_exp + (1 - alpha) x; d (n + m) d operations.
        - "outputs": alpha (sum of y_exp x^T) + (1 - alpha) W_i G_i, from the expert's own outputs; m (n + d) d.
        - "mixed": sum of (alpha y_exp + (1 - alpha) W_i x) x^T, token by token; 2 n m d.
        """
        d, m = self.inputs, self.outputs
        costs = {"inputs": d * (tokens + m), "outputs": m * (tokens + d), "mixed": 2 * tokens * m}
        return min(costs, key=lambda name: costs[name])

    def features(self, inputs: Named, tokens: TokenRows) -> Float[Tensor, "n d"]:
        """The group's input, one row per token that counts."""
        return tokens.take(inputs[self.names[0]])

    def expert_outputs(self, outputs: Named, expert: Named, tokens: TokenRows) -> Float[Tensor, "n m"]:
        """W_i x_exp: the expert's own outputs less their biases; `expert` holds its tensors of the block."""
        own = [tokens.take(outputs[name]) for name in self.names]
        stacked = own[0] if len(own) == 1 else torch.cat(own, dim=1)
        return stacked - self.stack(expert, "bias", stacked.dtype) if self._biased else stacked

    def update(
        self, inputs: Named, trace: Step, expert: Named, tokens: TokenRows, count: int, config: CalibrationConfig
    ) -> None:
        """Count one batch of the current task, of whose tokens `count` count in all."""
        x, alpha = self.features(inputs, tokens), config.alpha
        if self._task is None:
            self._route, self._products = self.route(count), multiplied_in(x.dtype, config)
        route, dtype = self._route, self._products
        x = x.to(dtype)
        if route == "inputs":
            r = torch.lerp(x, self.features(trace.inputs, tokens).to(dtype), alpha)
        else:
            r = self.expert_outputs(trace.outputs, expert, tokens).to(dtype)
        if route == "mixed" and alpha < 1:
            r = torch.addmm(r, x, self.stack(expert, "weight", dtype).mT, beta=alpha, alpha=1 - alpha)
        if self._task is None:
            self._task = self.new_task(r.shape[1], x.device, accumulated_in(x.dtype))
        self._task.update(x, r, tokens)

    def new_task(self, rows: int, device: torch.device, dtype: torch.dtype) -> LinearMoments:
        return LinearMoments.zeros(rows, self.inputs, device, dtype)

    def end_task(self, expert: Named, config: CalibrationConfig) -> None:
        """Fold the current task into the sums: targets by Eq. (10), weight by Eq. (14)."""
        task, self._task = self._task, None
        if task is None or not task.weight > 0:
            raise NumericalError(f"{', '.join(self.names)}: no token of a task counts; see its samples")
        route, alpha, dtype = self._route, config.alpha, task.cross.dtype
        weight = self.stack(expert, "weight", self._products)
        if route == "mixed":
            target, target_mean = task.cross, task.row_mean
        elif route == "inputs":
            target = (weight @ task.cross.to(weight.dtype)).to(dtype)
            target_mean = weight.to(dtype) @ task.row_mean
        else:
            target = task.replayed(weight, alpha)
            target_mean = alpha * task.row_mean + (1 - alpha) * (weight.to(dtype) @ task.mean)
        if self._biased:
            target_mean = target_mean + task.weight * self.stack(expert, "bias")
        if self._sums is None:
            self._sums = LinearSums.zeros(target)
        omega = closed_form.task_weight(task.gram.norm() / task.weight, config.eps)
        self._sums.add(omega, task, target, target_mean)

    def solve(self, merged: Named, base: Named, config: CalibrationConfig) -> dict[str, Tensor]:
        """Calibrated weights and, where asked for, biases; this group gives up its sums."""
        if self._sums is None:
            raise NumericalError(f"no task was counted for {', '.join(self.names)}")
        sums, self._sums = self._sums, None
        if not (all_finite(sums.gram.norm()) and all_finite(sums.target)):
            raise NumericalError(f"{', '.join(self.names)}: features are not finite")
        dtype = solved_in(self._products)
        anchor = closed_form.anchor(self.stack(merged, "weight", dtype), self.stack(base, "weight", dtype), config.rho)
        try:
            weight = closed_form.linear_weight(sums.gram.lower(dtype), sums.target, anchor, config.lam, config.eps)
        except SolveError as error:
            raise NumericalError(f"{', '.join(self.names)}: {error}; raise lam or use more samples") from error
        solved = self._split(weight, "weight")
        if self._biased and config.biases:
            anchor = closed_form.anchor(self.stack(merged, "bias"), self.stack(base, "bias"), config.rho)
            bias = closed_form.linear_bias(sums.target_mean, sums.mean, weight, anchor, sums.omega, config.lam)
            solved |= self._split(bias, "bias")
        return solved

    def stack(self, tensors: Named, kind: str, dtype: torch.dtype = torch.float64) -> Tensor:
        """The group's weights or biases, rows stacked."""
        parts = [tensors[f"{name}.{kind}"].to(dtype) for name in self.names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _split(self, stacked: Tensor, kind: str) -> dict[str, Tensor]:
        parts = torch.split(stacked, self._rows)
        return {f"{name}.{kind}": part for name, part in zip(self.names, parts, strict=True)}


def multiplied_in(features: torch.dtype, config: CalibrationConfig) -> torch.dtype:
    """The dtype in which products are formed.

    Rounding of a product shows in the solution divided by lam, in directions that the samples hardly have:
    below `FLOAT64_BELOW` exact features are therefore multiplied in float64, and fast ones in float32.
    """
    careful = config.lam < FLOAT64_BELOW
    if features is torch.bfloat16:
        return torch.float32 if careful else torch.bfloat16
    return torch.float64 if careful else features


def solved_in(products: torch.dtype) -> torch.dtype:
    """The dtype of the solve: float64, but for bfloat16 products, whose own rounding is far above float32's.

    They are formed only where lam bounds the condition number: it is at most 1 + N / lam, since ||omega_i G_i|| = 1.
    """
    return torch.float32 if products is torch.bfloat16 else torch.float64


def accumulated_in(products: torch.dtype) -> torch.dtype:
    """The dtype in which products are summed."""
    return torch.promote_types(products, torch.float32)

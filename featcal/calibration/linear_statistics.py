"""Hold statistics of linear maps that share their input: per task (Eq. 13), then summed over tasks (Eqs. 17 and 55)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.calibration.gram import Gram, add_alike, add_gram_product
from featcal.calibration.prior import Prior
from featcal.calibration.token_rows import TokenRows
from featcal.models.compute import find_device, widen


@dataclass
class TaskStatistics:
    """The moments of one task before division by n, the sum of its token weights: x are the deployed inputs (X_cal), r
    the rows of the right-hand side."""

    weight: float
    """Sum of the token weights: the n of Eq. (13)."""
    gram: Gram
    """Sum of x x^T, which is n G_i."""
    cross: Float[Tensor, "r d"]
    """Sum of r x^T."""
    x_sum: Float[Tensor, " d"]
    """Sum of x."""
    r_sum: Float[Tensor, " r"]
    """Sum of r."""

    @classmethod
    def zeros(cls, rows: int, inputs: int, device: torch.device, dtype: torch.dtype) -> TaskStatistics:
        """Make empty statistics."""
        zero = partial(torch.zeros, dtype=dtype, device=device)
        return cls(0.0, Gram.zeros(inputs, device, dtype), zero(rows, inputs), zero(inputs), zero(rows))

    def update(self, x: Float[Tensor, "n d"], r: Float[Tensor, "n r"], tokens: TokenRows) -> None:
        """Add n tokens, the rows of `tokens.take`. Sums are kept in the dtype of the statistics."""
        self.weight += tokens.total
        self.x_sum += tokens.sum(x)
        self.r_sum += tokens.sum(r)
        if tokens.weights is not None:
            root = tokens.weights.sqrt().to(x)[:, None]  # in both factors, so that a token counts by its weight
            x, r = x * root, r * root
        self.gram.add_rows(x)
        add_gram_product(self.cross, r, x)

    def merge(self, other: TaskStatistics) -> None:
        """Add the sums over other samples of the same task; raise InputError if shapes or dtypes differ."""
        self.gram.merge(other.gram)
        for mine, theirs in ((self.cross, other.cross), (self.x_sum, other.x_sum), (self.r_sum, other.r_sum)):
            add_alike(mine, theirs)
        self.weight += other.weight

    def replay_targets(self, weight: Float[Tensor, "m d"], alpha: float) -> Float[Tensor, "m d"]:
        """Return the sum of W_i (alpha x_exp + (1 - alpha) x) x^T, which is n W_i C_i, if r are the expert's outputs
        W_i x_exp (Eqs. 10 and 13)."""
        dtype = self.cross.dtype
        if alpha == 1:
            return self.cross
        return torch.addmm(self.cross, weight.to(dtype), self.gram.full(dtype), beta=alpha, alpha=1 - alpha)


@dataclass
class LinearSums:
    """Sums over tasks of Eqs. (17) and (55), each task weighted by its omega."""

    omega: Float[Tensor, ""]
    """Sum of omega_i."""
    gram: Gram
    """Sum of omega_i G_i."""
    target: Float[Tensor, "m d"]
    """Sum of omega_i W_i C_i."""
    mean: Float[Tensor, " d"]
    """Sum of omega_i mu_i, the mean of the deployed inputs."""
    target_mean: Float[Tensor, " m"]
    """Sum of omega_i (W_i mu_i^tgt + b_i), where b_i is left out if the maps have no biases."""
    tokens: int = 0
    """Number of tokens with non-zero weight, of all tasks."""
    tasks: int = 0
    """Number of tasks."""
    share: float = 0.0
    """Sum of their shares (`CurrentTask.share`)."""
    priors: list[Prior] = field(default_factory=list)
    """Prior of every map, in the order of the group; empty without a prior."""
    apart: list[tuple[LinearSums, Sequence[Tensor | None]]] = field(default_factory=list)
    """Share of every task in these sums, with the directions of its decisions map by map;
    empty for the plain squared error.
    """

    @property
    def scale(self) -> float:
        """Return the factor that scales the ridge to N tasks, whatever their shares add up to; 1 for maps that all
        tokens pass, and without tasks.
        """
        # Maps that no token came to have a prior alone, which counts every task in full.
        return self.share / self.tasks if self.share else 1.0

    @classmethod
    def zeros(cls, target: Float[Tensor, "m d"], dtype: torch.dtype) -> LinearSums:
        """Make empty sums for targets like this one, in the dtype of the solve; means are summed in float64."""
        place = find_device(target.device, torch.float64)
        zero = partial(torch.zeros, dtype=torch.float64, device=place)
        m, d = target.shape
        return cls(
            zero(()), Gram.zeros(d, place, dtype), torch.zeros(m, d, dtype=dtype, device=place), zero(d), zero(m)
        )

    def add(self, omega: Float[Tensor, ""], task: TaskStatistics, target: Tensor, target_mean: Tensor) -> None:
        """Add one task: its sums over tokens become means with weight omega.

        Args:
            target: n W_i C_i.
            target_mean: n (W_i mu_i^tgt + b_i).
        """
        # 1 / n turns sums over tokens into the means of Eq. (13), omega weighs the task (Eq. 14).
        factor = omega / task.weight
        self.omega += omega
        self.gram.add(task.gram, factor)
        self.target.addcmul_(target.to(self.target), factor.to(self.target))
        self.mean.addcmul_(widen(task.x_sum), factor)
        self.target_mean.addcmul_(widen(target_mean), factor)

    def merge(self, other: LinearSums) -> None:
        """Add the sums over other tasks; raise InputError if shapes or dtypes differ."""
        self.gram.merge(other.gram)
        add_alike(self.omega, other.omega)
        add_alike(self.target, other.target)
        add_alike(self.mean, other.mean)
        add_alike(self.target_mean, other.target_mean)
        self.tokens += other.tokens
        self.tasks += other.tasks
        self.share += other.share
        for mine, theirs in zip(self.priors, other.priors, strict=True):
            mine.merge(theirs)

    def left_matrix(self, place: int, dtype: torch.dtype, mu: float) -> Float[Tensor, "d d"]:
        """Return the left matrix of the map at `place` with its prior, without the ridge, as `Gram.lower` has it."""
        whole = self.gram.lower(dtype)
        self.priors[place].gram.add_to(whole, mu)
        return whole

    @staticmethod
    def combine(sums: Sequence[LinearSums], shares: Sequence[float]) -> LinearSums:
        """Return the first of several sums over the same tokens, with the targets combined by these coefficients."""
        target, mean = (
            torch.stack([share * part for share, part in zip(shares, parts, strict=True)]).sum(0)
            for parts in ([one.target for one in sums], [one.target_mean for one in sums])
        )
        return replace(sums[0], target=target, target_mean=mean)


@dataclass
class CurrentTask:
    """The task whose batches are being added."""

    statistics: TaskStatistics
    route: str
    """Route of the targets; see `LinearGroup.route`."""
    tokens: int
    """Tokens of the whole task with non-zero weight, which decide the route."""
    counted: int = 0
    """Number of these tokens that are in the statistics so far."""
    mass: float = 0.0
    """Sum of the same tokens' weights in all experts of the mixture; 0 outside of a mixture."""

    @property
    def share(self) -> float:
        """Return the share of the task's weights that falls on this expert of a mixture, by
        which its sums are scaled; 1 for all of it.
        """
        return self.statistics.weight / self.mass if self.mass else 1.0

    def merge(self, other: CurrentTask) -> None:
        """Add other samples of the same task; InputError if shapes or dtypes differ."""
        self.statistics.merge(other.statistics)
        self.counted += other.counted
        self.mass += other.mass

"""Sufficient statistics of one block: per task (Eqs. 13, 52, 56), then summed over tasks (Eqs. 17, 55, 58).

Features are dropped as soon as they are counted. The sums over tasks have the size of one task, so memory
does not grow with the number of experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from featcal.calibration import closed_form
from featcal.calibration.closed_form import SolveError
from featcal.calibration.config import CalibrationConfig
from featcal.errors import NumericalError
from featcal.models.adapter import Batch, Call, Stage
from featcal.models.capture import layernorms, linears, rmsnorms

STRIP = 512
"""Columns of a Gram matrix that are formed together."""
FLOAT64_BELOW = 1e-3
"""Ridge strength below which products are formed in float64."""

Named = Mapping[str, Tensor]
"""Tensors by their name inside the block."""


@dataclass
class LinearMoments:
    """One task's moments of linear maps that share their input; their m output rows are stacked."""

    weight: float
    """Sum of the token weights."""
    gram: Float[Tensor, "d d"]
    """Sum of x_cal x_cal^T; its lower triangle only, until `targets` mirrors it."""
    cross: Float[Tensor, "m d"]
    """Sum of (W_i x_exp) x_cal^T: the expert's own outputs less their biases, against the deployed inputs."""
    mean: Float[Tensor, " d"]
    """Sum of x_cal."""
    expert_mean: Float[Tensor, " m"]
    """Sum of W_i x_exp."""

    @classmethod
    def zeros(cls, outputs: int, inputs: int, device: torch.device, dtype: torch.dtype) -> LinearMoments:
        def zero(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(0.0, zero(inputs, inputs), zero(outputs, inputs), zero(inputs), zero(outputs))

    def update(
        self, inputs: Float[Tensor, "n d"], expert: Float[Tensor, "n m"], weights: Float[Tensor, " n"] | None
    ) -> None:
        """Count n tokens: deployed inputs, expert outputs less bias, and token weights (None: all 1).

        Products are formed and accumulated in place in the dtype of the moments.
        """
        x, y = inputs.to(self.gram.dtype), expert.to(self.gram.dtype)
        root = torch.ones_like(x[:, 0]) if weights is None else weights.to(x.dtype).sqrt()
        if weights is not None:
            x, y = x * root[:, None], y * root[:, None]
        self.weight += len(x) if weights is None else float(weights.double().sum())
        add_gram(self.gram, x)
        self.cross.addmm_(y.mT, x)
        self.mean += root @ x
        self.expert_mean += root @ y

    def targets(self, weight: Float[Tensor, "m d"], alpha: float) -> tuple[Tensor, Tensor]:
        """(G_i, W_i C_i) of Eq. (13): means, with the inputs of the targets interpolated by Eq. (10).

        The sum of the Gram matrix becomes the mean in place, so this is asked for once.
        """
        gram = mirror(self.gram).div_(self.weight)
        target = self.cross * (alpha / self.weight)
        return gram, target if alpha == 1 else target.addmm_(weight.to(gram.dtype), gram, alpha=1 - alpha)


@dataclass
class LinearSums:
    """Sums over tasks of Eqs. (17) and (55), each task weighted by its omega."""

    omega: float
    gram: Float[Tensor, "d d"]
    target: Float[Tensor, "m d"]
    mean: Float[Tensor, " d"]
    target_mean: Float[Tensor, " m"]

    @classmethod
    def zeros(cls, gram: Float[Tensor, "d d"], target: Float[Tensor, "m d"]) -> LinearSums:
        """Empty sums for moments of these shapes, in float64."""
        m, d = target.shape

        def zero(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=gram.device)

        return cls(0.0, zero(d, d), zero(m, d), zero(d), zero(m))

    def add(self, omega: float, gram: Tensor, target: Tensor, mean: Tensor, target_mean: Tensor) -> None:
        self.omega += omega
        self.gram.add_(gram, alpha=omega)
        self.target.add_(target, alpha=omega)
        self.mean.add_(mean, alpha=omega)
        self.target_mean.add_(target_mean, alpha=omega)


class LinearGroup:
    """Linear maps with the same input and the same token weighting: one Gram matrix, one Cholesky factor."""

    def __init__(self, names: Sequence[str], weighting: str, modules: Mapping[str, nn.Linear]) -> None:
        self.names = tuple(names)
        self.weighting = weighting
        self._biased = all(modules[name].bias is not None for name in names)
        self._rows = [modules[name].out_features for name in names]
        self.inputs = modules[names[0]].in_features
        self._task: LinearMoments | None = None
        self._mixed = False
        self._sums: LinearSums | None = None

    def features(self, inputs: Named) -> Float[Tensor, "n d"]:
        """The group's input, one row per token."""
        return _tokens(inputs[self.names[0]])

    def expert_rows(self, outputs: Named, expert: Named) -> Float[Tensor, "n m"]:
        """W_i x_exp: the expert's own outputs less their biases; `expert` holds its tensors of the block."""
        own = torch.cat([_tokens(outputs[name]) for name in self.names], dim=1)
        return own - torch.cat([expert[f"{name}.bias"] for name in self.names]) if self._biased else own

    def new_task(self, device: torch.device, dtype: torch.dtype) -> LinearMoments:
        return LinearMoments.zeros(sum(self._rows), self.inputs, device, dtype)

    def update(
        self,
        inputs: Named,
        outputs: Named,
        expert: Named,
        weights: Tensor | None,
        config: CalibrationConfig,
        tokens: int,
    ) -> None:
        """Count one batch of the current task, which has at most `tokens` tokens in all.

        W_i G_i costs d^2 m once, and (W_i x_cal) x_cal^T another d m per token: the cheaper one is formed.
        """
        features = self.features(inputs)
        if self._task is None:
            self._task = self.new_task(features.device, accumulated_in(features.dtype, config))
            self._mixed = tokens < self.inputs
        counted, own, weights = _counted(weights, features, self.expert_rows(outputs, expert))
        if self._mixed and config.alpha < 1:
            dtype = self._task.gram.dtype
            weight = self.stack(expert, "weight", dtype)
            own = config.alpha * own.to(dtype) + (1 - config.alpha) * counted.to(dtype) @ weight.mT
        self._task.update(counted, own, weights)

    def end_task(self, expert: Named, config: CalibrationConfig) -> None:
        """Fold the current task into the sums: targets by Eq. (10), weight by Eq. (14)."""
        task, self._task = self._task, None
        if task is None or not task.weight > 0:
            raise NumericalError(f"{', '.join(self.names)}: no token of a task counts; see its samples")
        if not bool(torch.isfinite(task.gram).all() and torch.isfinite(task.cross).all()):
            raise NumericalError(f"{', '.join(self.names)}: features are not finite")
        alpha = 1.0 if self._mixed else config.alpha  # mixed rows are targets already
        weight = self.stack(expert, "weight", task.gram.dtype)
        gram, target = task.targets(weight, alpha)
        target_mean = alpha * task.expert_mean.double() / task.weight
        mean = task.mean.double() / task.weight
        if alpha < 1:
            target_mean += (1 - alpha) * weight.double() @ mean
        if self._biased:
            target_mean = target_mean + self.stack(expert, "bias")
        if self._sums is None:
            self._sums = LinearSums.zeros(gram, target)
        self._sums.add(closed_form.task_weight(gram, config.eps), gram, target, mean, target_mean)

    def solve(self, merged: Named, base: Named, config: CalibrationConfig) -> dict[str, Tensor]:
        """Calibrated weights and, where asked for, biases, in float64; the sums are given up."""
        if self._sums is None:
            raise NumericalError(f"no task was counted for {', '.join(self.names)}")
        sums, self._sums = self._sums, None
        anchor = closed_form.anchor(self.stack(merged, "weight"), self.stack(base, "weight"), config.rho)
        try:
            weight = closed_form.linear_weight(sums.gram, sums.target, anchor, config.lam, config.eps)
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
        return torch.cat([tensors[f"{name}.{kind}"].to(dtype) for name in self.names])

    def _split(self, stacked: Tensor, kind: str) -> dict[str, Tensor]:
        parts = torch.split(stacked, self._rows)
        return {f"{name}.{kind}": part for name, part in zip(self.names, parts, strict=True)}


@dataclass
class NormSums:
    """Sums over tasks of Eq. (58); tasks count alike."""

    square: Float[Tensor, " d"]
    mean: Float[Tensor, " d"]
    scale_target: Float[Tensor, " d"]
    shift_target: Float[Tensor, " d"]
    tasks: int = 0

    def add(self, square: Tensor, mean: Tensor, scale: Tensor, shift: Tensor) -> None:
        """One task's moments of its normalised features, and its expert's scale and shift."""
        self.square += square
        self.mean += mean
        self.scale_target += square * scale + mean * shift
        self.shift_target += mean * scale + shift
        self.tasks += 1


class NormGroup:
    """One LayerNorm: moments of the current model's normalised inputs, expert features play no part (Eq. 57)."""

    def __init__(self, name: str, weighting: str, module: nn.LayerNorm, device: torch.device) -> None:
        self.names = (name,)
        self.weighting = weighting
        self._shape, self._eps = module.normalized_shape, module.eps
        zero = torch.zeros(*self._shape, dtype=torch.float64, device=device)
        self._sums = NormSums(zero.clone(), zero.clone(), zero.clone(), zero.clone())
        self._weight, self._mean, self._square = 0.0, zero.clone(), zero.clone()

    def update(self, inputs: Named, weights: Tensor | None) -> None:
        """Count one batch of the current task: weighted sums of z and z^2."""
        features, weights = _counted(weights, _at_least_float32(_tokens(inputs[self.names[0]])))
        z = nn.functional.layer_norm(features, self._shape, eps=self._eps).double()
        w = torch.ones_like(z[:, 0]) if weights is None else weights.double()
        self._weight += float(w.sum())
        self._mean += w @ z
        self._square += w @ z.square()

    def end_task(self, expert: Named, config: CalibrationConfig) -> None:
        """Fold the current task into the sums."""
        self._sums.add(self._square / self._weight, self._mean / self._weight, *self._affine(expert))
        self._weight = 0.0
        self._mean.zero_()
        self._square.zero_()

    def solve(self, merged: Named, base: Named, config: CalibrationConfig) -> dict[str, Tensor]:
        """Calibrated scale and shift, in float64."""
        (merged_scale, merged_shift), (base_scale, base_shift) = self._affine(merged), self._affine(base)
        scale, shift = closed_form.layernorm_affine(
            self._sums.square,
            self._sums.mean,
            self._sums.scale_target,
            self._sums.shift_target,
            closed_form.anchor(merged_scale, base_scale, config.rho),
            closed_form.anchor(merged_shift, base_shift, config.rho),
            self._sums.tasks,
            config.lam,
            config.eps,
        )
        return {f"{self.names[0]}.weight": scale, f"{self.names[0]}.bias": shift}

    def _affine(self, tensors: Named) -> tuple[Tensor, Tensor]:
        return tensors[f"{self.names[0]}.weight"].double(), tensors[f"{self.names[0]}.bias"].double()


class RmsGroup:
    """One RMSNorm: as `NormGroup`, with a scale alone."""

    def __init__(self, name: str, weighting: str, module: nn.Module) -> None:
        self.names = (name,)
        self.weighting = weighting
        self._module = module
        self._weight, self._square, self._sums = 0.0, torch.zeros(()), torch.zeros(())

    def update(self, inputs: Named, weights: Tensor | None) -> None:
        """Count one batch of the current task: weighted sums of z^2."""
        features, weights = _counted(weights, _at_least_float32(_tokens(inputs[self.names[0]])))
        ones = {"weight": torch.ones_like(features[0])}
        z = functional_call(self._module, ones, (features,), strict=True).double()
        w = torch.ones_like(z[:, 0]) if weights is None else weights.double()
        self._weight += float(w.sum())
        self._square = self._square + w @ z.square()

    def end_task(self, expert: Named, config: CalibrationConfig) -> None:
        """Fold the current task into the sums of q_i and q_i gamma_i."""
        square = self._square / self._weight
        self._sums = self._sums + torch.stack([square, square * self._scale(expert)])
        self._weight, self._square = 0.0, torch.zeros(())

    def solve(self, merged: Named, base: Named, config: CalibrationConfig) -> dict[str, Tensor]:
        """Calibrated scale, in float64."""
        anchor = closed_form.anchor(self._scale(merged), self._scale(base), config.rho)
        return {f"{self.names[0]}.weight": closed_form.rmsnorm_scale(self._sums[0], self._sums[1], anchor, config.lam)}

    def _scale(self, tensors: Named) -> Tensor:
        return tensors[f"{self.names[0]}.weight"].double()


class BlockMoments:
    """The statistics of every calibrated module of one block, from one snapshot of features."""

    def __init__(self, stage: Stage, index: int, config: CalibrationConfig) -> None:
        self.stage, self._index, self._config = stage, index, config
        self._groups: list[LinearGroup | NormGroup | RmsGroup] = []

    @property
    def norm(self) -> type[nn.Module] | None:
        """Class of the scale-only norms whose inputs must be captured; None where they are not calibrated."""
        return self.stage.norm if self._config.rmsnorms else None

    @property
    def started(self) -> bool:
        """Whether a batch was counted already."""
        return bool(self._groups)

    def update(self, call: Call, batch: Batch, inputs: Named, outputs: Named, expert: Named, tokens: int) -> None:
        """Count one batch of a task: the student's call and captured inputs, the expert's outputs and tensors, and
        the number of tokens that the task has in all."""
        if not self._groups:
            self._groups = [*linear_groups(self.stage, self._index, inputs), *self._norm_groups(call)]
        for group in self._groups:
            weights = self.stage.token_weights(group.weighting, call, batch, self._config)
            flat = None if weights is None else weights.flatten()
            if isinstance(group, LinearGroup):
                group.update(inputs, outputs, expert, flat, self._config, tokens)
            else:
                group.update(inputs, flat)

    def end_task(self, expert: Named) -> None:
        for group in self._groups:
            group.end_task(expert, self._config)

    def _norm_groups(self, call: Call) -> list[NormGroup | RmsGroup]:
        block, stage, index = self.stage.blocks[self._index].module, self.stage, self._index
        shifted = layernorms(block) if self._config.layernorms else {}
        return [
            *(NormGroup(n, stage.weighting(index, n), module, call.hidden.device) for n, module in shifted.items()),
            *(RmsGroup(n, stage.weighting(index, n), module) for n, module in rmsnorms(block, self.norm).items()),
        ]

    def solve(self, merged: Named, base: Named) -> dict[str, Tensor]:
        """Every calibrated tensor of the block, in float64."""
        solved: dict[str, Tensor] = {}
        for group in self._groups:
            solved |= group.solve(merged, base, self._config)
        return solved


def linear_groups(stage: Stage, index: int, inputs: Named) -> list[LinearGroup]:
    """Linear maps of a block that share a statistic: the same captured input under the same token weighting."""
    modules = linears(stage.blocks[index].module)
    shared: dict[tuple[int, str], list[str]] = {}
    for name in modules:
        shared.setdefault((id(inputs[name]), stage.weighting(index, name)), []).append(name)
    return [LinearGroup(names, weighting, modules) for (_, weighting), names in shared.items()]


def accumulated_in(features: torch.dtype, config: CalibrationConfig) -> torch.dtype:
    """The dtype in which products are formed and summed.

    Rounding of a product shows in the solution divided by lam, in directions that the samples hardly have:
    below `FLOAT64_BELOW` exact features are therefore multiplied in float64.
    """
    if features is torch.float64 or (config.precision == "exact" and config.lam < FLOAT64_BELOW):
        return torch.float64
    return torch.float32


def add_gram(gram: Float[Tensor, "d d"], x: Float[Tensor, "n d"]) -> None:
    """Add the lower triangle of x^T x in place; strip by strip, which leaves out most of the upper one."""
    for start in range(0, len(gram), STRIP):
        gram[start:, start : start + STRIP].addmm_(x[:, start:].mT, x[:, start : start + STRIP])


def mirror(gram: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """Fill the upper triangle that `add_gram` left out, in place."""
    for start in range(0, len(gram), STRIP):
        end = start + STRIP
        gram[start:end, end:] = gram[end:, start:end].mT
    return gram


def _counted(weights: Tensor | None, *rows: Tensor) -> tuple[Any, ...]:
    """Rows and weights without the tokens of weight 0: padding may hold anything, even what is not finite."""
    if weights is None or bool((weights > 0).all()):
        return *rows, weights
    counted = weights > 0
    return *(part[counted] for part in rows), weights[counted]


def _at_least_float32(features: Tensor) -> Tensor:
    return features.to(torch.promote_types(features.dtype, torch.float32))


def _tokens(features: Tensor) -> Float[Tensor, "n d"]:
    """`[batch, tokens, d]` or `[n, d]` → one row per token."""
    return features.reshape(-1, features.shape[-1])

"""Collect statistics of norms (Eqs. 56 and 58) and solve them, from the calibrated model's own normalised inputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.func import functional_call

from featcal.calibration import closed_form
from featcal.calibration.gram import add_alike
from featcal.calibration.token_rows import Named, TokenRows
from featcal.models.compute import find_device, widen
from featcal.suite.calibration_options import CalibrationConfig
from featcal.system.errors import InputError


@dataclass
class NormTaskStatistics:
    """One task's weighted sums of z and z^2."""

    mean: Float[Tensor, " d"]
    square: Float[Tensor, " d"]
    weight: float = 0.0

    def merge(self, other: NormTaskStatistics) -> None:
        """Add the moments of other samples of the same task; raise InputError if shapes differ."""
        add_alike(self.mean, other.mean)
        add_alike(self.square, other.square)
        self.weight += other.weight


@dataclass
class NormSums:
    """Sums over tasks of Eq. (58); tasks have equal weights."""

    square: Float[Tensor, " d"]
    mean: Float[Tensor, " d"]
    scale_target: Float[Tensor, " d"]
    shift_target: Float[Tensor, " d"]
    tasks: int = 0

    def add(self, square: Tensor, mean: Tensor, scale: Tensor, shift: Tensor) -> None:
        """Add one task: moments of its normalised features, and its expert's scale and shift."""
        self.square += square
        self.mean += mean
        self.scale_target += square * scale + mean * shift
        self.shift_target += mean * scale + shift
        self.tasks += 1

    def merge(self, other: NormSums) -> None:
        """Add the sums over other tasks; raise InputError if shapes differ."""
        add_alike(self.square, other.square)
        add_alike(self.mean, other.mean)
        add_alike(self.scale_target, other.scale_target)
        add_alike(self.shift_target, other.shift_target)
        self.tasks += other.tasks


class NormGroup:
    """Statistics of one norm, scale * z (+ bias): moments of the calibrated model's own z; expert features play no part
    (Eq. 57).

    Most LayerNorms have a bias. A LayerNorm without bias, and an RMSNorm (which does not subtract the mean), has only a
    scale, and its sums of z stay 0. A norm over each head's part of a token has one scale for all heads: every head is
    a row with the weight of its token.

    Args:
        offset: the scale is the stored weight plus this: 1 in Gemma, whose norms are (1 + weight) * z.
    """

    def __init__(self, name: str, weighting: str, module: nn.Module, device: torch.device, offset: float = 0.0) -> None:
        self.names = (name,)
        self.weighting = weighting
        self._offset = 0.0 if isinstance(module, nn.LayerNorm) else offset
        self._module, self._shifted = module, isinstance(module, nn.LayerNorm) and module.bias is not None
        width = module.get_parameter("weight").shape
        # Moments of z are near 1 and 0: their sums over many tokens lose digits in float32.
        self._zeros = partial(torch.zeros, width, dtype=torch.float64, device=find_device(device, torch.float64))
        self._start()

    def _start(self) -> None:
        zeros = self._zeros
        self._task = NormTaskStatistics(zeros(), zeros())
        self._sums = NormSums(zeros(), zeros(), zeros(), zeros())

    def update(self, inputs: Named, tokens: TokenRows) -> None:
        """Add one batch of the current task."""
        mean, square = normalised_sums(self._module, inputs[self.names[0]], tokens, self._offset)
        self._task.weight += tokens.total
        if self._shifted:
            self._task.mean += widen(mean)
        self._task.square += widen(square)

    def end_task(self, expert: Named, config: CalibrationConfig) -> None:
        """Add the current task to the sums."""
        task, self._task = self._task, NormTaskStatistics(self._zeros(), self._zeros())
        self._sums.add(task.square / task.weight, task.mean / task.weight, *self._affine(expert))

    def finite(self) -> Bool[Tensor, ""]:
        """Say whether the sums over the finished tasks are finite, on their device."""
        return torch.isfinite(self._sums.square.sum() + self._sums.mean.sum())

    def merge_part(self, part: NormTaskStatistics) -> None:
        """Add other samples of the current task; InputError if shapes differ."""
        self._task.merge(part)

    def solve(self, merged: Named, base: Named, config: CalibrationConfig) -> dict[str, Tensor]:
        """Solve the scale and, if there is one, the shift, in float64, by name inside the block.

        Args:
            merged, base: tensors of the block for the anchor, by name inside it.
        """
        sums, name = self._sums, self.names[0]
        pairs = zip(self._affine(merged), self._affine(base), strict=True)
        # An anchor's shares sum to 1 (Eq. 11), so scales with an offset are pulled as stored weights are.
        gamma, beta = (closed_form.anchor(*pair, config.rho) for pair in pairs)
        if not self._shifted:
            scale = closed_form.rmsnorm_scale(sums.square, sums.scale_target, gamma, config.lam)
            return {f"{name}.weight": scale - self._offset}
        targets = sums.scale_target, sums.shift_target
        scale, shift = closed_form.layernorm_affine(
            sums.square, sums.mean, targets, (gamma, beta), sums.tasks, config.lam, config.eps
        )
        return {f"{name}.weight": scale, f"{name}.bias": shift}

    @property
    def sums(self) -> NormSums:
        """Return the sums over all finished tasks."""
        return self._sums

    @property
    def current(self) -> NormTaskStatistics:
        """Return the moments of the current task."""
        return self._task

    def let_go(self) -> None:
        """Release all statistics, after another group has taken them over."""
        self._start()

    def _affine(self, tensors: Named) -> closed_form.Affine:
        """Return scale and shift in float64; a missing shift is 0."""
        scale = widen(tensors[f"{self.names[0]}.weight"]) + self._offset
        return scale, widen(tensors[f"{self.names[0]}.bias"]) if self._shifted else torch.zeros_like(scale)

    def __str__(self) -> str:
        return self.names[0]


def normalised_sums(
    norm: nn.Module, features: Tensor, tokens: TokenRows, offset: float
) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"]]:
    """Return the weighted sums over tokens of z, the normalised inputs before scale and shift, and of its square; z is
    at least float32.

    Args:
        features: `[batch, tokens, d]`, or `[batch, tokens, heads, d]` for a norm over each head's part; a token counts
            with the mean over its heads.
        offset: the scale is the stored weight plus this.
    """
    rows = tokens.take(features.flatten(2) if features.ndim == 4 else features)
    z = _normalise(norm, rows.reshape(-1, features.shape[-1]), offset)
    one, two = (values.reshape(len(rows), -1, values.shape[-1]).mean(1) for values in (z, z.square()))
    return tokens.sum(one), tokens.sum(two)


def _normalise(norm: nn.Module, features: Float[Tensor, "n d"], offset: float) -> Float[Tensor, "n d"]:
    features = features.to(torch.promote_types(features.dtype, torch.float32))
    if isinstance(norm, nn.LayerNorm):
        return nn.functional.layer_norm(features, norm.normalized_shape, eps=norm.eps)
    # The library's own norm with a scale of 1 gives z, whatever its formula of the root mean square.
    ones = {"weight": features.new_full(features.shape[-1:], 1 - offset)}
    z: Tensor = functional_call(norm, ones, (features,), strict=True)
    return z


def check_norm(name: str, module: nn.Module, offset: float = 0.0) -> None:
    """Verify numerically that a norm of the library computes weight * z + bias (LayerNorm) or (offset + weight) * z.

    z is x minus its mean, over its standard deviation; or x over its root mean square if there is no shift.

    Raises:
        InputError: the norm is another function of its parameters, such as a scale with another offset, or has other
            parameters.
    """
    centred = isinstance(module, nn.LayerNorm)
    kinds = {"weight", "bias"} if centred and module.bias is not None else {"weight"}
    shapes = {parameter: tuple(p.shape) for parameter, p in module.named_parameters()}
    width = shapes.get("weight", ())
    if shapes.keys() == kinds and len(width) == 1:
        generator = torch.Generator().manual_seed(0)
        # Tried on numbers: a class may compute anything under the name of a norm.
        x = _LARGE * torch.randn(3, *width, generator=generator)
        own = {n: torch.randn(width, generator=generator) for n in shapes}
        z = x - x.mean(1, keepdim=True) if centred else x
        scale = own["weight"] + (0.0 if centred else offset)
        expected = scale * z * z.square().mean(1, keepdim=True).rsqrt() + own.get("bias", torch.zeros(()))
        found: Tensor = functional_call(module, own, (x,), strict=True)
        if bool(((found - expected).norm(dim=1) <= _SAME * expected.norm(dim=1)).all()):
            return
    scaled = f"({offset:g} + weight) * x / rms(x)" if offset else "weight * x / rms(x)"
    kind, option = ("weight * z + bias", "--no-layernorms") if centred else (scaled, "--no-rmsnorms")
    raise InputError(f"{name}: {type(module).__name__} is not {kind}; featcal cannot calibrate it, give {option}")


_LARGE, _SAME = 1e3, 1e-4
"""_LARGE: size of inputs for which eps is negligible, wherever a norm adds it. _SAME: largest relative difference of
equal norms."""

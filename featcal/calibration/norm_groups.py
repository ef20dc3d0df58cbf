"""Statistics of norms (Eqs. 56 and 58): moments of the current model's own normalised inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from featcal.calibration import closed_form
from featcal.calibration.config import CalibrationConfig
from featcal.calibration.token_rows import Named, TokenRows
from featcal.errors import InputError


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

    def update(self, inputs: Named, tokens: TokenRows) -> None:
        """Count one batch of the current task: weighted sums of z and z^2."""
        features = _at_least_float32(tokens.take(inputs[self.names[0]]))
        z = nn.functional.layer_norm(features, self._shape, eps=self._eps)
        self._weight += tokens.total
        self._mean += tokens.sum(z)
        self._square += tokens.sum(z.square())

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

    def update(self, inputs: Named, tokens: TokenRows) -> None:
        """Count one batch of the current task: weighted sums of z^2."""
        features = _at_least_float32(tokens.take(inputs[self.names[0]]))
        ones = {"weight": torch.ones_like(features[0])}
        z: Tensor = functional_call(self._module, ones, (features,), strict=True)
        self._weight += tokens.total
        self._square = self._square + tokens.sum(z.square()).double()

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


def check_norm(name: str, module: nn.Module) -> None:
    """Hold a module of the library against what is solved for, weight * z + bias of a LayerNorm, weight * z of others.

    z is x less its mean over its standard deviation, or x over its root mean square where there is no shift.

    Raises:
        InputError: another function of its parameters, such as (1 + weight) * z, or other parameters.
    """
    shifted = isinstance(module, nn.LayerNorm)
    shapes = {parameter: tuple(p.shape) for parameter, p in module.named_parameters()}
    width = shapes.get("weight", ())
    if shapes.keys() == ({"weight", "bias"} if shifted else {"weight"}) and len(width) == 1:
        generator = torch.Generator().manual_seed(0)
        x = _LARGE * torch.randn(3, *width, generator=generator)
        own = {n: torch.randn(width, generator=generator) for n in shapes}
        z = x - x.mean(1, keepdim=True) if shifted else x
        expected = own["weight"] * z * z.square().mean(1, keepdim=True).rsqrt() + own.get("bias", torch.zeros(()))
        found: Tensor = functional_call(module, own, (x,), strict=True)
        if bool(((found - expected).norm(dim=1) <= _SAME * expected.norm(dim=1)).all()):
            return
    kind, option = ("weight * z + bias", "--no-layernorms") if shifted else ("weight * x / rms(x)", "--no-rmsnorms")
    raise InputError(f"{name}: {type(module).__name__} is not {kind}; featcal cannot calibrate it, give {option}")


_LARGE, _SAME = 1e3, 1e-4
"""Size of inputs beside which no eps matters, wherever a norm adds it; largest relative difference of equal norms."""


def _at_least_float32(features: Tensor) -> Tensor:
    return features.to(torch.promote_types(features.dtype, torch.float32))

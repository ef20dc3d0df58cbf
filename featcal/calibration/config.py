"""The options of a calibration run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from featcal.errors import InputError
from featcal.models.adapter import Adapter
from featcal.models.compute import PRECISIONS


@dataclass(frozen=True)
class CalibrationConfig:
    """Options of Algorithm 1, with the paper's CLIP values as defaults (`config_for` gives those of a suite).

    Raises:
        InputError: a value outside its range; the message names the option.
    """

    lam: float = 0.05
    """Ridge strength, >= 0: pull towards the anchor (Eq. 12). 0 needs features of full rank."""
    rho: float = 2.0
    """Anchor = rho * merged + (1 - rho) * base (Eq. 11); above 1 it extrapolates beyond the merged model."""
    alpha: float = 0.3
    """Share of the expert's own input features in the targets, in [0, 1] (Eq. 10)."""
    samples: int = 256
    """Calibration samples per task, > 0; a task that has fewer gives all it has."""
    seed: int = 42
    """Together with the task's name it decides which samples are drawn."""
    biases: bool = True
    """Calibrate the biases of linear maps (Eq. 55)."""
    layernorms: bool = True
    """Calibrate LayerNorm scales and shifts (Eq. 59)."""
    rmsnorms: bool = False
    """Calibrate the scales of RMSNorms too (T5, Llama); our extension of Eq. (59), which the paper does not run."""
    completion_only: bool = False
    """In causal language models count the positions that predict the answer alone, not the rest of the prompt."""
    patch_weight: float = 0.01
    """Weight of CLIP's patch tokens in the last block, in (0, 1]; the class token has 1, inputs of keys and
    values always 1. The paper's own code uses 0.01."""
    eps: float = 1e-8
    """Numerical stabiliser of Eqs. (14), (17) and (59)."""
    batch_size: int = 64
    """Samples per forward pass; changes nothing but time and memory."""
    precision: str = "exact"
    """"exact" (float32 features and products, float64 solve) or "fast" (bfloat16 features and products, float32
    solve; below lam = 1e-3 float32 products and float64 solve)."""

    def __post_init__(self) -> None:
        for name in ("lam", "rho", "alpha", "patch_weight", "eps"):
            if not math.isfinite(getattr(self, name)):
                raise InputError(f"{name} must be a finite number, not {getattr(self, name)}")
        if self.lam < 0:
            raise InputError(f"lam is {self.lam:g}; a ridge strength is >= 0")
        if not 0 <= self.alpha <= 1:
            raise InputError(f"alpha is {self.alpha:g}; an interpolation share lies in [0, 1]")
        if not 0 < self.patch_weight <= 1:
            raise InputError(f"patch_weight is {self.patch_weight:g}; it lies in (0, 1]")
        if self.eps < 0:
            raise InputError(f"eps is {self.eps:g}; it is >= 0")
        if self.samples < 1:
            raise InputError(f"samples is {self.samples}; calibration needs at least one sample per task")
        if self.batch_size < 1:
            raise InputError(f"batch_size is {self.batch_size}; it is at least 1")
        if self.precision not in PRECISIONS:
            raise InputError(f"precision is '{self.precision}'; choose {' or '.join(PRECISIONS)}")


class Options(TypedDict, total=False):
    """The fields of `CalibrationConfig`, each of which may be left to the suite and the paper by None."""

    lam: float | None
    rho: float | None
    alpha: float | None
    samples: int | None
    seed: int | None
    biases: bool | None
    layernorms: bool | None
    rmsnorms: bool | None
    completion_only: bool | None
    patch_weight: float | None
    eps: float | None
    batch_size: int | None
    precision: str | None


def config_of(adapter: Adapter, asked: Mapping[str, Any]) -> CalibrationConfig:
    """The options that were asked for over the paper's for an architecture.

    Raises:
        InputError: a value outside its range, or an option switched on that means nothing to the architecture.
    """
    idle = sorted(name for name in asked if asked[name] and name in idle_options(adapter))
    if idle:
        raise InputError(f"{', '.join(idle)}: a {adapter.family} model has nothing that this applies to")
    return CalibrationConfig(**{**adapter.defaults, **asked})


def idle_options(adapter: Adapter) -> set[str]:
    """Options of `CalibrationConfig` that change nothing for an architecture."""
    blocks = adapter.blocks()
    applies = {
        "biases": any(linear.bias is not None for block in blocks for linear in block.linears.values()),
        "layernorms": any(block.layernorms for block in blocks),
        "rmsnorms": any(stage.norm is not None for stage in adapter.stages),
        "completion_only": adapter.modality == "causal",
        "patch_weight": adapter.class_token,
    }
    return {name for name, does in applies.items() if not does}

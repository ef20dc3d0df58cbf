"""Choose the dtypes of a calibration: of products, of their sums, and of the solve (README.md)."""

from __future__ import annotations

import torch

from featcal.suite.calibration_options import CalibrationConfig

FLOAT64_BELOW = 1e-3
"""Ridge strength below which products of float32 features are formed in float64."""
FLOAT32_BELOW = 2e-2
"""Ridge strength below which products of bfloat16 features are formed in float32. At lam 0.001 the rounding of bfloat16
products made the systems of t5-mini indefinite, and put maps of clip-mini 37 % away from those of "exact"; at 0.01 up
to 7 %."""


def product_dtype(features: torch.dtype, config: CalibrationConfig) -> torch.dtype:
    """Return the dtype of products: wider than the features' if lam is small (`FLOAT64_BELOW`, `FLOAT32_BELOW`)."""
    # In directions that the samples hardly have, rounding of a product shows divided by lam.
    if features is torch.bfloat16:
        return torch.float32 if config.lam < FLOAT32_BELOW else torch.bfloat16
    return torch.float64 if config.lam < FLOAT64_BELOW else features


def solve_dtype(products: torch.dtype) -> torch.dtype:
    """Return the dtype of the solve, and of its sums over tasks: float64, but float32 for bfloat16 products, whose
    rounding is far above float32's."""
    # They come with a large lam alone: the condition is at most 1 + N / lam, as ||omega_i G_i|| = 1.
    return torch.float32 if products is torch.bfloat16 else torch.float64


def sum_dtype(products: torch.dtype) -> torch.dtype:
    """Return the dtype of sums of products over the tokens of a task."""
    return torch.promote_types(products, torch.float32)

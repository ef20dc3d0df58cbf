"""Round solved weights to the grid of a quantised model, so that the objective of their calibration grows least.

Around its minimiser W* the objective of Eq. (15) is tr(E H E^T) + constant, with E = W* - W and H = L L^T the left
matrix of Eq. (17), ridge included. The solve has already computed its factor L, lower triangular:

    tr(E H E^T) = sum over columns j of |sum over k >= j of e_k L_kj|^2

so column j is rounded once the columns after it are, at the value that would make its term 0, t_j = w_j + sum over k >
j of e_k L_kj / L_jj, and the remaining error is L_jj^2 |t_j - round(t_j)|^2: columns that are not yet rounded
compensate the error of every column. This is the rule of GPTQ (Frantar et al., arXiv:2210.17323, section 3) with
columns in reverse order, that is Babai's nearest plane (Chen et al., arXiv:2507.18553); GPTQ takes 2 X X^T with a
damping in the place of H, the calibration's own matrix and ridge here. docs/theory/compact.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.calibration.rounding import Rounding, sum_parts
from featcal.export.config_files import unpacked_maps
from featcal.family.opening import Family
from featcal.formats.grid import SCALE, OnGrid, QuantizationGrid
from featcal.formats.weights import Overlay, Weights
from featcal.suite.calibration_options import CalibrationConfig
from featcal.system.extras import require_packages

_TOGETHER = 128
"""Columns that share one product for the errors after them, if a scale is for whole rows."""


class Rounder:
    """Rounds the weights of a block one by one, and keeps their scales and rounding errors.

    Args:
        grid: grid of the quantised values.
        nearest: round every weight by itself, for comparison.
    """

    def __init__(self, grid: QuantizationGrid, nearest: bool) -> None:
        self._grid, self._nearest = grid, nearest
        self.scales: dict[str, Tensor] = {}
        """Scales `[outputs, groups]` by name inside the block, that of the weight with `SCALE`."""
        self.lost: Rounding = {}

    def round(
        self, name: str, weight: Float[Tensor, "m d"], factor: Float[Tensor, "d d"], merged: Float[Tensor, "m d"]
    ) -> Float[Tensor, "m d"]:
        """Round a solved weight to the grid; return it in its own dtype, with the values of its storage dtype.

        Args:
            name: of the weight inside the block.
            factor: see `closed_form.left_factor`.
            merged: the tensor that the solution replaces, in its storage dtype.
        """
        if self._nearest:
            rounded, scale = round_to_nearest(weight, self._grid, merged.dtype)
        else:
            rounded, scale = round_columns(weight, factor, self._grid, merged.dtype)
        self.scales[f"{name}{SCALE}"] = scale
        moved, lost = ((weight - other.to(weight)).square().sum() for other in (merged, rounded))
        self.lost = sum_parts([self.lost, {f"int{self._grid.bits}": (float(moved), float(lost))}])
        return rounded


def rounder_of(config: CalibrationConfig) -> Rounder | None:
    """Make the rounder for the options; None if nothing is quantised."""
    grid = grid_of(config)
    return None if grid is None else Rounder(grid, config.quantize.endswith("-nearest"))


def grid_of(config: CalibrationConfig) -> QuantizationGrid | None:
    """Return the grid for the options; None if nothing is quantised."""
    if not config.is_quantized:
        return None
    return QuantizationGrid(int(config.quantize.removeprefix("int").partition("-")[0]), config.group_size)


def calibrated_weights(merged: Weights, config: CalibrationConfig, solved: Mapping[str, Tensor]) -> Overlay:
    """Return the merged model with its calibrated blocks; for quantised ones it knows the grid.

    Args:
        solved: tensors of the blocks by canonical name, with the scales of those that lie on a grid.
    """
    grid = grid_of(config)
    made = "calibrated model", merged, solved
    return Overlay(*made) if grid is None else OnGrid(*made, grid)


def require_packable(family: Family, config: CalibrationConfig) -> None:
    """Check before a calibration that its quantised maps can be written.

    Raises:
        InputError: compressed-tensors is not installed, or transformers would not find the packed maps.
    """
    if config.is_quantized:
        require_packages("compressed_tensors", label="quantised weights")
        maps = [f"{b.stored_name(name)}.weight" for b in family.adapter.blocks() for name in b.maps]
        unpacked_maps(family.adapter, family.container.config, maps)


def round_to_nearest(
    weight: Float[Tensor, "m d"], grid: QuantizationGrid, dtype: torch.dtype
) -> tuple[Float[Tensor, "m d"], Float[Tensor, "m groups"]]:
    """Round every weight by itself; arguments and result are those of `round_columns`."""
    parts = torch.split(weight, grid.columns(weight.shape[1]), dim=1)
    scales = [grid.scale(part).to(dtype) for part in parts]
    rounded = [grid.round(part, scale) for part, scale in zip(parts, scales, strict=True)]
    return torch.cat(rounded, dim=1), torch.cat(scales, dim=1)


def round_columns(
    weight: Float[Tensor, "m d"], factor: Float[Tensor, "d d"], grid: QuantizationGrid, dtype: torch.dtype
) -> tuple[Float[Tensor, "m d"], Float[Tensor, "m groups"]]:
    """Round the columns from the last to the first, each so that it compensates the errors of the columns after it.

    A group of columns gets its scale before its first column is rounded, from its best values given the columns after
    it; a scale for whole rows comes from the weight.

    Args:
        weight: W*, the solution of Eq. (17).
        factor: L, lower triangular, of its left matrix.
        dtype: storage dtype of the scales, and of the product of an integer and its scale.

    Returns:
        The weights as stored, in the dtype of `weight`, and the scales in `dtype`.
    """
    columns = weight.shape[1]
    size = grid.columns(columns)
    step = size if grid.group else min(size, _TOGETHER)
    diagonal, errors, rounded = factor.diagonal(), torch.zeros_like(weight), torch.empty_like(weight)
    scale = grid.scale(weight).to(dtype)
    scales: list[Tensor] = []
    for start in reversed(range(0, columns, step)):
        end = min(start + step, columns)
        # One product for all columns that are rounded already; those of this part are added one by one.
        behind, own = errors[:, end:] @ factor[end:, start:end], factor[start:end, start:end]
        if grid.group:
            best = weight[:, start:end] + torch.linalg.solve_triangular(own, behind, upper=False, left=False)
            scale = grid.scale(best).to(dtype)
            scales.insert(0, scale)
        for j in reversed(range(start, end)):
            within = errors[:, j + 1 : end] @ factor[j + 1 : end, j]
            target = weight[:, j] + (behind[:, j - start] + within) / diagonal[j]
            rounded[:, j] = grid.round(target[:, None], scale)[:, 0]
            errors[:, j] = weight[:, j] - rounded[:, j]
    return rounded, torch.cat(scales, dim=1) if scales else scale

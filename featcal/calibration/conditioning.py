"""Measure the conditioning of the linear systems of a calibration: the eigenvalues of every left matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from featcal.calibration.block_statistics import BlockStatistics, FirstBlock
from featcal.calibration.calibrate import calibrate_family
from featcal.calibration.config import resolve_options
from featcal.calibration.linear_group import LinearGroup
from featcal.family.opening import Family
from featcal.formats.weights import all_finite
from featcal.models.lane import ExpertPass
from featcal.suite.calibration_options import CalibrationConfig
from featcal.system.errors import InputError, NumericalError
from featcal.system.progress import Progress, silent


@dataclass(frozen=True)
class Conditioning:
    """Figures of the left matrix of Eq. (17), sum_i omega_i G_i + (lam + eps) I, of linear maps that are solved
    together, or of one map with its prior, mu sum_i K_i more. There are none for an expert of a mixture with too few
    tokens, nor for norms, whose systems have two unknowns.
    """

    layer: str
    """Name of the block in tables."""
    maps: str
    """The linear maps, by their names inside the block."""
    width: int
    """Features of their input: the side of the matrix."""
    tokens: int
    """Tokens with non-zero weight, of all tasks; with fewer than `width` some directions
    are decided by the anchor alone.
    """
    smallest: float
    """Smallest eigenvalue of the left matrix; `lam + eps` if the samples miss a direction."""
    largest: float
    effective_rank: float
    """sum_j e_j / (e_j + lam + eps) over the eigenvalues e of the sum without lam: the number of directions that the
    samples and the prior decide, not the anchor; the rank as lam goes to 0."""

    @property
    def condition(self) -> float:
        """Return the largest eigenvalue over the smallest; at most 1 + N / lam for N tasks."""
        return self.largest / self.smallest if self.smallest > 0 else float("inf")

    def to_json(self) -> dict[str, Any]:
        """Return every number by its name; `condition` is None if it is infinite."""
        return {**asdict(self), "condition": self.condition if math.isfinite(self.condition) else None}


def conditioning_of(layer: str, group: LinearGroup, config: CalibrationConfig) -> Iterator[Conditioning]:
    """Measure every system of a group before it is solved; costs a decomposition of each matrix in float64.

    Raises:
        NumericalError: matrix or eigenvalues are not finite; the message names block and maps.
    """
    sums = group.sums
    ridge = sums.scale * (config.lam + config.eps)
    if not all_finite(sums.gram.norm()):
        raise NumericalError(f"{layer}: {group}: the left matrix is not finite")
    for maps, left in group.systems(config):
        found = torch.linalg.eigvalsh(left)
        if not all_finite(found):
            raise NumericalError(f"{layer}: {maps}: eigenvalues of the left matrix are not finite")
        # Rounding makes some zero eigenvalues negative; they must not count against others.
        rank = float(torch.where(found > 0, found / (found + ridge), 0.0).sum())
        # The ridge shifts every eigenvalue alike, so the matrix is decomposed without it.
        ends = float(found[0]) + ridge, float(found[-1]) + ridge
        yield Conditioning(layer, maps, group.inputs, sums.tokens, *ends, rank)


def measure_conditioning(
    family: Family,
    config: CalibrationConfig,
    experts: Mapping[str, ExpertPass] | None = None,
    first: FirstBlock | None = None,
    progress: Progress = silent,
) -> list[Conditioning]:
    """Measure every system that a calibration solves, in forward order. Costs a calibration and the decompositions.

    Raises:
        InputError: the suite, its models or its samples are not usable.
        NumericalError: the closed form has no trustworthy solution with these options.
    """
    adapter, found = family.adapter, list[Conditioning]()
    config = resolve_options(config, adapter, family.suite.tasks)
    if config.decisions:
        raise InputError(
            "decisions couples the rows of a map in one system, whose conditioning is not measured; set decisions to 0"
        )
    layers = adapter.block_names()

    def look(statistics: BlockStatistics) -> None:
        linears = (group for group in statistics.groups if isinstance(group, LinearGroup) and not group.is_starved)
        found.extend(one for group in linears for one in conditioning_of(layers[statistics.block.name], group, config))

    calibrate_family(family, config, experts=experts, first=first, watch=look, progress=progress)
    return found

"""Compute the second moments of the inputs of a finished model's linear maps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.calibration import closed_form
from featcal.calibration.block_statistics import check_inputs, linear_groups
from featcal.calibration.gram import Gram
from featcal.calibration.linear_group import LinearGroup
from featcal.calibration.precision import product_dtype, sum_dtype
from featcal.calibration.token_rows import Named, TaskRows, uncounted_error
from featcal.models.adapter import Stage
from featcal.models.compute import cast, find_device, widen
from featcal.suite.calibration_options import CalibrationConfig
from featcal.system.errors import NumericalError


@dataclass(frozen=True)
class InputMetric:
    """H = sum over tasks of omega_i G_i + (lam + eps) I of maps that share their input: the left matrix of Eq. (17)."""

    group: LinearGroup
    matrix: Float[Tensor, "d d"]
    """The matrix H in float64, with zeros above the blocks on its diagonal."""


class DeployedInputs:
    """The inputs of all linear maps of one block in a finished model, summed with the token
    weights of a calibration.
    """

    def __init__(self, stage: Stage, index: int, config: CalibrationConfig) -> None:
        self._stage, self._index, self._config = stage, index, config
        self._groups: list[LinearGroup] = []
        self._sums: dict[str, Gram] = {}

    def count(self, batches: Iterable[Named], rows: TaskRows) -> None:
        """Add the inputs of one task.

        Args:
            batches: the inputs of all linear maps of the block, batch by batch.
            rows: the task's tokens with non-zero weight.

        Raises:
            InputError: the input of a map does not have one row per token.
            NumericalError: features are not finite, or no token has weight.
        """
        own: dict[str, Gram] = {}
        weight: dict[str, float] = {}
        for position, inputs in enumerate(batches):
            check_inputs(self._stage, self._index, inputs)
            self._groups = self._groups or linear_groups(self._stage, self._index, inputs)
            for group in self._groups:
                tokens, name = rows.batches[position][group.weighting], str(group)
                x = group.features(inputs, tokens)
                x = cast(x, product_dtype(x.dtype, self._config))
                if tokens.weights is not None:
                    x = x * tokens.weights.sqrt().to(x)[:, None]
                own.setdefault(name, Gram.zeros(group.inputs, x.device, sum_dtype(x.dtype))).add_rows(x)
                weight[name] = weight.get(name, 0.0) + tokens.total
        for name, gram in own.items():
            self._add(name, gram, weight[name])

    def _add(self, name: str, gram: Gram, weight: float) -> None:
        if not weight > 0:
            raise uncounted_error(name)
        norm = gram.norm()
        if not bool(torch.isfinite(norm)):
            raise NumericalError(f"{name}: features are not finite")
        # As a calibration weighs it: omega of the mean over tokens (Eq. 14), times that mean.
        factor = closed_form.task_weight(norm / weight, self._config.eps) / weight
        first = gram.strips[0]
        total = self._sums.setdefault(
            name, Gram.zeros(len(first), find_device(first.device, torch.float64), torch.float64)
        )
        total.add(gram, factor)

    def metrics(self) -> Iterator[InputMetric]:
        """Yield the metric of every group of maps that share their input."""
        for group in self._groups:
            matrix = self._sums[str(group)].lower(torch.float64)
            matrix.diagonal().add_(self._config.lam + self._config.eps)
            yield InputMetric(group, matrix)


def map_changes(
    group: LinearGroup, start: Mapping[str, Tensor], end: Mapping[str, Tensor]
) -> Iterator[tuple[str, Float[Tensor, "m d"]]]:
    """Yield the name inside the block and the change in float64, `[outputs, inputs]`, of every map that differs between
    two models.

    Args:
        start, end: tensors of the block by name inside it.
    """
    for name in group.names:
        before, after = (group.orient(name, one[f"{name}.weight"]) for one in (start, end))
        change = widen(after) - widen(before)
        if bool(change.any()):
            yield name, change

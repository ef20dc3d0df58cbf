"""Sum the second moments of the inputs of one block's linear maps on the samples of one task."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.calibration.block_statistics import linear_groups
from featcal.calibration.gram import Gram
from featcal.calibration.linear_group import LinearGroup
from featcal.calibration.token_rows import Named, TokenRows, uncounted_error
from featcal.models.adapter import Stage


class TaskGrams:
    """The Gram matrices of one task for one block, one for all maps that share their input.

    Args:
        dtype: of products and their sums; None for that of the features.
    """

    def __init__(self, stage: Stage, index: int, dtype: torch.dtype | None = torch.float64) -> None:
        self._stage, self._index, self._dtype = stage, index, dtype
        self.groups: list[LinearGroup] = []
        """Maps that share their input; none before the first batch."""
        self._grams: dict[str, Gram] = {}
        self._counted: dict[str, float] = {}

    def add(self, inputs: Named, tokens: Mapping[str, TokenRows]) -> None:
        """Add one batch to the Gram matrices.

        Args:
            inputs: of all linear maps of the block.
            tokens: its tokens with non-zero weight, by weighting.
        """
        self.groups = self.groups or linear_groups(self._stage, self._index, inputs)
        for group in self.groups:
            own, name = tokens[group.weighting], str(group)
            x = group.features(inputs, own).to(dtype=self._dtype)
            self._grams.setdefault(name, Gram.zeros(group.inputs, x.device, x.dtype)).add_rows(x)
            self._counted[name] = self._counted.get(name, 0.0) + own.total

    def sum(self, group: LinearGroup) -> Float[Tensor, "d d"]:
        """Return the sum of x x^T over all tokens except padding, in float64."""
        return self._grams[str(group)].full(torch.float64)

    def mean(self, group: LinearGroup) -> Float[Tensor, "d d"]:
        """Return the mean of x x^T over all tokens except padding, in float64.

        Raises:
            NumericalError: no token counts.
        """
        counted = self._counted[str(group)]
        if not counted > 0:
            raise uncounted_error(group)
        return self.sum(group) / counted

"""Find the tokens with non-zero weight, and their weights, before a stage starts; they are
the same in every block of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from featcal.models.adapter import Batch, Call, Stage, TokenOptions
from featcal.models.compute import widen
from featcal.models.lane import ExpertPass, ModelStream
from featcal.system.errors import NumericalError

Named = Mapping[str, Tensor]
"""Tensors by their name inside the block."""


def uncounted_error(what: object) -> NumericalError:
    """Return the error for a task in which no token has weight; `what` names the statistics."""
    return NumericalError(f"{what}: no token of a task has weight; see its samples")


@dataclass(frozen=True)
class TokenRows:
    """The tokens of one batch with non-zero weight, under one weighting."""

    count: int
    """Number of tokens with a weight above 0."""
    total: float
    """Sum of their weights."""
    index: Int[Tensor, " n"] | None = None
    """Positions of these tokens among all tokens of the batch; None for all."""
    weights: Float[Tensor, " n"] | None = None
    """Weights of these tokens in float64; None if all are 1."""

    @classmethod
    def from_weights(cls, weights: Float[Tensor, "batch tokens"] | None, tokens: int) -> TokenRows:
        """Make the rows from `Stage.token_weights`; `tokens` is their number if all weights are 1."""
        if weights is None:
            return cls(tokens, float(tokens))
        flat = widen(weights).flatten()
        # Left out, not multiplied by 0: padding may hold anything, even what is not finite.
        index = flat.nonzero().squeeze(1)
        chosen = flat[index]
        alike = bool((chosen == 1).all())
        return cls(
            len(index),
            float(chosen.sum()),
            None if len(index) == len(flat) else index,
            None if alike else chosen,
        )

    def spread(self, tokens: int) -> Float[Tensor, " tokens"]:
        """Return the weight of every token of the batch, in float64; on the CPU if all are 1."""
        if self.index is None:
            return torch.ones(tokens, dtype=torch.float64) if self.weights is None else self.weights
        whole = torch.zeros(tokens, dtype=torch.float64, device=self.index.device)
        whole[self.index] = 1.0 if self.weights is None else self.weights
        return whole

    def take(self, features: Tensor) -> Float[Tensor, "n d"]:
        """Take one row per token with non-zero weight from `[batch, tokens, d]` or `[batch * tokens, d]`."""
        flat = features.reshape(-1, features.shape[-1])
        return flat if self.index is None else flat[self.index.to(flat.device)]

    def sum(self, rows: Float[Tensor, "n d"]) -> Float[Tensor, " d"]:
        """Return the weighted sum of rows, in float32 at least."""
        dtype = torch.promote_types(rows.dtype, torch.float32)
        return (
            rows.sum(0, dtype=dtype) if self.weights is None else self.weights.to(rows.device, dtype) @ rows.to(dtype)
        )


@dataclass(frozen=True)
class TaskRows:
    """The rows of all batches of one task, by weighting."""

    batches: Sequence[Mapping[str, TokenRows]]
    task: str = ""
    """Name of the task, if the batches are a part of it."""
    whole: Mapping[str, int] = field(default_factory=dict)
    """Numbers of tokens with non-zero weight in that whole task, by weighting; empty if the
    batches are the whole task.
    """

    def count(self, weighting: str) -> int:
        """Return the number of tokens with non-zero weight in the whole task (all ranks)."""
        return self.whole[weighting] if self.whole else self._own(weighting)

    def counts(self) -> dict[str, int]:
        """Return the number of tokens with non-zero weight in these batches, by weighting."""
        return {weighting: self._own(weighting) for weighting in (self.batches[0] if self.batches else ())}

    def part_of(self, task: str, counts: Iterable[Mapping[str, int]]) -> TaskRows:
        """Return these batches as a part of a task with `counts` over all its parts."""
        # The route of a task depends on all its tokens (`LinearGroup.route`), and parts must agree on it.
        whole: Counter[str] = Counter()
        for part in counts:
            whole.update(part)
        return TaskRows(self.batches, task, whole)

    def _own(self, weighting: str) -> int:
        return sum(batch[weighting].count for batch in self.batches)


def find_token_rows(stage: Stage, calls: Iterable[Call], batches: Sequence[Batch], options: TokenOptions) -> TaskRows:
    """Find the rows of every weighting that a stage uses, on every batch of a task.

    Args:
        calls: calls of the stage's first block, one per batch.
    """
    norm = stage.norm or nn.LayerNorm
    used = {
        stage.weighting(i, name)
        for i, block in enumerate(stage.blocks)
        for name in (*block.maps, *block.routers, *block.layernorms, *block.modules_of(norm))
    }

    def rows(call: Call, batch: Batch) -> dict[str, TokenRows]:
        tokens = call.hidden_state.shape[:-1].numel()
        return {
            one: TokenRows.from_weights(stage.token_weights(one, call, batch, options), tokens) for one in sorted(used)
        }

    return TaskRows([rows(call, batch) for call, batch in zip(calls, batches, strict=True)])


def lane_rows(
    stage: Stage, lanes: Mapping[str, ModelStream], experts: Mapping[str, ExpertPass], options: TokenOptions
) -> dict[str, TaskRows]:
    """Find the `TaskRows` of every task whose lane has entered the stage."""
    return {task: find_token_rows(stage, lane.calls, experts[task].batches, options) for task, lane in lanes.items()}

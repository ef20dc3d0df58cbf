"""Weight tokens by how strongly the expert's task vector acts on them (the option `weigh_tokens` of featcal's own
recipes).

Training changed an expert only where its data did; many tokens of a sample (background, frame words) are irrelevant to
it. With tau the task vectors and W_0 the base's weights of all maps that share an input, stacked, and b_t their input
in the expert at token t,

    r_t = ||tau b_t||^2 / (||W_0 b_t||^2 + 1e-6 mean ||W_0 b||^2),  s_t = (r_t / mean r)^(1/2) / mean of all these,

with r_t / mean r clipped to 0.01 and 100. s_t multiplies the token's other weights (mask, patch weight, share of the
router). Means are over the tokens of the task, with their weights without s, so a task's total weight does not change.
The weights do not depend on the student, except for the router's choice in a mixture. The method is new in featcal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.calibration.token_rows import TokenRows
from featcal.formats.weights import all_finite
from featcal.models.compute import widen
from featcal.system.distributed import Ranks
from featcal.system.errors import NumericalError

FLOOR = 1e-6
"""Share of the mean that is added to ||W_0 b||^2 of a token, so that the ratio exists even if that is 0."""
LEAST, MOST = 0.01, 100.0
"""Range of a token's ratio to the mean, before the root."""


@dataclass
class TaskVectorEffect:
    """Action of one expert's task vector on the tokens of one group of maps, batch by batch."""

    change: Float[Tensor, "k d"]
    """change^T change = tau^T tau (`prior.spanning_rows`)."""
    base: Float[Tensor, "m d"]
    """Base's weights W_0 of the maps, stacked."""
    _squares: list[Float[Tensor, "2 n"]] = field(default_factory=list)
    """||tau b||^2 and ||W_0 b||^2 of every batch in float64."""
    _rows: list[TokenRows] = field(default_factory=list)

    def see(self, given: Float[Tensor, "n d"], rows: TokenRows) -> None:
        """Add the next batch.

        Args:
            given: the expert's inputs of the maps at the tokens of `rows`.
        """
        made = (given.to(one.dtype) @ one.mT for one in (self.change, self.base))
        self._squares.append(torch.stack([widen(one.square()).sum(1) for one in made]))
        self._rows.append(rows)

    def all(self) -> tuple[Float[Tensor, "2 n"], Float[Tensor, " n"]]:
        """Return the squares of all batches, and the current weights of their tokens."""
        squares = torch.cat(self._squares, dim=1)
        ones = squares.new_ones(1)
        own = [ones.expand(rows.count) if rows.weights is None else rows.weights for rows in self._rows]
        return squares, torch.cat([one.to(squares.device) for one in own])

    def rows(self, weights: Float[Tensor, " n"]) -> list[TokenRows]:
        """Return the same tokens, batch by batch, with other weights."""
        parts = torch.split(weights, [rows.count for rows in self._rows])
        totals = torch.stack([part.sum() for part in parts]).tolist()
        changed = zip(self._rows, totals, parts, strict=True)
        return [replace(rows, total=total, weights=part) for rows, total, part in changed]


def weigh(acting: Sequence[TaskVectorEffect], ranks: Ranks) -> list[list[TokenRows]]:
    """Multiply the weights of every batch's tokens by s_t, and return the rows, for every group of `begin_acting`.

    Args:
        ranks: ranks that share the task; each has seen a part of its tokens, and they add up the sums of the means.

    Raises:
        NumericalError: inputs or outputs of the expert's maps are not finite.
    """
    if not acting:
        return []
    squares, weights = zip(*(one.all() for one in acting), strict=True)
    if not all_finite(torch.stack([one.sum() for one in squares])):
        raise NumericalError("tokens cannot be weighed: features of the expert, or its weights, are not finite")

    def means(values: Sequence[Tensor]) -> list[Tensor]:
        own = [weight @ value for weight, value in zip(weights, values, strict=True)]
        return [*(ranks.team_sum(torch.stack(own)) / totals)]

    totals = ranks.team_sum(torch.stack([weight.sum() for weight in weights]))
    floors = means([of_base for _, of_base in squares])
    ratios = [change / (kept + FLOOR * mean) for (change, kept), mean in zip(squares, floors, strict=True)]
    roots = [_root(ratio, mean) for ratio, mean in zip(ratios, means(ratios), strict=True)]
    # Divided by the mean of the roots, so that a task's total weight stays.
    scaled = zip(acting, weights, roots, means(roots), strict=True)
    return [one.rows(weight * root / mean) for one, weight, root, mean in scaled]


def _root(ratio: Float[Tensor, " n"], mean: Float[Tensor, ""]) -> Float[Tensor, " n"]:
    """Return s_t before division by its mean; 1 if nothing distinguishes the tokens, as when the expert is the base."""
    mask = mean.isfinite() & (mean > 0)
    return torch.where(mask, (ratio / mean).clamp(LEAST, MOST).sqrt(), 1.0)

"""Read decisions through depth: the model's final norm and head on the state after every block.

A head is made for the last layer alone; after earlier blocks its scores show how the decision develops, not what a
block "thinks".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from featcal.drift.sample_numbers import require_sample
from featcal.models.compute import widen
from featcal.models.model import Head

TOP = 3
"""Number of answers kept after every block."""


@dataclass(frozen=True)
class DepthDecisions:
    """The decisions of one model on one task after every block of the stage that the head reads."""

    layers: tuple[str, ...]
    answers: Int[Tensor, "layers n top"]
    """Classes, or first tokens, with the largest scores, in descending order."""
    chances: Float[Tensor, "layers n top"]
    """Softmax probabilities of these answers, over all scores."""
    words: Mapping[int, str]
    """Text of every answer in `answers`: class names, or the words of tokens."""
    beside: DepthDecisions | None = None
    """The decisions of the expert; None if these are the expert's."""

    @property
    def agreement(self) -> Float[Tensor, " layers"]:
        """Return the share of samples whose decision after a block equals the expert's final one."""
        final = (self.beside or self).answers[-1, :, 0]
        return (self.answers[:, :, 0] == final).double().mean(1)

    @property
    def turning_points(self) -> Int[Tensor, " n"]:
        """Return the position of the first block from which on the decision equals the model's final one."""
        first = self.answers[:, :, 0]
        # How many blocks, counted from the last, have the final decision without a break.
        kept = (first == first[-1]).long().flip(0).cumprod(0).sum(0)
        return len(self.layers) - kept

    def to_json(self) -> list[dict[str, Any]]:
        """Return one row per block: agreement, the expert's own agreement, and the share of
        samples with their final decision by then.
        """
        turned = [float((self.turning_points <= place).double().mean()) for place in range(len(self.layers))]
        both = self.agreement.tolist(), (self.beside or self).agreement.tolist()
        rows = zip(self.layers, *both, turned, strict=True)
        return [dict(zip(("layer", "agreement", "expert_agreement", "turned"), row, strict=True)) for row in rows]

    def course(self, sample: int) -> list[dict[str, Any]]:
        """Return one row per block and top answer of a sample: model ("expert" or "model"), layer, rank from 1, answer
        and its probability; the expert's rows first.

        Raises:
            InputError: there is no such sample.
        """
        require_sample(sample, self.answers.shape[1])
        rows = [] if self.beside is None else self.beside.course(sample)
        of = "expert" if self.beside is None else "model"
        for layer, answers, chances in zip(self.layers, self.answers[:, sample], self.chances[:, sample], strict=True):
            for rank, (answer, chance) in enumerate(zip(answers.tolist(), chances.tolist(), strict=True), 1):
                rows.append(
                    {"of": of, "layer": layer, "rank": rank, "answer": self.words[answer], "probability": chance}
                )
        return rows


def read_decisions(
    features: Mapping[str, Float[Tensor, "n k"]], head: Head, words: Callable[[list[int]], dict[int, str]]
) -> DepthDecisions:
    """Return the decisions of a head on the state after every block, passed through the model's final norm.

    Args:
        features: by layer in forward order (`models.features.depth_features`).
        words: returns the text of an answer.
    """
    found = []
    for one in features.values():
        # In float64, as where the drift of scores is measured, so that ties are the same.
        chances = torch.softmax(head.scores(widen(one)), dim=1)
        found.append(chances.topk(min(TOP, chances.shape[1]), dim=1))
    answers = torch.stack([one.indices for one in found])
    chances = torch.stack([one.values for one in found])
    return DepthDecisions(tuple(features), answers, chances, words(sorted({*answers.flatten().tolist()})))

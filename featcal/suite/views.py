"""Define the scope of a measurement: samples, tokens and layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from featcal.system.errors import InputError

TOKENS = ("all", "class")


@dataclass(frozen=True)
class EvaluationSamples:
    """Samples of every task that a model is measured on: their number, their split, and the seed that draws them.

    >>> import featcal
    >>> on = featcal.EvaluationSamples(16, "test", seed=1)
    >>> found = featcal.compare(featcal.load_suite("lm-mini"), "base", "merged", on=on)
    >>> found.split, found.tasks["sentiment"].n
    ('test', 16)
    """

    samples: int | None = 64
    """Samples per task; a task that has fewer gives all it has. None means all."""
    split: str | None = None
    """"calibration", "validation" or "test"; None means validation if every task has it, else calibration."""
    seed: int = 42
    """Together with the task's name it decides which samples are drawn."""

    def flags(self) -> list[str]:
        """Return the options of the command line that draw these samples.

        >>> EvaluationSamples(16, "test").flags()
        ['--eval-samples', '16', '--split', 'test', '--seed', '42']
        """
        given = {"--eval-samples": self.samples, "--split": self.split, "--seed": self.seed}
        return [word for flag, value in given.items() if value is not None for word in (flag, str(value))]


@dataclass(frozen=True)
class DriftOptions(EvaluationSamples):
    """Options of a drift measurement: the samples, and what to measure on them.

    Raises:
        InputError: `tokens` is neither "all" nor "class".

    >>> import featcal
    >>> options = featcal.DriftOptions(samples=8, split="validation", sublayers=True)
    >>> ledger = featcal.open_session("lm-mini").measure.drift("merged", options)
    >>> [layer.layer for layer in ledger.tasks["sentiment"].layers][:3]
    ['embeddings', 'block 0 attention', 'block 0 mlp']
    """

    tokens: str = "all"
    """"all", or "class" to take every norm over the class token only."""
    sublayers: bool = False
    """Treat attention and MLP of every block as layers of their own (Prop. 4 per sublayer)."""
    attribution: bool = False
    """Also attribute the final drift to the layers (Prop. 2), at several times the cost."""
    output: bool = False
    """Also measure scores, losses and margins (Props. 3 and 7, Eq. 44); needs labels and a head."""

    def __post_init__(self) -> None:
        if self.tokens not in TOKENS:
            raise InputError(f"tokens is one of {', '.join(TOKENS)}, not '{self.tokens}'")


class DriftKeywords(TypedDict, total=False):
    """The fields of `DriftOptions` as keywords of `measure_drift`."""

    samples: int | None
    split: str | None
    seed: int
    tokens: str
    sublayers: bool
    attribution: bool
    output: bool

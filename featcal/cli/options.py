"""Options that several commands have, one by one and in the blocks that they come in."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import click

from featcal.suite.name_grammar import grammar

T = TypeVar("T")
Option = Callable[[Any], Any]


class Size(click.ParamType[int]):
    """Bytes, as a number with or without a unit: 8GiB, 800MB, 8.5G."""

    name = "size"
    _UNITS: Mapping[str, int] = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 2**10, "mi": 2**20, "gi": 2**30}

    def convert(self, value: Any, param: Any, context: Any) -> int:
        found = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*([kmg]?i?)b?", str(value).strip().lower())
        if found is None or found[2] not in self._UNITS:
            self.fail(f"'{value}' is not a size such as 8GiB or 800MB", param, context)
        size = int(Decimal(found[1]) * self._UNITS[found[2]])
        if size < 1:
            self.fail(f"'{value}' is less than a byte; give a size such as 8GiB or 800MB", param, context)
        return size


def block(*options: Option) -> Callable[[T], T]:
    """Several options as one decorator, in the order of the help text."""

    def add(command: T) -> T:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _some(context: click.Context, param: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...] | None:
    """Names that were given; None where there are none, which is all of them."""
    return given or None


SUITE = click.argument("suite")
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
DEVICE = click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
MODEL = click.option("--model", default="merged", show_default=True, help=grammar())
MAX_MEMORY = click.option("--max-memory", type=Size(), help="Stay within this much memory, such as 8GiB.")
OUT = click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write; must not exist.")
SPLIT = click.Choice(["calibration", "validation", "test"])

DRAWN = block(
    click.option("--seed", default=42, show_default=True, help="Decides which samples are drawn."), DEVICE, JSON
)
"""How every measurement ends."""

SCORED = block(
    click.option("--split", type=SPLIT, default="test", show_default=True),
    click.option("--samples", type=int, help="Samples per task.  [default: all]"),
)
"""Of a command that scores."""

RECIPE = block(
    click.option(
        "--recipe",
        type=click.Choice(["paper", "refined", "informed"]),
        help="refined and informed are featcal's own: in pieces, informed with a prior; see docs/theory.md.  [paper]",
    ),
    click.option("--beta", type=float, help="Not of paper: share of the stream's gap to close, 0-1.  [0.5]"),
    click.option("--mu", type=float, help="Of informed: weight of what the experts' weights know.  [0.1]"),
    click.option(
        "--cautious",
        is_flag=True,
        default=None,
        help="Not of paper: alpha 0.3 and beta 0, for samples in fog, or drifted from those to come; costs elsewhere.",
    ),
    click.option(
        "--weigh-tokens/--no-weigh-tokens",
        default=None,
        help="Not of paper: a token counts by how much the expert's task vector does to it.  [off]",
    ),
    click.option(
        "--augment",
        type=int,
        help="Varied copies of every picture, each as dear as one: 1, or 3 below 32 samples.  [0]",
    ),
)
"""How a block is calibrated."""

SWITCHES_AND_PARTS = block(
    click.option("--biases/--no-biases", default=None, help="Calibrate biases (Eq. 55).  [on]"),
    click.option("--layernorms/--no-layernorms", default=None, help="Calibrate LayerNorms (Eq. 59).  [on]"),
    click.option("--rmsnorms/--no-rmsnorms", default=None, help="Calibrate RMSNorm scales, our extension.  [off]"),
    click.option(
        "--completion-only/--no-completion-only",
        default=None,
        help="Decoder-only models: count what predicts the answer alone.  [off]",
    ),
    click.option("--patch-weight", type=float, help="Weight of patch tokens in the last block, 0-1.  [CLIP: 0.01]"),
    click.option("--image-weight", type=float, help="Weight of a picture's tokens in a language model, 0-1.  [1]"),
    click.option("--eps", type=float, help="Numerical stabiliser of Eqs. (14), (17) and (59), >= 0.  [1e-8]"),
    click.option(
        "--blocks",
        multiple=True,
        callback=_some,
        help="Calibrate these alone ('block 0,block 3'), leave others as merged.  [all]",
    ),
    click.option(
        "--maps", multiple=True, callback=_some, help="Calibrate these alone: attention, mlp, cross-attention.  [all]"
    ),
    click.option("--tasks", multiple=True, callback=_some, help="Calibrate on these tasks alone.  [all]"),
)
"""What a calibration, or every one of a sweep, solves for and what counts how much in it."""


def view_options(
    samples: str = "Samples per task.",
    split: str = "Default: validation where every task has it, else calibration.",
) -> Callable[[T], T]:
    """Of a command that measures features: 64 samples of a split that may be left to the suite.

    Args:
        samples, split: what the help says of them.
    """
    return block(
        click.option("--samples", default=64, show_default=True, help=samples),
        click.option("--split", type=SPLIT, help=split),
    )


def file_to_write(what: str) -> Callable[[T], T]:
    """`--out` of a command that writes one file."""
    return block(click.option("--out", required=True, type=click.Path(path_type=Path), help=what))

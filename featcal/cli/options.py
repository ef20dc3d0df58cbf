"""Define the options that several commands share, one by one and in blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from featcal.cli.completion import complete_model, complete_models, complete_suite
from featcal.cli.terminal import print_message
from featcal.suite.calibration_options import ASKED, RECIPES, SHORTHANDS
from featcal.suite.calibration_options import Option as CalibrationOption
from featcal.suite.methods import ALL, NAMED, is_method
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
        # Decimal: 8.1 as a float would be a few bytes off.
        size = int(Decimal(found[1]) * self._UNITS[found[2]])
        if size < 1:
            self.fail(f"'{value}' is less than a byte; give a size such as 8GiB or 800MB", param, context)
        return size


class NewPath(click.Path):
    """Path of a file or folder to write; `~` is the home folder, which a shell does not expand in `--out=~/x`."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: Any, context: Any) -> Any:
        if not str(value):  # it would be the current folder
            self.fail("it is empty; name a file or folder", param, context)
        return Path(str(value)).expanduser()


def block(*options: Option) -> Callable[[T], T]:
    """Return several options as one decorator, in the order of the help text."""

    def add(command: T) -> T:
        # click lists the decorator nearest to the function last.
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _some(context: click.Context, param: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the given names; None if there are none, which means all."""
    # click gives an empty tuple for an option that was not given, which would mean no part at all.
    return given or None


def note_folders(context: click.Context, param: click.Parameter, given: Any) -> Any:
    """Return the name of a model, or of several each once, and note names that are also folders here."""
    names = given if isinstance(given, str | None) else tuple(dict.fromkeys(given))
    # Whoever typed nothing meant no folder.
    typed = context.get_parameter_source(str(param.name)) is not ParameterSource.DEFAULT
    for name in ([names] if isinstance(names, str) else names or ()) if typed else ():
        if (name in NAMED or is_method(name)) and Path(name).exists() and not context.resilient_parsing:
            print_message(
                f"note: {param.opts[0]} {name} is what featcal calls so; write ./{name} for the folder", err=True
            )
    return names


def model_option(default: str = "merged", help: str = "The model: ", flag: str = "--model") -> Option:
    """Return `--model` of a command for one model.

    Args:
        help: text before the grammar of names.
        flag: its name, for commands whose `--model` is for several models.
    """
    return click.option(
        flag,
        metavar="MODEL",
        default=default,
        show_default=True,
        callback=note_folders,
        shell_complete=complete_model,
        help=f"{help}{grammar()}.",
    )


def models_option(help: str, default: Sequence[str] = (), left_out: str = "", *, or_all: bool = False) -> Option:
    """Return `--model` of a command for several models, without repetitions.

    Args:
        help: text before the grammar of names.
        left_out: models that the command uses without it, in words, if there is no default.
        or_all: whether "all" stands for every method.
    """
    return click.option(
        "--model",
        "models",
        metavar="MODEL",
        multiple=True,
        default=default,
        show_default=bool(default),
        callback=note_folders,
        shell_complete=complete_models if or_all else complete_model,
        help=f"{help} {grammar()}{or_all * f', or every method ({ALL})'}.{f'  [{left_out}]' if left_out else ''}",
    )


SUITE = click.argument("suite", shell_complete=complete_suite)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
DEVICE = click.option(
    "--device",
    default="auto",
    show_default=True,
    help="auto (an NVIDIA GPU if there is one), cpu, cuda or mps (a Mac's).",
)
MODEL = model_option()
MAX_DEVICE_MEMORY = click.option(
    "--max-device-memory",
    type=Size(),
    help="Stay within this much memory of the GPU, such as 6GiB; further token states wait in main memory.  [no limit]",
)
MAX_MEMORY = click.option("--max-memory", type=Size(), help="Stay within this much memory, such as 8GiB.  [no limit]")
OUT = click.option("--out", required=True, type=NewPath(), help="Folder to write; must not exist.")
SPLIT = click.Choice(["calibration", "validation", "test"])
JSON_FILE = click.option(
    "--out", type=NewPath(), help="Write the JSON document to this file; must not exist.  [no file]"
)

DRAWN = block(
    click.option("--seed", default=42, show_default=True, help="Seed of the random choice of samples."), DEVICE, JSON
)
"""The last options of every measurement."""

SCORED = block(
    click.option("--eval-samples", type=int, help="Samples per task to score.  [all]"),
    click.option(
        "--split",
        type=SPLIT,
        help="Split whose samples are scored.  [test if every task has it, else validation, else calibration]",
    ),
)
"""Options for the samples that a command scores."""

MEASURED = block(
    click.option(
        "--eval-samples",
        "samples",
        default=64,
        show_default=True,
        help="Samples per task on which features are measured.",
    ),
    click.option(
        "--split", type=SPLIT, help="Split of these samples.  [validation if every task has it, else calibration]"
    ),
)
"""Options for the samples on which a command measures features."""


def calibration_options(*but: str) -> Callable[[T], T]:
    """Return the options of a calibration, each as `suite.calibration_options` defines it.

    Args:
        but: names of options that the command defines itself, or does not have.
    """
    return block(*(_calibration_option(name, one) for name, one in ASKED.items() if name not in but))


def _calibration_option(name: str, option: CalibrationOption) -> Option:
    flag = name.replace("_", "-")
    alone = "" if option.recipes == RECIPES else f"; {' and '.join(option.recipes)} alone"
    text = f"{option.help}  [{option.left_out}{alone}]"
    if option.kind is bool:
        # A shorthand stands for other options: without it there is nothing to switch off.
        off = "" if name in SHORTHANDS else f"/--no-{flag}"
        # None, not False: the suite's own default holds unless one of the two flags is given.
        return click.option(f"--{flag}{off}", is_flag=True, default=None, help=text)
    if option.kind is tuple:
        return click.option(f"--{flag}", multiple=True, callback=_some, help=text)
    return click.option(f"--{flag}", type=click.Choice(option.choices) if option.choices else option.kind, help=text)


def file_to_write(what: str) -> Option:
    """Return `--out` of a command that writes one file."""
    return click.option("--out", required=True, type=NewPath(), help=what)

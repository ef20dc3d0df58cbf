"""Write a sweep as command lines and as lines of Python: a few grids that hold its calibrations and no others."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from featcal.figures.commands.measured import Measured
from featcal.suite.name_grammar import model_name, parts_of

AXES = ("lam", "rho", "alpha")
_VALUES = ("recipe", "beta", "mu", "augment", "samples", "seed", "patch_weight", "image_weight", "eps")
_SWITCHES = ("biases", "layernorms", "rmsnorms", "completion_only", "weigh_tokens")
_PARTS = ("blocks", "maps", "tasks")
Box = tuple[tuple[str, ...], ...]
"""Values of every axis, as they are written in names; it stands for all their combinations."""


@dataclass(frozen=True)
class Grid:
    """Combinations of values over the other options of one calibration, written as in models' names."""

    values: Box
    options: tuple[tuple[str, str], ...]


def grids(names: Iterable[str]) -> list[Grid]:
    """Return grids that hold these calibrations and no others; models that are not calibrations are passed over.

    Args:
        names: full names, which say lam, rho and alpha (`featcal.session.model_names.full_name`).
    """
    found: dict[tuple[tuple[str, str], ...], list[tuple[str, ...]]] = {}
    for name in map(model_name, names):
        if name.kind == "calibrated" and name.of == "merged":
            said = dict(name.options)
            rest = tuple((option, text) for option, text in name.options if option not in AXES)
            found.setdefault(rest, []).append(tuple(said[axis] for axis in AXES))
    return [Grid(box, options) for options, points in found.items() for box in boxes(points)]


def boxes(points: Iterable[tuple[str, ...]]) -> list[Box]:
    """Return boxes that hold these points and no others.

    >>> boxes([("1", "a"), ("2", "a"), ("1", "b"), ("2", "b"), ("3", "b")])
    [(('1', '2'), ('a',)), (('1', '2', '3'), ('b',))]
    """
    found: list[Box] = [tuple((value,) for value in point) for point in dict.fromkeys(points)]
    for axis in range(len(found[0]) if found else 0):
        joined: dict[Box, list[str]] = {}
        for box in found:
            joined.setdefault(box[:axis] + box[axis + 1 :], []).extend(box[axis])
        # Boxes that differ in this axis alone become one; the next axis joins what came of it.
        found = [(*rest[:axis], tuple(values), *rest[axis:]) for rest, values in joined.items()]
    return found


def commands(measured: Measured) -> tuple[str, ...]:
    """Return one command line per grid; grids with options that the command does not have are passed over."""
    lines = []
    for grid in grids(measured.models):
        options = list(_options(grid))
        if None not in options:
            listed = [f"--{axis}={','.join(values)}" for axis, values in zip(AXES, grid.values, strict=True)]
            more = [word for word in options if word is not None]
            words = ["featcal", "sweep", measured.suite, *listed, *more, "--n", str(measured.on.samples), "--json"]
            lines.append(shlex.join(words))
    return tuple(lines)


def python(measured: Measured) -> str:
    """Return lines of Python that run all grids and print every point."""
    lines = [
        "from featcal import Grid, View, open_session, run_sweep",
        "",
        f"session = open_session({measured.suite!r})",
        f"view = View({measured.on.samples!r})",
        "points = []",
    ]
    for grid in grids(measured.models):
        lam, rho, alpha = (tuple(map(float, values)) for values in grid.values)
        options = f"calibrated:{','.join(f'{option}={text}' for option, text in grid.options)}".rstrip(":")
        lines += [
            f"options = session.resolve({options!r})",
            f"points += run_sweep(session, Grid({lam}, {rho}, {alpha}, options), on=view)",
        ]
    return "\n".join([*lines, "for point in points:", f'    print(point.run.model, {measured.kind.read}, sep="\\n")'])


def _options(grid: Grid) -> Iterator[str | None]:
    """Yield the words of the command line; None for an option that the command does not have."""
    for option, text in grid.options:
        flag = option.replace("_", "-")
        if option in _VALUES:
            yield from (f"--{flag}", text)
        elif option in _SWITCHES:
            yield f"--{flag}" if text == "true" else f"--no-{flag}"
        elif option in _PARTS and (parts := parts_of(text)) is not None:
            for part in parts:
                yield from (f"--{flag}", part)
        else:
            yield None

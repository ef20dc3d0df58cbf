"""Write a sweep as command lines and as Python code: a few grids that cover exactly its calibrations."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from featcal.figures.commands.measurement import ChartSource
from featcal.suite.calibration_options import PARTIAL, SWITCHES
from featcal.suite.methods import ALL
from featcal.suite.name_grammar import model_name, parts_of

AXES = ("lam", "rho", "alpha")
Box = tuple[tuple[str, ...], ...]
"""Values of every axis, as written in names; it means all their combinations."""


@dataclass(frozen=True)
class NamedGrid:
    """Combinations of values over the other options of one calibration, written as in models' names."""

    values: Box
    options: tuple[tuple[str, str], ...]
    of: str
    """Name of the calibrated model."""


def grids(names: Iterable[str]) -> list[NamedGrid]:
    """Return grids that cover exactly these calibrations; models that are not calibrations are skipped.

    Args:
        names: full ones, with lam, rho and alpha (`featcal.session.model_ref.ModelRef.name`).
    """
    found: dict[tuple[tuple[tuple[str, str], ...], str], list[tuple[str, ...]]] = {}
    for name in map(model_name, names):
        if name.kind == "calibrated" and name.of is not None:
            values = dict(name.options)
            rest = tuple((option, text) for option, text in name.options if option not in AXES)
            found.setdefault((rest, name.of), []).append(tuple(values[axis] for axis in AXES))
    return [NamedGrid(box, *alike) for alike, points in found.items() for box in boxes(points)]


def boxes(points: Iterable[tuple[str, ...]]) -> list[Box]:
    """Return boxes that cover exactly these points.

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


def sweep_command_lines(measured: ChartSource) -> tuple[str, ...]:
    """Return one line per grid."""
    lines = []
    for grid in grids(measured.models):
        listed = [f"--{axis}={','.join(values)}" for axis, values in zip(AXES, grid.values, strict=True)]
        words = [
            "featcal",
            "study",
            "sweep",
            measured.suite,
            *(() if grid.of == "merged" else ("--model", grid.of)),
            *listed,
            *_options(grid),
            "--eval-samples",
            str(measured.on.samples),
        ]
        lines.append(shlex.join([*words, "--json"]))
    return tuple(lines)


def sweep_python_lines(measured: ChartSource) -> str:
    """Return lines of Python that run all grids and print every point."""
    lines = [
        "from featcal import EvaluationSamples, Grid, open_session, run_sweep",
        "",
        f"session = open_session({measured.suite!r})",
        f"on = EvaluationSamples({measured.on.samples!r})",
        "points = []",
    ]
    for grid in grids(measured.models):
        lam, rho, alpha = (tuple(map(float, values)) for values in grid.values)
        start = "" if grid.of == "merged" else f", {grid.of!r}"
        options = f"calibrated:{','.join(f'{option}={text}' for option, text in grid.options)}".rstrip(":")
        lines += [
            f"options = session.resolve({options!r}).config",
            f"points += run_sweep(session, Grid({lam}, {rho}, {alpha}, options{start}), on=on)",
        ]
    return "\n".join([*lines, "for point in points:", f'    print(point.run.model, {measured.kind.read}, sep="\\n")'])


def _options(grid: NamedGrid) -> Iterator[str]:
    """Yield the grid's other options as words of the command line."""
    for option, text in grid.options:
        flag = option.replace("_", "-")
        if option in SWITCHES:
            yield f"--{flag}" if text == "true" else f"--no-{flag}"
        elif option in PARTIAL:
            for part in parts_of(text) or (ALL,):
                yield from (f"--{flag}", part)
        else:
            yield from (f"--{flag}", text)

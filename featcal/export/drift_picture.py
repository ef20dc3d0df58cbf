"""Draw the drift of a calibrated model after every block, as the picture of its card."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcal.system.errors import InputError
from featcal.system.formatting import printable, shorten

if TYPE_CHECKING:
    from PIL import Image

PICTURE_FILE = "drift-per-layer.png"
WIDTH, HEIGHT = 960, 400
"""Pixels of the file."""
_FINER = 2
"""Factor by which the picture is drawn larger at first, because Pillow's lines are not smooth."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 240, 34, 52
"""Pixels around the frame: numbers, names of tasks, title, names of blocks."""
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7f7f7f", "#b8a800")
"""Colours of the tasks, distinguishable with colour blindness (Okabe and Ito), except for the last two."""
_INK, _RULE = "#333333", "#dddddd"
_MOST_NAMES, _MOST_LABELS, _MOST_LETTERS = 18, 8, 26
"""Tasks in the legend, names of blocks below the frame, letters of a task's name."""
Drift = Mapping[str, Mapping[str, float]]
"""Block → task → relative drift of the features after it, >= 0."""


def write_drift_picture(drift: Drift, file: Path) -> None:
    """Write `draw_drift` as a PNG file; raise InputError if the disk is full or not writable."""
    try:
        draw_drift(drift).save(file, "PNG")
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror or error}") from error


def draw_drift(drift: Drift) -> Image.Image:
    """Draw a line per task, from the first block to the last; values that are not finite are left out."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (_FINER * WIDTH, _FINER * HEIGHT), "white")
    frame = _Frame(ImageDraw.Draw(image), _step(drift), len(drift))
    frame.rule(list(drift))
    tasks = list(dict.fromkeys(task for one in drift.values() for task in one))
    for task, colour in zip(tasks, cycle(_COLOURS), strict=False):
        frame.line([one.get(task, math.nan) for one in drift.values()], colour)
    frame.name_tasks(tasks)
    return image.reduce(_FINER)


def _step(drift: Drift) -> float:
    """Return the distance of two lines of the grid: 1, 2 or 5 times a power of ten, of which five reach the top."""
    most = max((value for one in drift.values() for value in one.values() if math.isfinite(value)), default=0.0)
    if most <= 0:
        return 0.2
    power = 10.0 ** math.floor(math.log10(most / 5))
    return next(factor * power for factor in (1, 2, 5, 10) if 5 * factor * power >= most)


class _Frame:
    """The frame of the picture: its scales, and what is drawn in and around it; `step` is between two rules."""

    def __init__(self, draw: Any, step: float, blocks: int) -> None:
        self._draw, self._step, self._blocks = draw, step, blocks

    def _x(self, block: int) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (block + 0.5) / max(self._blocks, 1)

    def _y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * value / (5 * self._step)

    def rule(self, names: Sequence[str]) -> None:
        """Draw title, grid with its numbers, and the names of some blocks."""
        self._write((_LEFT, 8), "Relative drift from the experts after every block, after calibration")
        for i in range(6):
            y = self._y(i * self._step)
            self._stroke([(_LEFT, y), (WIDTH - _RIGHT, y)], _RULE, 1)
            self._write((_LEFT - 8, y), f"{i * self._step:.3g}", "rm")
        for i in range(0, len(names), math.ceil(len(names) / _MOST_LABELS) or 1):
            self._write((self._x(i), HEIGHT - _BOTTOM + 8), names[i], "ma")

    def line(self, values: Sequence[float], colour: str) -> None:
        """Draw a task's values, one per block, as points that a line joins."""
        points = [(self._x(i), self._y(value)) for i, value in enumerate(values) if math.isfinite(value)]
        self._stroke(points, colour, 2)
        for x, y in points:
            corners = [_FINER * one for one in (x - 3, y - 3, x + 3, y + 3)]
            self._draw.ellipse(corners, fill=colour)

    def name_tasks(self, tasks: Sequence[str]) -> None:
        """Draw the legend."""
        shown = tasks[:_MOST_NAMES]
        for i, (task, colour) in enumerate(zip(shown, cycle(_COLOURS), strict=False)):
            y = _TOP + 8 + 17 * i
            self._stroke([(WIDTH - _RIGHT + 14, y), (WIDTH - _RIGHT + 34, y)], colour, 3)
            self._write((WIDTH - _RIGHT + 42, y), task, "lm")
        if len(tasks) > len(shown):
            y = _TOP + 8 + 17 * len(shown)
            self._write((WIDTH - _RIGHT + 42, y), f"and {len(tasks) - len(shown)} more", "lm")

    def _stroke(self, points: Sequence[tuple[float, float]], colour: str, width: int) -> None:
        self._draw.line([(_FINER * x, _FINER * y) for x, y in points], colour, _FINER * width, "curve")

    def _write(self, place: tuple[float, float], text: str, anchor: str = "la") -> None:
        from PIL import ImageFont

        shown = shorten(" ".join(printable(text).split()), 80)
        if anchor == "lm" and len(shown) > _MOST_LETTERS:
            shown = f"{shown[: _MOST_LETTERS - 1]}…"
        font = ImageFont.load_default(_FINER * 12)
        self._draw.text((_FINER * place[0], _FINER * place[1]), shown, _INK, font, anchor)

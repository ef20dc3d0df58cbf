"""Hold the content of a report as plain values, for every layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pandas as pd
import plotly.graph_objects as go

from featcal.figures.commands import ChartSource
from featcal.system.formatting import decimals


@dataclass(frozen=True)
class ReportTable:
    """Numbers for display.

    Args:
        frame: a missing number is shown as a dash.
        units: of the columns; "" if their names include them.
        digits: decimals of numbers; a column whose name says "%" has one.
        formats: of the columns whose numbers are written in another way, by name.
    """

    caption: str
    frame: pd.DataFrame
    units: str = ""
    digits: int = 3
    formats: Mapping[str, Callable[[float], str]] = field(default_factory=dict)

    @property
    def header(self) -> list[str]:
        return [str(name) for name in self.frame.columns]

    @property
    def numeric(self) -> list[bool]:
        """Say of every column whether it holds numbers."""
        return [bool(pd.api.types.is_numeric_dtype(kind)) for kind in self.frame.dtypes]

    @property
    def rows(self) -> list[list[str]]:
        formats = [self._format(name) for name in self.header]
        return [
            [_cell(value, number) for value, number in zip(row, formats, strict=True)]
            for row in self.frame.itertuples(index=False)
        ]

    def _format(self, column: str) -> Callable[[float], str]:
        digits = 1 if "%" in column else self.digits
        return self.formats.get(column, lambda value: decimals(value, digits))


def _cell(value: object, number: Callable[[float], str]) -> str:
    if value is None or value != value:
        return "–"
    return number(value) if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Figure:
    """A chart, with a description for readers who cannot see it.

    Args:
        name: of its file, and of the place in a page: letters, digits and hyphens.
    """

    name: str
    chart: go.Figure
    alt: str


@dataclass(frozen=True)
class Thumbnail:
    """A sample for display: its caption, and its picture (`data:` address) or its text."""

    caption: str
    picture: str | None
    text: str | None


@dataclass(frozen=True)
class ReportSection:
    """A section: plain sentences, figures, tables, samples, and the commands that give the numbers again."""

    title: str
    text: str
    figures: tuple[Figure, ...] = ()
    tables: tuple[ReportTable, ...] = ()
    samples: Mapping[str, tuple[Thumbnail, ...]] = field(default_factory=dict)
    measured: ChartSource | None = None


@dataclass(frozen=True)
class ReportContent:
    """A whole report.

    Args:
        suite: its name.
        description: its own words.
        made: date and version.
        about: lines of the verdict.
        settings: everything that the numbers depend on.
    """

    suite: str
    description: str
    made: str
    about: tuple[str, ...]
    parts: tuple[ReportSection, ...]
    settings: tuple[ReportTable, ...]

    @property
    def figures(self) -> tuple[Figure, ...]:
        return tuple(figure for part in self.parts for figure in part.figures)

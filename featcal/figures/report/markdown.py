"""Lay a report out as Markdown, for an appendix: tables, the names of its figures' files, commands."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

from featcal.figures.commands import command_lines, python_lines
from featcal.figures.names import plain
from featcal.figures.report.content import ReportContent, ReportSection, ReportTable
from featcal.system.formatting import code_block


def document(content: ReportContent, drawn: Mapping[str, str], missing: str = "") -> str:
    """Return the whole file.

    Args:
        drawn: name of a figure → the path of its file, relative to this one.
        missing: why there are no figures.
    """
    lines = [f"# {plain(content.suite)}: what merging did, layer by layer", content.made]
    lines += [plain(content.description)] if content.description else []
    lines += ["\n".join(f"- {plain(line)}" for line in content.about)]
    lines += [f"*{plain(missing)}*"] if missing else []
    for part in content.parts:
        lines += _section(part, drawn)
    lines += ["## Settings, versions, files", *(_table(one) for one in content.settings)]
    return "\n\n".join(lines) + "\n"


def _section(part: ReportSection, drawn: Mapping[str, str]) -> list[str]:
    lines = [f"## {plain(part.title)}", plain(part.text)]
    lines += [f"![{plain(figure.alt)}]({quote(drawn[figure.name])})" for figure in part.figures if figure.name in drawn]
    lines += [_table(one) for one in part.tables]
    for task, samples in part.samples.items():
        entries = [" ".join(filter(None, [sample.text and f"“{sample.text}”", sample.caption])) for sample in samples]
        lines += [f"### {plain(task)}", "\n".join(f"- {plain(one)}" for one in entries)] if entries else []
    if part.measured is not None:
        where = f"The numbers are at {_code(part.measured.kind.where)} of the document of"
        lines += [where, code_block("\n".join(command_lines(part.measured)), "sh"), "or, in Python,"]
        lines += [code_block(python_lines(part.measured), "python")]
    return lines


def _table(one: ReportTable) -> str:
    title = f"{plain(one.caption)}{f' ({plain(one.units)})' if one.units else ''}:"
    cells = [
        [cell if number else plain(cell) for cell, number in zip(row, one.numeric, strict=True)] for row in one.rows
    ]
    written = [f"| {' | '.join(row)} |" for row in [[plain(name) for name in one.header], *cells]]
    ruled = f"|{'|'.join('---:' if number else '---' for number in one.numeric)}|"
    return "\n".join([title, "", written[0], ruled, *written[1:]])


def _code(text: str) -> str:
    return f"`{text}`"

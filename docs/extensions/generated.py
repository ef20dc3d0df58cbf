"""Write parts of pages from the code while the site is built: commands from click, the suite file from its schema.

`<!-- generated: NAME -->` alone on a line is where a part goes; `PARTS` has their names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import click
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.pycode import ModuleAnalyzer

from featcal.cli import SECTIONS

_PLACE = re.compile(r"^<!-- generated: (.+) -->$", re.MULTILINE)
_SCHEMAS = {
    "Suite": "The whole file",
    "Task": "A task",
    "Source": "A source of samples",
    "Corruption": "`corruption`",
    "SelfGenerated": "`self_generated`",
}
"""Parts of a suite file in the order of the page, with their headings."""
_HOMES = {"Suite": "schema", "Task": "schema", "Source": "source", "Corruption": "source", "SelfGenerated": "source"}
"""Modules of `featcal.suite` that define them."""
_ELSEWHERE = {
    "CalibrationDefaults": "[options of a calibration](../options.md)",
    "MergeRecipe": "a [method](../methods.md) with its options",
    "Reference": "a [model](../suites.md#models)",
}
"""Types that another page describes."""


def write_commands(section: str) -> str:
    """Return every command of a section of the help, groups with all of theirs, as Markdown."""
    parts = []
    for command in SECTIONS[section]:
        if isinstance(command, click.Group):
            parts.append(f"## {command.name}\n\n{_escape(command.help or '')}\n")
            parts += [_write_command(one, f"{command.name} {name}", "###") for name, one in command.commands.items()]
        else:
            parts.append(_write_command(command, str(command.name), "##"))
    return "\n".join(parts)


def _write_command(command: click.Command, name: str, level: str) -> str:
    context = click.Context(command, info_name=f"featcal {name}")
    usage = command.get_usage(context).removeprefix("Usage: ")
    paragraphs = re.split(r"\n\s*\n", (command.help or "").replace("\b\n", ""))
    text = "\n\n".join(_escape(" ".join(one.split())) for one in paragraphs)
    lines = [f"{level} {name}", "", f"```text\n{usage}\n```", "", text, "", "| option | what it does |", "|---|---|"]
    for flags, words in _options(command, context):
        shown = "<br>".join(f"`{one}`" for one in _markdown(flags).split(" / "))
        lines.append(f"| {shown} | {_escape(words)} |")
    return "\n".join([*lines, ""])


def _options(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and record[1] and "--help" not in record[0]:
            yield " ".join(record[0].split()), " ".join(record[1].split())


def write_suite_file() -> str:
    """Return a table of the keys of every part of a suite file, as Markdown."""
    from featcal.suite.schema import Suite

    whole = Suite.model_json_schema()
    parts = []
    for name, title in _SCHEMAS.items():
        schema = whole if name == "Suite" else whole["$defs"][name]
        about = _docs(name)
        lines = [f"## {title}", "", "| key | type | left out | what it is |", "|---|---|---|---|"]
        for key, one in schema["properties"].items():
            if key != "rows":  # samples in memory, which no file can name
                left_out = "**required**" if key in schema.get("required", ()) else _default(one)
                lines.append(f"| `{key}` | {_type_of(one)} | {left_out} | {_markdown(about.get(key, ''))} |")
        parts.append("\n".join([*lines, ""]))
    return "\n".join(parts)


def _docs(name: str) -> dict[str, str]:
    """Return what the code says below each field of a class."""
    found = ModuleAnalyzer.for_module(f"featcal.suite.{_HOMES[name]}").find_attr_docs()
    return {key: " ".join(lines).strip() for (holder, key), lines in found.items() if holder == name}


def _type_of(one: dict[str, Any]) -> str:
    """Return a type of the schema in words."""
    if "$ref" in one:
        name = one["$ref"].rpartition("/")[2]
        return _ELSEWHERE.get(
            name, f"[{name}](#{_SCHEMAS[name].strip('`').lower().replace(' ', '-')})" if name in _SCHEMAS else name
        )
    if "enum" in one:
        return ", ".join(f"`{value}`" for value in one["enum"])
    if "anyOf" in one:
        return " or ".join(dict.fromkeys(_type_of(part) for part in one["anyOf"] if part.get("type") != "null"))
    if one.get("type") == "array":
        return f"list of {_type_of(one['items'])}s" if "items" in one else "list"
    if one.get("type") == "object":
        return f"mapping to {_type_of(one['additionalProperties'])}"
    limits = {"minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}"}
    bounds = [text.format(one[bound]) for bound, text in limits.items() if bound in one]
    names = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}
    return " ".join([names[one["type"]], ", ".join(bounds)]).strip()


def _default(one: dict[str, Any]) -> str:
    value = one.get("default")
    if value is None or value == "" or isinstance(value, dict):
        return "–"
    return ", ".join(f"`{part}`" for part in value) if isinstance(value, list) else f"`{value}`"


def _escape(text: str) -> str:
    """Return words of the command line as Markdown that shows them as they are, `code` as code."""
    words, code = re.compile(r"([\\`*_<>\[\]|])"), re.compile(r"(`[^`]+`)")
    parts = code.split(text)
    parts[::2] = [words.sub(r"\\\1", one) for one in parts[::2]]
    parts[1::2] = [_markdown(one) for one in parts[1::2]]
    return "".join(parts)


def _markdown(text: str) -> str:
    """Return what is Markdown already, for a cell of a table."""
    return text.replace("|", "\\|")


PARTS: dict[str, Callable[[], str]] = {
    **{f"commands of '{section}'": partial(write_commands, section) for section in SECTIONS},
    "keys of a suite file": write_suite_file,
}


def fill(app: Sphinx, page: str, source: list[str]) -> None:
    """Put every part in its place."""

    def write(place: re.Match[str]) -> str:
        if place[1] not in PARTS:
            raise ExtensionError(f"{page}: nothing is called '{place[1]}'; there are {', '.join(PARTS)}")
        return PARTS[place[1]]()

    source[0] = _PLACE.sub(write, source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", fill, priority=400)  # before what runs marked blocks
    return {"parallel_read_safe": True}

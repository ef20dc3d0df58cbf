"""Read the content below the roots for agents: suites, folders of models, results and reports; nothing is measured."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from featcal.formats.card_data import read_card_data, read_card_text
from featcal.formats.hub import RECORD_FILE
from featcal.formats.peft import CONFIG_FILE as ADAPTER_CONFIG
from featcal.server.agents import work
from featcal.server.agents.access import resolve_shared_path
from featcal.server.agents.answers import find_section, quote, quote_strings
from featcal.suite.facts import shipped_suites
from featcal.suite.schema import load_suite
from featcal.system.errors import InputError
from featcal.system.json_files import read_json
from featcal.system.paths import from_folder, require_plain
from featcal.system.sandbox import server_rules

DEEP = 4
"""Depth of folders below a root in which suites are searched."""
LOOKED_AT = 2000
"""Most folders to search for suites, in all roots together."""
MOST_SUITES = 50
CARD = 1200
"""Most characters quoted of a card."""
SECTION = 3000
"""Most characters quoted of a section of a report."""
MOST_REPORT = 4 << 20
"""Most bytes read of a report."""
_SCORES = re.compile(r"<!-- scores -->.*?<!-- end of scores -->", re.DOTALL)
"""Part of featcal's cards with scores on the test split."""
_FRONT = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
_DIGESTS: Mapping[str, tuple[str, ...]] = {
    "select": ("model", "suite_lines", "verdict", "margin", "criterion", "read", "candidates", "notes"),
    "diagnose": ("model", "next", "split", "samples"),
    "difference": ("a", "b", "split", "average", "tasks"),
    "calibrate": ("out", "tasks", "relative_drift", "warnings", "notes", "canary"),
}
"""Kind of a job → the parts of its document that an answer begins with."""


def suites_of_featcal() -> list[dict[str, Any]]:
    """Return the suites that come with featcal; those of the Hub by their names alone."""
    return [
        {"suite": one["name"], "where": one["where"]}
        | ({"tasks": one["tasks"], "about": one["description"]} if one["where"] == "embedded" else {})
        for one in shipped_suites()
    ]


def suites_below_roots() -> list[dict[str, Any]]:
    """Return the readable suite files below the roots, nearest first; links are not followed."""
    rules = server_rules()
    found: list[dict[str, Any]] = []
    for file in _yaml_files(() if rules is None else rules.roots):
        with suppress(InputError):  # another tool's file, or one with mistakes: whoever names it is told
            suite = load_suite(file)
            place = from_folder(file, Path.cwd())
            found.append({"suite": place, "name": suite.name, "where": "root", "tasks": list(suite.tasks)})
        if len(found) == MOST_SUITES:
            break
    return found


def _yaml_files(roots: Sequence[str]) -> Iterator[Path]:
    waiting = [(Path(root), 0) for root in roots]
    for _ in range(LOOKED_AT):
        if not waiting:
            return
        folder, depth = waiting.pop(0)
        with suppress(OSError):  # a folder that may not be read, or is gone
            with os.scandir(folder) as entries:
                ordered = sorted(entries, key=lambda one: one.name)
            for one in ordered:
                if one.is_dir(follow_symlinks=False) and depth < DEEP and not one.name.startswith("."):
                    waiting.append((Path(one.path), depth + 1))
                elif one.is_file(follow_symlinks=False) and one.name.endswith((".yaml", ".yml")):
                    yield Path(one.path)


def describe_model(folder: Path, with_scores: bool) -> dict[str, Any]:
    """Describe the files in a model's folder; all text from them is quoted.

    Args:
        with_scores: whether scores on the test split in its card may be shown.

    Raises:
        InputError: it is no folder of a model.
    """
    from featcal.preflight.handover.folder import Folder

    if not any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        raise InputError(f"path: neither config.json nor {ADAPTER_CONFIG} is there; name the folder of a model")
    own = Folder(folder)
    adapter = own.json(ADAPTER_CONFIG)
    layers = (own.config.get(name) for name in ("num_hidden_layers", "n_layer", "num_layers"))
    facts = {
        "architecture": own.model_class,
        "model_type": own.config.get("model_type"),
        "dtype": own.dtype,
        "parameters": sum(prod(shape) for shape, _ in own.tensors.values()),
        "tensors": len(own.tensors),
        "layers": next((one for one in layers if one is not None), None),
        "vocabulary": own.rows or own.config.get("vocab_size"),
        "chat_template": own.template is not None,
        "adapter": {key: adapter.get(key) for key in ("peft_type", "r", "base_model_name_or_path")}
        if adapter
        else None,
        "problems": [one.sentence for one in own.headers[1]],
    }
    known_facts = {key: one for key, one in facts.items() if one not in (None, "", [], 0)}
    quoted: dict[str, Any] = quote_strings({**known_facts, "made_of": _origins(folder), "record": _record(folder)})
    return quoted | _card(folder, with_scores)


def _origins(folder: Path) -> dict[str, Any]:
    """Return the models of a merge, from mergekit's configuration or the card."""
    from featcal.authoring.from_merge import find_origins

    try:
        found = find_origins(folder, None, {})
    except InputError as error:
        return {"unknown": str(error)}
    method = found.contents.method if found.contents is not None else None
    return {"base": found.base, "experts": dict(found.experts), "said_by": found.where, "method": method}


def _record(folder: Path) -> dict[str, Any] | None:
    """Return the beginning of featcal's own record."""
    file = folder / RECORD_FILE
    if not file.is_file():
        return None
    record = read_json(file)
    return {key: record.get(key) for key in ("command", "suite", "model", "config") if key in record}


def _card(folder: Path, with_scores: bool) -> dict[str, Any]:
    data, text = read_card_data(folder), _FRONT.sub("", read_card_text(folder))
    text = text if with_scores else _SCORES.sub("(scores on the test split are closed)", text)
    kept = {key: data[key] for key in ("license", "base_model", "pipeline_tag", "tags", "language") if key in data}
    # YAML knows dates and more, which JSON does not.
    plain = {key: [str(own) for own in one] if isinstance(one, list) else str(one) for key, one in kept.items()}
    return {"card": {**quote_strings(plain, 80), "text": quote(text.strip(), CARD)}} if text or kept else {}


def digest(kind: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the most important parts of a job's document; `read_report` has all."""
    wanted = _DIGESTS.get(kind, tuple(document))
    found = {key: document[key] for key in wanted if document.get(key) not in (None, [], {})}
    if kind == "diagnose":
        return {"lines": [one["text"] for one in document["sentences"]], **found}
    if kind == "difference":
        return found | {"tasks": {task: _difference(one) for task, one in document["tasks"].items()}}
    if kind == "calibrate":
        drift = {block: round(sum(own.values()) / len(own), 4) for block, own in document["relative_drift"].items()}
        samples = {task: one["samples"] for task, one in document["tasks"].items()}
        return found | {"tasks": samples, "relative_drift": drift, "took": document["seconds"]["total"]}
    if kind == "select":
        options = {**(document["chosen"] or {}), "samples": max(document["read"]["samples"].values())}
        ready = {"options": options, "model": document["start"]} if document["chosen"] else None
        rows = [{key: one[key] for key in ("model", "score", "margin", "failure")} for one in document["candidates"]]
        made = {"calibrate_with": ready} if ready else {"made_by": document["command"]}
        return found | made | {"candidates": rows}
    return found


def _difference(one: Mapping[str, Any]) -> dict[str, Any]:
    return {key: one[key] for key in ("a", "b", "difference", "low", "high", "within_noise")}


@dataclass(frozen=True)
class WrittenReport:
    """Sections of an existing report, document or record.

    Args:
        command: command line that shows the same.
        names: names in it from files of others.
        is_own: it is from a job of this server, so its words are featcal's.
    """

    sections: Mapping[str, Any]
    command: str
    names: Sequence[str] = ()
    is_own: bool = False

    def select(self, section: str | None) -> Any:
        """Return the content that must be permitted before a section is shown; names of sections reveal nothing."""
        if section is None:
            return None
        self._find(section)  # one that is not there is said to be so
        return self.sections

    def show(self, section: str | None) -> dict[str, Any]:
        """Return a section, or the list of all."""
        if section is None:
            return {"sections": self._list()}
        found = self._find(section)
        return {"section": section, "content": found if self.is_own else quote_strings(found, SECTION)}

    def _find(self, section: str) -> Any:
        try:
            return find_section(self.sections, section)
        except KeyError as error:
            known = ", ".join(map(str, self._list()))
            raise InputError(f"section: there is none of this name; there are {known}") from error

    def _list(self) -> list[Any]:
        return [key if self.is_own else quote_strings(key, 80) for key in self.sections]


def open_run(run: str) -> WrittenReport:
    """Open what an agent names: a job by its number, or a folder or file below a root.

    Raises:
        InputError: it is not readable, or outside the roots.
    """
    if run.isdecimal():
        job = work.find_job(int(run))
        return WrittenReport(work.read_result(job), work.command_of(job), work.job_names(job), is_own=True)
    place = resolve_shared_path(run, "run")
    if place.is_dir():
        place /= RECORD_FILE
    command = shlex.join(["cat", from_folder(place, Path.cwd())])
    if place.suffix == ".json":
        return WrittenReport(read_json(place, missing="run: the folder has no featcal.json"), command)
    if place.suffix != ".md":
        raise InputError("run: give the number of a job, a written model's folder, a report.md or a JSON document")
    require_plain(place, "run", MOST_REPORT)
    text = place.read_text(encoding="utf-8", errors="replace")
    title, *parts = re.split(r"^## +", text, flags=re.MULTILINE)
    sections = {"beginning": title} | {head.strip(): body for head, _, body in (one.partition("\n") for one in parts)}
    return WrittenReport(sections, command)

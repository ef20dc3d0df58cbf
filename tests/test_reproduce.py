"""Commands and lines of Python give the numbers that they are said to give, and the same ones."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from reproducing import document, printed

from featcal.reproduce import KINDS, Measured, commands, python
from featcal.views import View

MODELS = ("merged", "calibrated:lam=0.1,rho=1.5,samples=6")
CALIBRATED = ("calibrated:lam=0.02,samples=4", *MODELS[1:])
ON = View(5, "validation", 3)
Document = dict[str, Any]


def of_tasks(entry: Callable[[Document], Any]) -> Callable[[Document], Any]:
    return lambda found: {task: entry(one) for task, one in found["tasks"].items()}


FROM_DOCUMENT: dict[str, Callable[[Document], Any]] = {
    "drift": of_tasks(lambda one: one["layers"]),
    "attribution": of_tasks(lambda one: one["layers"]),
    "growth": of_tasks(lambda one: one["layers"]),
    "cosines": of_tasks(lambda one: one["final"]["cosine"]),
    "samples": of_tasks(lambda one: one["per_sample"]),
    "decisions": of_tasks(lambda one: one["output"]),
    "margins": of_tasks(lambda one: one["margins"]),
    "gains": of_tasks(lambda one: (one["final"], one["output"])),
    "task vectors": lambda found: found["task_vector_cosines"],
    "sources": lambda found: found["sources"],
    "scores": of_tasks(lambda one: one["value"]),
    "answers": of_tasks(lambda one: one["answers"]),
    "differences": of_tasks(lambda one: {name: one[name] for name in ("difference", "low", "high", "p")}),
}


def rows(frame: Any) -> Any:
    """The layers of a ledger's frame as the document has them; missing numbers are left out of both."""
    return {
        task: [{n: v for n, v in row.items() if n != "task" and v == v and v is not None} for row in part]
        for task, part in ((task, own.to_dict("records")) for task, own in frame.groupby("task", sort=False))
    }


FROM_PYTHON: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("drift", "attribution", "growth"), rows),
    "decisions": lambda found: {task: one["output"] for task, one in found.items()},
    "gains": lambda found: {task: (one["final"], one["output"]) for task, one in found.items()},
    "sources": lambda found: [asdict(one) for one in found],
    "differences": lambda frame: {
        row["task"]: {name: row[name] for name in ("difference", "low", "high", "p")}
        for row in frame[frame["task"] != "average"].to_dict("records")
    },
    "scores": lambda frame: dict(zip(frame["task"], frame["value"], strict=True)),
}


def places(where: str, found: Document) -> Iterator[Any]:
    """What stands where the numbers are said to be, of the first task and sample."""
    for path in where.split(", "):
        here: Any = found
        for name in path.split("."):
            here = here[next(iter(here)) if name == "TASK" else name.removesuffix("[]")]
            here = here[0] if name.endswith("[]") else here
        yield here


def same(said: Any, again: Any) -> bool:
    """Equal as far as float32 goes, whatever the order of the work."""
    if isinstance(said, dict):
        said = {name: value for name, value in said.items() if value is not None}
        return said.keys() == again.keys() and all(same(said[name], again[name]) for name in said)
    if isinstance(said, list | tuple):
        return len(said) == len(again) and all(map(same, said, again))
    return bool(said == pytest.approx(again, rel=1e-4, abs=1e-6)) if isinstance(said, float) else bool(said == again)


def test_every_kind_is_tried() -> None:
    assert set(FROM_DOCUMENT) == set(KINDS)


@pytest.mark.parametrize("what", KINDS)
def test_command_and_python_say_the_same(what: str, tiny_suite_file: Path) -> None:
    models = CALIBRATED if what == "sources" else MODELS
    measured = Measured(what, str(tiny_suite_file), models, ON)
    documents = [document(line) for line in commands(measured)]
    assert all(map(bool, places(measured.where, documents[0])))
    by_command = [FROM_DOCUMENT[what](found) for found in documents]
    by_python = printed(python(measured))
    assert tuple(by_python) == ((models,) if what == "differences" else models)
    read = FROM_PYTHON.get(what, lambda found: found)
    assert same(by_command, [read(found) for found in by_python.values()])
    assert what == "differences" or not same(*by_command)  # of two models


def test_options_are_said(tiny_suite_file: Path) -> None:
    measured = Measured("growth", str(tiny_suite_file), ("merged",), ON, tokens="class", sublayers=True)
    (line,) = commands(measured)
    assert "--tokens class --sublayers --samples 5 --split validation --seed 3" in line
    (again,) = printed(python(measured)).values()
    of_document = FROM_DOCUMENT["growth"](document(line))
    assert same(of_document, rows(again))
    assert [row["layer"] for row in of_document["pets"]].count("block 0 attention") == 1


@pytest.mark.parametrize("name", ["a b", "it's", "$HOME", "`ls`", "-x; rm", 'say "hi"', "\\n"])
def test_names_stay_one_word(name: str) -> None:
    measured = Measured("drift", f"/{name}/suite.yaml", (name,))
    (line,) = commands(measured)
    words = shlex.split(line)
    assert words[:5] == ["featcal", "drift", f"/{name}/suite.yaml", "--model", name]
    compile(python(measured), "lines", "exec")
    assert repr(name) in python(measured)

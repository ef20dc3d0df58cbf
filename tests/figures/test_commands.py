"""Commands and lines of Python give the numbers that they are said to give, and the same ones."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reproducing import document, printed

from featcal.figures.commands import KINDS, ChartSource, command_lines, python_lines
from featcal.figures.commands.sweeps import boxes
from featcal.suite.views import EvaluationSamples

pytestmark = pytest.mark.slow

MODELS = ("merged", "calibrated:lam=0.1,rho=1.5,samples=6")
CALIBRATED = ("calibrated:lam=0.02,samples=4", *MODELS[1:])
ON = EvaluationSamples(5, "validation", 3)
TOGETHER = ("differences", "features", "small maps", "UMAP", "small UMAPs")
"""Kinds that are of all models at once."""
Document = dict[str, Any]


def of_tasks(entry: Callable[[Document], Any]) -> Callable[[Document], Any]:
    return lambda found: {task: entry(one) for task, one in found["tasks"].items()}


def points(found: Document) -> list[Document]:
    return [
        {"task": task, "layer": layer["layer"], **point}
        for task, one in found["tasks"].items()
        for layer in one["layers"]
        for point in layer["points"]
    ]


FROM_DOCUMENT: dict[str, Callable[[Document], Any]] = {
    "drift": of_tasks(lambda one: one["layers"]),
    "attribution": of_tasks(lambda one: one["layers"]),
    "cosines": of_tasks(lambda one: one["final"]["cosine"]),
    "samples": of_tasks(lambda one: one["per_sample"]),
    "decisions": of_tasks(lambda one: one["output"]),
    "margins": of_tasks(lambda one: one["margins"]),
    "gains": of_tasks(lambda one: (one["final"], one["output"])),
    "answer gains": of_tasks(lambda one: one["final"]),
    "task vectors": lambda found: found["task_vector_cosines"],
    "weights": of_tasks(lambda one: one["weights"]),
    "depth": of_tasks(lambda one: one["depth"]),
    "course": of_tasks(lambda one: one["course"]),
    "tokens": of_tasks(lambda one: one["tokens"]),
    "maps": of_tasks(lambda one: one["maps"]),
    "sources": lambda found: found["sources"],
    "scores": of_tasks(lambda one: one["value"]),
    "answers": of_tasks(lambda one: one["answers"]),
    "differences": of_tasks(lambda one: {name: one[name] for name in ("difference", "low", "high", "p")}),
    **dict.fromkeys(("features", "small maps", "UMAP", "small UMAPs"), points),
    "conditioning": lambda found: found["systems"],
}


def rows(frame: Any) -> Any:
    """The layers of a ledger's frame as the document has them; missing numbers are left out of both."""
    return {
        task: [{n: v for n, v in row.items() if n != "task" and v == v and v is not None} for row in part]
        for task, part in ((task, own.to_dict("records")) for task, own in frame.groupby("task", sort=False))
    }


def known(row: Document) -> Document:
    return {name: value for name, value in row.items() if value is not None}


def with_lists(frame: Any) -> Any:
    return frame.assign(feature=[one.tolist() for one in frame["feature"]])


FROM_PYTHON: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("drift", "attribution"), rows),
    "decisions": lambda found: {task: one["output"] for task, one in found.items()},
    "gains": lambda found: {task: (one["final"], one["output"]) for task, one in found.items()},
    "answer gains": lambda found: {task: one["final"] for task, one in found.items()},
    "maps": lambda found: {task: [known(one.to_json()) for one in rows] for task, rows in found.items()},
    "tokens": lambda found: {task: [known(row) for row in rows] for task, rows in found.items()},
    "sources": lambda found: [asdict(one) for one in found],
    "differences": lambda frame: {
        row["task"]: {name: row[name] for name in ("difference", "low", "high", "p")}
        for row in frame[frame["task"] != "average"].to_dict("records")
    },
    "scores": lambda frame: dict(zip(frame["task"], frame["value"], strict=True)),
    **dict.fromkeys(("features", "small maps"), lambda frame: frame.to_dict("records")),
    **dict.fromkeys(("UMAP", "small UMAPs"), lambda frame: with_lists(frame).to_dict("records")),
    "conditioning": lambda found: [one.to_json() for one in found],
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
    assert {*FROM_DOCUMENT, "sweep"} == set(KINDS)


@pytest.mark.parametrize("what", FROM_DOCUMENT)
def test_command_and_python_say_the_same(what: str, tiny_suite_file: Path) -> None:
    models = CALIBRATED if what in ("sources", "conditioning") else MODELS
    sample, layer = (1 if what in ("course", "tokens") else None), ("block 1" if what == "tokens" else None)
    measured = ChartSource(what, str(tiny_suite_file), models, ON, sample=sample, layer=layer)
    documents = [document(line) for line in command_lines(measured)]
    assert all(map(bool, places(measured.kind.where, documents[0])))
    by_command = [FROM_DOCUMENT[what](found) for found in documents]
    by_python = printed(python_lines(measured))
    assert tuple(by_python) == ((models,) if what in TOGETHER else models)
    read = FROM_PYTHON.get(what, lambda found: found)
    assert same(by_command, [read(found) for found in by_python.values()])
    assert what in TOGETHER or not same(*by_command)  # of two models


def test_options_are_said(tiny_suite_file: Path) -> None:
    measured = ChartSource("drift", str(tiny_suite_file), ("merged",), ON, tokens="class", sublayers=True)
    (line,) = command_lines(measured)
    assert "--tokens class --sublayers --eval-samples 5 --split validation --seed 3" in line
    (again,) = printed(python_lines(measured)).values()
    of_document = FROM_DOCUMENT["drift"](document(line))
    assert same(of_document, rows(again))
    assert [row["layer"] for row in of_document["pets"]].count("block 0 attention") == 1


def test_task_and_layer_are_said(tiny_suite_file: Path) -> None:
    measured = ChartSource("features", str(tiny_suite_file), MODELS, ON, task="signs", layer="block 1")
    (line,) = command_lines(measured)
    assert "--task signs --layer 'block 1' --eval-samples 5" in line
    (again,) = printed(python_lines(measured)).values()
    said = points(document(line))
    assert same(said, again.to_dict("records"))
    assert {(one["task"], one["layer"]) for one in said} == {("signs", "block 1")}
    assert [one["model"] for one in said] == [name for name in ("expert", *MODELS) for _ in range(5)]


def test_a_sweep_is_a_few_grids(tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [f"calibrated:lam={lam},rho={rho},alpha=0.3,samples=4" for lam in ("0.05", "0.5") for rho in ("-1", "1.5")]
    part = "calibrated:lam=0.1,rho=2,alpha=0,samples=4,seed=7,layernorms=false,blocks=block 0+block 2,tasks=signs"
    refined = "calibrated:lam=0.01,rho=2,alpha=0.6,samples=4,recipe=refined,beta=0.5"
    weighed = "calibrated:lam=0.1,rho=2,alpha=0,samples=4,patch_weight=0.5"
    fast = "calibrated:lam=0.1,rho=2,alpha=0,samples=4,precision=fast"
    other = "calibrated:lam=0.1,rho=2,alpha=0,samples=4@tsv-m"
    every = (*whole, part, refined, weighed, fast, other)
    measured = ChartSource("sweep", str(tiny_suite_file), ("base", *every), EvaluationSamples(5))
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "by command"))
    lines = first, second, third, fourth, fifth, sixth = command_lines(measured)
    assert "--lam=0.05,0.5 --rho=-1,1.5 --alpha=0.3 --samples 4 --eval-samples 5" in first
    assert "--seed 7 --no-layernorms --blocks 'block 0' --blocks 'block 2' --tasks signs --eval-samples 5" in second
    assert "--samples 4 --recipe refined --beta 0.5 --eval-samples 5" in third
    assert "--samples 4 --patch-weight 0.5 --eval-samples 5" in fourth
    assert "--samples 4 --precision fast --eval-samples 5" in fifth
    assert "--model tsv-m --lam=0.1 --rho=2 --alpha=0 --samples 4 --eval-samples 5" in sixth
    found = {one["model"]: one["measured"][0] for line in lines for one in document(line)["points"]}
    assert {name for name in found if name.startswith("calibrated")} == {*every}
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "by python"))
    again = {model: asdict(one) for model, one in printed(python_lines(measured)).items()}
    assert {*again} == {*found}
    for one in found:
        assert same({n: found[one][n] for n in ("scores", "drift")}, {n: again[one][n] for n in ("scores", "drift")})
    assert not same(found[whole[0]]["drift"], found[whole[1]]["drift"])


@given(st.lists(st.tuples(*3 * [st.sampled_from("abc")]), max_size=12))
def test_boxes_hold_every_point_once(points: list[tuple[str, ...]]) -> None:
    held = [point for box in boxes(points) for point in product(*box)]
    assert sorted(held) == sorted(set(points))


@pytest.mark.parametrize("name", ["a b", "it's", "$HOME", "`ls`", "-x; rm", 'say "hi"', "\\n"])
def test_names_stay_one_word(name: str) -> None:
    measured = ChartSource("drift", f"/{name}/suite.yaml", (name,))
    (line,) = command_lines(measured)
    words = shlex.split(line)
    assert words[:5] == ["featcal", "drift", f"/{name}/suite.yaml", "--model", name]
    compile(python_lines(measured), "lines", "exec")
    assert repr(name) in python_lines(measured)

"""Every chart of the app has a command that gives its numbers: run, and held against the chart's own table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from app_pages import button, charts, control, healthy, opened
from reproducing import document

from app import downloads
from app.downloads import Numbers
from featcal.reproduce import commands

pytestmark = [pytest.mark.usefixtures("instant_maps"), pytest.mark.filterwarnings("ignore")]  # streamlit warns a lot

MODELS = {"b": "calibrated", "rho": "1.5", "lam": "0.02", "samples": "6", "n": "8"}
Documents = Mapping[str, dict[str, Any]]
"""What the commands print, by what the table calls the model."""
Pairs = Iterator[tuple[Any, Any]]
"""A column of the table, and the same numbers out of the document."""


def part(frame: Any, model: str) -> Any:
    return frame[frame["model"] == model]


def mean(found: dict[str, Any], read: Callable[[dict[str, Any]], float | None]) -> list[float]:
    """Over tasks, layer by layer; layers that have no such number are left out."""
    values = [[read(layer) for layer in task["layers"]] for task in found["tasks"].values()]
    return [float(np.mean(column)) for column in zip(*values, strict=True) if None not in column]


def drift_per_layer(frame: Any, found: Documents) -> Pairs:
    for model, one in found.items():
        yield part(frame, model)["drift"], mean(one, lambda layer: layer["relative_drift"])
        for name in ("mismatch", "propagation"):
            yield part(frame, model)[name], mean(one, lambda layer, n=name: layer[n] / layer["expert_norm"])
        yield part(frame, model)["alignment"], mean(one, lambda layer: layer["alignment"])


def drift_per_task(frame: Any, found: Documents) -> Pairs:
    (layer,) = set(frame["layer"])
    for model, one in found.items():
        of_layer = [next(at for at in task["layers"] if at["layer"] == layer) for task in one["tasks"].values()]
        yield part(frame, model)["drift"], [at["drift"] / at["expert_norm"] for at in of_layer]
        yield part(frame, model)["mismatch"], [at["mismatch"] / at["expert_norm"] for at in of_layer]


def attribution(frame: Any, found: Documents) -> Pairs:
    for model, one in found.items():
        yield part(frame, model)["share"], mean(one, lambda layer: layer["share"])
        yield part(frame, model)["telescoped share"], mean(one, lambda layer: layer["telescoped_share"])
        booked = [
            [layer["share"] * task["layers"][-1]["relative_drift"] for layer in task["layers"]]
            for task in one["tasks"].values()
        ]
        yield part(frame, model)["contribution"], np.mean(booked, axis=0)


def growth(frame: Any, found: Documents) -> Pairs:
    for model, one in found.items():
        for name in ("gamma", "eta", "response", "certified_growth"):
            yield part(frame, model)[name], mean(one, lambda layer, n=name: layer.get(n))


def decisions(frame: Any, found: Documents) -> Pairs:
    for model, one in found.items():
        for name in ("score_drift", "bound", "margin", "certified", "agreement", "accuracy"):
            yield part(frame, model)[name], [task["output"][name] for task in one["tasks"].values()]


def margins(frame: Any, found: Documents) -> Pairs:
    for model, one in found.items():
        task = one["tasks"]["signs"]
        yield frame["expert margin"], [row["margin"] for row in task["margins"]]
        for column, name in (("score change", "score_change"), ("certified", "certified"), ("agrees", "agrees")):
            yield frame[f"{model} {column}"], [row[name] for row in task["margins"]]
        for name in ("drift", "cosine"):
            yield frame[f"{model} {name}"], [row[name] for row in task["per_sample"]]


def feature_sources(frame: Any, found: Documents) -> Pairs:
    (one,) = found.values()
    for _, row in frame.iterrows():
        same = [it for it in one["sources"] if (it["block"], it["source"]) == (row["block"], row["source"])]
        assert same
        yield row["excess"], sum(it["excess"] for it in same)


def drift_before_and_after(frame: Any, found: Documents) -> Pairs:
    for model, one in found.items():
        yield frame[model], mean(one, lambda layer: layer["relative_drift"])


def scores_before_and_after(frame: Any, found: Documents) -> Pairs:
    for model, one in found.items():
        yield frame[model][:-1], [100 * task["output"]["accuracy"] for task in one["tasks"].values()]
        yield frame["expert"][:-1], [100 * task["output"]["expert_accuracy"] for task in one["tasks"].values()]


def mean_cosines(frame: Any, found: Documents) -> Pairs:
    for model, one in found.items():
        yield frame[model], [task["final"]["cosine"] for task in one["tasks"].values()]


def cosines(frame: Any, found: Documents) -> Pairs:
    for model, one in found.items():
        yield frame[model], [row["cosine"] for row in one["tasks"]["signs"]["per_sample"]]


def distances(frame: Any, found: Documents) -> Pairs:
    for model, one in found.items():
        rows = one["tasks"]["signs"]["per_sample"]
        yield part(frame, model)["cosine"], [row["cosine"] for row in rows]
        yield part(frame, model)["L2 distance"], [row["distance"] for row in rows]


def gains(frame: Any, found: Documents) -> Pairs:
    before, after = (list(one["tasks"].values()) for one in found.values())
    gained = [(a["final"]["cosine"], b["final"]["cosine"]) for a, b in zip(before, after, strict=True)]
    yield frame["cosine gain"], [b - a for a, b in gained]
    right = [(a["output"]["accuracy"], b["output"]["accuracy"]) for a, b in zip(before, after, strict=True)]
    yield frame["score gain"], [100 * (b - a) for a, b in right]


def task_vectors(frame: Any, found: Documents) -> Pairs:
    for model, one in found.items():
        yield frame[model], list(one["task_vector_cosines"].values())


def accuracy(frame: Any, found: Documents) -> Pairs:
    assert set(found) == {"base", "merged", "calibrated", "expert"}
    for model, one in found.items():
        yield frame[model], [100 * v for v in (*(t["value"] for t in one["tasks"].values()), one["average"])]


def flips(frame: Any, found: Documents) -> Pairs:
    before, after = (found[model]["tasks"]["signs"]["answers"] for model in ("merged", "calibrated"))
    rows = [
        (row["said"] == row["right"], next_["said"] == next_["right"]) for row, next_ in zip(before, after, strict=True)
    ]
    yield frame["sample"], [i for i, (was, now) in enumerate(rows) if was != now]
    yield frame["flip"] == "fixed", [now for was, now in rows if was != now]


CHARTS: dict[str, tuple[str, Callable[[Any, Documents], Pairs]]] = {
    "drift per layer": ("drift", drift_per_layer),
    "drift per task at head": ("drift", drift_per_task),
    "attribution": ("drift", attribution),
    "growth": ("drift", growth),
    "decisions": ("drift", decisions),
    "margins signs": ("drift", margins),
    "feature sources": ("drift", feature_sources),
    "drift before and after": ("calibrate", drift_before_and_after),
    "scores before and after": ("calibrate", scores_before_and_after),
    "mean cosines": ("cosines", mean_cosines),
    "cosines signs": ("cosines", cosines),
    "gains": ("cosines", gains),
    "distances signs head": ("features", distances),
    "task vector cosines": ("cosines", task_vectors),
    "accuracy": ("accuracy", accuracy),
    "flips signs": ("accuracy", flips),
}
"""What a table is of → the page that has it, and how its numbers are found in the documents."""


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, Numbers]:
    """Tables of the pages that are run, by what they are of."""
    found: dict[str, Numbers] = {}
    measured = downloads.Numbers.measured

    def noted(numbers: Numbers, reference: str) -> Any:
        found[numbers.what] = numbers
        return measured(numbers, reference)

    monkeypatch.setattr(downloads.Numbers, "measured", noted)
    return found


@pytest.mark.parametrize("page", ["drift", "calibrate", "cosines", "accuracy", "features"])
def test_commands_give_the_numbers_of_charts(page: str, tiny_suite_file: Path, shown: dict[str, Numbers]) -> None:
    app = opened(tiny_suite_file, page, **MODELS, sources="true", task="signs", layer="head")
    if page == "accuracy":
        button(app, "Score the calibrated").click().run()
    assert healthy(app)
    on_page = {block.value for block in app.code}
    ran: dict[str, dict[str, Any]] = {}
    for what in (what for what, (where, _) in CHARTS.items() if where == page):
        numbers = shown[what]
        measured = numbers.measured(str(tiny_suite_file))
        assert measured is not None
        lines = commands(measured)
        assert "\n".join(lines) in on_page
        for line in set(lines) - ran.keys():
            ran[line] = document(line)
        models = [label for label, name in numbers.origin.models.items() if name in measured.models]
        found = {label: ran[line] for label, line in zip(models, lines, strict=True)}
        pairs = list(CHARTS[what][1](numbers.frame, found))
        assert pairs
        for said, again in pairs:
            assert list(np.ravel(said)) == pytest.approx(list(np.ravel(again)), rel=2e-4, abs=1e-5), what


@pytest.mark.parametrize("choice", [{"tokens": "class token"}, {"parts": "attention and MLP"}])
def test_options_of_a_chart_are_in_its_command(choice: dict[str, str], tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "drift", n="8", **choice)
    assert healthy(app)
    lines = [line for block in app.code for line in block.value.splitlines() if line.startswith("featcal drift")]
    flag = "--tokens class" if "tokens" in choice else "--sublayers"
    assert any("--attribution" in line and flag in line for line in lines)


def test_every_table_of_a_chart_says_its_command(tiny_suite_file: Path, shown: dict[str, Numbers]) -> None:
    without = []
    for page in ("drift", "calibrate", "cosines", "accuracy"):
        shown.clear()
        app = opened(tiny_suite_file, page, **MODELS)
        assert healthy(app)
        assert charts(app)
        without += [what for what, numbers in shown.items() if not numbers.kind]
        assert len(app.code) >= 2 * len(shown)
    assert without == []


def test_a_model_of_controls_is_named_in_full(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "drift", **MODELS)
    control(app, "alpha").set_value(0.5).run()
    lines = [line for block in app.code for line in block.value.splitlines()]
    name = "--model calibrated:lam=0.02,rho=1.5,alpha=0.5,samples=6"
    assert any(line.startswith("featcal drift") and name in line for line in lines)

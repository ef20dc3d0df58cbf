"""Results draw themselves in notebooks: what is shown is what the result has, with plotly and without it."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from html import escape, unescape
from types import SimpleNamespace
from typing import Any

import pytest
from clip_config import clip_config

import featcal
from featcal.calibration.calibrate import CalibrationResult, calibrate_family, config_for
from featcal.calibration.config import resolve_options
from featcal.drift.ledger import DriftLedger
from featcal.evaluation.comparison import Comparison
from featcal.evaluation.evaluate import Scores
from featcal.family.opening import Family
from featcal.figures import result_tables
from featcal.session.model_names import name_calibration
from featcal.session.session import Session
from featcal.studies.selection.judge import Score, margin
from featcal.studies.selection.outcome import Candidate, Selection
from featcal.suite.views import DriftOptions, EvaluationSamples
from featcal.system.extras import MissingPackage

VIEW = EvaluationSamples(None, "validation")


def cells(html: str) -> list[list[str]]:
    """The text of all cells of the one table in it, row by row, without the head."""
    (table,) = re.findall(r"<tbody>(.*?)</tbody>", html, re.DOTALL)
    rows = re.findall(r"<tr.*?>(.*?)</tr>", table, re.DOTALL)
    return [[unescape(cell) for cell in re.findall(r"<t[dh]>(.*?)</t[dh]>", row, re.DOTALL)] for row in rows]


@pytest.fixture(scope="module")
def session(tiny: Family) -> Session:
    return Session(tiny)


@pytest.fixture(scope="module")
def ledger(session: Session) -> DriftLedger:
    return session.measure.drift("merged", DriftOptions(split="validation", attribution=True))


@pytest.fixture(scope="module")
def scores(session: Session) -> Scores:
    return session.measure.scores("merged", VIEW)


@pytest.fixture(scope="module")
def comparison(session: Session) -> Comparison:
    return session.measure.compare("base", "task-arithmetic:scale=0.9", VIEW)


@pytest.fixture(scope="module")
def selection(tiny: Family) -> Selection:
    """A choice as `select` gives it, of scores that were made up."""
    options = ({}, {"mu": 0.3}, {"recipe": "paper"})
    configs = [
        resolve_options(config_for(tiny, **{"recipe": "informed"} | one), tiny.adapter, tiny.suite.tasks)
        for one in options
    ]
    values = (0.6, 0.7, 0.5, 0.1)
    scored = [Score("decision", {"t": (value, value + 0.01)}) for value in values]
    made = [
        Candidate(
            "merged" if one is None else name_calibration(one, tiny),
            "merged",
            one,
            score,
            margin(scored[0], score),
            "",
            1,
        )
        for one, score in zip([*configs, None], scored, strict=True)
    ]
    ranked = (made[1], made[0], made[2], made[3])
    return Selection(tiny, configs[0], "merged", configs[1], ranked, made[1].margin, {}, {"t": 2}, (), 4.0, None)


@pytest.fixture(scope="module")
def calibrated(tiny: Family) -> CalibrationResult:
    return calibrate_family(tiny, clip_config(samples=6))


@pytest.mark.parametrize("name", ["ledger", "scores", "comparison", "selection", "calibrated"])
def test_a_result_is_shown_with_its_picture_and_without_plotly_as_its_table_alone(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    result: Any = request.getfixturevalue(name)
    kind, whole = result.plot().data[0].type, result._repr_html_()
    assert f'"type":"{kind}"' in whole.rpartition("Plotly.newPlot(")[2]
    elements = re.sub(r"(<script\b[^>]*>).*?</script>", r"\1", whole, flags=re.DOTALL)
    assert not re.findall(r"<[^>]*(?:src|href)=[^>]*>", elements), "it loads something"
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "plotly", None)
        alone = result._repr_html_()
        with pytest.raises(MissingPackage, match=r"plotly is not installed; .*featcal\[report\]"):
            result.plot()
    assert "plotly" not in alone
    assert alone.startswith(f"<p>{escape(result_tables.describe_result(result))}</p><table")
    assert cells(alone) == cells(whole)


@pytest.mark.parametrize("name", ["ledger", "calibrated", "scores", "comparison", "selection"])
def test_a_console_prints_the_table_and_no_tensors(name: str, request: pytest.FixtureRequest) -> None:
    result = request.getfixturevalue(name)
    heading, header, *rows = repr(result).splitlines()
    assert heading in unescape(result._repr_html_())
    assert [row.split() for row in rows] == [" ".join(row).split() for row in cells(result._repr_html_())]
    assert "tensor" not in header


def test_the_table_of_a_ledger_has_its_final_drift(ledger: DriftLedger) -> None:
    *tasks, mean = cells(ledger._repr_html_())
    assert [row[0] for row in tasks] == list(ledger.tasks)
    for row, one in zip(tasks, ledger.tasks.values(), strict=True):
        largest = max(one.layers, key=lambda layer: float(layer.mismatch.mean() / layer.expert_norm.mean()))
        share = float(largest.mismatch.mean() / largest.expert_norm.mean())
        final = f"{one.layers[-1].relative_drift:.3f}", f"{float(one.cosine.mean()):.3f}"
        assert row[1:] == [*final, f"{share:.3f}, {largest.layer}"]
    drift = [one.layers[-1].relative_drift for one in ledger.tasks.values()]
    assert mean == ["mean", f"{sum(drift) / len(drift):.3f}", f"{ledger.macro_cosine:.3f}", ""]


def test_the_picture_of_a_ledger_says_who_caused_the_drift_where_that_was_measured(ledger: DriftLedger) -> None:
    booked = ledger.plot().data[0]
    final = [one.layers[-1].relative_drift for one in ledger.tasks.values()]
    assert booked.type == "waterfall"
    assert sum(booked.y[:-1]) == pytest.approx(sum(final) / len(final), rel=1e-5)
    bare = replace(ledger, tasks={task: replace(one, attribution=None) for task, one in ledger.tasks.items()})
    parts = {one.name: list(one.y) for one in bare.plot().data}
    assert list(parts) == ["local mismatch", "propagation", "drift, merged"]
    assert parts["drift, merged"][-1] == pytest.approx(sum(final) / len(final), rel=1e-6)


def test_a_calibration_is_shown_by_the_final_drift_before_and_after(calibrated: CalibrationResult) -> None:
    *tasks, mean = cells(calibrated._repr_html_())
    final = calibrated.record["final_drift"]
    columns = {name: [one[name] for one in final.values()] for name in ("merged", "calibrated")}
    assert tasks == [[task, f"{one['merged']:.3f}", f"{one['calibrated']:.3f}"] for task, one in final.items()]
    assert mean == ["mean", *(f"{sum(one) / len(one):.3f}" for one in columns.values())]
    drawn = {
        trace.name: dict(zip(trace.customdata, trace.x, strict=True)) for trace in calibrated.plot().data if trace.name
    }
    assert {name: [one[task] for task in final] for name, one in drawn.items()} == columns


def test_a_calibration_that_did_not_follow_the_merge_is_shown_by_its_blocks(calibrated: CalibrationResult) -> None:
    bare = replace(calibrated, record={name: one for name, one in calibrated.record.items() if name != "final_drift"})
    blocks = calibrated.record["relative_drift"]
    means = {name: sum(one.values()) / len(one) for name, one in blocks.items()}
    assert cells(bare._repr_html_()) == [[name, f"{one:.3f}"] for name, one in means.items()]
    assert dict(zip(blocks, bare.plot().data[0].y, strict=True)) == pytest.approx(means)


def test_scores_are_shown_in_percent(scores: Scores) -> None:
    *tasks, average = cells(scores._repr_html_())
    shown = {task: (float(value), int(n)) for task, value, n in tasks}
    assert shown == {task: (pytest.approx(100 * one.value, abs=0.051), one.n) for task, one in scores.tasks.items()}
    assert float(average[1]) == pytest.approx(100 * scores.average, abs=0.051)
    assert list(scores.plot().data[0].x)[-1] == 100 * scores.average


def test_a_comparison_is_shown_with_its_intervals(comparison: Comparison) -> None:
    html = comparison._repr_html_()
    *tasks, average = cells(html)
    assert re.findall("<th>(.*?)</th>", html)[1:3] == ["base", "task-arithmetic"]
    for row, one in zip([*tasks, average], [*comparison.tasks.values(), comparison.average], strict=True):
        low, high = row[4].split(" to ")
        numbers = [float(number) for number in (*row[1:4], low, high)]
        expected = [100 * number for number in (one.a, one.b, one.difference, one.low, one.high)]
        assert numbers == pytest.approx(expected, abs=0.051)
        assert (row[5] == "within noise") == one.is_within_noise
    traces = [trace for trace in comparison.plot().data if trace.name]
    drawn = {task: x for trace in traces for (task, *_), x in zip(trace.customdata, trace.x, strict=True)}
    assert drawn["average"] == 100 * comparison.average.difference


def test_two_models_without_a_name_of_their_own_are_told_apart(comparison: Comparison) -> None:
    twice = replace(comparison, a="ties:scale=1", b="ties:scale=0.5")
    assert re.findall("<th>(.*?)</th>", twice._repr_html_())[1:3] == ["ties:scale=1", "ties:scale=0.5"]
    same = replace(comparison, a="an object", b="an object")
    assert "<th>an object (B)</th>" in same._repr_html_()
    assert same.plot().layout.xaxis.title.text.startswith("an object (B) − an object,")
    folders = replace(comparison, a="/home/me/task", b="/home/me/second")
    assert folders.plot().layout.xaxis.title.text.startswith("second − task,")
    assert [len(row) for row in cells(folders._repr_html_())] == [6] * (len(comparison.tasks) + 1)


def test_a_selection_is_shown_best_first_with_the_margins(selection: Selection) -> None:
    html = selection._repr_html_()
    rows = cells(html)
    assert [row[0] for row in rows] == [f"{one.score.value:.4f}" for one in selection.candidates if one.score]
    assert [row[-1] for row in rows] == ["chosen", "default", "", "as it is"]
    assert f"Chosen for {selection.family.suite.name}, without labels: {selection.model}" in unescape(html)
    drawn = {y: x for trace in selection.plot().data for x, y in zip(trace.x, trace.y, strict=True)}
    assert drawn == {
        "informed, μ 0.3": pytest.approx(10),
        "informed": 0.0,
        "paper": pytest.approx(-10),
        "merged": pytest.approx(-50),
    }
    assert list(selection.plot().layout.yaxis.categoryarray) == ["merged", "paper", "informed", "informed, μ 0.3"]


def test_a_selection_that_tried_nothing_is_shown(selection: Selection) -> None:
    untried = replace(selection, candidates=(), config=selection.default, margin=None)
    assert cells(untried._repr_html_()) == []


def test_names_that_are_markup_are_shown_as_text(scores: Scores) -> None:
    (first, one), *others = scores.tasks.items()
    named = replace(scores, suite="<b>suite</b>", model="<i>m</i>", tasks={f"<u>{first}</u>": one, **dict(others)})
    html = named._repr_html_().partition("<table")
    assert "<b>" not in html[0]
    assert "&lt;b&gt;suite" in html[0]
    assert "<u>" not in html[2]
    assert f"&lt;u&gt;{first}&lt;/u&gt;" in named.plot().data[0].customdata


class Terminal:
    """IPython's shell in a terminal."""


class Kernel(Terminal):
    """IPython's shell after a notebook."""

    kernel = None


@pytest.mark.parametrize("shell", [Terminal, Kernel])
def test_a_kernel_shows_the_picture_as_plotly_does_and_a_terminal_none(
    shell: type[Terminal], scores: Scores, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Before there is an IPython: plotly chooses once how it shows figures, for all tests.
    picture, expected, displayed = scores.plot(), cells(scores._repr_html_()), list[Any]()
    display = SimpleNamespace(HTML=str, display=displayed.append)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=shell, display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    if shell is Terminal:
        with pytest.raises(NotImplementedError):
            scores._ipython_display_()
        assert displayed == []
        return
    scores._ipython_display_()
    heading, figure, table = displayed
    assert figure == picture
    assert f"{heading}{table}".count("<p>") == 1
    assert cells(table) == expected


@pytest.mark.slow
def test_results_do_not_bring_plotly() -> None:
    """Nor any chart, until they are looked at."""
    code = (
        "import sys, featcal\nfeatcal.DriftLedger, featcal.Scores, featcal.Comparison, featcal.Selection\n"
        "print([name for name in sys.modules if name == 'plotly' or name.startswith('featcal.figures')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert {"DriftLedger", "Scores", "Comparison", "Selection"} <= set(featcal.__all__)

"""Charts as data: what stands on axes and in legends, without drawing."""

from __future__ import annotations

import colorsys
import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from app.downloads import Numbers, Origin
from app.selection import file_words
from featcal.drift.source import SourceExcess
from featcal.family.opening import Family
from featcal.figures import charts, ledger_charts, ledger_tables, repair_charts, sample_charts, study_charts, theme
from featcal.figures.report.content import ReportTable
from featcal.figures.report.models import label_models
from featcal.figures.result_tables import shorten_names
from featcal.figures.sample_charts import Dots
from featcal.session.model_ref import resolve_model
from featcal.suite.calibration_options import CalibrationConfig

LAYERS = ["encoder embeddings", "encoder block 0", "decoder embeddings", "decoder block 0", "head"]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_models_name_is_drawn_alike(copied: Callable[[theme.Shown], theme.Shown]) -> None:
    one = theme.Shown("merged, scale 0.6", "merged", second=True)
    other = copied(one)
    assert (other, other.role, other.second) == ("merged, scale 0.6", "merged", True)
    assert theme.colour(other) == theme.SECOND["merged"]


def test_two_merges_are_told_apart_by_hue() -> None:
    first, second = (
        colorsys.rgb_to_hsv(*bytes.fromhex(one.removeprefix("#")))[0] * 360
        for one in (theme.COLOUR["merged"], theme.SECOND["merged"])
    )
    assert min(abs(first - second), 360 - abs(first - second)) > 60
    assert len({*theme.COLOUR.values(), *theme.SECOND.values()}) == len(theme.COLOUR) + len(theme.SECOND)


def test_layers_of_an_encoder_decoder_have_short_ticks_and_full_names() -> None:
    figure = charts.compare_drift({"merged": pd.Series(range(5), index=LAYERS)})
    assert list(figure.layout.xaxis.ticktext) == ["enc<br>emb", "enc<br>0", "dec<br>emb", "dec<br>0", "head"]
    assert list(figure.layout.xaxis.tickvals) == LAYERS
    assert figure.layout.yaxis.exponentformat == "power"  # 2e11 is not "200B"
    assert list(figure.data[0].x) == LAYERS


def test_mismatch_and_propagation_do_not_look_like_a_sum() -> None:
    norms = {"drift": [0.3], "mismatch": [0.25], "propagation": [0.25], "alignment": [-0.3]}
    figure = charts.drift_layers({"merged": pd.DataFrame({"layer": ["block 0"], **norms})}, relative=True)
    assert figure.layout.barmode == "group"
    assert [(one.type, one.y[0]) for one in figure.data] == [("bar", 0.25), ("bar", 0.25), ("scatter", 0.3)]


def test_answers_never_look_like_a_model() -> None:
    assert not set(theme.OTHERS) & {theme.COLOUR[role] for role in theme.ROLES}


def excess_of(block: str, modules: str, source: str, excess: float, minimum: float) -> SourceExcess:
    return SourceExcess(block, modules, source, excess, excess, 0.0, 0.0, 0.0, minimum, excess / minimum)


def test_sources_are_summed_per_layer_of_every_stage() -> None:
    found = [
        excess_of(block, modules, "stale", excess, 2 * excess)
        for block in (LAYERS[1], LAYERS[3])
        for modules, excess in (("q", 1.0), ("o", 3.0))
    ]
    frame = ledger_tables.sources_table(found)
    assert sorted(frame["layer"]) == ["decoder block 0", "encoder block 0"]
    assert list(frame["excess"]) == [4.0, 4.0]
    assert list(frame["relative"]) == [0.5, 0.5]


def test_classes_beyond_ten_have_colours_of_their_own() -> None:
    for count in (2, 10, 26, 60):
        found = theme.colours(count)
        assert len(set(found)) == count
        assert not set(found) & {theme.COLOUR[role] for role in theme.ROLES}


def test_the_chosen_layer_is_marked_with_its_attention_and_mlp() -> None:
    parts = ["embeddings", *(f"block {i} {part}" for i in (1, 10) for part in ("attention", "mlp")), "head"]
    columns = {name: [0.1] * len(parts) for name in ("contribution", "share", "final")}
    figure = ledger_charts.waterfall({"merged": pd.DataFrame({"layer": parts, **columns})}, "block 1")
    (band,) = figure.layout.shapes
    assert (band.x0, band.x1) == (0.5, 2.5)


def test_long_names_of_models_stay_above_their_own_panels() -> None:
    frame = pd.DataFrame({"layer": ["block 0"], **{name: [0.1] for name in ("contribution", "share", "final")}})
    long = [f"calibrated, paper, {options}" for options in ("λ 0.1", "λ 10 ρ 0.25 α 0.3 n 8 seed 43")]
    names = ["merged", *(theme.Shown(one, "calibrated") for one in long)]
    titles = [one.text for one in ledger_charts.waterfall(dict.fromkeys(names, frame), None).layout.annotations]
    assert [title.replace("<br>", " ") for title in titles] == names
    assert max(len(line) for title in titles for line in title.split("<br>")) <= 30


def test_tasks_with_markup_or_long_names_stay_apart_on_the_axis() -> None:
    tasks = ["<b>a</b> " + "x" * 40 + end for end in ("1", "2")]
    figure = charts.score_dots(pd.DataFrame({"task": tasks, "merged": [1.0, 2.0]}), ["merged"])
    assert list(figure.data[0].y) == list(figure.layout.yaxis.tickvals) == [1.0, 0.0]
    assert list(figure.data[0].x) == [2.0, 1.0]
    assert list(figure.layout.yaxis.ticktext) == ["&lt;b&gt;a&lt;/b&gt; xxxxxxxxxxxxxx…"] * 2


def test_tasks_are_sorted_by_what_they_gain_and_the_average_stands_apart() -> None:
    scores = {"merged": [50.0, 60.0, 70.0, 60.0], "calibrated": [55.0, 80.0, 69.0, 68.0]}
    frame = pd.DataFrame({"task": ["a", "b", "c", "average"], **scores})
    figure = charts.score_dots(frame, ["merged", "calibrated"], "accuracy, %", ("merged", "calibrated"))
    joined, merged, calibrated, gained = figure.data
    assert list(merged.customdata) == list(figure.layout.yaxis.ticktext) == ["b", "a", "c", "average"]
    assert list(merged.y) == [3.5, 2.5, 1.5, 0.0]
    assert list(calibrated.x) == [80.0, 55.0, 69.0, 68.0]
    assert list(gained.text) == ["+20.0", "+5.0", "-1.0", "+8.0"]
    assert list(joined.x[:3]) == [60.0, 80.0, None]


@pytest.mark.parametrize(("low", "high"), [(83.5, 87.9), (20.0, 95.0), (83.1, 83.4), (50.0, 63.0)])
def test_an_axis_of_scores_has_numbers_on_it(low: float, high: float) -> None:
    frame = pd.DataFrame({"task": ["a", "b"], "merged": [low, low], "expert": [high, high]})
    figure = charts.score_dots(frame, ["merged", "expert"], "accuracy, %")
    start, end = figure.layout.xaxis.range
    assert 1 <= sum(start <= tick <= end for tick in figure.layout.xaxis.tickvals) <= 7


def test_halves_in_a_chart_are_those_of_the_table_beside_it() -> None:
    """Compare halves that floats store as less (60.15, 8.15), and one that they store exactly (6.25)."""
    frame = pd.DataFrame({"task": ["a", "b"], "merged": [52.0, 53.9], "calibrated": [60.15, 60.15]})
    table = ReportTable("c", frame.assign(gain=frame["calibrated"] - frame["merged"]), digits=1)
    pair = ("merged", "calibrated")
    *_, calibrated, gained = charts.score_dots(frame, pair, "accuracy, %", pair).data
    assert [*gained.text] == [f"+{row[3]}" for row in table.rows] == ["+8.2", "+6.3"]
    assert [*calibrated.hovertext] == [row[2] for row in table.rows] == ["60.2", "60.2"]
    drift = charts.score_dots(frame.assign(merged=[0.0625, 0.0004]), ["merged"], "drift").data[-1]
    assert [*drift.text] == ["0.063", "0.000"]
    gains = pd.DataFrame({"task": ["a", "b"], "cosine gain": [0.1, 0.2], "score gain": [8.15, -0.04]})
    assert charts.gains(gains, "accuracy", "calibrated").data[0].hovertext == ("+8.2", "+0.0")
    spread = pd.DataFrame({"task": ["a"], "mean": [60.15], "lowest": [58.15], "highest": [62.0]})
    assert [*repair_charts.spread_bars(spread, "accuracy, %").data[0].customdata[0]] == ["60.2", "58.2", "62.0"]


def test_what_a_model_starts_from_tells_its_label_from_anothers(tiny: Family) -> None:
    """Two rows would have one label, and a reader could not say which calibration was polished."""
    names = [f"polished@calibrated:recipe=informed,lam={lam}@task-arithmetic" for lam in (0.1, 0.5)]
    shown = [f"polished, of calibrated, informed, λ {lam}, of task-arithmetic" for lam in (0.1, 0.5)]
    assert [*label_models(((one, resolve_model(one, tiny)) for one in names), tiny)] == shown
    assert shorten_names(names) == names
    rows = [{"method": one, "n": n, "average": 50.0, "interval": 1.0} for one in names for n in (8, 16)]
    drawn = [str(one.name) for one in study_charts.place_lines(pd.DataFrame(rows), ["n"]).data]
    assert drawn == [one[:47] + "…" for one in names]


def test_two_models_share_one_axis_of_drift() -> None:
    norms = {"mismatch": [0.2, 0.3], "propagation": [0.1, 0.4], "alignment": [0.0, 0.0]}
    frames = {
        name: pd.DataFrame({"layer": ["block 0", "head"], "task": ["x", "y"], "drift": drift, **norms})
        for name, drift in (("merged", [0.3, 0.5]), ("calibrated", [0.2, 0.4]))
    }
    figure = charts.drift_layers(frames, relative=True, chosen="head")
    lines = {one.name: list(one.y) for one in figure.data if one.type == "scatter"}
    assert lines == {"drift, merged": [0.3, 0.5], "drift, calibrated": [0.2, 0.4]}
    assert {one.xaxis for one in figure.data} == {None}
    assert [one.marker.line.color for one in figure.data if one.type == "bar"] == [
        theme.COLOUR[name] for name in ("merged", "merged", "calibrated", "calibrated")
    ]
    rows = charts.drift_tasks(frames, relative=True)
    assert list(rows.data[0].y) == ["x", "y"]  # upwards, the largest drift on top


CONFIG = CalibrationConfig(lam=0.0002, rho=1.2, alpha=0.3, samples=32)
NAMES = {"merged": "merged", "calibrated": "calibrated:lam=0.0002,rho=1.2"}
ORIGIN = Origin(
    "my suite", "validation", {"a": 64, "b": 40}, NAMES, file_words(CONFIG, CalibrationConfig(0.05, 2.0, 0.3))
)


def read(numbers: Numbers) -> pd.DataFrame:
    return pd.read_csv(BytesIO(numbers.csv()))


def test_a_table_says_what_was_measured_in_its_name_and_columns() -> None:
    frame = pd.DataFrame({"model": ["merged", "calibrated"], "task": ["a", "b"], "drift": [0.5, 0.25]})
    numbers = Numbers("drift per task", frame, "norm / norm", ORIGIN)
    assert numbers.name == "drift-per-task-my-suite-lam0.0002-rho1.2-alpha0.3-n32-40-to-64-validation"
    found = read(numbers)
    assert list(found["drift"]) == [0.5, 0.25]
    assert list(found["samples_per_task"]) == [64, 40]
    assert set(found["suite"]) == {"my suite"}
    assert set(found["split"]) == {"validation"}
    assert set(found["units"]) == {"norm / norm"}
    assert list(found["model_name"]) == ["merged", "calibrated:lam=0.0002,rho=1.2"]
    wide = read(replace(numbers, frame=pd.DataFrame({"merged": [1.0], "calibrated": [0.5]})))
    assert list(wide["models"]) == ["merged; calibrated:lam=0.0002,rho=1.2"]


def test_a_table_without_a_calibrated_model_has_no_settings() -> None:
    origin = Origin("s", "validation", {"a": 64, "b": 40})
    found = read(Numbers("drift", pd.DataFrame({"layer": ["head"], "drift": [1.0]}), "norm", origin))
    assert found["models"].isna().all()
    assert list(found["samples_per_task"]) == ["40 to 64"]
    assert (
        read(Numbers("drift", pd.DataFrame({"drift": [1.0]}), "", origin.with_task("b")))["samples_per_task"][0] == 40
    )


def test_every_source_is_relative_to_its_own_deployed_minimum() -> None:
    """`snapshot` has another deployed objective than the others, and so another minimum."""
    found = [
        excess_of("b", "q", "prefix", 0.0, 1.0),
        excess_of("b", "q", "stale", 0.05, 1.0),
        excess_of("b", "q", "snapshot", 0.45, 1.5),
        excess_of("b", "o", "prefix", 0.0, 3.0),
        excess_of("b", "o", "stale", 0.15, 3.0),
        excess_of("b", "o", "snapshot", 0.0, 3.0),
    ]
    frame = ledger_tables.sources_table(found).set_index("source")
    assert frame["relative"].to_dict() == pytest.approx({"prefix": 0.0, "stale": 0.05, "snapshot": 0.1})


def test_labels_of_gains_lie_on_no_other_point_or_label() -> None:
    """Four tasks near one another: names above and below by turns would cover those of the neighbours."""
    gained = [0.100, 0.104, 0.108, 0.3]
    frame = pd.DataFrame({"task": ["faces", "shapes", "flags", "far"], "cosine gain": gained, "score gain": [10.0] * 4})
    sides = charts.gains(frame, "accuracy", "calibrated").data[0].textposition
    assert sides == ("top center", "bottom center", "middle right", "top center")
    apart = frame.assign(**{"cosine gain": [0.1, 0.2, 0.3, 0.4]})
    assert set(charts.gains(apart, "accuracy", "calibrated").data[0].textposition) == {"top center"}


def test_a_cosine_is_drawn_under_the_id_of_its_sample() -> None:
    cosines = {"merged": np.array([0.2, 0.5, 0.9]), "calibrated": np.array([0.6, 0.4, 0.95])}
    figure = sample_charts.cosine_pairs(cosines, Dots((4, 7, 9), ["a", "b", "c"], picked=(7, 9, 30)))
    (samples,) = (one for one in figure.data if one.customdata is not None)
    assert list(zip(samples.customdata, samples.x, samples.y, strict=True)) == [
        (4, 0.2, 0.6),
        (7, 0.5, 0.4),
        (9, 0.9, 0.95),
    ]
    assert list(samples.selectedpoints) == [1, 2]
    (ring,) = (one for one in figure.data if one.name == "selected")
    assert (list(ring.x), list(ring.y)) == ([0.5, 0.9], [0.4, 0.95])


def test_drift_stands_over_the_margin_of_the_expert() -> None:
    table = pd.DataFrame({"expert margin": [1.0, 2.0], "merged drift": [0.5, 0.7], "calibrated drift": [0.3, 0.1]})
    figure = sample_charts.margins(table, ["merged", "calibrated"], Dots((0, 1), ["a", "b"], picked=(1,)))
    drawn = {one.name: (list(one.x), list(one.y)) for one in figure.data}
    assert drawn == {
        "merged": ([1.0, 2.0], [0.5, 0.7]),
        "calibrated": ([1.0, 2.0], [0.3, 0.1]),
        "selected": ([2.0, 2.0], [0.7, 0.1]),
    }


def test_models_that_differ_in_their_last_options_have_lines_of_their_own() -> None:
    names = [f"calibrated:lam=0.001,rho=2,alpha=0.6,samples=256,recipe=refined,beta={beta}" for beta in (0.2, 0.8)]
    study_charts._name_lines(figure := go.Figure(), names)
    assert list(figure.layout.yaxis.tickvals) == names
    assert max(map(len, figure.layout.yaxis.ticktext)) <= 48

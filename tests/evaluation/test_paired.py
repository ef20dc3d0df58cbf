"""Paired intervals and tests: against every draw there is, against scipy, and how often they are right."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import comb
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from lanes import cases_by_message
from scipy.stats import binomtest, bootstrap, spearmanr
from tiny_clip import TASKS

from featcal import cli
from featcal.evaluation.comparison import (
    DRAWS,
    Comparison,
    Counts,
    compare_scores,
    drawn_correlations,
    drawn_means,
    flips,
)
from featcal.evaluation.evaluate import Scores, TaskScore
from featcal.evaluation.language import spearman
from featcal.evaluation.ranks import rank_correlation
from featcal.family.opening import Family
from featcal.figures import sample_charts, sample_tables, tables, theme
from featcal.samples.sources import Samples
from featcal.session import api
from featcal.session.session import Session
from featcal.suite.views import DriftOptions, EvaluationSamples
from featcal.system.errors import InputError

Turned = Sequence[int]


def scores(name: str, **tasks: Sequence[int]) -> Scores:
    """A model that is right where a task's list has 1."""
    made = {}
    for task, right in tasks.items():
        labels = torch.arange(len(right)) % 3
        said = torch.where(torch.tensor(right) == 1, labels, (labels + 1) % 3)
        made[task] = TaskScore("accuracy", sum(right) / len(right), said, labels)
    return Scores("s", name, "test", made)


def ranked(name: str, answers: Sequence[str], right: Sequence[str]) -> Scores:
    made = TaskScore("spearman", spearman(answers, right), tuple(answers), tuple(right))
    return Scores("s", name, "test", {"t": made})


def test_draws_are_spread_as_all_draws_there_are() -> None:
    """All 5^5 ways to draw five samples, each as likely, give the distribution; 50,000 draws come within 4 sigma."""
    turned = np.array([0, -1, 1, 1, 0])
    every = Counter(sum(one) for one in product(turned.tolist(), repeat=5))
    drawn = Counter(np.rint(5 * drawn_means(turned, 50_000, np.random.default_rng(0))).astype(int).tolist())
    assert set(drawn) == set(every) == {*range(-5, 6)}
    for total, ways in every.items():
        share = ways / 5**5
        assert drawn[total] / 50_000 == pytest.approx(share, abs=4 * (share * (1 - share) / 50_000) ** 0.5)


def test_the_average_is_drawn_within_tasks() -> None:
    """All 3^3 * 4^4 pairs of draws of two tasks, and the quantiles of the average of their means."""
    one, two = ([0, 0, 1], [1, 1, 0]), ([0, 1, 1, 0], [1, 0, 1, 0])
    gains = [np.array(after) - np.array(before) for before, after in (one, two)]
    means = [[np.mean(picked) for picked in product(gain, repeat=len(gain))] for gain in gains]
    every = [(left + right) / 2 for left, right in product(*means)]
    found = compare_scores(scores("A", x=one[0], y=two[0]), scores("B", x=one[1], y=two[1]), draws=40_000)
    low, high = np.quantile(every, [0.025, 0.975])
    assert found.average.low == pytest.approx(low, abs=1e-9)
    assert found.average.high == pytest.approx(high, abs=1e-9)
    assert found.average.difference == pytest.approx(np.mean([gain.mean() for gain in gains]))
    assert found.tasks["x"].counts == Counts(2, 1, 0, 0)
    assert found.average.counts == Counts(3, 2, 1, 1)


def test_the_interval_is_scipys() -> None:
    rng = np.random.default_rng(3)
    before, after = (rng.random(200) < 0.6).astype(int), (rng.random(200) < 0.7).astype(int)
    found = compare_scores(scores("A", t=before.tolist()), scores("B", t=after.tolist())).tasks["t"]
    reference = bootstrap((after - before,), np.mean, method="percentile", n_resamples=20_000, rng=1)
    assert found.low == pytest.approx(reference.confidence_interval.low, abs=0.006)  # 0.1 of the interval's half
    assert found.high == pytest.approx(reference.confidence_interval.high, abs=0.006)


@pytest.mark.parametrize(("fixed", "broken"), [(4, 0), (0, 4), (9, 2), (3, 3), (0, 0), (30, 12)])
def test_mcnemar_is_a_sum_of_coin_throws(fixed: int, broken: int) -> None:
    turned, fewer = fixed + broken, min(fixed, broken)
    tail = sum(comb(turned, k) for k in range(fewer + 1)) / 2**turned
    assert Counts(fixed, broken, 7, 8).mcnemar == pytest.approx(min(1.0, 2 * tail))


def test_mcnemar_is_scipys_for_many_samples() -> None:
    assert Counts(4_900, 5_100, 0, 0).mcnemar == pytest.approx(binomtest(4_900, 10_000).pvalue, rel=1e-9)


def test_a_rank_correlation_is_scipys() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.integers(0, 5, 40).astype(float), rng.normal(size=40)
    assert rank_correlation(a, b) == pytest.approx(spearmanr(a, b).statistic, abs=1e-12)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=30))
def test_models_that_change_places_change_the_sign_alone(pairs: list[tuple[bool, bool]]) -> None:
    a, b = (scores(name, t=[int(pair[i]) for pair in pairs]) for i, name in enumerate("AB"))
    there, back = compare_scores(a, b, draws=200).tasks["t"], compare_scores(b, a, draws=200).tasks["t"]
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low))
    assert (there.difference, there.p, there.is_within_noise) == (-back.difference, back.p, back.is_within_noise)
    assert there.counts is not None
    assert back.counts is not None
    assert (there.counts.fixed, there.counts.broken) == (back.counts.broken, back.counts.fixed)
    assert there.low <= there.difference <= there.high


def test_a_model_and_itself_differ_by_nothing() -> None:
    one = scores("A", x=[1, 0, 1, 1], y=[0, 0])
    found = compare_scores(one, replace(one, model="B"))
    for each in (*found.tasks.values(), found.average):
        assert (each.difference, each.low, each.high, each.p, each.is_within_noise) == (0, 0, 0, 1.0, True)


def test_a_task_is_drawn_alike_alone_and_among_others() -> None:
    rng = np.random.default_rng(5)
    x, y, z = (rng.integers(0, 2, 40).tolist() for _ in range(3))
    alone = compare_scores(scores("A", t=x), scores("B", t=y))
    among = compare_scores(scores("A", u=z, t=x), scores("B", u=x, t=y))
    assert alone.tasks["t"] == among.tasks["t"]
    assert alone == compare_scores(scores("A", t=x), scores("B", t=y))
    assert alone.draws == DRAWS
    assert alone.to_json()["draws"] == DRAWS


@pytest.mark.parametrize("tasks", [1, 3])
def test_intervals_hold_the_truth_in_about_95_of_100(tasks: int) -> None:
    """400 pairs of models of which 15 % of samples are fixed and 5 % broken; binomial error of the share: 0.011."""
    rng, held = np.random.default_rng(11), 0
    for _ in range(400):
        drawn = rng.choice([1, -1, 0], p=[0.15, 0.05, 0.8], size=(tasks, 100))
        before = {f"t{i}": np.where(one == 0, 1, one < 0).astype(int).tolist() for i, one in enumerate(drawn)}
        after = {f"t{i}": np.where(one == 0, 1, one > 0).astype(int).tolist() for i, one in enumerate(drawn)}
        found = compare_scores(scores("A", **before), scores("B", **after), draws=500).average
        held += found.low <= 0.1 <= found.high
    assert 0.91 <= held / 400 <= 0.98


def test_two_models_of_one_worth_are_seldom_told_apart() -> None:
    """Few samples turn: where the interval alone would be too sure, the test holds it back."""
    rng, by_interval, by_both = np.random.default_rng(12), 0, 0
    for _ in range(600):
        drawn = rng.choice([1, -1, 0], p=[0.08, 0.08, 0.84], size=64)
        before, after = (np.where(drawn == 0, 1, sign * drawn > 0).astype(int).tolist() for sign in (-1, 1))
        found = compare_scores(scores("A", t=before), scores("B", t=after), draws=500).tasks["t"]
        by_interval += not found.low <= 0 <= found.high
        by_both += not found.is_within_noise
    assert by_interval / 600 > 0.05
    assert by_both / 600 <= 0.05


def test_four_fixed_and_none_broken_are_no_proof() -> None:
    before, after = [0] * 4 + [1] * 60, [1] * 64
    found = compare_scores(scores("A", t=before), scores("B", t=after)).tasks["t"]
    assert found.low > 0
    assert found.p == 0.125
    assert found.is_within_noise
    fifth = compare_scores(scores("A", t=[0] * 6 + [1] * 58), scores("B", t=after)).tasks["t"]
    assert fifth.p == 0.03125
    assert not fifth.is_within_noise


def test_rank_correlations_are_drawn_with_ties_as_scipy_has_them() -> None:
    rng = np.random.default_rng(7)
    right = rng.integers(0, 4, 30).astype(float)
    a, b = right + rng.integers(0, 4, 30), right + rng.integers(0, 2, 30)
    drawn = drawn_correlations(a, b, right, 50, np.random.default_rng(9))
    picked = np.random.default_rng(9).integers(30, size=(50, 30))
    expected = [spearmanr(b[i], right[i]).statistic - spearmanr(a[i], right[i]).statistic for i in picked]
    np.testing.assert_allclose(drawn, expected, atol=1e-12)


def test_a_rank_correlation_has_an_interval_and_no_test() -> None:
    right = [str(i / 2) for i in range(24)]
    better = [str(float(i)) for i in range(24)]
    worse = [str((7 * i) % 24) for i in range(24)]
    found = compare_scores(ranked("A", worse, right), ranked("B", better, right)).tasks["t"]
    assert found.b == 1.0
    assert 0 < found.low < found.difference < found.high
    assert (found.p, found.counts, found.is_within_noise) == (None, None, False)
    constant = compare_scores(ranked("A", ["1"] * 24, right), ranked("B", better, right)).tasks["t"]
    assert (constant.a, constant.low, constant.high) == (0, 1, 1)
    again = compare_scores(ranked("A", better, right), ranked("B", better, right)).tasks["t"]
    assert (again.low, again.high, again.is_within_noise) == (0, 0, True)


def test_an_average_with_a_rank_correlation_counts_no_samples() -> None:
    right = ("1", "2", "3", "4")
    tasks = {"t": ranked("A", right, right).tasks["t"], "u": scores("A", u=[1, 0]).tasks["u"]}
    one = Scores("s", "A", "test", tasks)
    found = compare_scores(one, replace(one, model="B"))
    assert (found.average.counts, found.average.p, found.average.is_within_noise) == (None, None, True)
    assert found.tasks["u"].counts == Counts(0, 0, 1, 1)
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["average"]["fixed"] is None


def test_answers_are_right_but_for_blanks() -> None:
    one = TaskScore("exact_match", 0.5, (" yes", "maybe"), ("yes ", "no"))
    assert one.right is not None
    assert one.right.tolist() == [True, False]
    assert TaskScore("spearman", 0.5, ("1", "2"), ("2", "1")).right is None


OTHER = {
    "not scored on the same tasks": scores("B", u=[1, 0, 1]),
    "task 't': the scores are of different samples": [scores("B", t=[1, 0]), scores("B", t=[1, 0, 1, 1])],
    "task 't': scored by accuracy and by first_token": Scores(
        "s", "B", "test", {"t": replace(scores("B", t=[1, 0, 1]).tasks["t"], metric="first_token")}
    ),
}


@pytest.mark.parametrize(("other", "message"), cases_by_message(OTHER))
def test_scores_of_other_samples_are_refused(other: Scores, message: str) -> None:
    with pytest.raises(InputError, match=message):
        compare_scores(scores("A", t=[1, 0, 1]), other)


def test_no_draws_are_refused() -> None:
    one = scores("A", t=[1, 0, 1])
    with pytest.raises(InputError, match="draws is at least 1, not 0"):
        compare_scores(one, one, draws=0)


@pytest.fixture(scope="module")
def session(tiny: Family) -> Session:
    return Session(tiny)


def test_models_of_a_suite_are_compared_as_they_are_scored(tiny: Family, session: Session) -> None:
    found = api.compare(session, "base", "merged", on=EvaluationSamples(None, "test"))
    assert isinstance(found, Comparison)
    assert (found.suite, found.split, found.a, found.b) == ("tiny", "test", "base", "merged")
    base, merged = api.evaluate(tiny, "base"), api.evaluate(tiny, "merged")
    for task in TASKS:
        one = found.tasks[task]
        assert (one.a, one.b) == (base.tasks[task].value, merged.tasks[task].value)
        assert one.counts is not None
        assert one.counts.both_right + one.counts.fixed == pytest.approx(merged.tasks[task].value * 12)
        assert one.difference == pytest.approx((one.counts.fixed - one.counts.broken) / 12)
    frame = found.to_frame()
    assert frame["task"].tolist() == [*TASKS, "average"]
    assert frame["difference"].iloc[-1] == pytest.approx(merged.average - base.average)


def test_compared_models_are_told_apart_by_their_names(session: Session) -> None:
    names = [f"calibrated:lam={lam},rho=2,alpha=0.3,samples=4" for lam in ("0.1", "5")]
    found = api.compare(session, *names, on=EvaluationSamples(4, "validation"))
    assert [found.a, found.b] == names


def test_the_command_line_compares_two_models(session: Session, tiny_suite_file: Path) -> None:
    def run(*more: str) -> Result:
        return CliRunner().invoke(cli.featcal_command, ["compare", str(tiny_suite_file), *more])

    both = ("--model", "base", "--model", "merged", "--split", "validation", "--eval-samples", "8")
    found = api.compare(session, "base", "merged", on=EvaluationSamples(8, "validation"))
    assert json.loads(run(*both, "--json").stdout) == found.to_json()
    shown = run(*both)
    lines = shown.stdout.splitlines()
    assert lines[0].split()[:2] == ["task", "n"]
    assert [line.split()[0] for line in lines[1:]] == [*TASKS, "average"]
    assert lines[-1].split()[1] == "16"
    assert "A base, B merged; validation split; 5000 bootstrap draws" in shown.stderr
    assert "name the models with --model" in run().stderr


def test_margins_of_a_session_are_those_of_the_ledger(session: Session) -> None:
    view = EvaluationSamples(6)
    ledger = session.measure.drift("merged", DriftOptions(6, output=True))
    own, experts = session.measure.margins("merged", view), session.measure.margins("expert", view)
    assert session.measure.has_features("merged", view)
    assert not session.measure.has_features("merged", EvaluationSamples(7))
    for task in TASKS:
        output = ledger.tasks[task].output
        assert output is not None
        torch.testing.assert_close(experts[task], output.margin, rtol=1e-4, atol=1e-4, check_dtype=False)
        torch.testing.assert_close(own[task], output.model_margin, rtol=1e-4, atol=1e-4, check_dtype=False)


def seen(labels: Sequence[int], texts: tuple[str, ...] | None = None) -> Samples:
    numbers = tuple(range(10, 10 + len(labels)))
    return Samples("t", "test", {}, torch.tensor(labels), numbers, ("cat", "dog"), None, texts)


def test_a_sample_table_has_a_row_for_every_sample() -> None:
    labels = torch.tensor([0, 1, 1, 0])
    data = seen(labels.tolist())
    a, b = torch.tensor([1, 1, 0, 1]), torch.tensor([0, 0, 1, 1])
    blank = sample_tables.PerSample()
    models = {
        "merged": replace(blank.with_scores(data, TaskScore("accuracy", 0.25, a, labels)), margin=np.arange(4.0)),
        "calibrated": blank.with_scores(data, TaskScore("accuracy", 0.5, b, labels)),
    }
    assert sample_tables.sample_table(data, models, "merged", "calibrated").to_dict("list") == {
        "sample": [0, 1, 2, 3],
        "index": [10, 11, 12, 13],
        "flip": ["fixed", "broken", "fixed", "both wrong"],
        "right": ["cat", "dog", "dog", "cat"],
        "merged": ["dog", "dog", "cat", "dog"],
        "merged margin": [0, 1, 2, 3],
        "calibrated": ["cat", "cat", "dog", "dog"],
    }
    assert "flip" not in sample_tables.sample_table(data, models, "merged", "base")


def test_a_sample_table_of_text_has_whole_answers() -> None:
    data = Samples("t", "test", {}, None, (3, 4), None, None, ("a?", "b?"), ("yes", "no"))
    one = sample_tables.PerSample().with_scores(
        data, TaskScore("exact_match", 0.5, ("yes indeed ", "no"), ("yes", "no"))
    )
    table = sample_tables.sample_table(data, {"merged": one})
    assert table["merged"].tolist() == ["yes indeed", "no"]
    assert table["right"].tolist() == ["yes", "no"]
    assert table["text"].tolist() == ["a?", "b?"]


def test_a_ledger_gives_margins_drift_and_certificates(session: Session) -> None:
    task, data = (
        session.measure.drift("merged", DriftOptions(6, output=True)).tasks["pets"],
        session.viewable_samples("pets", EvaluationSamples(6)),
    )
    models = {"expert": sample_tables.expert_samples(data, task), "merged": sample_tables.model_samples(data, task)}
    table = sample_tables.sample_table(data, models)
    assert task.output is not None
    assert table["expert margin"].tolist() == task.output.margin.tolist()
    assert table["merged drift"].tolist() == task.layers[-1].drift.tolist()
    assert table["merged cosine"].tolist() == task.cosine.tolist()
    assert table["merged certified"].tolist() == task.output.is_certified.tolist()
    assert (table["merged"] == table["right"]).tolist() == task.output.correct.tolist()
    assert (table["merged"] == table["expert"]).tolist() == table["merged agrees"].tolist()
    rows = {row["index"]: row for row in task.margins()}
    assert [rows[i]["score_change"] for i in table["index"]] == table["merged score change"].tolist()
    unscored = sample_tables.model_samples(data, replace(task, output=None))
    columns = list(sample_tables.sample_table(data, {"merged": unscored}))
    assert columns == ["sample", "index", "right", "merged drift", "merged cosine"]


def test_rows_of_a_sample_table_are_kept_by_flip_and_sorted_by_size() -> None:
    table = pd.DataFrame(
        {
            "sample": [0, 1, 2, 3],
            "flip": flips([False, True, True, False], [True, False, True, False]),
            "m": [0.5, 0.7, 0.1, 0.9],
        }
    )
    assert sample_tables.select_rows(table, "flipped", "sample")["sample"].tolist() == [0, 1]
    assert sample_tables.select_rows(table, "all", "m")["sample"].tolist() == [3, 1, 0, 2]
    assert sample_tables.select_rows(table, "unchanged", "m")["sample"].tolist() == [3, 2]
    assert sample_tables.select_rows(table.drop(columns="flip"), "fixed", "sample")["sample"].tolist() == [0, 1, 2, 3]


def test_how_much_of_the_flips_a_selection_holds() -> None:
    flip = flips([False, False, True, True, False], [True, True, False, True, False])
    assert sample_tables.share_of_flips(flip, [0, 2, 3, 2, -1, 99]) == {
        "fixed": (1, 2), "broken": (1, 1), "both right": (1, 1), "both wrong": (0, 1),
    }  # fmt: skip


def test_a_score_table_gets_intervals() -> None:
    both = {"merged": scores("merged", t=[0, 0, 1, 0]), "calibrated": scores("calibrated", t=[1, 1, 0, 0])}
    found = compare_scores(*both.values())
    table = sample_tables.with_intervals(tables.score_table(both, ("merged", "calibrated")), found)
    row = table.iloc[0]
    assert row[["task", "merged", "calibrated", "calibrated − merged"]].tolist() == ["t", 25.0, 50.0, 25.0]
    assert row[["from", "to"]].tolist() == [100 * found.tasks["t"].low, 100 * found.tasks["t"].high]
    assert row[["fixed", "broken", "both right", "both wrong"]].tolist() == [2, 1, 0, 1]
    assert (row["McNemar p"], bool(row["within noise"])) == (1.0, True)
    assert table["task"].tolist() == ["t", "average"]
    said = sample_tables.difference_words(found.tasks["t"])
    assert said.startswith("+25.0 points, ")
    assert said.endswith(", within noise")


def test_intervals_are_drawn_grey_where_they_are_noise() -> None:
    found = compare_scores(scores("A", t=[0, 0, 1, 0], u=[0] * 9), scores("B", t=[1, 1, 0, 0], u=[1] * 9))
    noise, sure = (
        next(
            one
            for one in sample_charts.differences_chart(found, ("merged", "calibrated"), "accuracy").data
            if one.name == name
        )
        for name in ("within noise", "beyond noise")
    )
    assert [task for task, *_ in noise.customdata] == ["t"]
    assert [task for task, *_ in sure.customdata] == ["u", "average"]
    assert list(sure.x) == [100 * found.tasks["u"].difference, 100 * found.average.difference]
    assert (list(sure.y), list(noise.y)) == ([2.5, 0.0], [1.5])  # the largest gain on top, the average apart
    assert (noise.marker.color, sure.marker.color) == (theme.COLOUR["base"], theme.COLOUR["calibrated"])
    assert noise.marker.symbol != sure.marker.symbol
    (one,) = noise.x
    assert one - noise.error_x.arrayminus[0] == pytest.approx(100 * found.tasks["t"].low)
    assert one + noise.error_x.array[0] == pytest.approx(100 * found.tasks["t"].high)

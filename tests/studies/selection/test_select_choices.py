"""A repair is chosen without labels, and the default stays within noise."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from selecting import ASKED, COUNT, DEFAULT, REPAIRS, SHORT, scores_of
from tiny_clip import CLASSES, TASKS

from featcal import calibrate, load_suite, measure_drift, select
from featcal.calibration.calibrate import config_for
from featcal.evaluation.heads import ClassificationHead
from featcal.family.opening import Family
from featcal.figures.selection_table import candidate_table, describe_selection
from featcal.formats.weights import Overlay
from featcal.models.model import Model
from featcal.session.model_ref import resolve_model
from featcal.session.session import Session
from featcal.studies.selection import choose, held_out_samples
from featcal.studies.selection.candidates import CandidateModel, candidate_options, merges_to_try, plan_candidates
from featcal.studies.selection.held_out_samples import FOLDS, Fold
from featcal.studies.selection.judge import (
    Score,
    margin,
)
from featcal.studies.selection.outcome import Candidate
from featcal.system.errors import InputError, NumericalError
from featcal.system.resources import cache_folder


def test_candidates_are_the_default_the_start_and_what_is_known_to_help(many: Family) -> None:
    plan = plan_candidates(many, ASKED, ("tsv-m", "ties:scale=1"))
    assert plan[0].config is not None
    assert candidate_options(plan[0].config) == DEFAULT
    assert plan[1] == CandidateModel("merged", None)
    own = [candidate_options(one.config) for one in plan if one.start == "merged" and one.config is not None]
    assert len(own) == REPAIRS
    assert [one["recipe"] for one in own] == ["informed", "paper", "refined", *["informed"] * 5]
    assert own[1]["lam"], own[2]["lam"] == (0.05, 0.01)
    assert [(one["mu"], one["rho"], one["alpha"], one["beta"], one["decisions"]) for one in own[3:]] == [
        (0.1, 2.0, 0.6, 0.5, 0.7),
        (0.2, 1.5, 0.6, 0.5, 0),
        (0.3, 1.0, 0.6, 0.5, 0),
        (0.3, 2.0, 0.6, 0.5, 0),
        (0.1, 2.0, 0.3, 0.0, 0),
    ]
    assert [(one.start, one.config) for one in plan[1 + REPAIRS :]] == [
        ("tsv-m", None),
        ("ties:scale=1", None),
        ("tsv-m", plan[0].config),
        ("ties:scale=1", plan[0].config),
    ]
    assert {(one.config.samples, one.config.layernorms) for one in plan if one.config} == {(COUNT, False)}
    another = replace(ASKED, recipe="refined", lam=0.3, beta=0.1)
    assert CandidateModel("merged", another) in plan_candidates(many, another)
    assert len(plan_candidates(many, another)) == len(plan_candidates(many, ASKED)) + 1
    for one in plan:
        if one.start == "merged" and one.config is not None:
            assert resolve_model(one.name(many), many).config == one.config


def test_all_is_tried_on_another_merge(many: Family, scored: Any) -> None:
    plan, own = plan_candidates(many, ASKED, of="ties"), plan_candidates(many, ASKED)
    assert [(one.start, one.config) for one in plan] == [("ties", one.config) for one in own]
    scored(lambda tried: 0.5, 0.05)
    found = select(many, ASKED, of="ties")
    assert (found.of, found.start, found.model) == ("ties", "ties", plan[4].name(many))
    assert found.calibrated is not None
    expected = Session(many).fit.calibrate(f"{own[4].name(many)}@ties").weights
    for name, tensor in expected.read(many.adapter.tower).items():
        assert tensor.equal(found.calibrated.weights.read([name])[name]), name
    rows, columns = candidate_table(found.to_json())
    assert [row[columns.index("start")] for row in rows if "default" in row[-1]] == ["ties"]
    assert any("the default stays" in line for line in describe_selection(found.to_json()))


def test_a_switch_is_off_in_recipes_that_lack_it(many: Family) -> None:
    asked = config_for(many, recipe="informed", samples=COUNT, weigh_tokens=True)
    plan = [one.config for one in plan_candidates(many, asked) if one.config is not None]
    assert {(one.recipe, one.weigh_tokens) for one in plan} == {
        ("paper", False),
        ("refined", True),
        ("informed", True),
    }


@pytest.mark.parametrize("name", ["regmean", "calibrated", "svc@regmean:samples=8", "expert:pets", "polished@ties"])
def test_a_start_that_saw_samples_is_refused(many: Family, name: str) -> None:
    with pytest.raises(InputError, match=f"start '{name}': .* is not a merge without samples"):
        select(many, ASKED, starts=name)
    with pytest.raises(InputError, match=f"start '{name}': .* is not a merge without samples"):
        select(many, ASKED, of=name)


def test_the_default_stays_within_noise(many: Family, scored: Any) -> None:
    """Others are better by chance, some of them by a lot: noise alone decides here."""
    scored(lambda tried: 0.5, 0.05)
    found = select(many, ASKED)
    assert found.config is not None
    assert found.config == found.default
    assert candidate_options(found.config) == {**DEFAULT, "decisions": 0.7}
    assert found.candidates[0].model != found.model
    assert found.candidates[0].margin is not None
    assert found.candidates[0].margin.difference > 0
    assert found.candidates[0].margin.is_within_noise
    assert found.margin is not None
    assert (found.margin.difference, found.margin.low, found.margin.high) == (0, 0, 0)
    assert found.verdict is not None
    assert found.verdict.sentence.startswith("start and repair cannot be told apart: merged as it is")
    assert found.to_json()["start_wins"] is False


def test_errors_are_weighed_by_default_where_they_can_be_and_samples_suffice(
    many: Family, monkeypatch: pytest.MonkeyPatch, scored: Any
) -> None:
    """Else "informed" at its defaults is what all are compared with."""
    scored(lambda tried: 0.5 - 0.2 * bool(tried.config and tried.config.decisions), 0.05)
    found = select(many, ASKED)  # what stays may be worse, too
    assert found.config is not None
    assert (found.default.decisions, found.config.decisions) == (0.7, 0)
    fewer = select(many, replace(ASKED, samples=COUNT - 1))
    assert candidate_options(fewer.default) == DEFAULT
    real = Fold.values

    def failing(fold: Fold, tried: CandidateModel, *more: Any) -> Any:
        if tried.config is not None and tried.config.decisions:
            raise InputError("there are no decisions")
        return real(fold, tried, *more)

    monkeypatch.setattr(Fold, "values", failing)
    monkeypatch.setenv("FEATCAL_CACHE", str(cache_folder() / "another"))
    found = select(many, ASKED)
    assert candidate_options(found.default) == candidate_options(found.config or ASKED) == DEFAULT
    assert found.margin is not None
    assert found.margin.difference == 0


def test_a_planted_better_candidate_wins(many: Family, scored: Any) -> None:
    scored(lambda tried: 0.5 + 0.2 * bool(tried.config and tried.config.recipe == "refined"), 0.05)
    found = select(many, ASKED)
    assert found.config is not None
    assert found.config.recipe == "refined"
    assert found.margin is not None
    assert found.margin.low > 0
    assert found.margin.difference == pytest.approx(0.2, abs=0.06)
    assert found.candidates[0].model == found.model


def test_a_short_time_goes_to_the_default_and_to_what_is_best_on_the_first_fold(
    many: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only the candidates move, a second each; a cell's own account says two."""
    clock, seen = [0.0], list[CandidateModel]()

    def values(fold: Fold, tried: CandidateModel, *_: Any) -> dict[str, tuple[float, ...]]:
        clock[0] += 1
        seen.append(tried)
        value = 0.9 if tried == best else 0.5 + 0.001 * plan.index(tried)  # those that are always kept are the worst
        return {task: (value,) * len(fold.held[task]) for task in TASKS}

    monkeypatch.setattr(Fold, "values", values)
    clocks = SimpleNamespace(monotonic=lambda: clock[0], perf_counter=lambda: 2 * clock[0])
    monkeypatch.setattr(choose, "time", clocks)
    plan, best = plan_candidates(many, ASKED, merges_to_try(1)), CandidateModel("ties", None)
    first = plan.index(best) + 1
    # A quarter of the time is just enough for the first fold up to the best; half of those fit into the rest.
    found = select(many, ASKED, minutes=FOLDS * first / 60)
    assert (found.start, found.config) == ("ties", None)
    assert seen[:first] == plan[:first]
    kept = {plan[0], plan[1], best, *plan[first - first // 2 + 2 : first - 1]}
    assert plan[2] not in kept
    assert {one.model for one in found.candidates} == {one.name(many) for one in kept}
    assert len(seen) == first + (FOLDS - 1) * len(kept)
    assert f"{len(plan) - len(kept)} candidates did not fit into {FOLDS * first / 60:g} minutes" in str(found.notes)
    # With more time it goes on: nothing that was found is computed again.
    assert len(select(many, ASKED, minutes=1000).candidates) == len(plan)
    assert len(seen) == FOLDS * len(plan)
    with pytest.raises(InputError, match="minutes is '1'; give a number above 0"):
        select(many, ASKED, minutes="1", starts="ties")
    with pytest.raises(InputError, match="minutes is 0; give a number above 0"):
        select(many, ASKED, minutes=0)


def test_of_several_that_are_better_the_best_wins_and_one_within_noise_does_not() -> None:
    def candidate(name: str, value: float, low: float) -> Candidate:
        score = Score("decision", {"t": (value,)})
        held = replace(margin(score, score), b=value, low=low, high=1.0)
        return Candidate(name, "merged", None, score, held, "", 0.0)

    default = candidate("default", 0.5, 0.0)
    unsure, better, best = candidate("u", 0.9, -0.1), candidate("c", 0.7, 0.1), candidate("b", 0.8, 0.1)
    assert choose._choose([unsure, best, better, default], "default") is best
    assert choose._choose([unsure, default], "default") is default
    failed = replace(default, score=None, margin=None, failure="singular")
    assert choose._choose([replace(unsure, margin=None), failed], "default").model == "u"
    with pytest.raises(NumericalError, match="default: singular"):
        choose._choose([failed], "default")


def test_the_start_wins_where_calibration_hurts(many: Family, monkeypatch: pytest.MonkeyPatch, short: None) -> None:
    """The merged model is the very expert of both tasks, and calibration, which is a bad one here, gives the base."""
    head = ClassificationHead(20 * torch.randn(3, 8, generator=torch.Generator().manual_seed(0)))
    expert = Model(many.experts["pets"], heads=dict.fromkeys(TASKS, head))
    base = many.base.read(many.adapter.tower)
    fit = SimpleNamespace(weights=Overlay("", expert, base))
    monkeypatch.setattr(held_out_samples, "calibrate_family", lambda *_, **__: fit)
    found = select(replace(many, merged=expert, experts=dict.fromkeys(TASKS, expert)), ASKED)
    assert found.config is None
    assert (found.model, found.start, found.calibrated) == ("merged", "merged", None)
    assert found.verdict is not None
    assert found.verdict.start_wins
    assert found.verdict.sentence.startswith("a start is better than any repair: merged as it is is above")
    assert found.margin is not None
    assert found.margin.low > 0
    document = found.to_json()
    assert (document["chosen"], document["start_wins"]) == (None, True)


@pytest.mark.slow
def test_the_choice_is_made_of_all_samples(many: Family, short: None) -> None:
    session = Session(many)
    found = select(session, ASKED)
    assert found.calibrated is not None
    assert found.config is not None
    again = calibrate(many, found.config)
    for name, tensor in again.weights.read(many.adapter.tower).items():
        assert tensor.equal(found.calibrated.weights.read([name])[name]), name
    assert {task: one["samples"] for task, one in again.record["tasks"].items()} == dict.fromkeys(TASKS, COUNT)
    assert session.fit.calibrate(found.config) is found.calibrated
    assert len(found.candidates) == SHORT
    assert found.calibrations == 4 * (SHORT - 1) + 1
    assert resolve_model(found.to_json()["model"], many).config == found.config
    assert [one.score.value for one in found.candidates if one.score] == sorted(
        (one.score.value for one in found.candidates if one.score), reverse=True
    )


@pytest.mark.slow
def test_only_calibration_samples_are_read_and_no_label(
    many_file: Path, many: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: None
) -> None:
    """The suite's other splits have no file; with labels, and wrong ones, every number is the same."""
    read: list[str] = []
    real = Family.samples

    def counted(family: Family, task: str, split: str, *more: Any, **options: Any) -> Any:
        read.append(split)
        return real(family, task, split, *more, **options)

    monkeypatch.setattr(Family, "samples", counted)
    bare = select(many, ASKED, starts=["tsv-m"])
    assert set(read) == {"calibration"}
    for split in ("validation", "test"):
        with pytest.raises(InputError, match="does not exist"):
            measure_drift(many, "merged", split=split)
    document = bare.to_json()
    assert document["read"] == {"split": "calibration", "seed": 42, "samples": dict.fromkeys(TASKS, COUNT)}
    for task in TASKS:
        assert sorted(chain(*document["folds"][task])) == list(range(COUNT))

    shutil.copytree(many_file.parent, tmp_path / "labelled")
    pictures = load_file(many_file.parent / "calibration.safetensors")
    labels = {f"{task}.y": torch.arange(COUNT) % len(CLASSES) for task in TASKS}
    save_file(pictures | labels, tmp_path / "labelled" / "calibration.safetensors")
    content = yaml.safe_load(many_file.read_text())
    for task in TASKS:
        content["tasks"][task]["calibration"]["labels"] = f"{task}.y"
    (tmp_path / "labelled" / "suite.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "another"))
    labelled = select(load_suite(tmp_path / "labelled" / "suite.yaml"), ASKED, starts=["tsv-m"], device="cpu")
    assert scores_of(labelled) == scores_of(bare)


@pytest.mark.slow
def test_a_candidate_that_fails_is_named_and_never_chosen(many: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    real, broken = Fold.values, {"informed"}

    def failing(fold: Fold, tried: CandidateModel, *more: Any) -> Any:
        if tried.config is None or tried.config.recipe in broken:
            raise NumericalError("block 0: the system is singular")
        return real(fold, tried, *more)

    monkeypatch.setattr(Fold, "values", failing)
    found = select(many, ASKED)
    assert found.config is not None
    assert found.config.recipe in ("paper", "refined")
    assert found.margin is None  # the default has no score
    assert found.verdict is None
    failures = [one.failure for one in found.candidates if one.score is None]
    assert failures == ["block 0: the system is singular"] * 7
    broken |= {"paper", "refined"}
    monkeypatch.setenv("FEATCAL_CACHE", str(cache_folder() / "another"))
    with pytest.raises(NumericalError, match=r"recipe=informed.*: block 0: the system is singular"):
        select(many, ASKED)

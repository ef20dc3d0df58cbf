"""Studies beyond the method table: what is measured at which place, by numbers of single measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner
from clip_config import clip_config

from featcal import evaluate, measure_drift
from featcal.calibration.calibrate import calibrate_family
from featcal.cli import featcal_command
from featcal.family.opening import Family, open_family
from featcal.figures import study_tables
from featcal.session.model_ref import resolve_model
from featcal.session.session import Session
from featcal.studies import ablate, budget, corrupt, schedule, tasks
from featcal.studies.maker import Maker
from featcal.studies.plan import StudyPlan
from featcal.studies.runner import Views
from featcal.studies.study import Study
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.schema import load_suite
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import InputError

CONFIG = clip_config(samples=8)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def own(tiny: Family) -> Session:
    return Session(tiny)


def plan(*methods: str, **options: Any) -> StudyPlan:
    return StudyPlan(methods, **{"seeds": (42,), "samples": 8, **options})


def drifts(study: Study, method: str) -> dict[Any, float]:
    """Mean drift of a method by the place in the study."""
    return {
        tuple(row.point.at.values()): float(np.mean(list(row.found.drift.values())))
        for row in study.rows
        if row.method == method
    }


def drift_of(family: Family, model: Any, samples: int = 64) -> float:
    ledger = measure_drift(family, model, samples=samples)
    return float(np.mean([one.layers[-1].relative_drift for one in ledger.tasks.values()]))


@pytest.mark.slow
def test_budgets_are_calibrations_on_so_many_samples(own: Session, tiny: Family) -> None:
    study = budget.study_budget(own, plan("merged", "calibrated", seeds=(42, 43)), (2, 5))
    assert [(row.method, row.point.at["n"], row.point.seed) for row in study.rows] == [
        (method, count, seed)
        for count in (2, 5)
        for method, seed in (("expert", None), ("merged", None), ("calibrated", 42), ("calibrated", 43))
    ]
    for row in study.rows:
        if row.method != "calibrated":
            continue
        config = replace(CONFIG, samples=int(row.point.at["n"]), seed=row.point.seed or 0)
        assert np.mean(list(row.found.drift.values())) == pytest.approx(
            drift_of(tiny, calibrate_family(tiny, config)), abs=1e-5
        )
    assert "n" in study_tables.text_cells(study.summaries())[1]


def test_a_budget_counts_the_samples_of_every_method(own: Session) -> None:
    """A name with samples of its own would stand at every number and be the same model."""
    with pytest.raises(InputError, match="'calibrated:samples=4' sets its own number of samples"):
        budget.study_budget(own, plan("merged", "calibrated:samples=4"), (2, 5))


def test_what_another_study_has_measured_is_not_measured_again(own: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    budget.study_budget(own, plan("merged", "calibrated"), (5, 8))
    monkeypatch.setattr(Maker, "make", None)
    again = budget.study_budget(own, plan("calibrated", "merged"), (8,))
    assert len(again.rows) == 3


@pytest.mark.parametrize("recipe", ["paper", "refined"])
def test_lag_0_is_algorithm_1(tiny64: Family, recipe: str) -> None:
    """Block by block on the finished blocks before it: the same weights as all at once."""
    config = resolve_model(f"calibrated:recipe={recipe},samples=8", tiny64).config
    assert isinstance(config, CalibrationConfig)
    whole = calibrate_family(tiny64, config).weights
    # What the recipe brings, and all blocks by a text, as a caller may write them.
    asked = CalibrationConfig(recipe=recipe, samples=8, blocks=("block 0,block 1,block 2",))
    found = schedule.calibrate_behind(Session(tiny64), asked, 0)
    for name, tensor in whole.read(tiny64.adapter.tower).items():
        torch.testing.assert_close(found.read([name])[name], tensor, rtol=1e-9, atol=1e-10)


def test_stale_and_parallel_blocks_are_fitted_on_their_own_features(tiny64: Family) -> None:
    """Block 2 of the stale order is fitted after a calibrated block 0 and a merged block 1; all of them agree on
    block 0, and stale and parallel on block 1."""
    blocks = list(tiny64.adapter.blocks())
    layers = list(tiny64.adapter.block_layers())
    stale, parallel = (schedule.calibrate_behind(Session(tiny64), CONFIG, lag) for lag in (1, len(blocks)))
    alone = [calibrate_family(tiny64, replace(CONFIG, blocks=(layer,))).weights for layer in layers]
    without_1 = calibrate_family(tiny64, replace(CONFIG, blocks=(layers[0], layers[2]))).weights

    def same(one: Any, other: Any, number: int) -> bool:
        names = blocks[number].names
        pairs = zip(one.read(names).values(), other.read(names).values(), strict=True)
        return all(torch.allclose(a, b, rtol=1e-9, atol=1e-10) for a, b in pairs)

    assert all(same(parallel, alone[number], number) for number in range(3))
    assert same(stale, parallel, 0)
    assert same(stale, parallel, 1)
    assert same(stale, without_1, 2)
    assert not same(stale, parallel, 2)
    assert not same(calibrate_family(tiny64, CONFIG).weights, parallel, 1)


@pytest.mark.slow
def test_schedules_are_measured_side_by_side(own: Session, tiny: Family) -> None:
    study = schedule.study_schedule(own, plan("calibrated"))
    found = drifts(study, "calibrated")
    assert list(found) == [("forward",), ("stale",), ("parallel",)]
    assert found["forward",] == pytest.approx(drift_of(tiny, calibrate_family(tiny, CONFIG)), abs=1e-5)
    parallel = schedule.calibrate_behind(own, CONFIG, 3)
    assert found["parallel",] == pytest.approx(drift_of(tiny, parallel), abs=1e-5)
    assert len({*found.values()}) == 3
    predicted = {one.at["schedule"]: one.beside for one in study.summaries() if one.at}
    sources = own.fit.sources(CONFIG)
    for order, source in (("stale", "stale"), ("parallel", "merged")):
        of_source = [one.relative for one in sources if one.source == source]
        assert predicted[order] == {"excess": pytest.approx(np.mean(of_source), abs=1e-6)}
    assert predicted["forward"] == {}
    assert predicted["parallel"]["excess"] > predicted["stale"]["excess"] > 0
    assert study_tables.text_cells(study.summaries())[1][-2:] == ["excess", "needs"]
    refined = schedule.study_schedule(own, plan("calibrated:recipe=refined"))
    assert all(row.found.beside == {} and not row.found.failure for row in refined.rows)
    with pytest.raises(InputError, match="is not a calibration"):
        schedule.study_schedule(own, plan("calibrated", "merged"))
    with pytest.raises(InputError, match="calibrated:samples=6@base calibrates another model"):
        schedule.study_schedule(own, plan("calibrated@merged", "calibrated:samples=6@base"))


@pytest.mark.slow
def test_parts_are_taken_out_one_by_one(own: Session, tiny: Family) -> None:
    study = ablate.study_ablation(own, plan("merged"))
    configs = {row.method: resolve_model(row.point.model, tiny).config for row in study.rows}
    whole = configs["paper: whole"]
    assert whole == replace(CONFIG)
    changed = {
        "paper: no biases": {"biases": False},
        "paper: no LayerNorms": {"layernorms": False},
        "paper: all tokens alike": {"patch_weight": 1.0},
        "paper: attention alone": {"maps": ("attention",)},
        "paper: mlp alone": {"maps": ("mlp",)},
        "paper: anchor at the merged model": {"rho": 1.0},
        "paper: deployed features alone": {"alpha": 0.0},
        "paper: expert features alone": {"alpha": 1.0},
    }
    assert {name: one for name, one in configs.items() if name.startswith("paper") and name != "paper: whole"} == {
        name: replace(CONFIG, **change) for name, change in changed.items()
    }
    refined = configs["refined: whole"]
    assert isinstance(refined, CalibrationConfig)
    assert configs["refined: refreshed, no stream targets"] == replace(refined, beta=0.0)
    assert configs["refined: paper's options"] == replace(CONFIG, recipe="refined", beta=0.0)
    informed = [name for _, name in ablate.variants(Session(tiny), "informed")]
    assert len({resolve_model(name, tiny).key for name in informed}) == len(informed)  # no model under two names
    assert [row.method for row in study.rows if row.found.failure] == []
    assert len({row.mean for row in study.rows}) > 3


def test_switches_that_mean_nothing_to_an_architecture_are_left_out() -> None:
    session = Session(open_family(load_suite("t5-mini"), device="cpu"))
    names = dict(ablate.variants(session, "paper"))
    assert "no biases" not in names
    assert "all tokens alike" not in names
    assert names["with RMSNorm scales"] == "calibrated:recipe=paper,rmsnorms=true"
    for name in names.values():
        resolve_model(name, session.family)


@pytest.mark.slow
def test_fewer_tasks_are_merged_and_calibrated_anew(own: Session, own_suite_file: Path) -> None:
    study = tasks.study_task_counts(own, plan("merged", "calibrated"), (1, 2))
    content = yaml.safe_load(own_suite_file.read_text())
    del content["tasks"]["signs"]
    own_suite_file.write_text(yaml.safe_dump(content))
    alone = open_family(load_suite(own_suite_file), device="cpu")
    for row in study.rows:
        family = alone if row.point.at["tasks"] == 1 else own.family
        assert row.found.scores.keys() == family.experts.keys()
        scores = evaluate(family, row.point.model).tasks
        assert {t: one.value for t, one in row.found.scores.items()} == {
            t: round(one.value, 6) for t, one in scores.items()
        }
    assert [row.point.at["tasks"] for row in study.rows] == [1, 1, 1, 2, 2, 2]
    with pytest.raises(InputError, match="3 tasks"):
        tasks.study_task_counts(own, plan("merged"), (3,))


def test_a_checkpoint_of_all_tasks_has_no_first_ones(
    edit_suite: Callable[[Callable[[dict[str, Any]], None]], Path],
) -> None:
    file = edit_suite(lambda content: content.update(merged="base"))
    with pytest.raises(InputError, match="checkpoint of all tasks"):
        tasks.study_task_counts(Session(open_family(load_suite(file), device="cpu")), plan("merged"), (1,))


@pytest.mark.slow
def test_corrupted_calibration_is_measured_on_clean_samples() -> None:
    """On the embedded suite: a place is the model calibrated on the corrupted suite, measured on the clean one."""
    clean = open_family(load_suite("clip-mini"), device="cpu")
    few = Views(EvaluationSamples(16, "test"), EvaluationSamples(16))
    study = corrupt.study_corruption(Session(clean), plan("calibrated", on=few), ("fog", "fog"), (5, 5))
    with pytest.raises(InputError, match=r"calibration pictures of .* are corrupted, so that none would be clean"):
        corrupt.study_corruption(
            Session(replace(clean, suite=corrupt.corrupt_suite(clean.suite, "fog", 5))), plan("merged")
        )
    noisy = open_family(corrupt.corrupt_suite(clean.suite, "fog", 5), device="cpu")
    found = drifts(study, "calibrated")
    assert len(study.rows) == 3  # the experts, and the two
    assert [*found] == [("clean", 0), ("fog", 5)]
    assert found["clean", 0] == pytest.approx(drift_of(clean, calibrate_family(clean, CONFIG), 16), abs=1e-5)
    assert found["fog", 5] == pytest.approx(drift_of(clean, calibrate_family(noisy, CONFIG), 16), abs=1e-5)
    assert found["fog", 5] > found["clean", 0]


@pytest.mark.parametrize(
    "arguments",
    [
        ["budget", "--counts", "4,8", "--model", "merged"],
        pytest.param(["schedule", "--model", "calibrated", "--samples", "4"], marks=pytest.mark.slow),
        ["tasks", "--counts", "2", "--model", "merged"],
    ],
)
def test_commands_print_their_study(tiny_suite_file: Path, arguments: list[str]) -> None:
    name, *options = arguments
    asked = ["study", name, str(tiny_suite_file), "--seeds", "42", "--eval-samples", "5", "--json", *options]
    document = json.loads(CliRunner().invoke(featcal_command, asked, standalone_mode=False).stdout)
    assert document["study"] == name
    assert document["on"]["scores"] == {"split": "test", "samples": 5, "seed": 42}
    assert all(one["at"] for one in document["rows"] if one["method"] not in ("merged", "expert") or name != "schedule")


def test_what_is_said_twice_is_measured_once(own: Session) -> None:
    """Two rows of one seed would have an interval of no width."""
    assert plan("calibrated", seeds=(43, 42, 43)).seeds == (43, 42)
    study = budget.study_budget(own, plan("merged", seeds=(42, 42)), (2, 2))
    assert [(row.method, row.point.at["n"]) for row in study.rows] == [("expert", 2), ("merged", 2)]
    study = tasks.study_task_counts(own, plan("merged"), (2, 2))
    assert [(row.method, row.point.at["tasks"]) for row in study.rows] == [("expert", 2), ("merged", 2)]


@pytest.mark.parametrize("options", [{"seeds": ()}, {"samples": 0}])
def test_plans_need_something(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        plan("merged", **options)
    with pytest.raises(InputError):
        plan()

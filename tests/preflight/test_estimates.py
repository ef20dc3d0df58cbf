"""Time, memory and disk of a calibration, estimated before it begins."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from clip_config import clip_config
from command_line import Run
from suite_edits import Edit

from featcal.calibration.calibrate import config_for
from featcal.calibration.memory import gradient_bytes, working_bytes
from featcal.family.opening import Family, open_family
from featcal.models import whole_forward
from featcal.models.whole_forward import tape_bytes
from featcal.preflight import estimates
from featcal.preflight.check import check_suite
from featcal.preflight.samples import DrawSize
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.schema import load_suite
from featcal.system.resources import data_path


@pytest.mark.slow
def test_memory_and_disk_are_near_what_a_run_takes(tmp_path: Path) -> None:
    content = yaml.safe_load(data_path("clip-mini", "suite.yaml").read_text())
    content["calibration"] = {"samples": 8}
    for entry in (content, *content["tasks"].values()):
        for key in {"base", "expert"} & entry.keys():
            entry[key] = str(data_path("clip-mini", entry[key]))
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(content))
    found = check_suite(load_suite(tmp_path / "suite.yaml"), probe=False).estimates
    assert found is not None
    run = ["calibrate", str(tmp_path / "suite.yaml"), "--samples", "8", "--out", str(tmp_path / "out"), "--json"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "featcal", *run], check=True, capture_output=True, text=True, env=alone
    )
    assert 0.5 < found.memory_bytes / json.loads(done.stdout)["peak_rss_bytes"] < 2
    assert found.disk_bytes == pytest.approx((tmp_path / "out" / "model.safetensors").stat().st_size, rel=0.1)
    assert found.samples == 8


def test_the_start_of_a_process_is_told_apart(tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running app is spared it: it promised 10 s for what took 1.7."""
    monkeypatch.setattr(estimates, "gemm_rate", lambda dtype: 1e30)
    monkeypatch.setattr(estimates, "CALL", 0.0)
    monkeypatch.setattr(estimates, "DISK_SPEED", 1e30)
    found = check_suite(load_suite(tiny_suite_file), probe=False).estimates
    assert found is not None
    assert found.seconds == pytest.approx(found.start_seconds)
    assert found.start_seconds == estimates.START
    assert found.generation_seconds == 0  # it generates nothing


@pytest.mark.slow
def test_the_check_of_what_a_model_writes_is_estimated_beside_the_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell of it before: it took three quarters of a command on T5 with eight tasks."""
    family = open_family(load_suite("t5-mini"), device="cpu")
    drawn = {task: DrawSize(64, 36.0, 1.0) for task in family.suite.tasks}
    monkeypatch.setattr(estimates, "gemm_rate", lambda dtype: math.inf)
    monkeypatch.setattr(estimates, "TOKENS", 64)  # tests write fewer
    weights = sum(one.numel() for one in family.merged.read(family.adapter.tower).values())
    found = estimates.generation_seconds(family.adapter, family.merged.info, drawn)
    tasks = len(drawn)  # 16 prompts each, of 100 tokens with their answers; 4096 of these are written at once
    assert found == pytest.approx(64 * (tasks + 2 * math.ceil(1600 * tasks / 4096)) * 4 * weights / 5e9)
    whole = estimates.estimate(family.adapter, family.merged.info, drawn, config_for(family), 4, Path())
    assert whole.to_json()["generation_seconds"] == pytest.approx(found)
    scores = 64 * family.merged.info["shared.weight"].shape[0] * 4  # bytes of an answer's
    memory = estimates.generation_bytes(family.adapter, family.merged.info, drawn)
    assert memory == 4 * weights + tasks * 16 * scores + 3 * 8 * scores
    assert whole.memory_bytes >= estimates.LIBRARIES + 4 * weights + memory
    monkeypatch.setattr(estimates, "ROOM", 0)  # the answers of one task are kept all the same
    assert estimates.generation_bytes(family.adapter, family.merged.info, drawn) == memory - (tasks - 1) * 16 * scores


def test_every_part_is_estimated_at_the_speed_of_its_dtype(tiny: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "CALL", 0.0)
    drawn, seconds = {task: DrawSize(64, 5.0, 100.0) for task in tiny.suite.tasks}, {}
    for precision in ("exact", "fast"):
        config = CalibrationConfig(lam=0.05, precision=precision)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            monkeypatch.setattr(estimates, "gemm_rate", lambda asked, one=dtype: 1e9 if asked is one else math.inf)
            seconds[precision, dtype] = estimates.calibration_seconds(tiny.adapter, drawn, config)
    assert min(seconds["exact", torch.float64], seconds["exact", torch.float32]) > 0
    assert seconds["exact", torch.bfloat16] == seconds["fast", torch.float64] == 0
    # fast: features and products in bfloat16, the solve in float32.
    assert seconds["fast", torch.bfloat16] == seconds["exact", torch.float32]
    assert seconds["fast", torch.float32] == seconds["exact", torch.float64]


def test_tasks_that_take_no_part_cost_nothing(tiny: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "gemm_rate", lambda dtype: 1e9)
    info, (first, second) = tiny.merged.info, tiny.suite.tasks
    drawn = {first: DrawSize(8, 5.0, 100.0), second: DrawSize(10**6, 500.0, 1e6)}
    alone, chosen = (
        estimates.estimate(tiny.adapter, info, of, clip_config(tasks=tasks), 4, Path())
        for of, tasks in (({first: drawn[first]}, None), (drawn, (first,)))
    )
    assert chosen.memory_bytes == alone.memory_bytes
    assert (chosen.seconds, chosen.samples) == (alone.seconds, 8)


def test_errors_weighed_by_decisions_take_longer_and_more_memory(
    tiny: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every task's own matrices wait for the solve, and gradients go through a whole expert before it."""
    monkeypatch.setattr(estimates, "gemm_rate", lambda dtype: 1e9)
    monkeypatch.setattr(estimates, "DISK_SPEED", 1e30)
    drawn = {task: DrawSize(4, 17.0, 1) for task in tiny.experts}
    plain, weighed = (config_for(tiny, recipe="informed", decisions=one, samples=4) for one in (0.0, 0.7))
    before, after = (
        estimates.estimate(tiny.adapter, tiny.merged.info, drawn, one, 3, tmp_path).seconds - estimates.START
        for one in (plain, weighed)
    )
    assert after == pytest.approx(estimates.WITH_DECISIONS * before, rel=1e-6)
    (stage,), info = tiny.adapter.stages, tiny.merged.info
    hidden, width = stage.blocks[0].maps["mlp.fc1"].weight.shape
    grown = [working_bytes(stage, 0, info, weighed, 1, tasks) for tasks in (100, 200)]
    assert grown[1] - grown[0] == 100 * 4 * (hidden**2 / 2 + hidden * width)
    same = [working_bytes(stage, 0, info, plain, 1, tasks) for tasks in (100, 200)]
    assert same[0] == same[1]
    stages = tiny.adapter.stages
    weights, kept = sum(4 * m.weight.numel() for b in stage.blocks for m in b.maps.values()), tape_bytes(stages, 17)
    assert gradient_bytes(stages, 17, 4) == weights + 4 * kept
    monkeypatch.setattr(whole_forward, "TAPE", 3 * kept)
    assert gradient_bytes(stages, 17, 4) == weights + 3 * kept


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "noted"), [(1e9, True), (1.4e11, False), (2e11, False)])
def test_slow_bfloat16_is_said_before_anyone_waits_for_it(
    rate: float, noted: bool, run: Run, edit_suite: Edit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimates, "gemm_rate", lambda dtype: rate if dtype is torch.bfloat16 else 1.5e11)
    said = "multiplies bfloat16 150 times as slowly as float32; precision exact is faster"
    suite = edit_suite(lambda content: content.update(calibration={"precision": "fast", "samples": 4}))
    assert any(said in note for note in check_suite(load_suite(suite), probe=False).notes) == noted
    for command in (("study", "sweep", suite, "--eval-samples", 4), ("select", suite)):
        assert (said in run(*command, "--device", "cpu")[2]) == noted
    calibrate = ("calibrate", suite, "--device", "cpu", "--out")
    assert (said in run(*calibrate, tmp_path / "fast")[2]) == noted
    assert "slow" not in run(*calibrate, tmp_path / "exact", "--precision", "exact")[2]


def test_operations_of_a_block_counted_by_hand(tiny: Family) -> None:
    (stage,) = tiny.adapter.stages
    forward, products, solve = estimates._operations(stage, 0, [100, 10], CalibrationConfig())
    assert forward == 2 * (4 * 16 * 16 + 2 * 16 * 32) * 110
    gram = 110 * (3 * 16**2 + 32**2)
    targets = {  # of the task with 100 tokens and the one with 10, by the cheapest of the three routes
        "q, k, v": 16 * (100 + 48) * 16 + 16 * (10 + 48) * 16,
        "out": 16 * (100 + 16) * 16 + 2 * 10 * 16 * 16,
        "fc1": 16 * (100 + 32) * 16 + 2 * 10 * 32 * 16,
        "fc2": 16 * (100 + 32) * 32 + 2 * 10 * 16 * 32,
    }
    assert products == gram + 2 * sum(targets.values())
    assert solve == pytest.approx(3 * 16**3 / 3 + 32**3 / 3 + 2 * (48 + 16 + 32) * 16**2 + 2 * 16 * 32**2)
    last = estimates._operations(stage, len(stage.blocks) - 1, [100, 10], CalibrationConfig())
    assert last[0] == forward
    assert last[1] > products  # the query has a matrix of its own

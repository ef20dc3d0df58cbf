"""What the benchmarks compute: the reference they compare with, operations, lines, memory of a process tree."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import adapters
import b32
import families
import gpu
import load
import measure
import pytest
import reference
import roofline
import scale
import sessions
import torch
from safetensors.torch import load_file, save_file

from featcal.calibration.calibrate import calibrate_family
from featcal.family.opening import Family, open_family
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.schema import load_suite

SHAPE = families.ClipShape(width=8, hidden=16, blocks=2, heads=2, patch=4, image=8)
LLAMA = families.LlamaShape(width=16, hidden=24, blocks=3, heads=4, kv_heads=2, vocabulary=32)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_reference_is_the_same_calibration(tiny: Family, alpha: float) -> None:
    config = CalibrationConfig(samples=7, lam=0.05, alpha=alpha, rho=1.7)
    ours = calibrate_family(tiny, config).weights
    pixels = {task: tiny.samples(task, "calibration", 7, config.seed).inputs["pixel_values"] for task in tiny.experts}
    theirs, seconds = reference.calibrate(tiny, pixels, config)
    for name, tensor in ours.read(tiny.adapter.tower).items():
        assert float((theirs[name] - tensor).norm() / tensor.norm()) <= 1e-4, name
    assert set(seconds) == {"load", "embeddings", "student forward", "expert forward", "moments", "solve"}
    merged = tiny.merged.read(tiny.adapter.tower)
    moved = {name for name, tensor in merged.items() if not theirs[name].equal(tensor)}
    assert moved == {name for block in tiny.adapter.blocks() for name in block.names}


def test_operations_of_a_small_model_counted_by_hand() -> None:
    """d = 8, f = 16, 2 blocks, 5 tokens; 3 samples are 15 rows: more than d, fewer than f."""
    found = roofline.clip_flops(SHAPE, tasks=1, samples=3)
    rows, patches = 15, 2 * 3 * 4 * (3 * 16) * 8
    linear = 2 * rows * (3 * 64 + 64 + 128 + 128)
    attention = 2 * (2 * 3 * 5 * 5 * 8)
    assert found.expert_forward == patches + 2 * (linear + attention)
    assert found.student_forward == patches + 2 * (2 * (linear + attention) - 2 * rows * 128)
    mixed_inputs = rows * 72 + 2 * rows * 64  # Gram matrix, and mixed inputs against inputs
    qkv, out, fc1 = (mixed_inputs + 2 * 64 * outputs for outputs in (24, 8, 16))
    fc2 = rows * 16 * 17 + 2 * 2 * rows * 128  # the expert's weight on every row, and the rows against inputs
    # in the last block the query is counted apart from keys and values
    assert found.moments == 2 * (qkv + out + fc1 + fc2) + mixed_inputs
    third, solves = 8**3 / 3, 2 * 64
    one = third + solves * 24 + third + solves * 8 + third + solves * 16 + 16**3 / 3 + 2 * 256 * 8
    assert found.solve == pytest.approx(2 * one + third, rel=1e-12)


def test_operations_of_a_prior_counted_by_hand() -> None:
    """Three tasks; the wide map of 16 inputs and 8 outputs goes by its small side."""
    paper, informed = (roofline.clip_flops(SHAPE, 3, 3, informed=one) for one in (False, True))
    square = 3 * (8 * 8 * 9 + 2 * 8**3) + 2 * 8**3
    tall = 3 * (16 * 8 * 9 + 2 * 16 * 64) + 2 * 16 * 64
    wide = 3 * (8 * 16 * 17 + 16 * 8 * 9 + 2 * 64 * 16) + 2 * 8 * 256
    assert informed.prior == 2 * (4 * square + tall + wide)
    # Query, keys and values have a factor each: of six maps per block in place of three systems, one of them shared.
    assert informed.solve - paper.solve == pytest.approx((2 + 1) * 8**3 / 3)
    assert informed.total == pytest.approx(paper.total + informed.prior + informed.solve - paper.solve)


def test_operations_grow_with_tasks_but_those_of_the_solve() -> None:
    one, four = (roofline.clip_flops(SHAPE, tasks, 3) for tasks in (1, 4))
    assert four.solve == one.solve
    assert four.total - four.solve == pytest.approx(4 * (one.total - one.solve))


def test_ideal_time_takes_every_part_at_the_peak_of_its_dtype() -> None:
    flops = roofline.Flops(expert_forward=10, student_forward=20, moments=30, solve=40)
    peaks = {"float32": 10.0, "float64": 2.0, "bfloat16": 100.0}
    assert roofline.ideal_seconds(flops, peaks, "exact", 0.05) == pytest.approx(1 + 2 + 3 + 20)
    assert roofline.ideal_seconds(flops, peaks, "fast", 0.05) == pytest.approx(0.1 + 0.2 + 0.3 + 4)
    assert roofline.ideal_seconds(flops, peaks, "fast", 0.001) == pytest.approx(0.1 + 0.2 + 3 + 20)


def test_sentences_hide_no_module_of_the_benchmarks() -> None:
    """The suite of sentences takes a script from beside t5-mini, where another measure.py lies."""
    importlib.import_module("sentences")
    found = PathFinder.find_spec("measure")
    assert found is not None
    assert found.origin == str(measure.BENCHMARKS / "measure.py")


def test_line_is_exact_on_a_line_and_says_when_there_is_none() -> None:
    exact = measure.line([1, 2, 5, 9], [3.5, 5.5, 11.5, 19.5])
    assert (exact.slope, exact.intercept) == pytest.approx((2.0, 1.5), abs=1e-12)
    assert exact.r2 == pytest.approx(1.0, abs=1e-12)
    assert measure.line([1, 2, 3, 4], [1, 4, 9, 16]).r2 == pytest.approx(0.9689922480620154)
    assert measure.line([1, 2, 3, 4], [1, -1, -1, 1]).r2 == pytest.approx(0.0, abs=1e-12)


@pytest.mark.slow
def test_memory_of_a_process_and_its_children_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 MB in the process, 60 MB more in its child while both live."""
    monkeypatch.setattr(measure, "POLL_SHARED", 0.5)
    child = "b = bytearray(60_000_000); import time; time.sleep(1.2)"
    code = (
        "import json, subprocess, sys, time; time.sleep(0.5); start = time.monotonic(); a = bytearray(80_000_000);"
        f"subprocess.run([sys.executable, '-c', {child!r}]); print(json.dumps([start, time.monotonic()]))"
    )
    run = measure.run([sys.executable, "-c", code])
    start, end = run.document
    before, peak = run.before(start), run.peak([start, end])
    assert before is not None
    assert peak["rss"] - before.rss > 140_000_000
    assert run.peak([0, start - 0.2])["rss"] < 60_000_000
    if before.anonymous is not None:
        assert peak["anonymous"] - before.anonymous > 135_000_000
        assert 130_000_000 < peak["pss"] <= peak["rss"]
    assert run.seconds >= 1.7


def test_a_failing_command_is_not_a_measurement() -> None:
    with pytest.raises(SystemExit, match="failed with status 3"):
        measure.run([sys.executable, "-c", "raise SystemExit(3)"])


def test_random_clip_is_written_once_and_calibrates(tmp_path: Path) -> None:
    file = families.clip_suite(tmp_path, SHAPE, tasks=3, samples=4)
    root = file.parent
    written = (root / "base" / "model.safetensors").stat().st_mtime_ns
    assert families.clip_suite(tmp_path, SHAPE, tasks=3, samples=4) == file
    assert (root / "base" / "model.safetensors").stat().st_mtime_ns == written
    names = [root / "experts" / f"t{task}" / "model.safetensors" for task in range(3)]
    assert names[0].samefile(names[2])
    assert not names[0].samefile(names[1])
    family = open_family(load_suite(file), "cpu")
    models = [load_file(root / name / "model.safetensors") for name in ("base", "expert-0", "expert-1", "merged")]
    for name, base in models[0].items():
        ours, theirs, merged = (model[name] - base for model in models[1:])
        assert float(ours.norm() / base.norm()) == pytest.approx(families.EXPERT_DISTANCE, rel=1e-3)
        torch.testing.assert_close(merged, families.SCALE * (ours + theirs), atol=1e-6, rtol=1e-4)
    record = calibrate_family(family, CalibrationConfig(samples=4)).record
    assert {task: entry["samples"] for task, entry in record["tasks"].items()} == {"t0": 4, "t1": 4, "t2": 4}


def test_random_llama_has_its_shards_and_calibrates(tmp_path: Path) -> None:
    file = families.llama_suite(tmp_path, LLAMA, tasks=2, samples=4, length=6)
    base = file.parent / "base"
    places = json.loads((base / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(list(base.glob("*.safetensors"))) == 4 == len(set(places.values()))
    assert any(len({f for n, f in places.items() if n.startswith(f"model.layers.{i}.")}) > 1 for i in range(3))
    family = open_family(load_suite(file), "cpu")
    assert {info.dtype for info in family.base.info.values()} == {torch.bfloat16}
    record = calibrate_family(family, CalibrationConfig(samples=4, lam=0.1, rho=0.5)).record
    assert record["tasks"]["t0"]["tokens"] == 21  # one row of four is padded to half


def test_another_shape_is_another_folder(tmp_path: Path) -> None:
    first = families.clip_suite(tmp_path, SHAPE, tasks=1, samples=1)
    second = families.clip_suite(tmp_path, replace(SHAPE, blocks=1), tasks=1, samples=1)
    assert first.parent != second.parent


def test_the_largest_difference_names_its_tensor(tmp_path: Path) -> None:
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    save_file({"near": torch.tensor([3.0, 4.01]), "far": torch.tensor([1.0, 1.0])}, one)
    save_file({"near": torch.tensor([3.0, 4.0]), "far": torch.tensor([1.0, 3.0]), "more": torch.ones(1)}, other)
    found = b32.largest_difference(one, other)
    assert found["tensor"] == "far"
    assert found["value"] == pytest.approx(2 / 10**0.5)


@pytest.mark.parametrize(
    ("later", "found"),
    [
        ({"drift 0": [1.0, 2.0 + 1e-5], "score": [80.5]}, []),
        ({"drift 0": [1.0, 2.001], "score": [80.5]}, ["drift 0"]),
        ({"drift 0": [1.0, math.nan], "score": [80.5]}, ["drift 0"]),
        ({"drift 0": [1.0], "score": [80.6]}, ["drift 0", "score"]),
        ({"drift 0": [1.0, 2.0]}, ["score"]),
    ],
)
def test_sessions_that_see_other_numbers_are_found(later: dict[str, list[float]], found: list[str]) -> None:
    log, options = sessions.Log(), ("drift", "rho 2")
    log.finished(sessions.Shown(options, {"drift 0": [1.0, 2.0], "score": [80.5]}), 0.1)
    assert not log.good  # nothing to compare with yet
    log.finished(sessions.Shown(("drift", "rho 1"), {"drift 0": [7.0]}), 0.1)
    log.finished(sessions.Shown(options, later), 0.2)
    assert log.compared == 1
    assert [one.partition(":")[0] for one in log.differing] == found
    assert log.good is not bool(found)
    log.failed("ValueError")
    assert not log.good


@pytest.mark.parametrize(("needed", "visits"), [(0, 1), (3, 3)])
def test_sessions_go_on_until_enough_was_compared(needed: int, visits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def visit(address: str, suites: object, over: Callable[[], bool], dice: object, log: sessions.Log) -> None:
        while True:
            log.compared += 1
            log.overtook()
            seen.append(log.compared)
            if over():
                return

    monkeypatch.setattr(sessions, "visit", visit)
    server: Any = SimpleNamespace(address="http://localhost")
    sessions.load(server, [], sessions=1, seconds=0, wanted=sessions.Wanted(needed, needed))
    assert len(seen) == visits
    with pytest.raises(TimeoutError, match="fewer than 1000000"):
        sessions.load(server, [], sessions=1, seconds=0, wanted=sessions.Wanted(10**6, 0, seconds=0.01))


def test_heights_of_a_trace_are_read() -> None:
    assert sessions.heights({"x": [0, 1], "y": [1, 2.5]}) == [1.0, 2.5]
    assert sessions.heights({"x": ["a"], "y": ["b"], "z": [[1, 2.5]]}) == [1.0, 2.5]
    assert sessions.heights({"x": [52.0, 80.0], "y": ["arrows", "arrows"]}) == [52.0, 80.0]
    assert sessions.heights({"y": ["arrows"]}) == []


@pytest.mark.usefixtures("all_tokens")
def test_the_model_of_costs_holds_on_runs_it_was_not_fitted_on() -> None:
    runs = scale.read_runs()
    constants = scale.fit_constants([run for run in runs if run["fitted"]])
    held_out = [run for run in runs if not run["fitted"]]
    assert {run["shape"] for run in held_out} - {run["shape"] for run in runs if run["fitted"]}
    assert min(constants) >= 0
    for run in held_out:
        assert scale.predict(constants, run) == pytest.approx(run["core_seconds"], rel=0.15)


def test_the_runs_of_the_page_are_those_that_the_script_measures() -> None:
    names = [field.name for field in fields(scale.Planned)]
    assert [scale.Planned(**{name: run[name] for name in names}) for run in scale.read_runs()] == scale.PLAN


@pytest.mark.usefixtures("all_tokens")
def test_the_page_of_scale_has_what_the_script_makes() -> None:
    page = scale.PAGE.read_text(encoding="utf-8")
    assert scale.fill_page(page, scale.read_runs()) == page


def test_sizes_of_the_large_models() -> None:
    assert scale.MODELS["8B"].parameters == pytest.approx(8.03e9, rel=0.01)
    assert scale.MODELS["70B"].parameters == pytest.approx(70.6e9, rel=0.01)


def test_what_more_processes_change() -> None:
    """Counting is shared, solving by at most four, and nobody reads more experts than it has tasks."""
    model = scale.MODELS["8B"]
    one, five, ten = (scale.need(model, 5, size) for size in (1, 5, 10))
    assert one.exchange == 0
    assert one.counting == pytest.approx(5 * five.counting, rel=0.01)
    assert five.counting == pytest.approx(2 * ten.counting, rel=0.05)
    assert five.read_bytes == ten.read_bytes == 2 * model.parameters * 4
    assert one.solving / five.solving < 4
    assert five.solving == ten.solving


def test_visitors_of_the_load_test_have_options_of_their_own() -> None:
    everyone = load.visitors(60)
    assert len({who.query.partition("beside=calibrated")[2] for who in everyone}) == 60
    assert {who.query.split("&")[0] for who in everyone} == {f"suite={name}" for name in load.SUITES}
    with pytest.raises(ValueError, match="for 60 visitors, not for 61"):
        load.visitors(61)


def test_cross_talk_is_a_page_that_a_visitor_alone_sees_otherwise() -> None:
    def saw(query: str, **pages: list[float]) -> load.Visitor:
        return load.Visitor(query, {(page,): {"chart": numbers} for page, numbers in pages.items()})

    many = [saw("suite=a&1", p=[1.0, 2.0], q=[3.0]), saw("suite=a&2", p=[5.0, 2.0]), saw("suite=b&3", p=[1.0, 2.0])]
    assert load.against(many, [saw("suite=a&1", p=[1.0, 2.0]), saw("suite=a&2", p=[5.0, 2.0]), saw("", q=[0.0])]) == (
        2,
        [],
    )
    assert load.against(many[:1], [saw("suite=a&1", p=[5.0, 2.0], q=[3.0])]) == (2, ["chart: suite=a&1"])
    assert load.alike(many) == 0.0  # the third is of another suite
    assert load.alike([saw("suite=a&1", p=[1.0]), saw("suite=a&2", p=[1.0])]) == 1.0
    changed = saw("suite=a&1", p=[1.0])
    changed.look(sessions.Shown(("p",), {"chart": [1.0]}))
    assert changed.changed == []
    changed.look(sessions.Shown(("p",), {"chart": [2.0]}))
    assert changed.changed == ["chart"]


def test_memory_of_a_server_is_followed_by_its_second_half() -> None:
    climbing = [(0.0, 0), (10.0, 500), (20.0, 100), (30.0, 110), (40.0, 120)]
    assert load.bounded(climbing) == {"first": 0, "most": 500, "last": 120, "growth_per_hour": pytest.approx(3600)}


def test_what_nobody_saw_of_a_server_is_none_and_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """A run can be too short for a line, and every look of it can end in an error."""
    few = load.bounded([(0.0, 7), (5.0, 9)])
    assert few == {"first": 7, "most": 9, "last": 9, "growth_per_hour": None}
    measure.show({"memory": few, "none": load.bounded([]), "waits": load.waiting(sessions.Log())})
    assert json.loads(capsys.readouterr().out)["waits"] is None
    assert load.waiting(sessions.Log(waits=[3.0, 1.0, 2.0])) == {"median": 2.0, "p95": 3.0, "worst": 3.0}


def test_a_stopped_measurement_of_adapters_goes_on_with_what_is_left() -> None:
    rows = [{"suite": suite, "rank": rank} for suite in "abc" for rank in range(3)]
    assert adapters.rows_to_keep(rows, ["a", "b"], 3) == rows[6:]  # all was done: both are measured anew
    assert adapters.rows_to_keep(rows[:5], ["a", "b"], 3) == rows[:5]
    assert adapters.rows_to_keep(rows, ["a", "d"], 3) == rows


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "up"), [("paper", 8.7), ("refined", 11.2)])
def test_the_path_of_a_gpu_is_walked_without_one(recipe: str, up: float, tmp_path: Path) -> None:
    suite = families.clip_suite(tmp_path, gpu.DRY, gpu.DRY_TASKS, gpu.DRY_SAMPLES)
    row = gpu.walk(suite, recipe, "exact")
    block = 4 * (4 * gpu.DRY.width**2 + 2 * gpu.DRY.width * gpu.DRY.hidden)
    assert row["largest_difference"] < 1e-5
    # Every model once, the student as often as it changes, and the pictures. Of a recipe in pieces the two experts once
    # more, each piece what it counts: never a block anew for each of its pieces.
    assert row["up_bytes_per_block"] < up * block
    assert row["waits_per_block"] < 50


@pytest.mark.slow
def test_a_record_of_a_gpu_goes_on_where_a_part_fails() -> None:
    """A part that fails, one that is compared with the CPU, one that takes too long."""
    parts = [
        gpu.Part("broken", ["-c", "raise SystemExit('no such kernel')"]),
        gpu.Part("compared", ["-c", "print('[1.0, {\"a\": 2.0}]')"], ["-c", "print('[1.0, {\"a\": 1.0}]')"]),
        gpu.Part("long", ["-c", "import time; time.sleep(60)"]),
    ]
    found = list(gpu.run_parts(parts, limit=2.0))
    assert [one["ended"].split(":")[0] for one in found] == ["status 1", "well", "out of time"]
    assert "no such kernel" in found[0]["ended"]
    assert found[1]["largest_difference"] == 0.5
    page = gpu.page({"machine": measure.machine(), "parts": found})
    assert page.count("`python -c") == 3
    assert "5.0e-01" in page


@pytest.mark.slow
def test_the_record_of_a_gpu_is_rehearsed_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole commands are set beside their ideal; numbers of both devices are the same, since both are one."""
    words = ["gpu.py", "--device", "cpu", "--small", "--out", str(tmp_path / "gpu"), "--work", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(gpu, "LIMIT", 3600)  # a busy machine is no failure
    gpu.main()
    parts = json.loads((tmp_path / "gpu" / "gpu.json").read_text(encoding="utf-8"))["parts"]
    assert [part["ended"] for part in parts] == ["well"] * len(parts), parts
    assert [part["largest_difference"] for part in parts if "largest_difference" in part] == [0.0, 0.0]
    (run,) = parts[-2]["found"]["runs"]
    assert run["command"] == "drift"
    assert 0 < run["ideal"] < run["wall"]
    page = (tmp_path / "gpu" / "gpu.md").read_text(encoding="utf-8")
    assert page.count("| paper |") == 2
    assert str(tmp_path) not in page

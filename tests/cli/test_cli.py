"""The command line: documents, exit statuses, and one clear message for everything that is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from clean_process import end_command, in_clean_process
from command_line import Run, document
from PIL import Image
from safetensors.torch import load_file
from suite_edits import Edit
from tiny_clip import BLOCKS, SIDE, TASKS
from tiny_text import write_text_suite

from featcal.calibration import calibrate as calibrate_module
from featcal.calibration.memory import MemoryLimits
from featcal.cli.options import Size
from featcal.family.opening import Family
from featcal.formats.output import OutputFolder
from featcal.session.measurements import Measurements
from featcal.session.session import Session
from featcal.studies import sweep as sweep_module
from featcal.studies.sweep import Grid
from featcal.suite import schema as suite_module
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.views import DriftOptions, EvaluationSamples
from featcal.system.errors import InputError


def test_suites(run: Run) -> None:
    suites = document(run("suite", "list", "--json"))["suites"]
    assert "clip-mini" in [suite["name"] for suite in suites]


def test_of_several_processes_each_would_do_it_all(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, err = run("suite", "list")
    assert (code, out) == (1, "")
    assert "Start it without torchrun; only calibrate can use several" in err


@pytest.mark.parametrize(("command", "spins"), [(("suite", "list"), "1000"), (("app", "--help"), None)])
def test_threads_of_commands_sleep_soon_and_those_of_the_app_do_not(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], spins: str | None
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert run(*command)[0] == 0
    assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_check_finds_nothing_wrong(run: Run, tiny_suite_file: Path) -> None:
    found = document(run("check", tiny_suite_file, "--json"))
    assert (found["ok"], found["problems"], found["blocks"], found["tasks"]) == (True, [], BLOCKS, len(TASKS))


def test_check_reports_all_problems_and_exits_1(run: Run, own_suite_file: Path) -> None:
    root = own_suite_file.parent
    (root / "samples.safetensors").unlink()
    expert = root / "experts" / "pets" / "model.safetensors"
    expert.write_bytes(expert.read_bytes()[:50])
    code, out, _ = run("check", own_suite_file, "--json")
    problems = json.loads(out)["problems"]
    assert code == 1
    assert len(problems) == 1 + 3 * len(TASKS)
    code, _, err = run("check", own_suite_file)
    assert code == 1
    assert all(problem in err for problem in problems)


def test_merge(run: Run, tiny_suite_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "merged"
    written = document(run("merge", tiny_suite_file, "--method", "task-arithmetic", "--out", out, "--json"))
    assert (written["out"], written["method"], written["scale"]) == (
        str(out),
        "task-arithmetic",
        0.5,
    )  # the suite's own scale
    assert (out / "model.safetensors").is_file()


def test_a_merge_by_its_whole_name(run: Run, tiny_suite_file: Path, tmp_path: Path, tiny: Family) -> None:
    """`--method` takes the options that `--model` takes, of a merge method as of a baseline."""
    name, out = "ties:density=0.3,scale=0.5", tmp_path / "merged"
    written = document(run("merge", tiny_suite_file, "--method", name, "--out", out, "--json"))
    assert (written["method"], written["density"], written["scale"]) == ("ties", 0.3, 0.5)
    named = Session(tiny).fit.weights(name).read(tiny.adapter.tower)
    found = load_file(out / "model.safetensors")
    assert all(found[one].equal(tensor) for one, tensor in named.items())
    again = tmp_path / "again"
    document(run("merge", tiny_suite_file, "--method", "ties:density=0.3", "--scale", 0.5, "--out", again, "--json"))
    assert all(found[one].equal(tensor) for one, tensor in load_file(again / "model.safetensors").items())


def test_a_merge_says_where_it_is_computed(run: Run, tiny_suite_file: Path, tmp_path: Path) -> None:
    for method in ("regmean:samples=4", "ties"):
        out = tmp_path / method[:4]
        written = document(run("merge", tiny_suite_file, "--method", method, "--device", "cpu", "--out", out, "--json"))
        assert written["machine"]["device"] == "cpu"
    for method in ("regmean", "ties"):
        code, _, err = run("merge", tiny_suite_file, "--method", method, "--device", "abacus", "--out", tmp_path / "o")
        assert (code, "device 'abacus'" in err) == (1, True)


def test_a_merge_that_does_not_fit_whole_is_verified_by_blocks(run: Run, tiny_suite_file: Path, tmp_path: Path) -> None:
    """The same tensors, whichever way they are verified."""
    found = {}
    for how, limit in (("reloaded", "1000GiB"), ("streamed", "1MiB")):
        out = tmp_path / how
        code, _, err = run("merge", tiny_suite_file, "--method", "ties", "--max-memory", limit, "--out", out)
        assert code == 0, err
        assert json.loads((out / "featcal.json").read_text())["verified"] == how
        found[how] = {name: t for file in out.glob("*.safetensors") for name, t in load_file(file).items()}
    assert found["reloaded"].keys() == found["streamed"].keys()
    assert all(tensor.equal(found["streamed"][name]) for name, tensor in found["reloaded"].items())


def test_drift(run: Run, tiny_suite_file: Path) -> None:
    ledger = document(run("drift", tiny_suite_file, "--json", "--eval-samples", 4, "--split", "calibration"))
    assert ledger["split"] == "calibration"
    assert {entry["samples"] for entry in ledger["tasks"].values()} == {4}


def test_margins_are_printed_sample_by_sample(run: Run, tiny_suite_file: Path) -> None:
    code, out, _ = run("drift", tiny_suite_file, "--margins", "--eval-samples", 3)
    assert code == 0
    header, *rows = out.split("\n\n")[-1].splitlines()
    assert "certified" in header
    assert [row.split()[0] for row in rows] == [task for task in TASKS for _ in range(3)]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--lm-eval-args", "--limit 8"), "--lm-eval-args needs --lm-eval"),
        (("--lm-eval", "gsm8k", "--lm-eval-args", "'open"), "--lm-eval-args cannot be read: No closing quotation"),
    ],
)
def test_arguments_of_the_harness_are_not_ignored(
    arguments: tuple[str, ...], problem: str, run: Run, tiny_suite_file: Path
) -> None:
    code, _, err = run("evaluate", tiny_suite_file, *arguments)
    assert code == 2
    assert problem in err


def test_a_study_of_nothing_is_refused(run: Run, tiny_suite_file: Path) -> None:
    code, _, err = run("study", "corrupt", tiny_suite_file, "--kinds", ",")
    assert code == 1
    assert "no kind or severity of corruption is named" in err


def test_the_folder_of_a_document_is_missed_before_the_work(run: Run, tiny_suite_file: Path, tmp_path: Path) -> None:
    for command in (("compare", "--model", "merged"), ("select",)):
        code, _, err = run(*command, tiny_suite_file, "--out", tmp_path / "nowhere" / "found.json")
        assert code == 1
        assert f"there is no folder {tmp_path / 'nowhere'}; make it, or name another file" in err


def test_a_path_to_write_may_begin_at_home_and_is_not_empty(
    run: Run, tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run("merge", tiny_suite_file, "--out=~/merged")[0] == 0
    assert (tmp_path / "merged" / "config.json").is_file()
    code, _, err = run("merge", tiny_suite_file, "--out", "")
    assert code == 2
    assert "it is empty; name a file or folder" in err


@pytest.mark.slow
def test_drift_with_everything(run: Run, tiny_suite_file: Path) -> None:
    options = ("--attribution", "--output", "--margins", "--source", "--maps", "--depth", "--sample", 5)
    options += ("--tokens", "each", "--eval-samples", 6)
    ledger = document(run("drift", tiny_suite_file, *options, "--json"))
    for entry in ledger["tasks"].values():
        assert sum(layer["share"] for layer in entry["layers"]) == pytest.approx(1.0, abs=1e-5)
        assert 0 <= entry["output"]["certified"] <= entry["output"]["agreement"] <= 1
        assert len(entry["margins"]) == entry["samples"] == 6
        assert all(row["agrees"] for row in entry["margins"] if row["certified"])
        assert entry["depth"][-1]["agreement"] == entry["output"]["agreement"]
        assert len(entry["course"]) == 2 * 3 * BLOCKS
        assert {row["layer"] for row in entry["tokens"]} == {layer["layer"] for layer in entry["layers"]}
        assert [row["map"] for row in entry["maps"][-2:]] == ["mlp.fc1", "mlp.fc2"]
    assert {one["source"] for one in ledger["sources"]} == {"prefix", "stale", "merged", "expert", "snapshot"}
    assert all(one["excess"] >= -1e-9 for one in ledger["sources"])
    code, out, _ = run("drift", tiny_suite_file, *options)
    assert code == 0
    assert all(
        word in out
        for word in (
            "share",
            "tightness",
            "coupling",
            "relative_mismatch",
            "probability",
            "class token",
        )
    )


def test_calibrate_then_use_the_folder_everywhere(run: Run, tiny_suite_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--lam", 0.01, "--rho", 1.5, "--alpha", 0.5, "--samples", 6, "--seed", 7)
    made = document(run("calibrate", tiny_suite_file, "--out", out, *options, "--json"))
    assert made["out"] == str(out)
    assert {k: made["config"][k] for k in ("lam", "rho", "alpha", "samples", "seed")} == {
        "lam": 0.01, "rho": 1.5, "alpha": 0.5, "samples": 6, "seed": 7,
    }  # fmt: skip
    assert made["tasks"]["pets"]["samples"] == 6
    assert made["tasks"]["pets"]["tokens"] == 60
    assert made["seconds"]["total"] > 0
    assert sorted(path.name for path in out.iterdir()) == made["written"]
    beside = json.loads((out / "featcal.json").read_text())
    assert beside == {key: value for key, value in made.items() if key != "out"}
    assert document(run("drift", tiny_suite_file, "--model", out, "--json"))["model"] == str(out)
    assert 0 <= document(run("evaluate", tiny_suite_file, "--model", out, "--json"))["average"] <= 1
    two = [f"calibrated:samples=2,lam={lam}" for lam in (0.1, 10)]
    for command in ("drift", "evaluate"):
        asked = [word for name in two for word in ("--model", name)]
        both = document(run(command, tiny_suite_file, *asked, "--eval-samples", "2", "--json"))["models"]
        assert [one["model"] for one in both] == two
    recorded = document(run("drift", tiny_suite_file, "--model", out, "--source", "--json"))["sources"]
    assert all(one["excess"] <= 1e-9 for one in recorded if one["source"] == "prefix")
    again = document(run("export", out, "--out", tmp_path / "again", "--json"))
    assert again["written"] == made["written"]
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "again"))
    assert all(ours[name].equal(theirs[name]) for name in ours)


def test_every_option_of_a_calibration_arrives(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[CalibrationConfig, dict[str, Any]]] = []

    def take(family: Family, config: CalibrationConfig, out: Path, **more: Any) -> None:
        taken.append((config, more))
        raise InputError("seen")

    monkeypatch.setattr(calibrate_module, "calibrate_to_folder", take)
    suite = write_text_suite(tmp_path / "text", "llama")
    numbers = ("--lam", 0.1, "--rho", 1.5, "--alpha", 0.2, "--samples", 5, "--batch-size", 3, "--seed", 9)
    switches = ("--no-biases", "--no-layernorms", "--rmsnorms", "--completion-only", "--precision", "fast", "--resume")
    limits = ("--max-memory", "2kB", "--max-device-memory", "3kB")
    code, _, err = run("calibrate", suite, "--out", tmp_path / "o", *numbers, *switches, *limits)
    assert (code, "seen" in err) == (1, True), err
    ((config, more),) = taken
    off = {"beta": 0.0, "mu": 0.0, "biases": False, "layernorms": False}
    on = {"rmsnorms": True, "completion_only": True}
    assert config == CalibrationConfig(0.1, 1.5, 0.2, 5, 9, batch_size=3, precision="fast", **off, **on)
    assert (more["resume"], more["max_memory"]) == (True, MemoryLimits(2000, 3000))


def test_every_option_of_a_sweep_arrives(run: Run, tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[Grid, EvaluationSamples]] = []

    def take(session: Session, grid: Grid, *_: object, on: EvaluationSamples, **__: object) -> None:
        taken.append((grid, on))
        raise InputError("seen")

    monkeypatch.setattr(sweep_module, "run_sweep", take)
    values = (
        "--lam",
        "0.1,1",
        "--rho",
        "1.5",
        "--samples",
        5,
        "--eval-samples",
        3,
        "--seed",
        9,
        "--no-biases",
        "--no-layernorms",
    )
    parts = ("--blocks", "block 0", "--blocks", "block 2", "--maps", "mlp", "--tasks", TASKS[1])
    for more in (parts, ()):
        code, _, err = run("study", "sweep", tiny_suite_file, *values, *more)
        assert (code, "seen" in err) == (1, True), err
    numbers = {"lam": 0.05, "rho": 2.0, "alpha": 0.3, "beta": 0.0, "mu": 0.0}  # the suite's own
    whole = CalibrationConfig(**numbers, samples=5, seed=9, biases=False, layernorms=False)
    part = replace(whole, blocks=("block 0", "block 2"), maps=("mlp",), tasks=TASKS[1:])
    assert taken == [(Grid((0.1, 1.0), (1.5,), (0.3,), one), EvaluationSamples(3)) for one in (part, whole)]


def test_every_option_of_a_drift_arrives(run: Run, tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[str, DriftOptions]] = []

    def take(measure: Measurements, model: str, options: DriftOptions, progress: object) -> None:
        taken.append((model, options))
        raise InputError("seen")

    monkeypatch.setattr(Measurements, "drift", take)
    given = ("--model", "base", "--eval-samples", 5, "--split", "test", "--seed", 3, "--tokens", "class")
    for more in (("--sublayers", "--attribution", "--output"), ("--margins",), ()):
        code, _, err = run("drift", tiny_suite_file, *given, *more)
        assert (code, "seen" in err) == (1, True), err
    assert taken == [
        ("base", DriftOptions(5, "test", 3, "class", sublayers=True, attribution=True, output=True)),
        ("base", DriftOptions(5, "test", 3, "class", output=True)),
        ("base", DriftOptions(5, "test", 3, "class")),
    ]


def test_tables_are_for_people(run: Run, tiny_suite_file: Path, tmp_path: Path) -> None:
    code, out, _ = run("evaluate", tiny_suite_file, "--model", "expert")
    assert code == 0
    assert out.splitlines()[0].split() == ["task", "metric", "%", "n"]
    assert out.splitlines()[-1].split()[0] == "average"
    code, out, _ = run("calibrate", tiny_suite_file, "--out", tmp_path / "o", "--samples", 4)
    assert code == 0
    assert [line[:7] for line in out.splitlines() if line.startswith(("block", "vision"))][1:] == [
        f"block {i}" for i in range(BLOCKS)
    ]
    assert f"written to {tmp_path / 'o'}" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("drift", "nowhere"), "no suite 'nowhere'"),
        (("calibrate", "SUITE", "--out", "OUT", "--lam", -1), "lam is -1; it is at least 0 and finite"),
        (("calibrate", "SUITE", "--out", "OUT", "--alpha", 1.5), "alpha is 1.5; it lies in [0, 1]"),
        (("calibrate", "SUITE", "--out", "OUT", "--rho", "nan"), "rho is nan; it is finite"),
        (("calibrate", "SUITE", "--out", "OUT", "--samples", 0), "samples is 0; it is at least 1"),
        (("calibrate", "SUITE", "--out", "OUT", "--device", "abacus"), "device 'abacus'"),
        (("merge", "SUITE", "--method", "task-aritmetic", "--out", "OUT"), "Did you mean 'task-arithmetic'?"),
        (("merge", "SUITE", "--method", "simple-averaging", "--scale", 1, "--out", "OUT"), "is not an option"),
        (("merge", "SUITE", "--method", "tie:density=0.3", "--out", "OUT"), "Did you mean 'ties'?"),
        (("merge", "SUITE", "--method", "ties:denisty=0.3", "--out", "OUT"), "Did you mean 'density'?"),
        (("merge", "SUITE", "--method", "ties:scale=1", "--scale", 2, "--out", "OUT"), "scale is given twice"),
        (("merge", "SUITE", "--method", "calibrated", "--out", "OUT"), "no merge method 'calibrated'"),
        (("drift", "SUITE", "--eval-samples", 0), "at least one"),
        (("drift", "SUITE", "--depth", "--sample", 99), "sample 99 is out of range"),
        (("drift", "SUITE", "--tokens", "each", "--sample", 0, "--layer", "blok 1"), "Did you mean 'block 1'?"),
        (("evaluate", "SUITE", "--model", "no/such/folder"), "no folder"),
        (("export", "EMPTY", "--out", "OUT"), "no readable config.json"),
        (("calibrate", "SUITE", "--out", "EMPTY"), "exists already"),
    ],
)
def test_wrong_input_is_one_message_and_status_1(
    run: Run, tiny_suite_file: Path, tmp_path: Path, arguments: tuple[object, ...], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"SUITE": tiny_suite_file, "OUT": tmp_path / "out", "EMPTY": tmp_path / "empty"}
    code, out, err = run(*(places.get(a, a) if isinstance(a, str) else a for a in arguments))
    assert code == 1
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_what_classes_were_taken_for_is_said_where_they_are_scored(run: Run, edit_suite: Any) -> None:
    def change(content: dict[str, Any]) -> None:
        content["tasks"]["pets"]["test"] = {"imagefolder": "folder"}

    file = edit_suite(change)
    for number in "012":
        (file.parent / "folder" / number).mkdir(parents=True)
        Image.new("L", (SIDE, SIDE)).save(file.parent / "folder" / number / "a.png")
    note = "task 'pets': the classes of the source are numbers and stand for those of 'classes': '0' is 'cat', '1' is"
    for words in (("evaluate",), ("compare", "--model", "base", "--model", "merged")):
        _, _, err = run(*words, file)
        assert err.count(note) == 1, err


def test_names_in_messages_and_tables_do_not_steer_the_terminal(run: Run, edit_suite: Any) -> None:
    """Names come from files; a clear-screen sequence in one must be shown, not obeyed."""
    task = "pets\x1b[2J"

    def rename(content: dict[str, Any]) -> None:
        content["tasks"][task] = content["tasks"].pop("pets")

    file = edit_suite(rename)
    code, out, err = run("evaluate", file, "--eval-samples", 4)
    assert (code, r"pets\x1b[2J" in out) == (0, True), err
    (file.parent / "experts" / "pets" / "model.safetensors").unlink()
    for command in ("check", "drift"):
        code, out, more = run(command, file)
        assert (code, r"expert 'pets\x1b[2J'" in more) == (1, True)
        err += out + more
    assert "\x1b" not in out + err


@pytest.mark.parametrize(
    ("left_out", "scored"), [([], "test"), (["test"], "validation"), (["test", "validation"], "calibration")]
)
def test_a_suite_without_a_test_split_is_scored_on_what_it_has(
    left_out: list[str], scored: str, run: Run, edit_suite: Edit
) -> None:
    def change(content: dict[str, Any]) -> None:
        for task in content["tasks"].values():
            task.setdefault("validation", task["test"])
            for split in left_out:
                del task[split]

    file = edit_suite(change)
    result = run("evaluate", file, "--eval-samples", 4, "--json")
    assert document(result)["split"] == scored
    flattered = "the suite has no test split; calibration samples flatter what was fitted on them"
    assert (flattered in result[2]) == (scored == "calibration")
    pair = run("compare", file, "--model", "base", "--model", "merged", "--eval-samples", 4, "--json")
    assert document(pair)["split"] == scored


def test_tasks_without_a_test_split_are_named(run: Run, edit_suite: Edit) -> None:
    def change(content: dict[str, Any]) -> None:
        for split in ("validation", "test"):
            content["tasks"]["pets"].pop(split, None)

    code, _, err = run("evaluate", edit_suite(change), "--eval-samples", 2)
    assert code == 0
    assert "note: no test split of 'pets'; calibration samples flatter what was fitted on them" in err


@pytest.mark.parametrize("message", ["x" * 20000, "\x1b" * 20000])
def test_a_message_is_never_longer_than_a_screenful(run: Run, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise InputError(message)

    with monkeypatch.context() as patched:
        patched.setattr(suite_module, "load_suite", fail)
        code, _, err = run("drift", "anything")
        assert code == 1
        assert 4000 < len(err) < 4100


@pytest.mark.parametrize(
    "arguments",
    [
        ("drift",),
        ("drfit", "x"),
        ("drift", "x", "--nope"),
        ("drift", "x", "--maps", "--max-memory", "8GiB"),
        ("drift", "x", "--sample", 3),
        ("drift", "x", "--tokens", "each"),
        ("drift", "x", "--layer", "block 0"),
        ("merge", "x"),
        ("evaluate", "clip-mini", "--answers"),
        ("study", "features", "clip-mini", "--pooled"),
        ("history", "list", "--json", "--csv"),
    ],
)
def test_wrong_usage_is_status_2(run: Run, arguments: tuple[str, ...]) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert "Usage" in err


def test_interrupt_is_status_130_and_leaves_nothing(
    run: Run, tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate_module.ForwardOrder, "calibrate", interrupt)
    code, out, err = run("calibrate", tiny_suite_file, "--out", tmp_path / "out", "--json")
    assert (code, out) == (130, "")
    assert "interrupted" in err
    assert list(tmp_path.iterdir()) == []


def interrupt(suite: Path, place: Path) -> int:
    """A calibration that waits after its first block is interrupted there."""
    put, partial = OutputFolder.put, place / "out.partial" / "blocks"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(OutputFolder, "put", lambda *given: (put(*given), time.sleep(30)))
        words = ["calibrate", suite, "--out", place / "out", "--samples", "4"]
        return end_command(words, signal.SIGINT, lambda: any(partial.glob("*.json")), place / "log")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_a_real_ctrl_c_in_the_middle(tiny_suite_file: Path, tmp_path: Path) -> None:
    """The process is told to stop once the first block is on disk."""
    status, said = in_clean_process(interrupt, tiny_suite_file, tmp_path), (tmp_path / "log").read_text()
    assert status == 130, said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "out.partial").glob("*.safetensors"))


def test_help_needs_nothing_heavy() -> None:
    """`featcal --help` and `import featcal` load neither torch nor transformers nor streamlit."""
    code = (
        "import sys, featcal, featcal.cli; sys.argv = ['featcal', '--help']\n"
        "try: featcal.cli.main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'streamlit', 'pandas', 'numpy', 'umap'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    "size", [".", "", "GiB", "-1GiB", "nan", "inf", "1e999", "0", "0.1", "1..5G", "1 2G", "8TiB", "٣GiB"]
)
def test_a_size_that_is_none_is_a_usage_error(run: Run, tiny_suite_file: Path, tmp_path: Path, size: str) -> None:
    code, _, err = run("calibrate", tiny_suite_file, "--out", tmp_path / "out", f"--max-memory={size}")
    assert code == 2
    assert "size such as 8GiB" in err
    assert "--max-memory" in err


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("8GiB", 2**33),
        ("800MB", 8e8),
        ("8.5G", 8.5e9),
        (" .5 k", 500),
        ("7", 7),
        pytest.param(f"1{400 * '0'}", 10**400, id="huge"),
    ],
)
def test_sizes_are_bytes(size: str, expected: float) -> None:
    assert Size().convert(size, None, None) == expected


def test_an_interrupted_calibration_is_not_continued_by_a_merge(
    run: Run, tiny_suite_file: Path, tmp_path: Path
) -> None:
    blocks = tmp_path / "out.partial" / "blocks"
    blocks.mkdir(parents=True)
    (blocks / "block.json").write_text("{}")
    code, _, err = run("merge", tiny_suite_file, "--out", tmp_path / "out")
    assert code == 1
    assert "is left from an interrupted run; remove it or choose another folder" in err
    assert "--resume" not in err
    assert (blocks / "block.json").exists()

"""A merge that someone else made: `featcal diagnose FOLDER` with nothing else. Faults one by one are planted in
`tests/house/test_symptoms.py`."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Run, document
from own_merges import WEIGHTS, edit_json, edit_tensors, plant, write_merge, write_parents
from safetensors.torch import load_file, save_file

from featcal.authoring.from_merge import BEGINNINGS
from featcal.cli.own_merge import DiagnosisOrder
from featcal.suite.views import EvaluationSamples


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("merges")
    write_parents(found)
    return found


@pytest.fixture(scope="module")
def merge(root: Path) -> Callable[[str], Path]:
    return cache(lambda fault: plant(root, fault))


def diagnose(run: Run, folder: Path, *more: str) -> dict[str, Any]:
    found = document(run("diagnose", folder, "--eval-samples", "3", "--json", *more))
    found["said"] = {one["about"]: one for one in found["sentences"]}
    return found


@pytest.mark.slow
def test_the_drift_of_a_zeroed_block_is_its_own_from_there_on(run: Run, merge: Callable[[str], Path]) -> None:
    found = diagnose(run, merge("zeros"))
    assert found["said"]["state"]["numbers"] == {"broken": True, "files": False}
    assert found["said"]["zeros"]["numbers"] == {"layer": "block 1"}
    assert found["differences"] == []
    assert found["said"]["since"]["numbers"]["layer"] == "block 1"
    cause = found["said"]["cause"]["numbers"]
    assert cause["layer"] == "block 1"
    assert cause["mismatch"] > 2 * cause["propagation"]
    assert "repaired drift" not in found["said"]  # nothing of it would hold once it is merged again


@pytest.mark.slow
def test_a_healthy_merge_is_called_so(run: Run, merge: Callable[[str], Path]) -> None:
    found = diagnose(run, merge(""))
    assert found["said"]["state"]["numbers"] == {"broken": False, "files": False}
    assert "is healthy" in found["said"]["state"]["text"]
    assert found["differences"] == []
    assert found["contents"]["coefficients"] == pytest.approx(WEIGHTS, abs=1e-4)
    assert found["contents"]["unexplained"] < 1e-3
    assert found["said"]["contents"]["text"].endswith("as its recipe says.")
    finals = {task: one["layers"][-1]["relative_drift"] for task, one in found["drift"]["tasks"].items()}
    worst = max(finals, key=finals.__getitem__)
    assert (found["said"]["worst"]["numbers"]["task"], found["said"]["worst"]["numbers"]["final"]) == (
        worst,
        pytest.approx(finals[worst]),
    )
    # Whatever the calibration of three texts brings, its number decides what is next.
    after = found["said"]["repaired drift"]["numbers"]
    assert found["next"] == ("repair" if after["calibrated"] < after["final"] else "other options")


@pytest.mark.slow
def test_commands_are_right_to_the_letter(
    run: Run, merge: Callable[[str], Path], root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for fault in ("tokenizer", "zeros"):
        folder = shutil.copytree(merge(fault), root / f"{fault}-copy")
        for command in diagnose(run, folder)["said"]["next"]["numbers"]["command"].split(" && "):
            words = shlex.split(command)
            if words[0] == "featcal":
                code, _, err = run(*words[1:])
                assert code == 0, err
            else:
                subprocess.run(words, check=True)
    assert diagnose(run, root / "tokenizer-copy")["differences"] == []
    own, again = (load_file(folder / "model.safetensors") for folder in (merge(""), tmp_path / "zeros-copy-again"))
    assert all(abs(own[name] - again[name]).max() < 1e-6 for name in own)


def test_the_next_command_draws_the_same_samples(tmp_path: Path) -> None:
    asked = DiagnosisOrder("m", None, {}, {}, (), None)
    assert asked.command(EvaluationSamples()) == "featcal diagnose m --out m.html"
    drawn = EvaluationSamples(8, "calibration", seed=7)
    assert asked.command(drawn) == "featcal diagnose m --eval-samples 8 --split calibration --seed 7 --out m.html"
    assert replace(asked, out=tmp_path / "m.html").command(drawn) == ""


@pytest.mark.parametrize("as_json", [False, True])
def test_a_report_that_cannot_be_written_is_a_failure(
    as_json: bool, run: Run, merge: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(merge(""), merge("").parent / f"vast-{as_json}")
    edit_tensors(folder, lambda name, one: one * 1e30 if ".layers.1." in name and one.dim() == 2 else one)
    asked = ("diagnose", folder, "--eval-samples", "3", *(["--json"] if as_json else []))
    code, out, err = run(*asked, "--out", tmp_path / "found.html")
    assert (code, [*tmp_path.iterdir()]) == (1, [])
    assert "nothing is written to" in err
    assert "cannot be measured" in out
    assert run(*asked)[0] == 0  # a verdict alone was asked for, and is there


@pytest.mark.slow
def test_a_report_begins_with_the_same_lines_and_its_suite_calibrates(
    run: Run, merge: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run("diagnose", merge(""), "--eval-samples", "3", "--out", "found.html")
    assert code == 0, err
    *lines, last = out.splitlines()
    assert last.endswith("and found.yaml")
    assert 9 <= len(lines) <= 12
    page = Path("found.html").read_text()
    assert "is healthy: nothing is wrong with its weights" in page
    content = yaml.safe_load(Path("found.yaml").read_text())
    own = {"self_generated": {"prompts": [*BEGINNINGS[:3]], "tokens": 32}}
    assert [task["calibration"] for task in content["tasks"].values()] == [own, own]
    (next_line,) = (line for line in lines if line.startswith("Next: "))
    command = shlex.split(next_line.rpartition(": ")[2])
    code, _, err = run(*command[1:])
    assert code == 0, err


@pytest.mark.slow
def test_from_the_hubs_cache_with_nothing_else(
    run: Run, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merge and its parents by their ids, in folders as the Hub's client lays them out."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    source = write_merge(root, "for-the-hub")
    recipe = (source / "mergekit_config.yml").read_text()
    (source / "mergekit_config.yml").write_text(recipe.replace("./", "someone/"))
    for folder, name in ((source, "merge"), *((root / one, one) for one in ("base", *WEIGHTS))):
        home = tmp_path / f"models--someone--{name}"
        shutil.copytree(folder, home / "snapshots" / ("a" * 40))
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text("a" * 40)
    found = diagnose(run, Path("someone/merge"))
    assert (found["from"], found["next"] in ("repair", "other options")) == ("mergekit_config.yml", True)
    assert found["contents"]["coefficients"] == pytest.approx(WEIGHTS, abs=1e-4)


@pytest.mark.slow
def test_a_merge_with_other_tensors_is_refused_with_what_lies_beside_them(
    run: Run, root: Path, merge: Callable[[str], Path]
) -> None:
    folder = shutil.copytree(merge("rope"), root / "other-shape")
    edit_json(folder / "config.json", num_hidden_layers=2)
    file = folder / "model.safetensors"
    tensors = {name: one for name, one in load_file(file).items() if ".layers.2." not in name}
    save_file(tensors, file, {"format": "pt"})
    code, _, err = run("diagnose", folder)
    assert code == 1
    assert "Rotary positions differ" in err
    assert "layers.2" in err


def test_what_was_merged_must_be_known(run: Run, root: Path, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    shutil.copy(root / "base" / "model.safetensors", tmp_path / "bare")
    code, _, err = run("diagnose", tmp_path / "bare")
    assert (code, err.count("featcal:")) == (1, 1)
    assert "give --base REFERENCE, and --expert NAME=REFERENCE once per expert" in err
    code, _, err = run("diagnose", "./nowhere")
    assert code == 1
    assert "nor is './nowhere' the folder of a merged model" in err


@pytest.mark.slow
def test_a_parent_that_is_not_there_is_one_clear_error(run: Run, root: Path) -> None:
    folder = write_merge(root, "orphan")
    recipe = folder / "mergekit_config.yml"
    recipe.write_text(recipe.read_text().replace("./left", "owner/left"))
    code, out, err = run("diagnose", folder)
    assert (code, out) == (1, "")
    assert "'owner/left' (expert 'left')" in err
    assert "--expert NAME=REFERENCE say where models are" in err
    said = diagnose(run, folder, "--expert", f"left={root / 'left'}")
    assert said["contents"]["coefficients"] == pytest.approx(WEIGHTS, abs=1e-4)
    assert json.dumps(said["check"]["problems"]) == "[]"

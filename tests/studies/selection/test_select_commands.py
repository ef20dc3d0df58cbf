"""`featcal select` says what it chose and what to run next."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from objects import clip_objects
from selecting import ASKED, COUNT, DEFAULT, REPAIRS, SHORT, Run

import featcal
from featcal import load_suite, open_family, select
from featcal.calibration.calibrate import config_for
from featcal.family.opening import Family
from featcal.session.session import Session
from featcal.studies.selection.candidates import CandidateModel, candidate_options, plan_candidates
from featcal.studies.selection.held_out_samples import Fold
from featcal.studies.selection.outcome import Selection
from featcal.suite.calibration_options import CHOSEN


@pytest.mark.slow
def test_the_command_says_what_to_run_next(
    run: Run, many_file: Path, many: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: None
) -> None:
    """The printed line makes the very model that was chosen, from whatever start."""
    real = Fold.values

    def lifted(fold: Fold, tried: CandidateModel, *more: Any) -> Any:
        above = 0.5 * (tried.start != "merged" and tried.config is not None)
        return {task: tuple(value + above for value in own) for task, own in real(fold, tried, *more).items()}

    monkeypatch.setattr(Fold, "values", lifted)
    given = (
        "select",
        many_file,
        "--samples",
        COUNT,
        "--no-layernorms",
        "--model",
        "ties:scale=1,density=0.5",
        "--model",
        "tsv-m",
    )
    code, out, err = run(*given, "--out", tmp_path / "best.json", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert json.loads((tmp_path / "best.json").read_text()) == document
    assert {file.name for file in tmp_path.iterdir()} == {"cache", "best.json"}  # nothing half-written
    found = select(many, ASKED, starts=["ties:scale=1,density=0.5", "tsv-m"])
    assert document["chosen"] == candidate_options(found.config or ASKED) == DEFAULT
    assert document["start"] == found.start
    assert found.start != "merged"
    assert len(document["candidates"]) == SHORT + 4
    assert document["margin"]["low"] > 0

    content = yaml.safe_load(many_file.read_text()) | yaml.safe_load(document["suite_lines"])
    said = many_file.with_name("said.yaml")
    said.write_text(yaml.safe_dump(content))
    again = open_family(load_suite(said), "cpu")
    assert again.suite.merged.method == found.start.partition(":")[0]
    assert config_for(again) == found.config

    words = [*document["command"].split()[1:-1], tmp_path / "calibrated"]
    code, _, err = run(*words)
    assert code == 0, err
    assert found.calibrated is not None
    for name, tensor in many.model(str(tmp_path / "calibrated")).read(many.adapter.tower).items():
        torch.testing.assert_close(tensor, found.calibrated.weights.read([name])[name], rtol=1e-5, atol=1e-6)

    code, out, _ = run(*given)
    assert code == 0
    assert out.splitlines()[0].split() == ["score", "against", "the", "default", "start", *CHOSEN]
    assert "32 calibration samples of 2 tasks, in 4 folds; no label" in out
    assert "no start is better than its repair" in out
    assert out.splitlines()[-1] == document["command"]
    code, _, err = run(*given, "--out", tmp_path / "best.json")
    assert (code, "best.json exists; name another file" in err) == (1, True)


@pytest.mark.parametrize("start", ["merged", "ties:scale=1,density=0.5", "svc@tsv-m"])
@pytest.mark.slow
def test_a_start_that_was_chosen_has_a_command_too(
    run: Run, many_file: Path, many: Family, tmp_path: Path, start: str
) -> None:
    config = plan_candidates(many, ASKED)[0].config
    assert config is not None
    found = Selection(many, config, start, None, (), None, {}, {}, (), 0.0, None)
    words = [*found.command(str(many_file)).split()[1:-1], str(tmp_path / "out")]
    code, _, err = run(*words)
    assert code == 0, err
    expected = Session(many).fit.weights(start)
    for name, tensor in many.model(str(tmp_path / "out")).read(many.adapter.tower).items():
        torch.testing.assert_close(tensor, expected.read([name])[name], rtol=1e-5, atol=1e-6)
    folder = replace(found, start=str(tmp_path / "out"))
    assert folder.command() == f"featcal export {tmp_path / 'out'} --out calibrated"
    code, _, err = run("merge", many_file, "--method", "ties:scale=1", "--scale", 2, "--out", tmp_path / "no")
    assert (code, "scale" in err) == (1, True)


def test_the_lines_of_a_suite_file_name_the_model_that_was_chosen(
    many_file: Path, many: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file reads folders from its own place, the command from where it runs; and `svc@FOLDER` is not the folder."""
    folder = many_file.parent / "runs" / "mine"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder.parent)
    config = replace(ASKED, recipe="refined", weigh_tokens=True)
    found = Selection(many, config, "mine", config, (), None, {}, {}, (), 0.0, None)
    assert yaml.safe_load(found.suite_lines() or "")["merged"] == "runs/mine"
    assert replace(found, start="svc:alpha=0.1@mine").suite_lines() is None
    assert found.to_json()["chosen"] == candidate_options(config) | {"weigh_tokens": True}


@pytest.mark.slow
def test_a_choice_of_a_suite_in_memory_is_a_python_call(tiny_suite_file: Path, tmp_path: Path) -> None:
    """No command can name the suite."""
    suite = featcal.Suite.of(**clip_objects(tiny_suite_file))
    family = featcal.open_family(suite, "cpu")
    config = plan_candidates(family, ASKED)[0].config
    assert config is not None
    for start, chosen in (("ties:scale=1", None), ("merged", None), ("svc", None), ("ties", config)):
        found = Selection(family, config, start, chosen, (), None, {}, {}, (), 0.0, None)
        out = tmp_path / start.partition(":")[0]
        exec(found.command(out=str(out)), {"featcal": featcal, "suite": suite})
        expected = Session(family).fit.weights(found.model)
        for name, tensor in family.model(str(out)).read(family.adapter.tower).items():
            torch.testing.assert_close(tensor, expected.read([name])[name], rtol=1e-5, atol=1e-6)
        shutil.rmtree(out)
    given = featcal.Suite.of(**{**clip_objects(tiny_suite_file), "merged": clip_objects(tiny_suite_file)["base"]})
    left = replace(found, family=featcal.open_family(given, "cpu"), start="merged", config=None)
    assert left.command() == "# the merged model as it was given"


def test_below_8_samples_the_default_stays(run: Run, many_file: Path, many: Family, scored: Any) -> None:
    scored(lambda tried: 0.5, 0.05)
    code, out, err = run("select", many_file, "--samples", 7, "--json")
    assert code == 0
    assert "fewer than 8 calibration samples of 'pets' (7), 'signs' (7): too few to tell" in err
    document = json.loads(out)
    assert document["chosen"] == document["defaults"] == DEFAULT
    assert (document["candidates"], document["calibrations"], document["margin"]) == ([], 0, None)
    assert "14 calibration samples of 2 tasks; no label" in run("select", many_file, "--samples", 7)[1]
    code, out, err = run("select", many_file, "--samples", 7, "--weigh-tokens", "--json")
    assert code == 0, err
    assert "--recipe informed" in json.loads(out)["command"]
    assert "--weigh-tokens" in json.loads(out)["command"]
    assert len(select(many, replace(ASKED, samples=8)).candidates) == REPAIRS + 1

"""`featcal replay`: a record is enough to make the same files again, and whatever differs is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from lanes import cases_by_message, rows
from safetensors.torch import load_file, save_file

from featcal.calibration.calibrate import calibrate_family, calibrate_to_folder, config_for
from featcal.cli import featcal_command
from featcal.export.change_layout import convert
from featcal.export.merge import merge_to_folder
from featcal.family.opening import open_family
from featcal.formats.contents import tensor_digest, tensor_digests
from featcal.studies.replay.again import replay_record
from featcal.studies.replay.record import read_record
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.facts import suite_facts
from featcal.suite.schema import load_suite
from featcal.system.environment import machine_facts
from featcal.system.errors import InputError
from featcal.system.versions import all_versions

RECORDS = {file.stem: file for file in sorted((Path(__file__).resolve().parents[2] / "docs/records").glob("*.json"))}
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def calibrated(tiny_suite_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration of the tiny suite; shared, so never to be changed."""
    out = tmp_path_factory.mktemp("calibrated") / "made"
    family = open_family(load_suite(tiny_suite_file), "cpu")
    calibrate_to_folder(family, config_for(family, samples=8, lam=0.1), out)
    return out


@pytest.fixture
def made(calibrated: Path, tmp_path: Path) -> Path:
    """A copy of the calibration that a test may change, as it may change its own copy of the suite."""
    return shutil.copytree(calibrated, tmp_path / "made")


@pytest.fixture
def edit(made: Path) -> Callable[[Callable[[dict[str, Any]], object]], None]:
    """Change the content of a record."""

    def change(by: Callable[[dict[str, Any]], object]) -> None:
        content = json.loads((made / "featcal.json").read_text())
        by(content)
        (made / "featcal.json").write_text(json.dumps(content))

    return change


def ask(*words: object) -> Result:
    return CliRunner().invoke(featcal_command, ["replay", *map(str, words)])


@pytest.mark.slow
def test_two_runs_write_the_same_bits(own_suite_file: Path, made: Path, tmp_path: Path) -> None:
    family = open_family(load_suite(own_suite_file), "cpu")
    config = config_for(family, samples=8, lam=0.1)
    calibrate_to_folder(family, config, tmp_path / "again")
    calibrate_family(family, config).save(tmp_path / "memory")
    written = (made / WEIGHTS).read_bytes()
    assert written == (tmp_path / "again" / WEIGHTS).read_bytes()
    assert written == (tmp_path / "memory" / WEIGHTS).read_bytes()
    assert replay_record(tmp_path / "memory", own_suite_file).same


def test_same(own_suite_file: Path, made: Path, tmp_path: Path) -> None:
    found = ask(made, "--suite", own_suite_file, "--out", tmp_path / "kept")
    count = len(load_file(made / WEIGHTS))
    assert (found.exit_code, found.output.strip()) == (0, f"same {count} tensors, bit for bit")
    assert (tmp_path / "kept" / WEIGHTS).read_bytes() == (made / WEIGHTS).read_bytes()
    told = json.loads(ask(made / "featcal.json", "--suite", own_suite_file, "--json").stdout)
    assert (told["same"], told["tensors"], told["held_against"]) == (True, count, "files")


@pytest.mark.slow
def test_a_record_alone_is_held_against_its_hashes(own_suite_file: Path, made: Path, edit: Any) -> None:
    (made / WEIGHTS).unlink()
    found = replay_record(made, own_suite_file)
    assert (found.same, found.held_against) == (True, "hashes")
    edit(lambda record: record["tensors"].update({"logit_scale": "0" * 64}))
    found = replay_record(made, own_suite_file)
    assert not found.same
    assert [(one.tensor, one.relative) for one in found.different] == [("logit_scale", None)]
    edit(lambda record: record["tensors"].pop("logit_scale"))
    (left,) = replay_record(made, own_suite_file).different
    assert (left.tensor, left.why) == ("logit_scale", "only in the replay")


def test_the_number_of_processes_is_named(own_suite_file: Path, made: Path, edit: Any) -> None:
    """Several processes sum in another order, and those that share a task in float32."""
    edit(lambda record: record.update(ranks=[{"tasks": {}}, {"tasks": {}}]))
    assert replay_record(made, own_suite_file).surroundings["machine"] == ["processes 2 then, 1 now"]


def test_a_changed_input_is_named_first(own_suite_file: Path, made: Path) -> None:
    expert = own_suite_file.parent / "experts" / "signs" / WEIGHTS
    tensors = load_file(expert)
    name = next(name for name in tensors if name.endswith("layers.2.mlp.fc1.weight"))
    save_file({**tensors, name: tensors[name] * 1.5}, expert, {"format": "pt"})
    found = ask(made, "--suite", own_suite_file)
    lines = [line.split(maxsplit=1) for line in found.output.splitlines()[1:]]
    assert found.exit_code == 1
    assert lines[0][0] == "input"
    assert lines[0][1].startswith(f"expert signs: {WEIGHTS} is another (sha256 ")
    assert {kind for kind, _ in lines[1:]} == {"tensor"}
    assert any("layers.2.mlp.fc1.weight: other values, relative difference " in line for _, line in lines)
    assert "same" not in found.output


def test_changed_samples_are_named(own_suite_file: Path, made: Path) -> None:
    file = own_suite_file.parent / "samples.safetensors"
    samples = load_file(file)
    samples["pets.calibration"] += 0.25
    save_file(samples, file)
    found = replay_record(made, own_suite_file)
    assert list(found.samples) == ["pets: the same positions give other inputs"]
    assert (list(found.inputs), found.same) == ([], False)


def test_the_relative_difference_is_that_of_the_largest_value(own_suite_file: Path, made: Path) -> None:
    tensors = load_file(made / WEIGHTS)
    name = next(name for name in tensors if name.endswith("layers.0.mlp.fc2.weight"))
    off = tensors[name].clone()
    off.view(-1)[3] += 2.0 * float(off.abs().max())
    save_file({**tensors, name: off}, made / WEIGHTS, {"format": "pt"})
    found = replay_record(made, own_suite_file)
    (one,) = found.different
    expected = float((off - tensors[name]).abs().max() / off.abs().max())
    assert one.tensor == name
    assert one.relative == pytest.approx(expected, rel=1e-6)
    assert list(found.damaged) == [name]


def test_other_versions_explain_and_do_not_differ(own_suite_file: Path, made: Path, edit: Any) -> None:
    edit(lambda record: record["versions"].update(torch="1.0"))
    edit(lambda record: record["machine"].update(cpu_capability="none", threads=3))
    found = ask(made, "--suite", own_suite_file)
    assert found.exit_code == 0
    assert f"note: versions: torch 1.0 then, {all_versions()['torch']} now" in found.stderr
    assert "note: machine: cpu_capability none then" in found.stderr
    assert "threads" not in found.output
    assert "processes" not in found.output
    assert torch.get_num_threads() == 1


def test_what_could_not_be_checked_is_said_below_the_result(
    own_suite_file: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise InputError("the library refuses")

    monkeypatch.setattr("featcal.export.write.verify_reload", fail)
    found = ask(made, "--suite", own_suite_file)
    assert (found.exit_code, found.stdout.strip()) == (1, f"same {len(load_file(made / WEIGHTS))} tensors, bit for bit")
    assert "the written model was not compared with the one in memory: the library refuses" in found.stderr
    (sentence,) = json.loads(ask(made, "--suite", own_suite_file, "--json").stdout)["unchecked"]
    assert sentence in found.stderr


@pytest.mark.slow
def test_a_merge(own_suite_file: Path, tmp_path: Path) -> None:
    merge_to_folder(load_suite(own_suite_file), "ties", 0.7, tmp_path / "merged")
    assert replay_record(tmp_path / "merged", own_suite_file).same
    expert = own_suite_file.parent / "experts" / "pets" / WEIGHTS
    save_file({name: tensor * 1.01 for name, tensor in load_file(expert).items()}, expert, {"format": "pt"})
    found = replay_record(tmp_path / "merged", own_suite_file)
    assert not found.same
    assert [line.split(":")[0] for line in found.inputs] == ["expert pets"]


@pytest.mark.slow
def test_another_model_that_was_calibrated(own_suite_file: Path, tmp_path: Path) -> None:
    words = ["calibrate", own_suite_file, "--model", "ties:scale=0.5", "--samples", 8, "--out", tmp_path / "made"]
    assert CliRunner().invoke(featcal_command, [*map(str, words)]).exit_code == 0
    assert read_record(tmp_path / "made" / "featcal.json").model == "ties:scale=0.5"
    assert replay_record(tmp_path / "made", own_suite_file).same


def test_a_record_names_no_folder(calibrated: Path, tiny_suite_file: Path) -> None:
    text = (calibrated / "featcal.json").read_text()
    assert str(calibrated.parent) not in text
    assert str(tiny_suite_file.parent) not in text
    assert str(Path.home()) + "/" not in text


def test_a_suite_that_featcal_brings_is_known_by_its_name(own_suite_file: Path, tmp_path: Path) -> None:
    shipped = load_suite("lm-mini")
    assert suite_facts(shipped)["shipped"] == "lm-mini"
    assert suite_facts(load_suite(own_suite_file))["shipped"] is None
    renamed = shipped.model_copy(update={"description": "another"})
    assert suite_facts(renamed)["shipped"] is None
    differing = [n for n, h in suite_facts(renamed)["sha256"].items() if h != suite_facts(shipped)["sha256"][n]]
    assert differing == ["description"]


@pytest.mark.parametrize(
    ("change", "message"),
    cases_by_message(
        {
            "'tiny' does not come with featcal; name its file suite.yaml with --suite": lambda record: None,
            "its suite is a file suite.yaml of its own, and not the suite 'lm-mini' that comes": [
                lambda record: record.update(suite="lm-mini")
            ],
            "'tiny' does not come with featcal; name its file with --suite": [
                lambda record: record["suite_file"].pop("name")
            ],
            "is not a record of a run": lambda record: record.pop("command"),
            "a record of 'evaluate'": lambda record: record.update(command="evaluate"),
            "tensors: ": [lambda record: record.pop("tensors"), lambda record: record.update(tensors={})],
            "machine: ": lambda record: record.update(machine=3),
            "was exported to another folder": lambda record: record.update(exported="hf"),
        }
    ),
)
def test_records_that_cannot_be_replayed(
    made: Path, edit: Any, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit(change)
    with pytest.raises(InputError, match=message):
        replay_record(made)


@pytest.mark.parametrize(
    ("options", "message"),
    cases_by_message(
        {"does not know: gamma": {"gamma": 1}, "config|options are not": {"lam": "much"}, "lam is -1": {"lam": -1}}
    ),
)
def test_options_out_of_range(
    own_suite_file: Path, made: Path, edit: Any, options: dict[str, Any], message: str
) -> None:
    edit(lambda record: record["config"].update(options))
    with pytest.raises(InputError, match=message):
        replay_record(made, own_suite_file)


def test_a_baseline_and_an_export_are_refused(own_suite_file: Path, made: Path, tmp_path: Path) -> None:
    words = ["merge", str(own_suite_file), "--method", "regmean:samples=8", "--out", str(tmp_path / "regmean")]
    assert CliRunner().invoke(featcal_command, words).exit_code == 0
    with pytest.raises(InputError, match="a record of the baseline 'regmean"):
        replay_record(tmp_path / "regmean", own_suite_file)
    convert(str(made), tmp_path / "exported", "hf")
    with pytest.raises(InputError, match="replay the record of the folder from which it was made"):
        replay_record(tmp_path / "exported", own_suite_file)


def test_digests_tell_dtype_shape_and_sign(tmp_path: Path) -> None:
    zero = torch.zeros(2, 3)
    others = [zero.half(), zero.view(3, 2), -zero, zero.to(torch.int32)]
    assert len({tensor_digest(one) for one in (zero, *others)}) == 5
    assert tensor_digest(zero.t().contiguous().t()) == tensor_digest(zero)
    save_file({"b": zero}, tmp_path / "1.safetensors")
    save_file({"a": others[0]}, tmp_path / "2.safetensors")
    found = tensor_digests([tmp_path / "1.safetensors", tmp_path / "2.safetensors"])
    assert found == {"a": tensor_digest(others[0]), "b": tensor_digest(zero)}


def test_there_are_records() -> None:
    assert [*RECORDS] == ["clip-mini-n16", "lm-mini-n16", "t5-mini-n16"]


@pytest.mark.parametrize("name", rows(RECORDS, quick=[], slow=RECORDS))
def test_records_of_the_docs(name: str, tmp_path: Path) -> None:
    """Inputs and samples are what they were anywhere; the bits are on the versions and the processor of the record."""
    shutil.copy(RECORDS[name], tmp_path / "featcal.json")
    then = read_record(RECORDS[name])
    assert then.options() == CalibrationConfig(**then.config)
    found = replay_record(tmp_path)
    assert (list(found.inputs), list(found.surroundings["suite file"])) == ([], [])
    here = machine_facts(torch.device("cpu")) | {"threads": then.machine["threads"]}
    elsewhere = [*found.surroundings["versions"], *found.surroundings["machine"]]
    if then.versions != all_versions() or then.machine != here:
        pytest.skip(f"bits may differ: {'; '.join(elsewhere)}")
    assert list(found.samples) == []
    assert found.same
    assert found.tensors == len(then.tensors)

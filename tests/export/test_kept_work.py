"""Checks after finished work that fail: the checkpoint is written all the same, and what was not checked is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tiny_text import text_suite

from featcal import InputError, NumericalError, calibrate, load_suite, open_family
from featcal.calibration.calibrate import calibrate_to_folder, config_for
from featcal.cli import featcal_command
from featcal.export.merge import merge_to_folder
from featcal.export.write import rewrite
from featcal.formats.contents import tensor_digests
from featcal.server import kinds
from featcal.system.errors import UncheckedError
from featcal.system.progress import silent

FEW = {"samples": 4, "lam": 0.1}
RUN = "featcal.calibration.calibrate"
FAILURES = {
    f"{RUN}.compare_generation": "whether it still generates was not checked",
    f"{RUN}.write_drift_picture": "the picture of the drift was not drawn",
    f"{RUN}.model_card": "the card was not written",
    "featcal.export.write.verify_reload": "the written model was not compared with the one in memory",
}
"""Function that fails → what is said of it."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_suite(tmp_path_factory.mktemp("text"), "llama")


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featcal.evaluation.generation_check.TOKENS", 2)


@pytest.fixture(scope="module")
def whole(file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Hashes of the tensors that are written where nothing fails."""
    family = open_family(load_suite(file), "cpu")
    out = tmp_path_factory.mktemp("whole") / "out"
    return dict(calibrate_to_folder(family, config_for(family, **FEW), out)["tensors"])


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(("place", "sentence"), FAILURES.items())
def test_a_check_that_fails_leaves_the_checkpoint_and_ends_with_status_1(
    file: Path, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, sentence: str
) -> None:
    monkeypatch.setattr(place, failing(IndexError("index 64 is out of range")))
    options = ["--samples", "4", "--lam", "0.1", "--device", "cpu", "--out", str(tmp_path / "out")]
    ended = CliRunner().invoke(featcal_command, ["calibrate", str(file), *options])
    assert ended.exit_code == 1
    assert isinstance(ended.exception, SystemExit)
    (said,) = [line for line in ended.stderr.splitlines() if sentence in line]
    assert said.startswith(f"warning: {sentence}: IndexError in test_kept_work.py, line ")
    assert said.endswith(": index 64 is out of range")
    assert f"written to {tmp_path / 'out'}" in ended.stdout
    assert [one.name for one in tmp_path.iterdir()] == ["out"]
    record = json.loads((tmp_path / "out" / "featcal.json").read_text())
    assert record["unchecked"] == [said.removeprefix("warning: ")]
    assert record["tensors"] == tensor_digests([tmp_path / "out" / "model.safetensors"]) == whole
    assert record["verified"] == (None if "verify" in place else "reloaded")
    card = (tmp_path / "out" / "README.md").read_text()
    assert sentence in card
    assert ("drift-per-layer.png" in card) == (place not in (f"{RUN}.write_drift_picture", f"{RUN}.model_card"))
    assert all((tmp_path / "out" / name).is_file() for name in record["written"])


def test_a_canary_whose_scores_are_not_finite_is_said_with_its_own_words(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{RUN}.compare_generation", failing(NumericalError("task 'left': scores are not finite")))
    family = open_family(load_suite(file), "cpu")
    with pytest.raises(UncheckedError) as told:
        calibrate(family, config_for(family, **FEW)).save(tmp_path / "out")
    sentence = "whether it still generates was not checked: task 'left': scores are not finite"
    assert str(told.value) == f"written to {tmp_path / 'out'}, but {sentence}"
    assert told.value.document["unchecked"] == [sentence]


def test_a_job_gives_the_document_with_what_was_not_checked(
    tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("featcal.export.write.verify_reload", failing(MemoryError()))
        document = kinds.run_calibration(
            kinds.Work(str(tiny_suite_file), {"options": {"samples": 4}}, tmp_path, silent)
        )
    assert document["out"] == str(tmp_path / kinds.CHECKPOINT)
    assert document["warnings"][-1:] == document["unchecked"]
    assert (tmp_path / kinds.CHECKPOINT / "featcal.json").is_file()
    # A folder that is written from it is checked anew, and says nothing of where the job lies.
    family = open_family(load_suite(tiny_suite_file), "cpu")
    kinds.calibration_from(family, config_for(family, samples=4), document).save(tmp_path / "again")
    record = json.loads((tmp_path / "again" / "featcal.json").read_text())
    assert record["verified"] == "reloaded"
    assert not {"unchecked", "out"} & {*record}
    assert not {*document["unchecked"]} & {*record["warnings"]}
    assert record["tensors"] == document["tensors"]


def test_a_written_model_that_is_another_one_is_no_finished_folder(
    file: Path, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that a library loads is left of it; what was solved is, and is written from there."""
    family = open_family(load_suite(file), "cpu")
    config, out = config_for(family, **FEW), tmp_path / "out"
    reference = type(family.adapter).reference
    with monkeypatch.context() as patch:
        patch.setattr(type(family.adapter), "reference", lambda *given: reference(*given) + 1)
        with pytest.raises(NumericalError, match="reloaded outputs differ"):
            calibrate_to_folder(family, config, out)
    assert [one.name for one in tmp_path.iterdir()] == ["out.partial"]
    assert not (tmp_path / "out.partial" / "model").exists()
    again = calibrate_to_folder(family, config, out, resume=True)
    assert again["tensors"] == whole
    assert again["verified"] == "reloaded"


def test_merges_and_exports_that_cannot_be_verified_are_written_and_say_so(
    tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("featcal.export.write.verify_reload", failing(InputError("the library refuses")))
        with pytest.raises(UncheckedError, match=r"merged, but the written model .*: the library refuses"):
            merge_to_folder(load_suite(tiny_suite_file), None, None, tmp_path / "merged")
        with pytest.raises(UncheckedError, match="again, but the written model"):
            rewrite(tmp_path / "merged", tmp_path / "again")
    record = json.loads((tmp_path / "merged" / "featcal.json").read_text())
    assert record["verified"] is None
    document = rewrite(tmp_path / "merged", tmp_path / "verified")  # what was not checked then is checked now
    assert "unchecked" not in document
    assert json.loads((tmp_path / "verified" / "featcal.json").read_text())["verified"] == "reloaded"

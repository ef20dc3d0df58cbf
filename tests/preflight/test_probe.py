"""Experts that are run: swapped ones, the split they are scored on, and what is said of weights that were not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from suite_edits import Edit
from tiny_clip import TASKS

from featcal.cli import featcal_command
from featcal.cli import suite as suites
from featcal.family import ancestry
from featcal.preflight.check import check_suite
from featcal.preflight.probe import Diagonal
from featcal.suite.schema import load_suite
from featcal.system.formatting import some


def diagonal(rows: list[list[float]], samples: int = 64) -> tuple[list[str], list[str]]:
    names = "abc"[: len(rows)]
    accuracy = {expert: dict(zip(names, row, strict=True)) for expert, row in zip(names, rows, strict=True)}
    return Diagonal(accuracy, dict.fromkeys(names, samples)).findings()


def test_the_diagonal() -> None:
    assert diagonal([[0.9, 0.5], [0.5, 0.9]]) == ([], [])
    (problem,), notes = diagonal([[0.2, 0.9], [0.9, 0.2]])
    assert (problem.count("swapped"), notes) == (1, [])
    assert diagonal([[0.2, 0.9], [0.9, 0.2]], samples=4) == ([], [])
    (problem,), _ = diagonal([[0.2, 0.9, 0.1], [0.1, 0.2, 0.9], [0.9, 0.1, 0.2]])
    assert "experts 'a' and 'c' and 'b' are probably mixed up: the expert of 'c' belongs to 'a'" in problem
    problems, (note,) = diagonal([[0.3, 0.9], [0.8, 0.95]])
    assert problems == []
    assert "expert 'a': the expert of 'b' does its task better (80% against its own expert's 30%" in note


@pytest.mark.parametrize(("split", "looks"), [("validation", 0), ("calibration", 0), ("test", len(TASKS))])
def test_a_look_at_the_test_split_is_avoided_said_and_counted(
    edit_suite: Edit, split: str, looks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """`split` is the first that has labels."""

    def change(content: dict[str, Any]) -> None:
        for task in content["tasks"].values():
            if split != "validation":
                del task["validation"]
            if split == "test":
                del task["calibration"]["labels"]

    found = check_suite(load_suite(edit_suite(change)), probe=True)
    samples = 12
    assert found.to_json()["probe"] == {
        "samples": samples,
        "scored_on": dict.fromkeys(TASKS, split),
        "test_looks": looks,
    }
    assert [note for note in found.notes if "a look at the test split" in note] == [
        f"experts were scored on {samples} test samples of {some(TASKS)}, for want of labels in validation and "
        "calibration samples: that is a look at the test split; --no-probe leaves it out"
    ][:looks]
    suites.show_check(found)
    assert f"{samples} samples of each, split {split}\n" in capsys.readouterr().out


def test_splits_are_named_by_task_where_they_differ() -> None:
    found = Diagonal({}, {"a": 4, "b": 12, "c": 64}, {"a": "validation", "b": "test", "c": "test"})
    assert found.split_words == "validation (a) and test (b, c)"
    assert found.samples == 4
    (look,) = [note for note in found.findings()[1] if "a look at the test split" in note]
    assert look.startswith("experts were scored on 12 to 64 test samples of 'b', 'c'")


@pytest.mark.parametrize(
    ("limit", "read"),
    [
        (2**26, "of weights, only the matrices of blocks and embeddings were read"),
        (1, "of weights, only one matrix of each layer was read"),
    ],
)
def test_what_was_not_read_of_weights_is_said(
    own_suite_file: Path, monkeypatch: pytest.MonkeyPatch, limit: int, read: str
) -> None:
    """The norm of an expert is NaN, which shows where experts are scored."""
    file = own_suite_file.parent / "experts" / "pets" / "model.safetensors"
    tensors = load_file(file)
    tensors["vision_model.post_layernorm.weight"][3] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    monkeypatch.setattr(ancestry, "READ_WHOLE", limit)
    suite = load_suite(own_suite_file)
    unread = f"{read}; values elsewhere that are NaN or infinite do not show here"
    found = check_suite(suite, probe=False)
    assert (found.problems, found.lineage is not None) == ((), True)
    assert f"{unread} (--probe runs every expert)" in found.notes
    said = CliRunner().invoke(featcal_command, ["check", str(own_suite_file), "--no-probe"])
    assert unread in said.output
    probed = check_suite(suite, probe=True)
    assert any("post_layernorm.weight" in problem and "NaN or infinite" in problem for problem in probed.problems)
    assert unread in probed.notes


def test_without_weights_here_it_is_said_that_none_were_read(edit_suite: Edit) -> None:
    found = check_suite(load_suite(edit_suite(lambda content: content.update(base="nowhere"))), probe=False)
    assert found.problems
    assert "no weights were read; values that are NaN or infinite do not show here" in "; ".join(found.notes)


def test_experts_that_were_scored_need_no_word(tiny_suite_file: Path) -> None:
    assert not any("were read" in note for note in check_suite(load_suite(tiny_suite_file), probe=True).notes)

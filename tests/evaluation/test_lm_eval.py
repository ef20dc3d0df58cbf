"""The bridge to lm-evaluation-harness, against a stand-in with its command line and results file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from featcal.evaluation import lm_eval
from featcal.system.errors import InputError

RESULTS = {
    "results": {
        "gsm8k": {"alias": "gsm8k", "exact_match,strict-match": 0.25, "exact_match_stderr,strict-match": 0.1},
        "arc": {"alias": "arc", "acc,none": 0.5, "acc_norm,none": 0.75, "acc_norm_stderr,none": "N/A"},
    },
    "n-samples": {"gsm8k": {"original": 9, "effective": 4}, "arc": {"original": 8, "effective": 8}},
    "lm_eval_version": "0.4.9",
}


def stand_in(folder: Path, body: str) -> None:
    script = folder / "lm-eval"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(lm_eval.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_results_are_read(tmp_path: Path) -> None:
    file = tmp_path / "results_now.json"
    file.write_text(json.dumps(RESULTS))
    found = lm_eval.read_results(file)
    assert found["tasks"]["gsm8k"] == {
        "metric": "exact_match,strict-match", "value": 0.25, "n": 4, "metrics": {"exact_match,strict-match": 0.25}
    }  # fmt: skip
    assert found["tasks"]["arc"]["metric"] == "acc_norm,none"
    assert found["average"] == 0.5
    assert found["lm_eval"] == {"lm_eval_version": "0.4.9"}


def test_the_number_of_samples_is_no_metric_and_a_perplexity_no_share(tmp_path: Path) -> None:
    """lm-eval 0.4.12 writes both."""
    results = {
        "cola": {"name": "cola", "alias": "cola", "sample_len": 1043, "mcc,none": 0.31},
        "wikitext": {"alias": "wikitext", "sample_len": 62, "word_perplexity,none": 37.4},
        "squadv2": {"alias": "squadv2", "f1,none": 76.2},  # of 100
    }
    better = {"cola": {"mcc": True}, "wikitext": {"word_perplexity": False}}
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"results": results, "higher_is_better": better}))
    found = lm_eval.read_results(file)
    assert found["tasks"]["cola"] == {"metric": "mcc,none", "value": 0.31, "n": None, "metrics": {"mcc,none": 0.31}}
    assert found["tasks"]["wikitext"]["value"] == 37.4
    assert found["average"] == 0.31


def test_a_group_stands_for_its_members(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    numbers = {
        "group": {"acc,none": 0.5},
        "one": {"acc,none": 1.0},
        "two": {"acc,none": 0.0},
        "free": {"acc,none": 0.9},
    }
    file.write_text(json.dumps({"results": numbers, "group_subtasks": {"group": ["one", "two"], "free": []}}))
    assert lm_eval.read_results(file)["average"] == pytest.approx(0.7)
    numbers["group"] = {" ": " "}  # as lm-eval has a group that aggregates nothing
    file.write_text(json.dumps({"results": numbers, "group_subtasks": {"group": ["one", "two"]}}))
    assert lm_eval.read_results(file)["average"] == pytest.approx((1.0 + 0.0 + 0.9) / 3)


def test_the_harness_runs_as_a_process_of_its_own(on_path: Path) -> None:
    stand_in(
        on_path,
        f"""echo "$@" > {on_path}/arguments
while [ "$1" != --output_path ]; do shift; done
mkdir -p "$2/model" && echo '{json.dumps(RESULTS)}' > "$2/model/results_2026.json" """,
    )
    found = lm_eval.run_lm_eval(Path("calibrated"), ["gsm8k", "arc"], ["--num_fewshot", "8"])
    assert found["tasks"]["gsm8k"]["value"] == 0.25
    arguments = (on_path / "arguments").read_text()
    assert arguments.startswith("--model hf --model_args pretrained=calibrated --tasks gsm8k,arc --output_path ")
    assert arguments.strip().endswith("--num_fewshot 8")


def test_a_failure_says_the_command(on_path: Path) -> None:
    stand_in(on_path, "exit 3")
    with pytest.raises(InputError, match=r"lm-eval ended with status 3 .* --tasks nope"):
        lm_eval.run_lm_eval(Path("calibrated"), ["nope"])


def test_no_results_is_an_error(on_path: Path) -> None:
    stand_in(on_path, "exit 0")
    with pytest.raises(InputError, match="wrote no results file"):
        lm_eval.run_lm_eval(Path("calibrated"), ["arc"])


def test_without_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_eval.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match=r"pip install \"lm-eval\[hf\]\""):
        lm_eval.run_lm_eval(Path("calibrated"), ["arc"])


@pytest.mark.parametrize("content", ["no json", "{}", '{"results": {"arc": {"alias": "arc"}}}', '{"results": 3}'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "results.json"
    file.write_text(content)
    with pytest.raises(InputError):
        lm_eval.read_results(file)

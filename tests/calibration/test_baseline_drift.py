"""A calibration that raises the drift it should lower says so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from lanes import rows
from tiny_text import write_text_suite

from featcal import calibrate, calibrate_to_folder, load_suite, open_family
from featcal.calibration.baseline_drift import SAMPLES, FinalDrift, warnings_of
from featcal.calibration.calibrate import config_for
from featcal.cli import featcal_command
from featcal.family.opening import Family
from featcal.models.features import final_features
from featcal.session.session import Session


@pytest.fixture(params=rows(["clip", "t5", "llama"], quick=("clip",), slow=("t5", "llama")))
def family(request: pytest.FixtureRequest, tmp_path: Path, tiny: Family) -> Family:
    if request.param == "clip":
        return tiny
    return open_family(load_suite(write_text_suite(tmp_path / "suite", request.param)), "cpu")


def assert_final_drift(family: Family, batch_size: int, expected: Sequence[int]) -> None:
    """Calibrate on 12 samples of every task, and hold the final drift against whole forwards on the expected ones."""
    config = replace(config_for(family), lam=0.05, rho=1.0, samples=12, batch_size=batch_size)
    made = calibrate(family, config)
    models = {"merged": family.merged, "calibrated": made.weights}
    for task, expert in family.experts.items():
        inputs = family.samples(task, "calibration", config.samples, config.seed).inputs
        batch = {name: tensor[expected] for name, tensor in inputs.items()}
        own = final_features(family.adapter, expert, {}, [batch], family.compute)
        found = made.record["final_drift"][task]
        assert found["samples"] == len(expected)
        for name, weights in models.items():
            features = final_features(family.adapter, weights, {}, [batch], family.compute)
            assert found[name] == pytest.approx(float((features - own).norm() / own.norm()), rel=1e-4)


def test_final_drift_before_and_after_is_that_of_whole_forwards(family: Family) -> None:
    # Spread, because sources are often sorted by class; the texts are eight.
    places = [0, 2, 3, 5, 6, 8, 9, 11] if family.adapter.family == "clip" else range(8)
    assert len(places) == SAMPLES
    assert_final_drift(family, 64, places)


def test_final_drift_is_that_of_the_middle_batch(tiny: Family) -> None:
    assert_final_drift(tiny, 5, range(5, 10))


def test_a_calibration_that_raises_the_drift_warns_on_stderr_in_record_and_card(
    tiny_suite_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(
        featcal_command, ["calibrate", str(tiny_suite_file), "--rho", "1e6", "--out", str(out), "--json"]
    )
    assert done.exit_code == 0
    record = json.loads((out / "featcal.json").read_text())
    assert [line.split(":")[0] for line in record["warnings"]] == ["task 'pets'", "task 'signs'"]
    assert all(f"warning: {line}" in done.stderr for line in record["warnings"])
    assert json.loads(done.stdout)["warnings"] == record["warnings"]
    assert (out / "README.md").read_text().count("**Warning:** task") == 2


def test_a_session_warns_as_a_command_does(tiny: Family) -> None:
    config = replace(config_for(tiny), rho=1e6)
    once, twice = calibrate(tiny, config), Session(tiny).fit.calibrate(config)
    assert len(twice.record["warnings"]) == 2
    for name in ("warnings", "final_drift"):
        assert twice.record[name] == once.record[name]


def test_a_calibration_that_lowers_the_drift_is_silent(tiny: Family, tmp_path: Path) -> None:
    document = calibrate_to_folder(tiny, replace(config_for(tiny), rho=1.0, samples=12), tmp_path / "out")
    assert document["warnings"] == []
    assert "Warning" not in (tmp_path / "out" / "README.md").read_text()
    assert all(one["calibrated"] < one["merged"] for one in document["final_drift"].values())


def test_rounding_is_not_worth_a_word() -> None:
    assert warnings_of({"a": FinalDrift(8, 0.0, 1e-5), "b": FinalDrift(8, 0.3, 0.2)}) == []
    assert len(warnings_of({"a": FinalDrift(8, 0.1, 0.2)})) == 1

"""Parity with the outputs of the paper's official code, where the golden files are at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from featcal.calibration.calibrate import calibrate_to_folder
from featcal.calibration.config import CalibrationConfig
from featcal.suite import load_suite

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="the golden files of the official code are not on this machine")
@pytest.mark.parametrize("case", ["a", "b"])
def test_agrees_with_the_official_code(case: str, tmp_path: Path) -> None:
    folder = GOLDEN / case
    official = json.loads((folder / "config.json").read_text())
    images = str(folder / "images.safetensors")
    tasks = {
        task: {"expert": str(folder / f"expert_{task}"), "calibration": {"tensors": images, "key": task}}
        for task in official["tasks"]
    }
    content = {"name": f"golden-{case}", "base": str(folder / "base"), "merged": str(folder / "merged"), "tasks": tasks}
    file = tmp_path / "suite.yaml"
    file.write_text(yaml.safe_dump(content))
    config = CalibrationConfig(
        lam=official["lam"],
        rho=official["rho"],
        alpha=official["alpha"],
        eps=official["epsilon"],
        samples=official["n"],
        biases=official["calibrate_bias"],
        layernorms=official["calibrate_layernorm"],
    )
    calibrate_to_folder(load_suite(file), config, tmp_path / "out")
    ours = load_file(tmp_path / "out" / "model.safetensors")
    merged = load_file(folder / "merged" / "model.safetensors")
    theirs = load_file(folder / "official_calibrated" / "model.safetensors")
    outside = 0
    for name, tensor in ours.items():
        assert float((tensor - theirs[name]).norm() / theirs[name].norm()) <= 1e-4, name
        if "encoder.layers" not in name:
            outside += 1
            assert tensor.equal(merged[name]), name
    assert outside == 7

"""`cautious`: a short name for two numbers, which every name, command and record says in its place."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app import selection
from featcal import cli as command_line
from featcal.calibration.calibrate import config_for
from featcal.family.opening import Family
from featcal.session.model_names import name_calibration
from featcal.session.model_ref import resolve_model
from featcal.suite.calibration_options import CAUTIOUS
from featcal.suite.command_lines import calibrate_line
from featcal.system.errors import InputError


@pytest.mark.parametrize("recipe", ["refined", "informed"])
def test_it_is_alpha_and_beta_and_nothing_else(recipe: str, tiny: Family) -> None:
    plain, careful = (config_for(tiny, recipe=recipe, samples=64, cautious=on) for on in (False, True))
    assert (plain.alpha, plain.beta) == (0.6, 0.5)
    assert careful == replace(plain, alpha=0.3, beta=0.0)
    assert plain == config_for(tiny, recipe=recipe, samples=64)


def test_what_a_suite_recommends_gives_way(tiny: Family) -> None:
    advised = tiny.suite.calibration.model_copy(update={"recipe": "informed", "alpha": 0.9, "rho": 1.0})
    family = replace(tiny, suite=tiny.suite.model_copy(update={"calibration": advised}))
    careful = config_for(family, cautious=True)
    assert (careful.recipe, careful.rho, careful.alpha, careful.beta) == ("informed", 1.0, 0.3, 0.0)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "choose the recipe 'refined' or 'informed'"),
        ({"recipe": "informed", "alpha": 0.3}, "leave alpha out"),
        ({"recipe": "informed", "alpha": 0.3, "beta": 0.0}, "leave alpha and beta out"),
    ],
)
def test_it_is_refused(options: dict[str, Any], why: str, tiny: Family) -> None:
    with pytest.raises(InputError, match=f"^cautious sets alpha and beta of featcal's own recipes; {why}$"):
        config_for(tiny, cautious=True, **options)


def test_names_and_commands_say_the_numbers(tiny: Family) -> None:
    config = config_for(tiny, recipe="informed", samples=64, cautious=True)
    assert resolve_model("calibrated:recipe=informed,samples=64,cautious=true", tiny).config == config
    assert (
        name_calibration(config, tiny)
        == "calibrated:lam=0.001,rho=2,alpha=0.3,samples=64,recipe=informed,beta=0,mu=0.1"
    )
    said = calibrate_line("s", config, config_for(tiny), "o")
    assert "--alpha 0.3 --beta 0 --mu 0.1" in said
    assert "cautious" not in said


def test_the_app_means_the_same() -> None:
    chosen = selection.HOME.change(recipe="informed", cautious=True)
    assert {name: getattr(chosen, name) for name in CAUTIOUS} == CAUTIOUS == selection.CAUTIOUS
    assert chosen.cautious
    assert chosen.to_query() == {"recipe": "informed", "alpha": "0.3", "beta": "0"}
    assert selection.from_query(chosen.to_query())[0] == chosen
    assert chosen.change(cautious=False) == selection.HOME.change(recipe="informed")


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["featcal", *words, "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    return int(ended.value.code or 0)


def test_the_command_line(tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = str(tiny_suite_file)
    outs = {"short": ["--cautious"], "long": ["--alpha", "0.3", "--beta", "0"]}
    for name, words in outs.items():
        out = str(tmp_path / name)
        assert run(monkeypatch, "calibrate", suite, "--recipe", "informed", "--samples", "8", *words, "--out", out) == 0
    short, long = (json.loads((tmp_path / name / "featcal.json").read_text()) for name in outs)
    assert short["config"] == long["config"]
    assert (short["config"]["alpha"], short["config"]["beta"]) == (0.3, 0.0)
    assert short["tensors"] == long["tensors"]


def test_a_sweep_over_alpha_is_not_cautious(
    tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["study", "sweep", str(tiny_suite_file), "--recipe", "informed", "--cautious", "--alpha", "0.1,0.6"]
    assert run(monkeypatch, *words) != 0
    assert "leave alpha out" in capsys.readouterr().err

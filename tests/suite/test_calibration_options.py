"""An option of a calibration is defined once; names, commands, suite files, the app and the docs follow."""

from __future__ import annotations

import json
import random
import runpy
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from app import selection
from featcal.calibration.calibrate import calibrate_family, config_for
from featcal.calibration.config import idle_options, resolve_options
from featcal.cli.repair import calibrate_command as calibrate_verb
from featcal.cli.repair import select_command as select_verb
from featcal.cli.repair import sweep_command as sweep_verb
from featcal.family.opening import Family
from featcal.models.compute import DTYPES
from featcal.session.model_ref import resolve_model
from featcal.suite.calibration_options import (
    ASKED,
    CHOSEN,
    IDLE,
    OPTIONS,
    PRECISIONS,
    RECIPES,
    SHORTHANDS,
    CalibrationConfig,
    Option,
)
from featcal.suite.command_lines import calibrate_line
from featcal.suite.schema import CalibrationDefaults
from featcal.system.errors import InputError

SETS = 200


def draw(rng: random.Random, family: Family) -> CalibrationConfig:
    """Return some of the options at values of their own, for a model that reads pictures."""
    recipe = rng.choice(RECIPES)
    known = {"blocks": family.adapter.block_layers(), "maps": family.adapter.parts(), "tasks": list(family.suite.tasks)}
    asked: dict[str, Any] = {"recipe": recipe}
    for name, one in OPTIONS.items():
        if recipe not in one.recipes or name in {"recipe", *IDLE, *idle_options(family.adapter)}:
            continue
        if rng.random() < 0.5:
            asked[name] = value_of(rng, one, known.get(name, ()))
    if asked.get("decisions"):  # which go with neither
        asked |= {"quantize": "off", "routers": False}
    if {"quantize", "group_size"} & asked.keys():
        asked["group_size"] = rng.choice((0, 8, 16))  # of 16 and 32 inputs
    if asked.get("alpha") == 0:
        asked |= {"beta": 0.0} if recipe in OPTIONS["beta"].recipes else {}
    return config_for(family, **asked)


def value_of(rng: random.Random, one: Option, names: list[str] | tuple[str, ...]) -> Any:
    """Return a value of an option, with digits that a careless printer would lose."""
    if one.kind is tuple:
        return tuple(sorted(rng.sample(list(names), rng.randint(1, len(names)))))
    if one.choices:
        return rng.choice(one.choices)
    if one.kind is bool:
        return rng.random() < 0.5
    if one.kind is int:
        return rng.randint(int(max(one.least or 0, 0)), 300)
    ends = [0.0] if one.below else [0.0, 1.0]
    return rng.choice(ends) if one.above is None and rng.random() < 0.2 else rng.uniform(1e-9, 1)


def read_back(family: Family, command: str) -> CalibrationConfig:
    """Return the options that `featcal calibrate` takes from a printed line."""
    words = shlex.split(command)
    assert words[:2] == ["featcal", "calibrate"]
    given = calibrate_verb.make_context("calibrate", words[2:]).params
    return config_for(family, **{name: given[name] for name in ASKED})


def test_names_and_printed_commands_mean_the_same_options(tiny: Family) -> None:
    """For 200 drawn sets of options, whatever the suite recommends."""
    rng = random.Random(42)
    advice = (
        {"recipe": "refined", "lam": 0.02, "samples": 16, "biases": False},
        {"recipe": "informed", "decisions": 0.7, "weigh_tokens": True, "mu": 0.2},
    )
    others = [
        replace(tiny, suite=tiny.suite.model_copy(update={"calibration": CalibrationDefaults.model_validate(one)}))
        for one in advice
    ]
    different = set()
    for _ in range(SETS):
        config = draw(rng, tiny)
        for family in (tiny, *others):
            name = resolve_model(config, family).name
            assert resolve_model(name, family).config == config
            line = calibrate_line("s", config, config_for(family), "out")
            assert read_back(family, line) == config, line
        different.add(config)
    assert len(different) > SETS * 0.9


@pytest.mark.parametrize("model", ["calibrated", "calibrated@tsv-m", "svc@calibrated", "calibrated:recipe=refined"])
def test_a_name_says_what_suites_recommend_apart(model: str, tiny: Family) -> None:
    """Results are kept by it, and a suite whose recommendations change is the same suite."""
    advice = ({}, {"biases": False}, {"biases": False, "maps": ["mlp"]}, {"layernorms": False})
    names = {
        resolve_model(model, replace(tiny, suite=tiny.suite.model_copy(update={"calibration": one}))).name
        for one in map(CalibrationDefaults.model_validate, advice)
    }
    assert len(names) == len(advice)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_printed_command_makes_the_same_tensors(seed: int, tiny: Family) -> None:
    config = replace(draw(random.Random(seed), tiny), samples=8, augment=0)  # its pictures are tensors of any scale
    again = read_back(tiny, calibrate_line("s", config, config_for(tiny), "out"))
    made, remade = (calibrate_family(tiny, one).weights for one in (config, again))
    names = [name for block in tiny.adapter.blocks() for name in block.names]
    first, second = made.read(names), remade.read(names)
    assert all(first[name].equal(second[name]) for name in names)


def test_every_option_is_everywhere() -> None:
    flags = {name: {one.name for one in verb.params} for name, verb in VERBS.items()}
    assert flags["calibrate"] >= set(ASKED)
    assert flags["sweep"] >= set(ASKED) - {"lam", "rho", "alpha"}
    assert flags["select"] & set(ASKED) == set(ASKED) - {*CHOSEN, "cautious"}
    assert list(CalibrationDefaults.model_fields) == list(OPTIONS)
    assert tuple(DTYPES) == PRECISIONS  # the names stand twice: models know nothing of suites, options nothing of torch
    assert set(selection.OPTIONS) == {name for name, one in OPTIONS.items() if one.label}
    assert all(hasattr(selection.HOME, name) for name in selection.OPTIONS)
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "options.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(docs / "options.py"))["filled"](page) == page
    assert all(f"| `{name}`" in page for name in ASKED)


VERBS: dict[str, click.Command] = {"calibrate": calibrate_verb, "sweep": sweep_verb, "select": select_verb}


def test_help_says_what_an_option_does_and_what_holds_without_it() -> None:
    params = {one.name: one for one in calibrate_verb.params if isinstance(one, click.Option)}
    for name, one in {**OPTIONS, **SHORTHANDS}.items():
        said = str(params[name].help)
        assert said.startswith(one.help)
        assert f"[{one.left_out}" in said


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"lam": -1.0}, "lam is -1; it is at least 0 and finite"),
        ({"alpha": 1.5}, r"alpha is 1.5; it lies in \[0, 1\]"),
        ({"patch_weight": 0.0}, r"patch_weight is 0; it lies in \(0, 1\]"),
        ({"samples": 0}, "samples is 0; it is at least 1"),
        ({"rho": float("nan")}, "rho is nan; it is finite"),
        ({"mu": 0.1}, "mu is 0.1; it belongs to the recipe 'informed'"),
        ({"weigh_tokens": True}, "weigh_tokens belongs to the recipe 'refined' or 'informed'"),
        ({"recipe": "fast"}, "recipe is 'fast'; choose paper or refined or informed"),
        ({"recipe": "refined", "alpha": 0.0, "beta": 0.5}, "alpha is 0: beta above 0 needs"),
        ({"blocks": ()}, "blocks is empty"),
        ({"samples": "8"}, "samples is '8'; give a whole number"),
        ({"samples": 8.5}, "samples is 8.5; give a whole number"),
        ({"samples": True}, "samples is True; give a whole number"),
        ({"lam": "0.1"}, "lam is '0.1'; give a number"),
        ({"biases": "no"}, "biases is 'no'; give True or False"),
        ({"biases": 1}, "biases is 1; give True or False"),
        ({"tasks": 3}, "tasks is 3; give a list of names"),
        ({"blocks": [0]}, r"blocks is \[0\]; give a list of names"),
        ({"samples": None}, "samples is None; give a whole number"),
        ({"biases": None}, "biases is None; give True or False"),
        ({"precision": None}, "precision is 'None'; choose exact or fast"),
        ({"eps": None}, "eps is None; give a number"),
        ({"quantize": None}, "quantize is 'None'; choose off"),
    ],
)
def test_a_value_out_of_range_is_refused(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        CalibrationConfig(**asked)


def test_numbers_of_numpy_are_written_as_pythons_own() -> None:
    config = CalibrationConfig(samples=np.int64(8), lam=np.float32(0.5), rho=1)
    assert json.dumps([config.samples, config.lam, config.rho]) == "[8, 0.5, 1]"
    assert config == CalibrationConfig(samples=8, lam=0.5, rho=1)


def test_an_unknown_option_gets_a_hint(tiny: Family) -> None:
    with pytest.raises(InputError, match="no option 'lambda'"):
        config_for(tiny, **{"lambda": 1.0})
    with pytest.raises(InputError, match="Did you mean 'weigh_tokens'"):
        config_for(tiny, weight_tokens=True)


def test_a_recipe_brings_its_numbers_for_the_architecture_and_the_samples(tiny: Family) -> None:
    """Also where options are replaced before anybody calibrates."""
    few = calibrate_family(tiny, replace(CalibrationConfig(recipe="refined", samples=64), samples=8)).config
    assert (few.lam, few.rho, few.alpha, few.beta, few.mu) == (0.05, 2.0, 0.3, 0.5, 0.0)
    assert few == config_for(tiny, recipe="refined", samples=8)
    other = resolve_options(replace(CalibrationConfig(), recipe="informed"), tiny.adapter, list(tiny.suite.tasks))
    assert (other.beta, other.mu) == (0.5, 0.1)
    assert other == config_for(tiny, recipe="informed")

"""Every model of a suite has a name, the same on the command line, in addresses and in Python."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st
from lanes import cases_by_message, rows
from tiny_clip import TASKS
from torch import Tensor

from featcal import calibrate, evaluate, measure_drift
from featcal.calibration.calibrate import calibrate_to_folder, config_for
from featcal.calibration.config import resolve_options
from featcal.calibration.config import resolve_recipe as config_of_recipe
from featcal.cli import featcal_command
from featcal.export.merge import merge_to_folder
from featcal.family.opening import Family, open_family
from featcal.formats.weights import Weights
from featcal.session.model_names import name_calibration, weights_of
from featcal.session.model_ref import resolve_model
from featcal.session.session import Session
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.command_lines import calibrate_line
from featcal.suite.methods import merger_names
from featcal.suite.name_grammar import ModelName, format_parts, model_name, parts_of, read_options
from featcal.suite.recipe import MergeRecipe
from featcal.suite.schema import load_suite
from featcal.system.errors import InputError


def tensors(family: Family, model: Weights) -> Mapping[str, Tensor]:
    return model.read(family.adapter.tower)


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor], within: float = 0.0) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=within, atol=within) for name in one)


IDLE = {"batch_size", "rmsnorms", "routers", "completion_only", "image_weight"}
"""Changes nothing but time, or means nothing to a CLIP."""


def test_a_name_in_its_parts() -> None:
    assert model_name("merged") == ModelName("merged")
    assert model_name("expert") == ModelName("expert")
    assert model_name("expert:a:b") == ModelName("expert", task="a:b")
    assert model_name("calibrated") == ModelName("calibrated", of="merged")
    assert model_name("calibrated:rho=1@tsv-m") == ModelName("calibrated", (("rho", "1"),), of="tsv-m")
    assert model_name("svc@calibrated@ties:scale=1").of == "calibrated@ties:scale=1"
    assert model_name("calibrated: lam=0.1 , rho=2") == ModelName(
        "calibrated", (("lam", "0.1"), ("rho", "2")), of="merged"
    )
    with_commas = ("./ties,scale=1", "mine,scale=1", "ties,more")
    for reference in (
        "./ties", "org/model", "open_clip:ViT-B-32:file.pt", "merged-model", "C:\\models\\a", "a+b", *with_commas
    ):  # fmt: skip
        assert model_name(reference).kind == "reference"


ODD = st.text("al,:%+@= -'\n\u3000é", min_size=1, max_size=4).filter(str.strip) | st.sampled_from(
    ["all", "a,b", "a", "b"]
)
"""Names that tasks may have, of signs that mean something to a name, an address or a shell."""
NAMES = st.lists(ODD, min_size=1, max_size=4, unique=True)


@given(NAMES)
@example(["all"])
@example(["all", "other"])
def test_names_of_parts_go_both_ways_in_the_name_of_a_model(names: list[str]) -> None:
    name = model_name(f"calibrated:tasks={format_parts(names)},rho=2@ties:scale=1")
    assert (name.of, [option for option, _ in name.options]) == ("ties:scale=1", ["tasks", "rho"])
    assert parts_of(dict(name.options)["tasks"]) == tuple(names)


@given(NAMES, st.data())
@example(["a", "b", "a,b"], None)
def test_names_of_tasks_go_both_ways_on_the_command_line(
    tiny: Family, names: list[str], data: st.DataObject | None
) -> None:
    """As one among others: `a` and `b` are not the task `a,b`."""
    chosen = names[:2] if data is None else data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    defaults = config_of_recipe(tiny.adapter, names, {})
    config = resolve_options(replace(defaults, tasks=tuple(chosen)), tiny.adapter, names)
    words = shlex.split(calibrate_line("mine.yaml", config, defaults, "out"))
    given_tasks = tuple(value for flag, value in pairwise(words) if flag == "--tasks")
    assert resolve_options(replace(defaults, tasks=given_tasks or None), tiny.adapter, names) == config


def test_a_suite_that_chooses_tasks_has_none_called_all(edit_suite: Callable[..., Path]) -> None:
    """Otherwise `--tasks all` could mean it, or take the choice back."""

    def rename(content: dict[str, Any]) -> None:
        content["tasks"]["all"] = content["tasks"].pop(TASKS[0])
        content["calibration"] = {"tasks": ["all"]}

    with pytest.raises(InputError, match="'all' would mean both one task and all tasks; rename"):
        load_suite(edit_suite(rename))
    family = open_family(load_suite(edit_suite(lambda content: content.pop("calibration"))), device="cpu")
    alone = resolve_model("calibrated:tasks=%61ll", family)
    assert alone.calibration is not None
    assert alone.calibration.tasks == ("all",)
    assert resolve_model(alone.name, family).config == alone.config
    every = resolve_model("calibrated:tasks=all", family)
    assert every.calibration is not None
    assert every.calibration.tasks is None


def test_a_task_has_a_name(edit_suite: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match="a task has no name"):
        load_suite(edit_suite(lambda content: content["tasks"].update({" ": content["tasks"].pop(TASKS[0])})))


@pytest.mark.parametrize("sign", "%+,:=@")
def test_signs_of_the_grammar_in_the_name_of_a_part_are_read_back(sign: str) -> None:
    parts = (f"a{sign}b", "c")
    name = model_name(f"calibrated:tasks={format_parts(parts)},rho=1@ties")
    assert (name.of, dict(name.options)["rho"]) == ("ties", "1")
    assert parts_of(dict(name.options)["tasks"]) == parts


def test_named_models_hold_the_tensors_they_say(tiny: Family) -> None:
    merged, base = tensors(tiny, tiny.merged), tensors(tiny, tiny.base)
    recipe = tiny.merge(MergeRecipe(method="task-arithmetic", scale=0.6))
    assert same(tensors(tiny, weights_of("task-arithmetic:scale=0.6", tiny)), tensors(tiny, recipe))
    assert same(tensors(tiny, weights_of(f"expert:{TASKS[1]}", tiny)), tensors(tiny, tiny.experts[TASKS[1]]))
    assert same(tensors(tiny, weights_of("anchor:rho=1", tiny)), merged, 1e-7)
    assert same(tensors(tiny, weights_of("anchor:rho=0", tiny)), base)
    beyond = tensors(tiny, weights_of("anchor:rho=2.5", tiny))
    assert same(beyond, {name: 2.5 * merged[name] - 1.5 * base[name] for name in merged}, 1e-5)


def test_an_anchor_may_be_of_another_merge(tiny: Family) -> None:
    session = Session(tiny)
    model = session.resolve("anchor:rho=2.5@svc@ties")
    assert model.of is not None
    assert (model.kind, model.of.name) == ("anchor", session.resolve("svc@ties").name)
    own, base = tensors(tiny, session.fit.weights("svc@ties")), tensors(tiny, tiny.base)
    found = tensors(tiny, session.fit.weights(model))
    assert same(found, {name: 2.5 * own[name] - 1.5 * base[name] for name in own}, 1e-5)
    assert model.key != session.resolve("anchor:rho=2.5").key


def test_an_anchor_is_task_arithmetic_at_another_scale(tiny: Family) -> None:
    """Eq. (11) of a merge with scale s: rho s instead of s."""
    of_recipe = weights_of("task-arithmetic:scale=0.3", tiny)
    family = Family(**{**vars(tiny), "merged": of_recipe})
    twice = tensors(tiny, weights_of("task-arithmetic:scale=0.6", tiny))
    assert same(tensors(tiny, weights_of("anchor:rho=2", family)), twice, 1e-6)


@pytest.mark.parametrize(
    "method",
    rows(
        merger_names(),
        quick=("simple-averaging", "ties", "tsv-m"),
        slow=("linear", "task-arithmetic", "dare-ties", "model-stock", "iso-cts", "swudi", "wudi", "ace"),
    ),
)
def test_a_merge_is_written_named_and_calibrated_alike(
    method: str, edit_suite: Callable[[Callable[[dict[str, Any]], None]], Path], tmp_path: Path
) -> None:
    """One model: what `merge` writes, what its name means, and what a strong ridge holds a calibration to."""
    few = {"steps": 3} if method == "wudi" else {}
    suite = load_suite(edit_suite(lambda content: content.update(merged={"method": method, **few})))
    family = open_family(suite, device="cpu")
    written = merge_to_folder(family, method, None, tmp_path / "out")
    assert written["method"] == method
    assert [note for note in written["notes"] if note.startswith("merged: ")] == MergeRecipe(method=method).notes
    merged = tensors(family, family.merged)
    assert same(tensors(family, family.model(str(tmp_path / "out"))), merged)
    assert same(tensors(family, weights_of(method, family)), merged)
    held = calibrate(family, CalibrationConfig(samples=4, lam=1e6, rho=1.0)).weights
    assert same(tensors(family, held), merged, 1e-4)


def test_the_name_of_a_calibration_goes_both_ways(tiny: Family) -> None:
    own = config_for(tiny)
    assert resolve_model("calibrated", tiny).config == own
    assert resolve_model("calibrated:lam=1e-05,biases=false,seed=7", tiny).config == config_for(
        tiny, lam=1e-5, biases=False, seed=7
    )
    for config in (own, config_for(tiny, lam=1 / 3, samples=8), config_for(tiny, layernorms=False, precision="fast")):
        again = resolve_model(name_calibration(config, tiny), tiny).config
        assert isinstance(again, CalibrationConfig)
        assert again.lam == pytest.approx(config.lam, rel=1e-11)
        assert CalibrationConfig(**{**vars(again), "lam": config.lam}) == config
    assert (
        name_calibration(own, tiny)
        == resolve_model(own, tiny).name
        == f"calibrated:lam=0.05,rho=2,alpha=0.3,samples={own.samples}"
    )
    asked = CalibrationConfig(samples=8, blocks=("block 1, block 0",))
    assert name_calibration(asked, tiny) == "calibrated:lam=0.05,rho=2,alpha=0.3,samples=8,blocks=block 0+block 1"
    assert [resolve_model(one, tiny).name for one in ("merged", "ties:scale=1")] == ["merged", "ties:scale=1"]


def test_a_name_says_what_a_suite_recommends_so_that_it_means_the_same_in_another(tiny: Family) -> None:
    options = tiny.suite.calibration.model_copy(update={"layernorms": False})
    family = replace(tiny, suite=tiny.suite.model_copy(update={"calibration": options}))
    recommended = config_for(family)
    name = name_calibration(recommended, family)
    assert resolve_model(name, tiny).config == recommended != config_for(tiny)


@pytest.mark.parametrize("word", ["true", "True"])
def test_a_switch_is_read_as_people_write_it(word: str) -> None:
    assert read_options(model_name(f"calibrated:biases={word}"), {"biases": bool}) == {"biases": True}


def changed(family: Family, name: str) -> CalibrationConfig:
    """The options of a suite but for one."""
    of_recipe = {"beta": "refined", "mu": "informed", "weigh_tokens": "refined", "decisions": "informed"}
    own = config_for(family, recipe=of_recipe.get(name))
    value = getattr(own, name)
    named = {
        "blocks": ("block 1",),
        "maps": ("mlp",),
        "tasks": ("pets",),
        "recipe": "refined",
        "beta": 0.0,
        "quantize": "int8",
    }
    of_kind = {bool: not value, int: 16, float: 0.5, str: "fast"}
    fitting = {"group_size": 16} if name == "quantize" else {}  # which divides the widths of these models
    return replace(own, **fitting, **{name: named.get(name, of_kind.get(type(value)))})


CHANGING = pytest.mark.parametrize("name", sorted(set(vars(CalibrationConfig())) - IDLE))


@CHANGING
def test_a_name_tells_apart_what_changes_a_calibrated_model(tiny: Family, name: str) -> None:
    other = changed(tiny, name)
    assert resolve_model(name_calibration(other, tiny), tiny).config == other != config_for(tiny, recipe=other.recipe)


@CHANGING
def test_a_command_makes_the_very_model(tiny: Family, name: str) -> None:
    """Every option that changes a model is one of the command line, and is said where it is not the suite's own."""
    other = changed(tiny, name)
    words = shlex.split(calibrate_line("suite.yaml", other, config_for(tiny), "out"))
    command = featcal_command.get_command(click.Context(featcal_command), words[1])
    assert command is not None
    params = command.make_context(words[1], words[2:]).params
    assert config_for(tiny, **{option: params[option] for option in vars(other)}) == other


def test_any_model_is_calibrated_as_if_it_were_the_suites(
    tiny: Family, edit_suite: Callable[[Callable[[dict[str, Any]], None]], Path]
) -> None:
    """The anchor after the @ is what `merged:` of a suite file is."""
    session = Session(tiny)
    assert session.resolve("calibrated:samples=8@merged").key == session.resolve("calibrated:samples=8").key
    name = session.resolve("calibrated:samples=8,rho=1@tsv-m")
    assert name.name == name.label == "calibrated:lam=0.05,rho=1,alpha=0.3,samples=8@tsv-m"
    suite = load_suite(edit_suite(lambda content: content.update(merged={"method": "tsv-m"})))
    other = calibrate(open_family(suite, device="cpu"), CalibrationConfig(samples=8, rho=1.0))
    assert same(tensors(tiny, session.fit.weights(name)), tensors(tiny, other.weights))
    assert session.fit.calibrate(name).record["merged"] == "tsv-m"
    assert session.fit.weights(session.resolve("calibrated:rho=1,samples=8@tsv-m")) is session.fit.weights(name)
    held = session.resolve("calibrated:samples=4,lam=1e6,rho=1@regmean:samples=8")
    regmean = tensors(tiny, session.fit.weights(session.resolve("regmean:samples=8")))
    assert same(tensors(tiny, session.fit.weights(held)), regmean, 1e-4)
    assert not same(regmean, tensors(tiny, tiny.merged), 1e-2)


FEW = CalibrationConfig(samples=4)


def interrupted(family: Family, out: Path) -> None:
    """A calibration that ended after a block."""

    def stop(_: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate_to_folder(family, FEW, out, progress=stop)


@pytest.mark.slow
def test_calibrate_writes_what_its_name_says(tiny_suite_file: Path, tiny: Family, tmp_path: Path) -> None:
    given = ["--model", "wudi-optimum", "--samples", "8", "--out", str(tmp_path / "out"), "--json"]
    done = CliRunner().invoke(featcal_command, ["calibrate", str(tiny_suite_file), *given])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["merged"] == "wudi-optimum"
    assert "| merged model | wudi-optimum: the minimiser of WUDI" in (tmp_path / "out" / "README.md").read_text()
    named = evaluate(tiny, "calibrated:samples=8@wudi-optimum")
    assert evaluate(tiny, str(tmp_path / "out")).average == named.average
    interrupted(Session(tiny).fit.family_with("tsv-m"), tmp_path / "again")
    with pytest.raises(InputError, match="comes from a run with other "):
        calibrate_to_folder(Session(tiny).fit.family_with("iso-c"), FEW, tmp_path / "again", resume=True)
    failed = CliRunner().invoke(
        featcal_command, ["calibrate", str(tiny_suite_file), "--model", "surgery:samples=8", *given[2:]]
    )
    assert failed.exit_code == 1
    assert "its adapters, maps or heads of" in str(failed.exception)


def test_numbers_of_a_name_are_those_of_its_options(tiny: Family) -> None:
    result = calibrate(tiny, CalibrationConfig(samples=8, rho=1.5))
    name = "calibrated:samples=8,rho=1.5"
    assert evaluate(tiny, name).average == evaluate(tiny, result).average
    named, given = (measure_drift(tiny, one, samples=8).to_frame()["drift"] for one in (name, result))
    assert named.tolist() == given.tolist()


NAMES = ("anchor:rho=2", "ties:scale=1,density=0.5", "dare-ties:drop=0.2,seed=7", f"expert:{TASKS[0]}",
         "calibrated:samples=8")  # fmt: skip


@pytest.mark.parametrize("name", rows(NAMES, quick=("ties:scale=1,density=0.5", "calibrated:samples=8"), slow=NAMES))
def test_the_command_line_takes_every_name(name: str, tiny_suite_file: Path) -> None:
    for command in (["drift", "--eval-samples", "4"], ["evaluate"]):
        done = CliRunner().invoke(
            featcal_command, [command[0], str(tiny_suite_file), "--model", name, "--json", *command[1:]]
        )
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["suite"] == "tiny"


WRONG = {
    "'scale' is not an option such as scale=0.6": "ties:scale",
    "'' is not an option such as scale=0.6": ["ties:", "ties:scale=1,"],
    "scale is given twice": "ties:scale=1,scale=2",
    "scale is a number, not 'much'": "ties:scale=much",
    "ties: scale is inf; it is finite": "ties:scale=inf",
    "has no option 'scal'; it takes scale, density, dtype. Did you mean 'scale'?": "ties:scal=1",
    "has no option 'density'; it takes scale, normalize, dtype": "task-arithmetic:density=0.5",
    "model 'calibrated' has no option 'lamda'": "calibrated:lamda=1",
    "samples is a whole number, not '1.5'": "calibrated:samples=1.5",
    "biases is true or false, not 'no'": "calibrated:biases=no",
    "names no model after @; leave @ out for the merged model": ["calibrated@", "svc@"],
    "is stacked on more than 8 others": ["svc@" * 10 + "merged"],
    "model 'ties' has no option 'scal'": "calibrated:samples=4@ties:scal=1",
    "lam is -1; it is at least 0 and finite": "calibrated:lam=-1",
    "needs its rho, such as anchor:rho=2": ["anchor"],
    "model 'anchor' has no option 'scale'": "anchor:scale=2",
    "rho is a number, not 'two'": "anchor:rho=two",
    "names no task; write expert:TASK": "expert:",
    "options follow a colon, as in calibrated:lam=0.1 (write ./calibrated,lam=0.1 for a folder": [
        "calibrated,lam=0.1",
        "svc@calibrated,lam=0.1",
    ],
    "as in calibrated:lam=0.1,rho=2@tsv-m (": "calibrated, lam=0.1,rho=2@tsv-m",
    "as in ties:density=0.2 (": "ties,density=0.2",
    "give an existing folder or a Hub id such as 'owner/name' or 'owner/name/folder'. Did you mean 'tsv-m'?": "tsvm",
    "Did you mean 'calibrated'?": "calibrted:rho=1",
    "no such task; there are pets, signs. Did you mean 'pets'?": "expert:pet",
}


@pytest.mark.parametrize(("name", "message"), cases_by_message(WRONG))
def test_a_name_that_stands_for_nothing_says_why(tiny: Family, name: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        measure_drift(tiny, name, samples=4)
    assert message in str(error.value)


def test_every_expert_at_once_is_not_one_model(tiny: Family) -> None:
    with pytest.raises(InputError, match="every expert on its own task; name a single one, such as expert:pets"):
        measure_drift(tiny, "expert", samples=4)


def test_a_name_never_means_a_folder_that_is_called_so(
    tiny: Family, tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["evaluate", str(tiny_suite_file), "--eval-samples", "4", "--model", "ties", "--json"]
    expected = CliRunner().invoke(featcal_command, asked)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ties").mkdir()
    (tmp_path / "merged").mkdir()  # what a command does when it is told no name is no name that somebody gave
    found = CliRunner().invoke(featcal_command, asked)
    assert json.loads(found.stdout) == json.loads(expected.stdout)
    assert "note: --model ties is what featcal calls so; write ./ties for the folder" in found.stderr
    assert "note" not in expected.stderr
    untold = CliRunner().invoke(featcal_command, ["drift", str(tiny_suite_file), "--eval-samples", "4"])
    assert untold.exit_code == 0
    assert "note" not in untold.stderr
    with pytest.raises(InputError, match=r"\./ties"):
        measure_drift(tiny, "./ties", samples=4)

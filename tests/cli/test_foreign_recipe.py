"""From a recipe of mergekit to a merged, diagnosed and calibrated folder, with one command."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import Run, document
from mergekit_merges import write_by_formula
from own_merges import TEMPLATE, WEIGHTS, edit_json, edit_tensors, write_parents
from safetensors.torch import load_file
from tiny_decoders import ROWS, tiny_decoder
from tiny_text import tiny_tokenizer
from torch import Tensor

from featcal.testing.trial import write_trial


@pytest.fixture(scope="module")
def parents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with tokenizer, and experts near it."""
    root = tmp_path_factory.mktemp("parents")
    write_parents(root)
    return root


def write_recipe(file: Path, method: str, models: dict[str, dict[str, float]], **more: Any) -> Path:
    """Write a recipe of mergekit whose models have these parameters."""
    inputs = [{"model": model, **({"parameters": own} if own else {})} for model, own in models.items()]
    file.write_text(yaml.safe_dump({"merge_method": method, "models": inputs, "dtype": "float32", **more}))
    return file


def weighted(root: Path, file: Path, method: str = "task_arithmetic", **more: Any) -> Path:
    inputs = {str(root / task): {"weight": weight} for task, weight in WEIGHTS.items()}
    return write_recipe(file, method, inputs, **more)


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_a_recipe_is_merged_as_a_suite_is(parents: Path, run: Run, tmp_path: Path) -> None:
    recipe = weighted(parents, tmp_path / "own.yml", base_model=str(parents / "base"))
    made = document(run("merge", recipe, "--out", tmp_path / "merged", "--json"))
    assert made["method"] == "task-arithmetic"
    assert (tmp_path / "merged" / "mergekit_config.yml").read_bytes() == recipe.read_bytes()
    base, *experts = (stored(parents / name) for name in ("base", *WEIGHTS))
    for name, tensor in stored(tmp_path / "merged").items():
        vectors = zip(WEIGHTS.values(), experts, strict=True)
        expected = base[name] + sum(weight * (one[name] - base[name]) for weight, one in vectors)
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-6)


def test_what_its_card_names_is_there(parents: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = weighted(parents, tmp_path / "own.yml", base_model=str(parents / "base"))
    assert run("merge", recipe, "--out", tmp_path / "first")[0] == 0
    monkeypatch.chdir(tmp_path / "first")
    blocks = Path("README.md").read_text().split("```bash\n")[1:]
    scored, again = ([shlex.split(line)[1:] for line in one.split("\n```")[0].splitlines()] for one in blocks)
    assert run(*again[0])[0] == 0
    assert Path("merged/model.safetensors").read_bytes() == Path("model.safetensors").read_bytes()
    code, _, err = run("replay", ".")
    assert (code, " ".join(scored[0]) in err) == (1, True)
    assert run(*scored[0])[0] == 0
    assert scored[1] == ["evaluate", "suite.yaml", "--card", "DIR"]
    assert run("replay", ".", "--suite", "suite.yaml")[0] == 0


def copy_parents(parents: Path, out: Path) -> Path:
    """Copy base and experts to a folder where a test may change them."""
    return Path(shutil.copytree(parents, out))


def test_a_mean_takes_the_files_of_its_first_model(parents: Path, run: Run, tmp_path: Path) -> None:
    """Not those of an ancestor that the models name: mergekit has the first model's, and nobody has to fetch it."""
    own = copy_parents(parents, tmp_path / "own")
    for task in WEIGHTS:
        edit_json(own / task / "config.json", _name_or_path=str(own / "base"))
    (own / "left" / "chat_template.jinja").write_text(TEMPLATE)
    recipe = weighted(own, tmp_path / "own.yml", "linear")
    made = document(run("merge", recipe, "--out", tmp_path / "merged", "--json"))
    assert (tmp_path / "merged" / "chat_template.jinja").read_text() == TEMPLATE
    assert any(f"base is {own / 'base'}" in note for note in made["notes"])
    assert "its weights are" not in "".join(made["notes"])  # the first model stands in for a base
    shutil.rmtree(own / "right")
    shutil.copytree(own / "left", own / "right")
    made = document(run("merge", recipe, "--out", tmp_path / "twice", "--json"))
    assert "expert 'right': its weights are those of the expert 'left'; is it the right file?" in made["notes"]


def test_what_a_recipe_asks_for_in_vain_is_said(parents: Path, run: Run, tmp_path: Path) -> None:
    recipe = weighted(parents, tmp_path / "own.yml", base_model=str(parents / "base"), chat_template="chatml")
    _, _, err = run("merge", recipe, "--out", tmp_path / "merged")
    assert "chat_template is not taken over" in err


def test_rows_that_the_base_lacks_are_left_out(parents: Path, run: Run, tmp_path: Path) -> None:
    own = copy_parents(parents, tmp_path / "own")
    rows = ("model.embed_tokens.weight", "lm_head.weight")
    edit_tensors(own / "right", lambda name, one: torch.cat([one, one[:2]]) if name in rows else one)
    size = len(stored(own / "right")[rows[0]])
    edit_json(own / "right" / "config.json", vocab_size=size)
    recipe = weighted(own, tmp_path / "own.yml", base_model=str(own / "base"))
    made = document(run("merge", recipe, "--out", tmp_path / "merged", "--json"))
    plain = document(
        run("merge", weighted(parents, recipe, base_model=str(parents / "base")), "--out", tmp_path / "plain", "--json")
    )
    found, expected = stored(tmp_path / "merged"), stored(tmp_path / "plain")
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    (note,) = [note for note in made["notes"] if note not in plain["notes"]]
    assert f"expert 'right': its vocabulary has 2 rows more than the base's {size - 2};" in note


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--method", "ties"], "--method: only for a suite; "),
        (["--merged", "there"], "--merged: only with --calibrate"),
        (["--calibrate", "--max-memory", "1GiB"], "--max-memory: not with --calibrate"),
        (["--calibrate", "best"], "'best' is not one of 'paper', 'refined', 'informed'"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], said: str, parents: Path, run: Run, tmp_path: Path) -> None:
    recipe = weighted(parents, tmp_path / "own.yml", base_model=str(parents / "base"))
    code, _, err = run("merge", recipe, *words, "--out", tmp_path / "out")
    assert (code, said in err) == (2, True), err
    assert not (tmp_path / "out").exists()


def test_a_suite_is_no_recipe(tiny_suite_file: Path, run: Run, tmp_path: Path) -> None:
    code, _, err = run("merge", tiny_suite_file, "--calibrate", "--base", "b", "--out", tmp_path / "out")
    assert code == 2
    assert "--calibrate, --base: only for a recipe of mergekit, and" in err


def test_what_mergekit_alone_merges_is_asked_for(parents: Path, run: Run, tmp_path: Path) -> None:
    models = {str(parents / task): {} for task in WEIGHTS}
    recipe = write_recipe(tmp_path / "own.yml", "karcher", models)
    code, _, err = run("merge", recipe, "--calibrate", "--out", tmp_path / "out")
    assert code == 1
    assert "merge_method 'karcher' has no recipe in featcal" in err
    assert "run mergekit and give its output folder with --merged" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_one_command_merges_looks_and_calibrates(parents: Path, run: Run, tmp_path: Path) -> None:
    recipe = weighted(parents, tmp_path / "own.yml", base_model=str(parents / "base"))
    found = document(run("merge", recipe, "--calibrate", "informed", "--out", tmp_path / "out", "--json"))
    assert {one.name for one in (tmp_path / "out").iterdir()} == {
        *("merged", "calibrated", "suite.yaml", "diagnosis.json")
    }
    assert found["diagnosis"] == json.loads((tmp_path / "out" / "diagnosis.json").read_text())
    assert found["diagnosis"]["contents"]["coefficients"] == pytest.approx(WEIGHTS, abs=1e-3)
    assert found["calibration"]["config"]["recipe"] == "informed"
    suite = yaml.safe_load((tmp_path / "out" / "suite.yaml").read_text())
    assert (suite["merged"], [*suite["tasks"]]) == ("merged", [*WEIGHTS])
    before, after = (
        document(run("drift", tmp_path / "out" / "suite.yaml", "--model", model, "--eval-samples", "16", "--json"))
        for model in ("merged", str(tmp_path / "out" / "calibrated"))
    )
    for task in WEIGHTS:
        drifts = [one["tasks"][task]["layers"][-1]["relative_drift"] for one in (before, after)]
        assert drifts[1] < drifts[0]
    code, out, err = run("replay", tmp_path / "out" / "calibrated", "--suite", tmp_path / "out" / "suite.yaml")
    assert (code, "bit for bit" in out) == (0, True), err


@pytest.mark.slow
def test_a_mean_of_models_needs_no_base_to_be_merged(parents: Path, run: Run, tmp_path: Path) -> None:
    """Its base is looked for to calibrate, and where nobody names one the merge itself is the anchor."""
    recipe = weighted(parents, tmp_path / "own.yml", "linear")
    found = document(run("merge", recipe, "--calibrate", "--out", tmp_path / "out", "--json"))
    assert found["calibration"]["config"]["rho"] == 1.0
    experts = [stored(parents / task) for task in WEIGHTS]
    for name, tensor in stored(tmp_path / "out" / "merged").items():
        expected = sum(weight * one[name] for weight, one in zip(WEIGHTS.values(), experts, strict=True))
        torch.testing.assert_close(tensor, expected / sum(WEIGHTS.values()), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_a_folder_of_mergekit_is_taken_as_it_is(parents: Path, run: Run, tmp_path: Path) -> None:
    folder = write_by_formula(parents, "slerp")
    words = ("--merged", folder, "--base", parents / "base", "--calibrate", "refined", "--out", tmp_path / "out")
    recipe = tmp_path / "slerp.yml"
    content = yaml.safe_load((folder / "mergekit_config.yml").read_text())
    content["models"] = [{"model": str(parents / Path(one["model"]).name)} for one in content["models"]]
    recipe.write_text(yaml.safe_dump({**content, "base_model": content["models"][0]["model"]}))
    found = document(run("merge", recipe, *words, "--json"))
    assert "merge" not in found
    assert not (tmp_path / "out" / "merged").exists()
    assert found["calibration"]["config"]["recipe"] == "refined"
    assert stored(tmp_path / "out" / "calibrated").keys() == stored(folder).keys()


@pytest.mark.slow
def test_a_merge_that_is_to_be_put_right_is_not_calibrated(parents: Path, run: Run, tmp_path: Path) -> None:
    recipe = weighted(parents, tmp_path / "own.yml", base_model=str(parents / "base"), parameters={"lambda": 40.0})
    code, out, err = run("merge", recipe, "--calibrate", "--out", tmp_path / "out")
    assert code == 1
    assert "calibration cannot mend this; merge again" in out
    assert "Nothing was calibrated" in err
    assert not (tmp_path / "out" / "calibrated").exists()


FEATCALS = ("linear", "task_arithmetic", "ties")
"""Methods of mergekit that featcal merges itself."""
FIRST_IS_BASE = {"slerp": {"t": 0.4}, "nearswap": {"t": 0.2}, "arcee_fusion": {}}
"""Methods of two models, of which the first is called the base, and their parameters."""
WITHOUT_BASE: dict[str, tuple[int, dict[str, float], dict[str, Any]]] = {
    "linear": (2, {"weight": 0.5}, {}),
    "nuslerp": (2, {"weight": 0.5}, {}),
    "karcher": (2, {}, {}),
    "multislerp": (2, {"weight": 0.5}, {}),
    "passthrough": (1, {}, {}),
}
"""Number of models, parameters of each and of all."""
WITH_BASE: dict[str, tuple[dict[str, float], dict[str, Any]]] = {
    "task_arithmetic": ({"weight": 0.5}, {"lambda": 0.9}),
    "ties": ({"weight": 0.5, "density": 0.6}, {"lambda": 1.1}),
    "dare_ties": ({"weight": 0.5, "density": 0.6}, {}),
    "dare_linear": ({"weight": 0.5, "density": 0.6}, {}),
    "breadcrumbs": ({"weight": 0.5, "density": 0.6, "gamma": 0.05}, {}),
    "breadcrumbs_ties": ({"weight": 0.5, "density": 0.6, "gamma": 0.05}, {}),
    "della": ({"weight": 0.5, "density": 0.6, "epsilon": 0.1}, {}),
    "della_linear": ({"weight": 0.5, "density": 0.6, "epsilon": 0.1}, {}),
    "model_stock": ({}, {}),
    "sce": ({}, {"select_topk": 0.8}),
    "ram": ({}, {}),
    "ramplus_tl": ({}, {}),
}
METHODS = (*WITH_BASE, *WITHOUT_BASE, *FIRST_IS_BASE)


def configuration(root: Path, method: str) -> dict[str, Any]:
    """Return a recipe of a method over the models in a folder."""
    experts = [str(root / "experts" / task) for task in ("left", "right")]
    if method in FIRST_IS_BASE:
        # Of these slerp lists both models, and so does nearswap; arcee_fusion the second alone.
        listed = experts[method == "arcee_fusion" :]
        models: list[dict[str, Any]] = [{"model": one} for one in listed]
        more = {"base_model": experts[0], "parameters": FIRST_IS_BASE[method]}
    elif method in WITHOUT_BASE:
        count, own, shared = WITHOUT_BASE[method]
        models = [{"model": one, "parameters": own} for one in experts[:count]]
        more = {"parameters": shared}
    else:
        own, shared = WITH_BASE[method]
        models = [{"model": one, "parameters": own} for one in experts]
        more = {"base_model": str(root / "base"), "parameters": shared}
    return {"merge_method": method, "models": models, "dtype": "float32", **more}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 and two experts near it, each with the tokenizer, which mergekit takes from the first model."""
    facts = ROWS["qwen3"]
    trial = write_trial(tiny_decoder(facts), facts, tmp_path_factory.mktemp("qwen3"))
    for folder in ("base", "experts/left", "experts/right"):
        tiny_tokenizer("qwen3").save_pretrained(trial.root / folder)
    return trial.root


@pytest.mark.slow
def test_every_method_of_mergekit_is_among_those_that_are_tried() -> None:
    registry = pytest.importorskip("mergekit.merge_methods.registry", reason="mergekit is not installed")
    assert {method.spec.name for method in registry.registered_methods()} == {*METHODS}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_of_mergekit_ends_calibrated(method: str, qwen: Path, run: Run, tmp_path: Path) -> None:
    """By featcal's own merger with the numbers of mergekit, else by way of mergekit's folder."""
    from transformers import AutoModelForCausalLM

    pytest.importorskip("mergekit", reason="mergekit is not installed")
    recipe, theirs = tmp_path / "recipe.yml", tmp_path / "theirs"
    recipe.write_text(yaml.safe_dump(configuration(qwen, method)))
    command = [sys.executable, "-m", "mergekit.scripts.run_yaml", recipe, theirs, "--quiet", "--no-write-model-card"]
    command += ["--random-seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    words = ["--base", qwen / "base", "--calibrate", "--out", tmp_path / "out", "--json"]
    if method in FEATCALS:
        document(run("merge", recipe, *words))
        own = stored(tmp_path / "out" / "merged")
        for name, tensor in own.items():
            torch.testing.assert_close(tensor, stored(theirs)[name], rtol=1e-6, atol=1e-6)
    else:
        code, _, err = run("merge", recipe, *words)
        assert (code, "give its output folder with --merged" in err) == (1, True)
        document(run("merge", recipe, "--merged", theirs, *words))
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "calibrated", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]

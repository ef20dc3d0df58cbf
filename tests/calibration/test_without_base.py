"""A suite whose base nobody knows: what needs none is as with one, and the rest is refused in words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_text import write_text_suite

import featcal
from featcal.calibration.calibrate import config_for
from featcal.calibration.config import config_of_suite
from featcal.family.ancestry import measure_lineage
from featcal.family.opening import Family, open_family
from featcal.preflight.check import check_suite
from featcal.session.session import Session
from featcal.studies.compare import every_method
from featcal.studies.selection.candidates import plan_candidates
from featcal.suite.schema import Suite, load_suite, references
from featcal.system.errors import InputError


@pytest.fixture(scope="module")
def suites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Suite]:
    """A merge in a folder, with its base and without."""
    root = tmp_path_factory.mktemp("llama")
    file = write_text_suite(root, "llama", 0.1)
    featcal.merge(load_suite(file), "task-arithmetic:scale=0.5").save(root / "merged")
    content: dict[str, Any] = yaml.safe_load(file.read_text()) | {"merged": "merged"}
    found = {}
    for name, base in (("with", "base"), ("without", None)):
        (root / f"{name}.yaml").write_text(yaml.safe_dump(content | {"base": base}))
        found[name] = load_suite(root / f"{name}.yaml")
    return found


@pytest.fixture(scope="module")
def family(suites: dict[str, Suite]) -> Family:
    return open_family(suites["without"], "cpu")


def test_the_files_that_all_share_are_the_merged_models(suites: dict[str, Suite], family: Family) -> None:
    assert references(suites["without"]) == {
        "merged": "merged", "expert 'left'": "experts/left", "expert 'right'": "experts/right",
    }  # fmt: skip
    assert (family.base_folder.name, family.is_base_known) == ("merged", False)
    assert family.resident().with_stored_tensors().base is family.base


@pytest.mark.parametrize("recipe", ["paper", "refined"])
def test_it_is_calibrated_as_with_a_base_and_rho_1(suites: dict[str, Suite], family: Family, recipe: str) -> None:
    config = config_for(family, recipe=recipe, samples=6)
    assert config.rho == 1
    own = featcal.calibrate(family, config)
    base = featcal.calibrate(suites["with"], config)
    expected = base.weights.read(family.adapter.tower)
    for name, tensor in own.weights.read(family.adapter.tower).items():
        assert tensor.equal(expected[name]), name
    merged = family.merged.read(family.adapter.tower)
    assert not all(expected[name].equal(tensor) for name, tensor in merged.items())
    for task in family.experts:
        before, after = (featcal.measure_drift(family, one).tasks[task].layers[-1] for one in ("merged", own))
        assert after.relative_drift < before.relative_drift


def test_drift_and_scores_are_those_with_a_base(suites: dict[str, Suite]) -> None:
    own, known = (Session(open_family(one, "cpu")) for one in (suites["without"], suites["with"]))
    assert own.measure.drift("merged").to_json()["tasks"] == known.measure.drift("merged").to_json()["tasks"]
    anchor = own.resolve("anchor:rho=1")
    drifts = [own.measure.features(one).tasks["left"].layers[-1].relative_drift for one in (anchor, "merged")]
    assert drifts[0] == drifts[1]


REFUSED = {
    "rho is 2, an anchor": {"rho": 2.0},
    "mu is 0.1, a prior of task vectors": {"recipe": "informed"},
    "weigh_tokens goes by task vectors": {"recipe": "refined", "weigh_tokens": True},
}


@pytest.mark.parametrize("message", REFUSED)
def test_options_that_start_from_a_base_are_refused_before_anything_is_done(family: Family, message: str) -> None:
    config = config_for(family, samples=4, **REFUSED[message])
    with pytest.raises(InputError, match=f"the base is not known: {message}.*Name it in the suite file"):
        featcal.calibrate(family, config)
    with pytest.raises(InputError, match=message):
        plan_candidates(family, config)


@pytest.mark.parametrize("model", ["base", "ties", "anchor:rho=2", "svc", "esm", "lot"])
def test_models_that_start_from_a_base_are_refused(suites: dict[str, Suite], model: str) -> None:
    session = Session(open_family(suites["without"], "cpu"))
    with pytest.raises(InputError, match=r"the base is not known, and this needs it: name it in the suite file"):
        session.measure.features(model)


def test_what_is_listed_is_what_there_is(suites: dict[str, Suite], family: Family) -> None:
    assert every_method(Session(family)) == ["expert", "merged", "calibrated", "calibrated:recipe=refined"]
    plan = [one.config for one in plan_candidates(family, config_for(family, samples=4))]
    assert [(one.recipe, one.rho, one.mu, one.decisions) for one in plan if one is not None] == [
        ("refined", 1, 0, 0), ("paper", 1, 0, 0), ("refined", 1, 0, 0.7), ("refined", 1, 0, 0),
    ]  # fmt: skip
    assert config_of_suite(suites["without"], family.adapter).rho == 1
    # Its own choice stands, and is refused where it is used.
    asking = suites["without"].model_copy(update={"calibration": type(family.suite.calibration)(rho=1.5)})
    assert config_of_suite(asking, family.adapter).rho == 1.5


def test_a_check_says_so_and_finds_strangers_without_a_base(suites: dict[str, Suite], family: Family) -> None:
    found = check_suite(suites["without"], probe=False)
    assert not found.problems
    assert any(
        note.startswith("the base is not known: a calibration pulls to the merged model") for note in found.notes
    )
    assert found.family is not None
    lineages, _ = measure_lineage(family, {**family.experts, "merged": family.merged})
    assert lineages.start == "merged model"
    assert lineages.models["merged"].mean == 0
    assert 0.03 < lineages.models["left"].mean < 0.3


def test_what_is_written_says_that_the_base_is_not_known(family: Family, tmp_path: Path) -> None:
    featcal.calibrate(family, config_for(family, samples=4)).save(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Unknown: the merged model states none." in card
    record = json.loads((tmp_path / "out" / "featcal.json").read_text())
    assert set(record["inputs"]) == {"merged", "expert left", "expert right"}
    assert record["notes"][0].startswith("the base is not known: ")


def test_pictures_are_scored_by_the_merged_models_own_head(tiny_suite_file: Path, tmp_path: Path) -> None:
    suite = load_suite(tiny_suite_file)
    featcal.merge(suite, "task-arithmetic:scale=0.3").save(tmp_path / "merged")
    merged = {"merged": str(tmp_path / "merged")}
    own, known = (
        featcal.evaluate(suite.model_copy(update=merged | more), "merged", split="test")
        for more in ({"base": None}, {})
    )
    assert own.to_json() == known.to_json()


def test_models_are_held_against_the_merged_model_or_the_expert_that_stands_for_it(
    suites: dict[str, Suite], tmp_path: Path
) -> None:
    root = shutil.copytree(suites["without"].root, tmp_path / "root")
    config = root / "experts" / "right" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_theta": 123.0, "rope_parameters": None}))
    for merged, words in (("merged", "the merged model"), ("experts/left", "the expert 'left'"), ("with", "the base")):
        content = yaml.safe_load((root / "without.yaml").read_text())
        base = "base" if merged == "with" else None
        content |= {"base": base, "merged": "merged" if base else merged}
        (root / "suite.yaml").write_text(yaml.safe_dump(content))
        suite = load_suite(root / "suite.yaml")
        with pytest.raises(InputError, match=f"^expert 'right': .* is .* in .*, {words} has "):
            open_family(suite, "cpu")
        assert any(f", {words} has " in one for one in check_suite(suite, probe=False).problems)

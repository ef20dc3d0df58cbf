"""What storing solutions in half precision costs, against float64."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from clip_config import clip_config
from lanes import rows
from several import calibrated
from tiny_clip import BLOCKS
from torch import Tensor

from featcal.calibration import rounding, store
from featcal.calibration.calibrate import calibrate_family, calibrate_to_folder
from featcal.calibration.rounding import QuantizationError, sum_parts, summarise_storing
from featcal.family.opening import Family, open_family
from featcal.formats.weights import InMemory
from featcal.studies.replay.again import replay_record
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.recipe import MergeRecipe
from featcal.suite.schema import Suite, load_suite
from featcal.system.errors import NumericalError

PAPER = clip_config(samples=8, batch_size=5)
REFINED = replace(PAPER, recipe="refined", beta=0.5)
RECIPES = pytest.mark.parametrize(
    "config", [pytest.param(PAPER, id="paper", marks=pytest.mark.slow), pytest.param(REFINED, id="refined")]
)
HALVES = pytest.mark.parametrize("dtype", rows(["bfloat16", "float16"], quick=("bfloat16",), slow=("float16",)))


def stored_in(suite: Suite, dtype: str) -> Family:
    """The tiny suite, merged in another dtype."""
    assert isinstance(suite.merged, MergeRecipe)
    return open_family(suite.model_copy(update={"merged": suite.merged.model_copy(update={"dtype": dtype})}), "cpu")


@pytest.fixture(scope="module")
def half(tiny_suite: Suite) -> Family:
    return stored_in(tiny_suite, "bfloat16")


def square(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor], names: Sequence[str]) -> float:
    return sum(float((tensors[name].double() - others[name].double()).square().sum()) for name in names)


@HALVES
def test_the_same_solved_in_float32(dtype: str, tiny_suite: Suite) -> None:
    """Block after block is solved by a calibration of this block alone, which is stored in float32; in front of it lies
    what the calibration in half precision stored, and all others are as it found them."""
    family = stored_in(tiny_suite, dtype)
    tower = family.adapter.tower
    found = calibrate_family(family, PAPER)
    merged, stored = family.merged.read(tower), found.weights.read(tower)
    deployed, sums = {name: tensor.float() for name, tensor in merged.items()}, {}
    for block, layer in zip(family.adapter.blocks(), family.adapter.block_layers(), strict=True):
        wide = replace(family, merged=InMemory("merged", dict(deployed)))
        solved = calibrate_family(wide, replace(PAPER, blocks=(layer,))).weights.read(tower)
        names = [name for name in block.names if not solved[name].equal(merged[name].float())]
        assert names
        sums[block.name] = square(solved, merged, names), square(stored, solved, names)
        deployed |= {name: stored[name].float() for name in block.names}
    moved, lost = (sum(one) for one in zip(*sums.values(), strict=True))
    shares = {block: (lost / moved) ** 0.5 for block, (moved, lost) in sums.items()}
    worst = max(shares, key=lambda block: shares[block])
    said = found.record["storing"]
    assert said["share"] == pytest.approx((lost / moved) ** 0.5, rel=1e-3)
    assert (said["dtype"], said["block"]) == (dtype, worst)
    assert said["worst"] == pytest.approx(shares[worst], rel=1e-3)
    assert 1e-4 < said["share"] < said["worst"] < 0.1


@RECIPES
def test_all_that_is_solved_counts_once(config: CalibrationConfig, half: Family, monkeypatch: Any) -> None:
    """Every solution is seen on its way to the stored dtype; chunks of three numbers are as good as whole tensors."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    rounded = store.round_to_stored

    def watched(block: Any, old: Any, solved: Any) -> dict[str, Tensor]:
        found = rounded(block, old, solved)
        pairs = {f"{block.name}.{name}": (solved[name].double(), tensor) for name, tensor in found.items()}
        assert not seen.keys() & pairs.keys()
        seen.update(pairs)
        return found

    monkeypatch.setattr(store, "round_to_stored", watched)
    monkeypatch.setattr(rounding, "CHUNK", 3)
    found = calibrate_family(half, config)
    merged, stored = half.merged.read(seen), found.weights.read(seen)
    assert all(tensor.equal(stored[name]) for name, (_, tensor) in seen.items())
    solved = {name: exact for name, (exact, _) in seen.items()}
    share = (square(stored, solved, [*seen]) / square(solved, merged, [*seen])) ** 0.5
    assert found.record["storing"]["share"] == pytest.approx(share, rel=1e-12)
    assert len({name.partition("layers.")[2][0] for name in seen}) == BLOCKS


@RECIPES
def test_float32_has_none(config: CalibrationConfig, tiny: Family, tmp_path: Path) -> None:
    document = calibrate_to_folder(tiny, config, tmp_path / "out")
    assert "storing" not in document
    assert "storing" not in json.loads((tmp_path / "out" / "featcal.json").read_text())
    assert "ounding" not in (tmp_path / "out" / "README.md").read_text()
    assert not document["notes"]


@RECIPES
def test_record_card_and_result_say_the_same_after_an_interruption_too(
    config: CalibrationConfig, half: Family, tmp_path: Path
) -> None:
    def stop(label: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate_to_folder(half, config, tmp_path / "out", progress=stop)
    document = calibrate_to_folder(half, config, tmp_path / "out", resume=True)
    said = calibrate_family(half, config).record["storing"]
    assert document["storing"] == said
    assert json.loads((tmp_path / "out" / "featcal.json").read_text())["storing"] == said
    (note,) = document["notes"]
    layer = dict(zip((b.name for b in half.adapter.blocks()), half.adapter.block_layers(), strict=True))[said["block"]]
    assert note == QuantizationError(**said).describe(layer)
    assert note.startswith("rounding to bfloat16 moves the weights by ")
    assert f"- {note}\n" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
@RECIPES
def test_several_ranks_measure_what_one_does(config: CalibrationConfig, half: Family, tmp_path: Path) -> None:
    """Every owner what it solved; of blocks that were finished before, from the folder of rank 0."""

    def stop(label: str, done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    alone = calibrate_family(half, config).record["storing"]
    with pytest.raises(KeyboardInterrupt):
        calibrate_to_folder(half, config, tmp_path / "out", progress=stop)
    calibrated(half, config, tmp_path / "out", 2, resume=True).check()
    found = json.loads((tmp_path / "out" / "featcal.json").read_text())["storing"]
    assert (found["dtype"], found["block"]) == (alone["dtype"], alone["block"])
    assert found["share"] == pytest.approx(alone["share"], rel=1e-9)
    assert found["worst"] == pytest.approx(alone["worst"], rel=1e-9)


def test_a_replay_has_the_same_bits_and_the_same_figure(own_suite_file: Path, tmp_path: Path) -> None:
    content = yaml.safe_load(own_suite_file.read_text())
    own_suite_file.write_text(yaml.safe_dump(content | {"merged": content["merged"] | {"dtype": "bfloat16"}}))
    said = calibrate_to_folder(load_suite(own_suite_file), PAPER, tmp_path / "out")["storing"]
    again = replay_record(tmp_path / "out", own_suite_file, tmp_path / "again")
    assert again.same, again.to_json()
    assert json.loads((tmp_path / "again" / "featcal.json").read_text())["storing"] == said


def test_what_float16_does_not_hold_is_refused(tiny_suite: Suite, tmp_path: Path) -> None:
    """By whoever solves it; of several ranks one says so."""
    family, config = stored_in(tiny_suite, "float16"), replace(PAPER, rho=1e7)
    right = (
        r"block 0: \S*layers\.0\.\S+: the solution does not fit float16: its largest value is "
        r"\d[\d.e+]+, float16 ends at 65504; store the merged model in bfloat16 or float32 .*, or calibrate with"
    )
    with pytest.raises(NumericalError, match=right):
        calibrate_family(family, config)
    ended = calibrated(family, config, tmp_path / "out", 2)
    assert ended.status == [1, 1]
    (said,) = [one for one in ended.said if one]
    assert re.search(right, said)


def test_sums_of_several_dtypes() -> None:
    both = sum_parts([{"bfloat16": (4.0, 1.0)}, {"float16": (12.0, 3.0)}, {"bfloat16": (4.0, 1.0)}, {}])
    assert both == {"bfloat16": (8.0, 2.0), "float16": (12.0, 3.0)}
    blocks = {"a": {"bfloat16": (3.0, 0.0)}, "b": {}, "c": {"bfloat16": (1.0, 1.0), "float16": (0.0, 0.0)}}
    assert summarise_storing(blocks) == QuantizationError("bfloat16 and float16", 0.5, "c", 1.0)
    assert summarise_storing({"a": {"float16": (0.0, 0.0)}}) == QuantizationError("float16", 0.0, "a", 0.0)
    assert summarise_storing({"a": {}}) is None
    assert "by 0.02 % of" in (said := QuantizationError("float16", 2.4e-4, "a", 1.04e-3).describe("block 0"))
    assert "(worst: block 0, 0.1 %)" in said
    wide = {"w": torch.zeros(2)}
    assert rounding.rounding(wide, wide, wide) == {}

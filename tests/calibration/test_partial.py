"""Partial calibration: chosen blocks, kinds of maps and tasks; all else stays as merged, bit by bit."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from clip_config import clip_config
from open_clip_models import suite_as_open_clip
from tiny_clip import BLOCKS, TASKS
from tiny_text import write_text_suite

from featcal import cli
from featcal.calibration.calibrate import calibrate_family, calibrate_to_folder, config_for, expert_passes
from featcal.calibration.config import resolve_options
from featcal.family.opening import Family, open_family
from featcal.formats.weights import Weights
from featcal.preflight.check import check_suite
from featcal.session.model_names import name_calibration, recorded_calibration
from featcal.session.model_ref import resolve_model
from featcal.session.session import Session
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.schema import load_suite
from featcal.system.errors import InputError
from featcal.system.json_files import read_json

CONFIG = clip_config(samples=12, batch_size=5)


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return open_family(load_suite(write_text_suite(tmp_path_factory.mktemp("t5"), "t5")), "cpu")


def changed(family: Family, one: Weights, other: Weights) -> set[str]:
    """Names of tensors of the tower that differ in some bit."""
    ours, theirs = (weights.read(family.adapter.tower) for weights in (one, other))
    return {name for name in ours if not torch.equal(ours[name], theirs[name])}


def names(family: Family, blocks: Collection[int], endings: Collection[str]) -> set[str]:
    """Tensors of these blocks whose module is among `endings`."""
    chosen = [family.adapter.blocks()[i] for i in blocks]
    return {name for block in chosen for name in block.names if name.rsplit(".", 1)[0].endswith(tuple(endings))}


ATTENTION, MLP, NORMS = ("q_proj", "k_proj", "v_proj", "out_proj"), ("fc1", "fc2"), ("norm1", "norm2")


@pytest.mark.parametrize(
    ("options", "blocks", "endings"),
    [
        ({"blocks": ("block 1",)}, [1], [*ATTENTION, *MLP, *NORMS]),
        ({"blocks": ("block 0", "block 2"), "layernorms": False}, [0, 2], [*ATTENTION, *MLP]),
        ({"maps": ("attention",), "layernorms": False}, range(BLOCKS), ATTENTION),
        ({"maps": ("mlp",)}, range(BLOCKS), [*MLP, *NORMS]),
        ({"blocks": ("block 2",), "maps": ("mlp",), "tasks": (TASKS[1],)}, [2], [*MLP, *NORMS]),
    ],
    ids=str,
)
def test_what_is_not_chosen_stays_as_merged(
    tiny: Family, options: dict[str, Any], blocks: Collection[int], endings: Collection[str]
) -> None:
    result = calibrate_family(tiny, replace(CONFIG, **options))
    assert changed(tiny, result.weights, tiny.merged) == names(tiny, blocks, endings)
    assert len(result.record["relative_drift"]) == BLOCKS  # the student walks through all of them


def test_chosen_parts_in_front_are_as_in_the_whole(tiny: Family) -> None:
    whole = calibrate_family(tiny, CONFIG).weights
    first = calibrate_family(tiny, replace(CONFIG, blocks=("block 0",))).weights
    block = tiny.adapter.blocks()[0]
    assert changed(tiny, first, whole) == names(tiny, [1, 2], [*ATTENTION, *MLP, *NORMS])
    assert not changed(tiny, calibrate_family(tiny, replace(CONFIG, blocks=(block.name,))).weights, first)


def test_later_blocks_see_the_merged_ones_before(tiny64: Family) -> None:
    """With everything in front as merged, block 1 is fitted on what the merged model gives it."""
    seen: dict[str, list[torch.Tensor]] = {}
    for blocks in (("block 1",), None):
        grams: list[torch.Tensor] = []
        calibrate_family(
            tiny64,
            replace(CONFIG, blocks=blocks, lam=1e10, rho=1.0),
            watch=lambda moments, kept=grams: kept.extend(
                group.sums.gram.lower(torch.float64) for group in moments.groups[:1]
            ),
        )
        seen[str(blocks)] = grams
    assert (len(seen["('block 1',)"]), len(seen["None"])) == (1, BLOCKS)
    # with so strong a pull to the merged model the calibrated block 0 is the merged one
    torch.testing.assert_close(seen["('block 1',)"][0], seen["None"][1], rtol=1e-6, atol=1e-8)


def test_chosen_tasks_are_a_suite_of_these_tasks(tiny: Family) -> None:
    config = replace(CONFIG, tasks=("signs",))
    result = calibrate_family(tiny, config)
    suite = tiny.suite.model_copy(update={"tasks": {"signs": tiny.suite.tasks["signs"]}})
    alone = calibrate_family(replace(tiny, suite=suite, experts={"signs": tiny.experts["signs"]}), CONFIG)
    assert changed(tiny, result.weights, alone.weights) == set()
    assert changed(tiny, result.weights, calibrate_family(tiny, CONFIG).weights)
    assert list(result.record["tasks"]) == ["signs"]
    assert all(list(drift) == ["signs"] for drift in result.record["relative_drift"].values())
    given = calibrate_family(tiny, config, experts=expert_passes(tiny, CONFIG))
    assert changed(tiny, given.weights, result.weights) == set()


def test_a_block_of_a_stage_without_chosen_maps_stays(t5: Family) -> None:
    config = config_for(t5, samples=6, lam=0.05, maps=["cross-attention"])
    result = calibrate_family(t5, config)
    found = changed(t5, result.weights, t5.merged)
    assert found
    assert all("EncDecAttention" in name for name in found)
    normed = calibrate_family(t5, replace(config, rmsnorms=True))
    norms = {name for name in changed(t5, normed.weights, t5.merged) if "EncDecAttention" not in name}
    assert any(name.startswith("encoder") for name in norms)
    assert all("layer_norm" in name for name in norms)
    alone = calibrate_family(t5, replace(config, rmsnorms=True, maps=None)).weights
    first = t5.adapter.blocks()[0].names
    assert {name for name in first if "layer_norm" in name}.isdisjoint(changed(t5, normed.weights, alone))


@pytest.mark.parametrize(
    ("kind", "parts"),
    [("clip", ["attention", "mlp"]), ("open_clip", ["attention", "mlp"]), ("llama", ["attention", "mlp"]),
     ("t5", ["attention", "mlp", "cross-attention"])],
)  # fmt: skip
def test_maps_are_named_by_their_residual_part(
    kind: str, parts: list[str], tiny_suite_file: Path, tmp_path: Path
) -> None:
    file = tiny_suite_file
    if kind != "clip":
        file = suite_as_open_clip(file, tmp_path) if kind == "open_clip" else write_text_suite(tmp_path, kind)
    family = open_family(load_suite(file), "cpu")
    assert family.adapter.parts() == parts
    stage = family.adapter.stages[-1]
    own = stage.sublayers(stage.blocks[0], {})
    assert {stage.part(name) for name in stage.blocks[0].linears} == set(own)


def test_names_are_put_in_order_and_all_of_them_are_none(tiny: Family) -> None:
    assert config_for(tiny, blocks=["block 2,block 0", "block 2"]).blocks == ("block 0", "block 2")
    assert config_for(tiny, blocks="block 2, block 0,").blocks == ("block 0", "block 2")
    every = config_for(tiny, blocks=tiny.adapter.block_layers(), maps=["mlp", "attention"], tasks=list(TASKS))
    assert every == config_for(tiny)
    assert hash(every) == hash(config_for(tiny))
    assert "blocks" not in every.settings()
    assert config_for(tiny, blocks=["block 2", "block 0"]).settings()["blocks"] == "block 0, block 2"


def test_parts_stand_in_the_name_of_a_model(tiny: Family) -> None:
    config = config_for(tiny, blocks=("block 0", "block 2"), tasks=("pets",), samples=12)
    name = name_calibration(config, tiny)
    assert name == "calibrated:lam=0.05,rho=2,alpha=0.3,samples=12,blocks=block 0+block 2,tasks=pets"
    assert resolve_model(name, tiny).config == config
    with pytest.raises(InputError, match="Did you mean 'attention'"):
        resolve_model("calibrated:maps=atention+mlp", tiny)


def test_a_name_with_a_comma_is_a_name(tiny: Family) -> None:
    config = resolve_options(CalibrationConfig(tasks=("a, b", "c")), tiny.adapter, ["c", "a, b", "d"])
    assert config.tasks == ("c", "a, b")


def test_unknown_names_are_all_reported(tiny: Family) -> None:
    wrong = replace(CONFIG, blocks=("blok 1", "block 0"), maps=("mpl",), tasks=("sign",))
    for attempt in (lambda: calibrate_family(tiny, wrong), lambda: calibrate_to_folder(tiny, wrong, "nowhere")):
        with pytest.raises(InputError) as caught:
            attempt()
        problems = caught.value.problems
        assert len(problems) == 3
        assert "blocks: no 'blok 1', only block 0, block 1, block 2. Did you mean 'block 1'?" in problems[0]
        assert "maps: no 'mpl', only attention, mlp. Did you mean 'mlp'?" in problems[1]
        assert "tasks: no 'sign', only pets, signs. Did you mean 'signs'?" in problems[2]
    with pytest.raises(InputError, match="maps is empty"):
        replace(CONFIG, maps=())


@pytest.mark.slow
def test_a_session_calibrates_parts_as_without_one(tiny: Family) -> None:
    """Experts and the statistics of the first chosen block are kept from run to run."""
    own = Session(tiny)
    for options in ({"blocks": ("block 1",)}, {"blocks": ("block 1",), "lam": 0.2}, {"tasks": ("pets",)}, {}):
        config = replace(CONFIG, **options)
        assert changed(tiny, own.fit.calibrate(config).weights, calibrate_family(tiny, config).weights) == set(), (
            options
        )


def test_sources_are_compared_where_maps_are_calibrated(tiny: Family) -> None:
    config = replace(CONFIG, blocks=("block 1",), maps=("mlp",), tasks=("pets",))
    found = Session(tiny).fit.sources(config)
    assert {one.block for one in found} == {"block 1"}
    assert {one.modules for one in found} == {"mlp.fc1", "mlp.fc2"}
    stale = [one.excess for one in found if one.source == "stale"]
    assert stale == [0.0, 0.0]  # the block before is not calibrated either


def test_a_suite_file_may_ask_for_parts(edit_suite: Callable[[Callable[[dict[str, Any]], None]], Path]) -> None:
    file = edit_suite(lambda content: content.update(calibration={"blocks": ["block 1"], "maps": ["mlp"]}))
    family = open_family(load_suite(file), "cpu")
    assert (config_for(family).blocks, config_for(family).maps) == (("block 1",), ("mlp",))
    assert config_for(family, blocks=family.adapter.block_layers()).blocks is None
    assert config_for(family, blocks="all") == config_for(family, blocks=family.adapter.block_layers())
    assert config_for(family, maps=["all"]).maps is None
    file = edit_suite(lambda content: content.update(calibration={"tasks": ["pet"]}))
    assert any("tasks: no 'pet'" in problem for problem in check_suite(load_suite(file), probe=False).problems)


def test_the_command_line_writes_them_down(
    tiny: Family, tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    asked = ["--blocks", "block 2,block 0", "--maps", "mlp", "--tasks", "signs", "--samples", "12"]
    monkeypatch.setattr(sys, "argv", ["featcal", "calibrate", str(tiny_suite_file), "--out", str(out), *asked])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code
    parts = {"blocks": ["block 0", "block 2"], "maps": ["mlp"], "tasks": ["signs"]}
    record = read_json(out / "featcal.json", missing="")
    assert parts.items() <= record["config"].items()
    config = recorded_calibration(out)[0]
    assert config == config_for(tiny, samples=12, **parts)
    assert json.loads(json.dumps(asdict(config))) == record["config"]
    card = (out / "README.md").read_text()
    assert "| blocks | block 0, block 2 |" in card
    assert "| tasks | signs |" in card
    written = tiny.model(str(out))
    assert changed(tiny, written, tiny.merged) == names(tiny, [0, 2], [*MLP, *NORMS])


def test_an_interrupted_run_of_parts_goes_on(tiny: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, blocks=("block 0", "block 2"))
    whole = calibrate_family(tiny, config).weights

    def stop(label: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate_to_folder(tiny, config, tmp_path / "out", progress=stop)
    calibrate_to_folder(tiny, config, tmp_path / "out", resume=True)
    assert changed(tiny, tiny.model(str(tmp_path / "out")), whole) == set()

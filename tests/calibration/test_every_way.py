"""Every way to calibrate gives the same tensors, whatever the options: random combinations of them, drawn by a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_decoders
import tiny_encoders
import torch
from lanes import rows
from preview_errors import relative_error
from tiny_clip import write_suite
from tiny_text import text_suite
from torch import Tensor

from featcal.calibration.calibrate import calibrate_family, calibrate_to_folder, config_for
from featcal.calibration.config import idle_options
from featcal.family.opening import Family, open_family
from featcal.session.session import Session
from featcal.suite.calibration_options import PAPER, RECIPES, SWITCHES, CalibrationConfig
from featcal.suite.schema import load_suite
from featcal.testing.trial import write_trial

KINDS = ("clip", "t5", "llama", "gemma2", "gpt2", "mixtral", "bert", "vit")
CASES = [f"{kind} {seed}" for seed in range(19) for kind in KINDS]
"""Each draws a configuration; those of the first seed are in the slow lane, the others run every night."""
NEAR = {torch.float32: 1e-5, torch.bfloat16: 5e-4, torch.float16: 1e-4}
"""Distance of a preview to the exact run: rounding of its features, which turns a last bit of some stored tensors."""


def opened(kind: str, dtype: torch.dtype, root: Path) -> Family:
    if kind in ("clip", "t5"):
        return open_family(load_suite(write_suite(root) if kind == "clip" else text_suite(root, kind)), "cpu")
    facts: Any = (tiny_decoders.ROWS | tiny_encoders.ROWS)[kind]
    model = (tiny_decoders.tiny_decoder if kind in tiny_decoders.ROWS else tiny_encoders.tiny_encoder)(facts)
    return write_trial(model, facts, root, dtype).family


def drawn(family: Family, dice: random.Random) -> CalibrationConfig:
    """Draw options that mean something to the architecture, and go together."""
    adapter, idle, recipe = family.adapter, idle_options(family.adapter), dice.choice(RECIPES)
    options: dict[str, Any] = {"recipe": recipe, "lam": dice.choice([0.01, 0.05, 1.0]), "rho": dice.choice([0.5, 2.0])}
    options |= {"alpha": dice.choice([0.3, 1.0]), "samples": dice.choice([3, 8]), "batch_size": dice.choice([2, 3, 64])}
    if recipe == PAPER:
        options["alpha"] = dice.choice([0.0, 0.3, 1.0])
    else:
        options |= {"beta": dice.choice([0.0, 0.5, 1.0]), "weigh_tokens": dice.random() < 0.5}
    if recipe == "informed":
        options["mu"] = dice.choice([0.0, 0.1, 3.0])
    switches = [name for name in SWITCHES if name not in {*idle, "weigh_tokens"}]
    options |= {name: dice.random() < 0.5 for name in switches if dice.random() < 0.5}
    every = {"blocks": adapter.block_layers(), "maps": adapter.parts(), "tasks": [*family.suite.tasks]}
    special = dice.choice([*every, "precision", "quantize", "decisions", "none", "none"])
    if special in every:
        options[special] = (dice.choice(every[special]),)
    elif special == "precision":
        options[special] = "fast"
    elif special == "quantize" and adapter.family == "llama":
        options |= {special: dice.choice(["int8", "int4"]), "group_size": 0}
    elif special == "decisions" and recipe != PAPER and "routers" in idle:  # not for mixtures
        options[special] = 0.7
        if adapter.family == "llama" and dice.random() < 0.5:
            options |= {"quantize": "int8", "group_size": 0}
    return config_for(family, **options)


def written(family: Family, config: CalibrationConfig, root: Path, last: int) -> Iterator[tuple[str, Path]]:
    """Yield the folder that every way of writing gives, by its name.

    Args:
        last: the block after which a run is interrupted that another one resumes.
    """
    calibrate_to_folder(family, config, root / "folder")
    yield "to a folder", root / "folder"
    assert calibrate_to_folder(family, config, root / "spilled", max_memory=1)["spilled_bytes"] > 0
    yield "with token states in files", root / "spilled"

    def stop(label: str, done: int, _: int) -> None:
        if label == "calibrating" and done == last:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate_to_folder(family, config, root / "resumed", progress=stop)
    calibrate_to_folder(family, config, root / "resumed", resume=True)
    yield f"resumed after block {last}", root / "resumed"


def asked_before(family: Family, config: CalibrationConfig, dice: random.Random) -> list[CalibrationConfig]:
    """Return other options that a session has seen before, of which it keeps what holds for these too."""
    last = family.adapter.block_layers()[-1]
    other = {"lam": 3 * config.lam, "rho": 1.0, "alpha": (1 + config.alpha) / 2, "biases": not config.biases}
    return [replace(config, **{name: value}) for name, value in dice.sample([*other.items(), ("blocks", (last,))], 5)]


@pytest.mark.parametrize("case", rows(CASES, quick=(), slow=CASES[: len(KINDS)]))
def test_every_way_to_calibrate_gives_the_same_tensors(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them to the bit, but for the preview of a block, which adds up other sums."""
    monkeypatch.setattr("featcal.calibration.calibrate.state_budget", lambda *_: 1)
    dice = random.Random(case)
    family = opened(case.split()[0], dice.choice([*NEAR]), tmp_path / "suite")
    config = drawn(family, dice)
    names = [name for block in family.adapter.blocks() for name in block.names]
    right = calibrate_family(family, config).weights.read(names)

    def assert_same(way: str, found: dict[str, Tensor]) -> None:
        differ = [name for name in names if not torch.equal(found[name], right[name])]
        assert not differ, (way, differ, config)

    assert_same("again", calibrate_family(family, config).weights.read(names))
    for way, folder in written(family, config, tmp_path, dice.randrange(1, len(family.adapter.blocks()))):
        assert_same(way, family.model(str(folder)).read(names))
    session = Session(family)
    for before in asked_before(family, config, dice):
        session.fit.calibrate(before)
    exact = session.fit.calibrate(config).weights
    assert_same("in a session, after other options", exact.read(names))
    # Whoever rounds to a grid turns by whole steps, and the other two have no preview.
    if config.precision == "exact" and not (config.is_quantized or config.decisions):
        layer = dice.choice(config.blocks or family.adapter.block_layers()[-1:])
        preview = session.fit.preview(config, layer).solve(config)
        dtype = next(iter(preview.tensors.values())).dtype
        assert relative_error(preview, exact) < NEAR[dtype], (layer, config)

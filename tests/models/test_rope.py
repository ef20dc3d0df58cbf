"""Rope settings whose frequencies depend on the longest text of a batch: never a result that depends on the batch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_text import CONFIGS, TASKS, write_text_suite
from version5 import ROPES

from featcal import calibrate, load_suite, open_family
from featcal.calibration.calibrate import config_for
from featcal.family.opening import Family
from featcal.models.adapter import Adapter, Batch
from featcal.models.families.registry import adapter_for
from featcal.system.errors import InputError


def llama(rope: str, **config: Any) -> Adapter:
    whole = CONFIGS["llama"] | {"rope_parameters": dict(ROPES[rope])} | config
    return adapter_for(whole, ["lm_head.weight"], torch.device("cpu"), "m")


def texts(*lengths: int) -> Batch:
    """Token ids padded on the right, of the given lengths."""
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": 3 * mask, "attention_mask": mask}


@pytest.mark.parametrize(
    ("rope", "lengths", "says"),
    [
        ("dynamic", (3, 16), None),
        ("dynamic", (3, 17), "rope type 'dynamic' .* texts reach from 3 to 17 tokens.*at most 16"),
        ("dynamic", (17, 18), "rope type 'dynamic'"),
        ("longrope", (3, 16), None),
        ("longrope", (17, 30), None),
        ("longrope", (16, 17), "rope type 'longrope' .* texts reach from 16 to 17 tokens.*at most 16"),
        ("yarn", (3, 30), None),
    ],
)
def test_texts_whose_rope_would_depend_on_the_batch(rope: str, lengths: tuple[int, ...], says: str | None) -> None:
    adapter = llama(rope, max_position_embeddings=16 if rope == "dynamic" else 64)
    found = adapter.misfit(texts(*lengths))
    assert (found is None) if says is None else re.search(says, str(found))
    if says is None and rope != "yarn":  # without a mask every row counts whole
        assert adapter.misfit({"input_ids": texts(*lengths)["input_ids"][-1:]}) is None


@pytest.mark.parametrize(("rope", "counts"), [("dynamic", True), ("longrope", True), ("yarn", False)])
def test_the_longest_text_is_a_setting_where_angles_are_scaled_by_it(rope: str, counts: bool) -> None:
    settings = [llama(rope, max_position_embeddings=longest).settings for longest in (64, 128)]
    assert (settings[0] != settings[1]) == counts


def suite(root: Path, length: int) -> Family:
    """A family with dynamic rope and texts of 4 to 8 tokens."""
    file = write_text_suite(root, "llama")
    rope = {"rope_parameters": ROPES["dynamic"], "max_position_embeddings": length}
    for config in file.parent.rglob("config.json"):
        config.write_text(json.dumps(CONFIGS["llama"] | rope))
    return open_family(load_suite(file), "cpu")


def test_dynamic_rope_beyond_its_length_is_refused(tmp_path: Path) -> None:
    family = suite(tmp_path / "s", 6)
    with pytest.raises(InputError, match=f"task '{TASKS[0]}', calibration samples: rope type 'dynamic'"):
        calibrate(family)


def test_dynamic_rope_within_its_length_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    family = suite(tmp_path / "s", 8)
    names = [name for block in family.adapter.blocks() for name in block.names]
    whole, apart = (calibrate(family, config_for(family, lam=0.05, batch_size=n)).weights.read(names) for n in (8, 3))
    for name in names:
        torch.testing.assert_close(whole[name], apart[name], rtol=1e-4, atol=1e-5)


def test_a_kind_of_rope_that_nothing_reads_tells_no_models_apart() -> None:
    """Files of older versions keep other words under `type` than those beside it under `rope_type`."""
    rope = dict(ROPES["longrope"])
    settings = [llama("longrope", rope_parameters={**rope, **old}).settings for old in ({}, {"type": "su"})]
    assert settings[0] == settings[1]
    assert settings[0]["rope_parameters"]["rope_type"] == "longrope"
    other = {**rope, "long_factor": [2.0, 4.0]}
    assert llama("longrope", rope_parameters=other).settings != settings[0]

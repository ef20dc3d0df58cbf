"""Pooled features are the library's own encoder states, averaged over real tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_text import KINDS, library_model, write_text_suite

from featcal.family import batches_of, open_family
from featcal.models.features import pooled_features
from featcal.suite import load_suite


@pytest.mark.parametrize("kind", KINDS)
def test_pooled_features_leave_out_padding(kind: str, tmp_path: Path) -> None:
    family = open_family(load_suite(write_text_suite(tmp_path / "suite", kind)), device="cpu")
    drawn = family.samples("left", "test", None, 0)
    found = pooled_features(family.adapter, family.base, batches_of(drawn, 3, family.compute.device), family.compute)

    model, seen = library_model(kind), []
    norm = model.encoder.final_layer_norm if kind.startswith("t5") else model.model.norm
    norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    inputs = {name: drawn.inputs[name] for name in drawn.inputs if name != "completion_mask"}
    with torch.no_grad():
        model(**inputs)
    mask = drawn.inputs["attention_mask"]
    assert 0 in mask
    rows = [state[kept.bool()].mean(0) for state, kept in zip(seen[0], mask, strict=True)]
    torch.testing.assert_close(found, torch.stack(rows), rtol=1e-5, atol=1e-5)

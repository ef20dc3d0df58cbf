"""Numbers that featcal prints, computed a second time with the library's own models, hooks and textbook formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_text import write_text_suite
from torch import Tensor, nn

from conftest import in_float64
from featcal import calibrate, load_suite, open_family
from featcal.calibration.calibrate import config_for
from featcal.family import Family, batches_of
from featcal.models.weights import Weights


@pytest.fixture(scope="module", params=["clip", "t5", "llama"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny64: Family) -> Family:
    """Tiny models in float64; of the language models every batch is padded."""
    if request.param == "clip":
        return tiny64
    opened = open_family(load_suite(write_text_suite(tmp_path_factory.mktemp("suite"), request.param)), "cpu")
    return in_float64(opened)


def network(family: Family, weights: Weights) -> nn.Module:
    """The library's own model with the given weights in place."""
    from transformers import CLIPVisionModelWithProjection

    adapter: Any = family.adapter
    tensors = weights.read(adapter.tower)
    if adapter.modality != "pixels":
        whole: nn.Module = adapter.generator(tensors, family.base_folder)
        return whole
    model = CLIPVisionModelWithProjection(adapter.model.config).double().eval()
    model.load_state_dict({**tensors, **family.base.read(adapter.head)}, strict=True)
    return model


def block_outputs(model: nn.Module, names: list[str], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Hidden state after every named block in one forward of the library."""
    seen: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda _, __, output, name=name: seen.__setitem__(name, output[0] if isinstance(output, tuple) else output)
        )
        for name in names
    ]
    with torch.no_grad():
        model(**{k: t.double() if t.is_floating_point() else t for k, t in inputs.items()})
    for handle in handles:
        handle.remove()
    return seen


def counted(name: str, inputs: Mapping[str, Tensor]) -> Tensor | None:
    """Which tokens of a block's own stream are no padding, `[batch, tokens, 1]`."""
    mask = inputs["labels"] != -100 if name.startswith("decoder") else inputs.get("attention_mask")
    return None if mask is None else mask.bool()[:, :, None]


def test_the_relative_drift_per_block_is_that_of_the_blocks_own_tokens(family: Family) -> None:
    """What `calibrate` prints; of a T5 decoder block the decoder's tokens alone, not the encoder's output as well."""
    config = replace(config_for(family), samples=8, lam=0.05, batch_size=3)
    result = calibrate(family, config)
    names = [block.name for block in family.adapter.blocks()]
    ours = network(family, result.weights)
    for task, expert in family.experts.items():
        own = network(family, expert)
        drift, scale = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
        drawn = family.samples(task, "calibration", config.samples, config.seed)
        for batch in batches_of(drawn, 4, torch.device("cpu")):
            reached, wanted = block_outputs(ours, names, batch), block_outputs(own, names, batch)
            for name in names:
                keep = counted(name, batch)
                one, other = (s if keep is None else s.masked_fill(~keep, 0) for s in (reached[name], wanted[name]))
                drift[name] += float((one - other).square().sum())
                scale[name] += float(other.square().sum())
        for name in names:
            expected = (drift[name] / scale[name]) ** 0.5
            assert result.record["relative_drift"][name][task] == pytest.approx(expected, rel=1e-9), name

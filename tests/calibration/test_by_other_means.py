"""Numbers that featcal prints, computed a second time with the library's own models, hooks and textbook formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from clip_config import clip_config
from tiny_clip import in_float64
from tiny_text import write_text_suite
from torch import Tensor, nn

from featcal import load_suite, measure_drift, open_family
from featcal.calibration.calibrate import calibrate_family, config_for, expert_passes
from featcal.calibration.norm_groups import NormGroup
from featcal.calibration.token_rows import TokenRows, find_token_rows
from featcal.drift.source import measure_sources
from featcal.family.opening import Family, batches_of
from featcal.formats.weights import Overlay, Weights
from featcal.models.lane import WalkCache
from featcal.suite.calibration_options import CalibrationConfig


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
        whole: nn.Module = adapter.whole(tensors, family.base_folder)
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
    result = calibrate_family(family, config)
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
        for name, layer in zip(names, family.adapter.block_layers(), strict=True):
            expected = (drift[name] / scale[name]) ** 0.5
            assert result.record["relative_drift"][layer][task] == pytest.approx(expected, rel=1e-9), name


def test_the_response_is_the_cosine_of_what_the_branch_adds_to_the_incoming_drift(tiny64: Family) -> None:
    """Signed, from the library's own blocks run one at a time: p - e_before against e_before."""
    ledger = measure_drift(tiny64, split="validation", samples=8)
    merged = network(tiny64, tiny64.merged)
    for task, expert in tiny64.experts.items():
        drawn = tiny64.samples(task, "validation", 8, 42).inputs
        ours, own = hidden_states(merged, drawn), hidden_states(network(tiny64, expert), drawn)
        for index, layer in enumerate(ledger.tasks[task].layers[1:-1]):
            with torch.no_grad():
                on_expert = merged.get_submodule(tiny64.adapter.blocks()[index].name)(own[index], None)
            before = (ours[index] - own[index]).flatten(1)
            answer = (ours[index + 1] - on_expert).flatten(1) - before
            assert layer.response is not None
            torch.testing.assert_close(layer.response, torch.cosine_similarity(answer, before), rtol=1e-8, atol=1e-10)


def hidden_states(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    with torch.no_grad():
        found: list[Tensor] = model(pixel_values=inputs["pixel_values"].double(), output_hidden_states=True)[-1]
    return list(found)


def test_the_coupling_counts_inputs_and_the_targets_that_alpha_leaves_to_the_student(tiny64: Family) -> None:
    """Mean over tokens of sqrt(|u' - u|^2 + (1 - alpha)^2 |W_expert (u' - u)|^2), both inputs from whole forwards."""
    config = clip_config(samples=6, alpha=0.4, batch_size=4)
    passes = expert_passes(tiny64, config, WalkCache(2**24))
    calibrated = calibrate_family(tiny64, config, experts=passes).weights
    first, second = tiny64.adapter.blocks()[:2]
    prefix = network(tiny64, Overlay("prefix", tiny64.merged, calibrated.read(first.names)))
    merged = network(tiny64, tiny64.merged)
    maps = [f"{second.name}.self_attn.{part}_proj" for part in "qkv"]
    distances = []
    for task, expert in tiny64.experts.items():
        pixels = tiny64.samples(task, "calibration", 6, config.seed).inputs["pixel_values"].double()
        apart = module_input(merged, maps[0], pixels) - module_input(prefix, maps[0], pixels)
        weight = torch.cat(list(expert.read(f"{name}.weight" for name in maps).values()))
        distances.append((apart.square().sum(-1) + 0.6**2 * (apart @ weight.mT).square().sum(-1)).sqrt())
    rows = measure_sources(tiny64, calibrated, config, passes)
    (found,) = [r for r in rows if (r.block, r.source) == ("block 1", "merged") and "q_proj" in r.modules]
    assert found.coupling == pytest.approx(float(torch.cat(distances).mean()), rel=1e-9)


def module_input(model: nn.Module, name: str, pixels: Tensor) -> Tensor:
    seen: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(pixel_values=pixels)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_a_layernorms_own_eps_is_in_its_statistics(eps: float) -> None:
    """Against least squares over every token with the features normalised by hand."""
    generator = torch.Generator().manual_seed(0)
    x, scale, shift, anchor = (torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (40, 1, 1, 2))
    config = CalibrationConfig(lam=0.5, rho=1.0, eps=0.0)
    group = NormGroup("norm", "all", nn.LayerNorm(6, eps=eps), torch.device("cpu"))
    group.update({"norm": x[None]}, TokenRows.from_weights(None, 40))
    group.end_task({"norm.weight": scale[0], "norm.bias": shift[0]}, config)
    merged = {"norm.weight": anchor[0], "norm.bias": anchor[1]}
    solved = group.solve(merged, merged, config)
    z = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + eps).sqrt()
    for d in range(6):
        design = torch.cat(
            [torch.stack([z[:, d], torch.ones(40)], 1) / 40**0.5, 0.5**0.5 * torch.eye(2, dtype=torch.float64)]
        )
        target = torch.cat([(z[:, d] * scale[0, d] + shift[0, d]) / 40**0.5, 0.5**0.5 * anchor[:, d]])
        expected = torch.linalg.lstsq(design, target[:, None]).solution[:, 0]
        ours = torch.stack([solved["norm.weight"][d], solved["norm.bias"][d]])
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


def test_every_target_of_a_t5_decoder_counts_and_every_token_of_its_encoder(tmp_path: Path) -> None:
    family = open_family(load_suite(write_text_suite(tmp_path, "t5")), "cpu")
    encoder, decoder = family.adapter.stages
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 1], [8, 1, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
        "labels": torch.tensor([[9, 4, 1], [3, 1, -100]]),
    }
    read = family.merged.read({*encoder.outer, *decoder.outer})
    first = encoder.first_call({name: read[name] for name in encoder.outer}, batch, None)
    call = decoder.first_call({name: read[name] for name in decoder.outer}, batch, first)
    rows = find_token_rows(decoder, [call], [batch], clip_config()).batches[0]
    assert rows["decoder tokens"].index is not None
    assert rows["decoder tokens"].index.tolist() == [0, 1, 2, 3, 4]
    assert rows["encoder tokens"].index is not None
    assert rows["encoder tokens"].index.tolist() == [0, 1, 2, 3, 4, 5]
    assert rows["decoder tokens"].weights is rows["encoder tokens"].weights is None
    used = {name: decoder.weighting(0, name) for name in decoder.blocks[0].linears}
    crossed = {"layer.1.EncDecAttention.k", "layer.1.EncDecAttention.v"}
    assert {name for name, weighting in used.items() if weighting == "encoder tokens"} == crossed

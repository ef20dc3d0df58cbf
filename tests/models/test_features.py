"""Features of every layer are the library's own hidden states, of the class token or averaged over real tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from clip_config import clip_config
from tiny_clip import TASKS
from tiny_text import KINDS, library_model, write_text_suite
from torch import Tensor

from featcal.family.opening import Family, open_family
from featcal.formats.weights import Weights
from featcal.models.adapter import Call
from featcal.models.features import layer_features
from featcal.models.lane import BlockStep, _bytes
from featcal.session.cache import nbytes
from featcal.session.model_ref import ModelId
from featcal.session.session import Session
from featcal.suite.schema import load_suite
from featcal.suite.views import EvaluationSamples

SEEN = EvaluationSamples(7, "test", 3)
CONFIG = clip_config(samples=8)


def clip_states(family: Family, weights: Weights, pixels: Tensor) -> list[Tensor]:
    """Class tokens after every layer and the projected feature, by transformers with all weights in place."""
    from transformers import CLIPVisionModelWithProjection

    network: Any = CLIPVisionModelWithProjection(family.adapter.model.config).double().eval()  # type: ignore[attr-defined]
    network.load_state_dict({**weights.read(family.adapter.tower), **family.base.read(family.adapter.head)})
    with torch.no_grad():
        output = network(pixel_values=pixels, output_hidden_states=True)
    return [*(state[:, 0] for state in output.hidden_states), output.image_embeds]


@pytest.mark.parametrize("model", ["base", "merged", CONFIG, "expert"], ids=["base", "merged", "calibrated", "expert"])
def test_class_tokens_are_those_of_the_library(tiny64: Family, model: ModelId) -> None:
    """In float64: the tiny models are built so that float32 alone moves the fourth digit."""
    session = Session(tiny64)
    for task in TASKS:
        weights = tiny64.experts[task] if model == "expert" else session.fit.weights(model)
        found = session.measure.layer_features(model, task, SEEN)
        assert list(found) == tiny64.adapter.layers() == ["embeddings", *tiny64.adapter.block_layers(), "head"]
        expected = clip_states(tiny64, weights, session.samples(SEEN)[task].inputs["pixel_values"].double())
        for own, theirs in zip(found.values(), expected, strict=True):
            torch.testing.assert_close(own, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_means_leave_out_padding(kind: str, tmp_path: Path) -> None:
    """Of every stage its own tokens; the library sees no answers that are padding."""
    family = open_family(load_suite(write_text_suite(tmp_path / "suite", kind)), device="cpu")
    drawn = family.samples("left", "test", None, 0)
    one = family.expert_pass(drawn, 3)
    base = layer_features(family.run(), type(one)("left", family.base, one.batches, (), one.compute))

    model, seen = library_model(kind), {}
    stacks = {"encoder ": model.encoder, "decoder ": model.decoder} if kind.startswith("t5") else {"": model.model}
    for stage, stack in stacks.items():
        blocks = stack.block if stage else stack.layers
        blocks[0].register_forward_pre_hook(_note(seen, f"{stage}embeddings"), with_kwargs=True)
        for i, block in enumerate(blocks):
            block.register_forward_hook(_note_output(seen, f"{stage}block {i}"))
    inputs = {name: drawn.inputs[name] for name in drawn.inputs if name != "completion_mask"}
    with torch.no_grad():
        model(**inputs)
    masks = {"encoder": inputs["attention_mask"], "": inputs["attention_mask"]}
    if "labels" in inputs:
        masks["decoder"] = (inputs["labels"] != -100).long()
    assert all(0 in mask for mask in masks.values())
    assert list(base) == family.adapter.layers()
    assert set(base) == {*seen, "head"}
    for layer, states in seen.items():
        mask = masks[layer.split()[0] if stacks.keys() != {""} else ""]
        rows = [state[kept.bool()].mean(0) for state, kept in zip(states, mask, strict=True)]
        torch.testing.assert_close(base[layer], torch.stack(rows), rtol=1e-5, atol=1e-5)


def _note(seen: dict[str, Tensor], layer: str) -> Any:
    return lambda _, args, kwargs: seen.update({layer: args[0] if args else kwargs["hidden_states"]})


def _note_output(seen: dict[str, Tensor], layer: str) -> Any:
    return lambda _, __, output: seen.update({layer: output[0] if isinstance(output, tuple) else output})


def test_what_a_block_hands_on_beside_the_states_counts_against_the_room() -> None:
    """The position biases of T5, which its first block makes."""
    state, mask, made = torch.zeros(2, 3, 4), torch.ones(2, 3), torch.zeros(5, 3, 3)
    first, after = Call((state, mask), {}), Call((state + 1, mask, made), {})
    assert _bytes(first) == 4 * (state.numel() + mask.numel())
    assert _bytes(BlockStep(first, after, {"q": state}, {})) == 4 * (2 * state.numel() + made.numel())


def test_the_last_features_are_those_of_the_drift(tiny: Family) -> None:
    session = Session(tiny)
    for model in ("merged", CONFIG):
        measured = session.measure.features(model, SEEN).tasks["pets"]
        assert session.measure.layer_features(model, "pets", SEEN)["head"].equal(measured.model_features)
        assert session.measure.layer_features("expert", "pets", SEEN)["head"].equal(measured.expert_features)


def test_features_of_every_layer_are_kept_and_counted(tiny: Family) -> None:
    session = Session(tiny)
    found = session.measure.layer_features("merged", "pets", SEEN)
    assert session.measure.layer_features("merged", "pets", SEEN) is found
    for budget, is_kept in ((nbytes(found) + 2000, True), (nbytes(found) - 1, False)):
        tight = Session(tiny, budget=budget)
        first = tight.measure.layer_features("merged", "pets", SEEN)
        assert (tight.measure.layer_features("merged", "pets", SEEN) is first) == is_kept
    alone = Session(tiny, one_shot=True)
    again = [alone.measure.layer_features(model, "pets", SEEN) for model in ("merged", "expert", "merged")]
    assert all(own.equal(other) for own, other in zip(again[0].values(), found.values(), strict=True))
    assert all(own.equal(other) for own, other in zip(again[0].values(), again[2].values(), strict=True))

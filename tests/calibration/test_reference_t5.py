"""T5: calibration and drift against references that know transformers and the paper alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from clip_config import clip_config
from lanes import pairs, rows
from library_references import (
    Reference,
    assert_calibrated_alike,
    assert_drift_alike,
    assert_excesses_alike,
    assert_relative_drift_alike,
    calibrate_reference,
    calibration_samples,
    text_reference,
)
from transformers import T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5LayerNorm

from featcal import CalibrationConfig
from featcal.testing.reference import Piece, ReferenceOptions, refine

BLOCKS = [f"{stack}.block.{i}" for stack in ("encoder", "decoder") for i in range(2)]
ENCODED = ("encoder.final_layer_norm", "out")
STATES = {
    "encoder embeddings": (("encoder.block.0", "in"),),
    "encoder block 0": (("encoder.block.1", "in"),),
    "encoder block 1": (("encoder.final_layer_norm", "in"),),
    "decoder embeddings": (("decoder.block.0", "in"), ENCODED),
    "decoder block 0": (("decoder.block.1", "in"), ENCODED),
    "decoder block 1": (("decoder.final_layer_norm", "in"), ENCODED),
    "head": (("decoder.final_layer_norm", "out"),),
}


KINDS = ("t5-gated", "t5-relu")


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """By kind, each written once."""
    return cache(lambda kind: text_reference(tmp_path_factory.mktemp(kind), kind, T5ForConditionalGeneration))


@pytest.fixture(params=rows(KINDS, quick=("t5-gated",), slow=("t5-relu",)))
def reference(request: pytest.FixtureRequest, references: Callable[[str], Reference]) -> Reference:
    return references(request.param)


PAPER = {
    "paper": CalibrationConfig(lam=1e-5, rho=2.0, alpha=0.6, batch_size=4),
    "scales": clip_config(lam=1e-5, rho=0.5, alpha=0.25, rmsnorms=True, batch_size=4),
    "much ridge": CalibrationConfig(lam=2.0, rho=1.0, alpha=1.0, rmsnorms=True, batch_size=4),
    # few samples: targets token by token
    "few": CalibrationConfig(lam=0.05, rho=1.0, alpha=0.4, samples=4, batch_size=3),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    pairs(
        KINDS,
        PAPER,
        quick=[("t5-gated", "scales"), ("t5-gated", "few")],
        slow=[("t5-gated", "paper"), ("t5-gated", "much ridge"), ("t5-relu", "scales")],
    ),
)
def test_every_calibrated_tensor(references: Callable[[str], Reference], kind: str, name: str) -> None:
    reference, config = references(kind), PAPER[name]
    options = ReferenceOptions(config.lam, config.rho, config.alpha, norms=(T5LayerNorm,) if config.rmsnorms else ())
    samples = calibration_samples(reference, config)
    theirs = calibrate_reference(reference.models, reference.experts, samples, BLOCKS, options)
    assert_calibrated_alike(reference, config, theirs)


def test_relative_drift_of_encoder_blocks(reference: Reference) -> None:
    assert_relative_drift_alike(reference, {f"encoder block {i}": STATES[f"encoder block {i}"] for i in range(2)})


def test_drift_of_every_layer(reference: Reference) -> None:
    assert_drift_alike(reference, STATES, lambda sample: 0)


@pytest.mark.slow
def test_excess_of_every_feature_source(reference: Reference) -> None:
    assert_excesses_alike(reference, BLOCKS)


def pieces(block: str, crossed: bool, gated: bool) -> list[Piece]:
    """Of one block, in the order of its forward."""
    attentions = [("layer.0", "SelfAttention"), *([("layer.1", "EncDecAttention")] if crossed else [])]
    found: list[Piece] = []
    for layer, name in attentions:
        norm, part = f"{block}.{layer}.layer_norm", f"{block}.{layer}.{name}"
        found += [([norm], None), ([f"{part}.{one}" for one in "qkv"], None), ([f"{part}.o"], norm)]
    norm, part = f"{block}.layer.{len(attentions)}.layer_norm", f"{block}.layer.{len(attentions)}.DenseReluDense"
    inner = ["wi_0", "wi_1"] if gated else ["wi"]
    return [*found, ([norm], None), ([f"{part}.{one}" for one in inner], None), ([f"{part}.wo"], norm)]


PIECEWISE = {
    "refined": clip_config(recipe="refined", lam=1e-3, rho=2.0, alpha=0.6, beta=0.5, batch_size=4),
    "scales": clip_config(recipe="refined", lam=1e-5, rho=0.5, alpha=0.25, beta=1.0, rmsnorms=True, batch_size=4),
    "informed": clip_config(recipe="informed", batch_size=4),
    "weighed": clip_config(recipe="informed", weigh_tokens=True, batch_size=4),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    pairs(
        KINDS,
        PIECEWISE,
        quick=[],
        slow=[("t5-gated", "refined"), ("t5-gated", "scales"), ("t5-gated", "weighed"), ("t5-relu", "informed")],
    ),
)
def test_every_tensor_of_the_recipes_that_go_piece_by_piece(
    references: Callable[[str], Reference], kind: str, name: str
) -> None:
    reference, config = references(kind), PIECEWISE[name]
    norms = (T5LayerNorm,) if config.rmsnorms else ()
    options = ReferenceOptions(config.lam, config.rho, config.alpha, norms=norms, beta=config.beta, mu=config.mu)
    options = replace(options, weigh_tokens=config.weigh_tokens)
    samples = calibration_samples(reference, config)
    gated = any("wi_0" in name for name in reference.exact.adapter.tower)
    fitted = [piece for block in BLOCKS for piece in pieces(block, block.startswith("decoder"), gated)]
    assert_calibrated_alike(reference, config, refine(reference.models, reference.experts, samples, fitted, options))

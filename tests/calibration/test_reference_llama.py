"""Llama: calibration and drift against references that know transformers and the paper alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
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
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from featcal import CalibrationConfig
from featcal.testing.reference import Piece, ReferenceOptions, Sample, every_token, refine

BLOCKS = [f"model.layers.{i}" for i in range(3)]
STATES = {
    "embeddings": (("model.layers.0", "in"),),
    "block 0": (("model.layers.1", "in"),),
    "block 1": (("model.layers.2", "in"),),
    "block 2": (("model.norm", "in"),),
    "head": (("model.norm", "out"),),
}


KINDS = ("llama-plain", "llama-biased")


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """By kind, each written once."""
    return cache(lambda kind: text_reference(tmp_path_factory.mktemp(kind), kind, LlamaForCausalLM))


@pytest.fixture(params=rows(KINDS, quick=("llama-plain",), slow=("llama-biased",)))
def reference(request: pytest.FixtureRequest, references: Callable[[str], Reference]) -> Reference:
    return references(request.param)


def what_predicts_an_answer(sample: Sample, module: str, tokens: int) -> Tensor:
    """Weight 1 where the next token is one of the answer."""
    answer = sample["labels"][0] != -100
    return torch.cat([answer[1:], torch.tensor([False])]).double()


def prompts_last(sample: Sample) -> int:
    """Position that decides the answer's first token."""
    return int((sample["labels"][0] != -100).nonzero()[0]) - 1


PAPER = {
    "paper": CalibrationConfig(lam=1e-5, rho=0.5, alpha=0.15, batch_size=4),
    "answers": CalibrationConfig(lam=0.01, rho=2.0, alpha=0.6, rmsnorms=True, completion_only=True, batch_size=4),
    "much ridge": CalibrationConfig(lam=3.0, rho=0.5, alpha=0.15, rmsnorms=True, batch_size=4),
    "few": CalibrationConfig(lam=0.05, rho=1.0, alpha=0.4, completion_only=True, samples=4, batch_size=3),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    pairs(
        KINDS,
        PAPER,
        quick=[("llama-plain", "answers"), ("llama-plain", "few")],
        slow=[("llama-plain", "paper"), ("llama-plain", "much ridge"), ("llama-biased", "answers")],
    ),
)
def test_every_calibrated_tensor(references: Callable[[str], Reference], kind: str, name: str) -> None:
    reference, config = references(kind), PAPER[name]
    options = ReferenceOptions(config.lam, config.rho, config.alpha, norms=(LlamaRMSNorm,) if config.rmsnorms else ())
    counted = what_predicts_an_answer if config.completion_only else every_token
    samples = calibration_samples(reference, config)
    theirs = calibrate_reference(reference.models, reference.experts, samples, BLOCKS, options, counted)
    assert_calibrated_alike(reference, config, theirs)


def test_relative_drift_of_every_block(reference: Reference) -> None:
    assert_relative_drift_alike(reference, {f"block {i}": STATES[f"block {i}"] for i in range(3)})


def test_drift_of_every_layer(reference: Reference) -> None:
    assert_drift_alike(reference, STATES, prompts_last)


def test_excess_of_every_feature_source(reference: Reference) -> None:
    assert_excesses_alike(reference, BLOCKS)


PIECES: list[Piece] = [
    piece
    for block in BLOCKS
    for piece in (
        ([f"{block}.input_layernorm"], None),
        ([f"{block}.self_attn.{name}_proj" for name in "qkv"], None),
        ([f"{block}.self_attn.o_proj"], f"{block}.input_layernorm"),
        ([f"{block}.post_attention_layernorm"], None),
        ([f"{block}.mlp.{name}_proj" for name in ("gate", "up")], None),
        ([f"{block}.mlp.down_proj"], f"{block}.post_attention_layernorm"),
    )
]


PIECEWISE = {
    "refined": clip_config(recipe="refined", lam=1e-2, rmsnorms=True, completion_only=False),
    "answers": clip_config(recipe="refined", lam=1e-2, alpha=0.6, rmsnorms=True),
    "informed": clip_config(recipe="informed", rmsnorms=True, completion_only=False),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    pairs(
        KINDS,
        PIECEWISE,
        quick=[("llama-plain", "informed")],
        slow=[("llama-plain", "refined"), ("llama-plain", "answers"), ("llama-biased", "informed")],
    ),
)
def test_every_tensor_of_the_recipes_that_go_piece_by_piece(
    references: Callable[[str], Reference], kind: str, name: str
) -> None:
    reference, config = references(kind), replace(PIECEWISE[name], batch_size=4)
    options = ReferenceOptions(
        config.lam, config.rho, config.alpha, norms=(LlamaRMSNorm,), beta=config.beta, mu=config.mu
    )
    counted = what_predicts_an_answer if config.completion_only else every_token
    samples = calibration_samples(reference, config)
    theirs = refine(reference.models, reference.experts, samples, PIECES, options, counted)
    assert_calibrated_alike(reference, config, theirs)

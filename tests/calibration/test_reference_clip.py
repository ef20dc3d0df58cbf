"""CLIP: calibration against a reference that knows transformers and the paper alone."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from clip_config import clip_config
from lanes import rows
from library_references import Reference, assert_calibrated_alike, calibrate_reference, calibration_samples
from safetensors.torch import load_file
from tiny_clip import BLOCKS, TASKS, in_float64, write_expert, write_suite
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPVisionModelWithProjection

from featcal import load_suite, open_family
from featcal.testing.reference import Piece, ReferenceOptions, Sample, refine

NAMES = [f"vision_model.encoder.layers.{i}" for i in range(BLOCKS)]
CONFIG = clip_config(samples=12, batch_size=5)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """With a LayerNorm epsilon that is not torch's own, and a merged model that is not a mean of anything."""
    root = tmp_path_factory.mktemp("clip")
    file = write_suite(root)
    base = load_file(root / "base" / "model.safetensors")
    write_expert(root / "merged", base, root / "base", seed=9, distance=0.3)
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "merged": "merged"}))
    for described in root.rglob("config.json"):
        content = json.loads(described.read_text())
        content.get("vision_config", content)["layer_norm_eps"] = 0.02
        described.write_text(json.dumps(content))
    config = CLIPConfig.from_pretrained(root / "base")
    config.vision_config.projection_dim = config.projection_dim

    def load(folder: str) -> Any:
        model = CLIPVisionModelWithProjection(config.vision_config).double().eval()
        stored = {**base, **load_file(root / folder / "model.safetensors")}
        model.load_state_dict({name: stored[name] for name in model.state_dict()})
        return model

    drawn = load_file(root / "samples.safetensors")
    pictures = {task: drawn[f"{task}.calibration"].double().split(1) for task in TASKS}
    family = open_family(load_suite(file), "cpu")
    return Reference(
        family,
        in_float64(family),
        {name: load(name) for name in ("base", "merged")},
        {task: load(f"experts/{task}") for task in TASKS},
        {"calibration": {task: [{"pixel_values": one} for one in own] for task, own in pictures.items()}},
    )


def token_weights(sample: Sample, module: str, tokens: int) -> Tensor:
    """All count alike, but in the last block patches have 0.01, except where keys and values are made of them."""
    last = module.startswith(NAMES[-1]) and not module.endswith(("k_proj", "v_proj"))
    return torch.cat([torch.ones(1), torch.full((tokens - 1,), 0.01 if last else 1.0, dtype=torch.float64)])


PAPER = {
    "usual": CONFIG,
    "little ridge, targets of the expert": replace(CONFIG, lam=1e-4, rho=0.5, alpha=1.0),
    "much ridge, targets of the student": replace(CONFIG, lam=2.0, rho=1.0, alpha=0.0),
}


@pytest.mark.parametrize("name", rows(PAPER, quick=("usual",), slow=PAPER))
def test_every_calibrated_tensor(reference: Reference, name: str) -> None:
    config = PAPER[name]
    options = ReferenceOptions(config.lam, config.rho, config.alpha, norms=(nn.LayerNorm,))
    samples = calibration_samples(reference, config)
    theirs = calibrate_reference(reference.models, reference.experts, samples, NAMES, options, token_weights)
    assert_calibrated_alike(reference, config, theirs)


PIECES: list[Piece] = [
    piece
    for block in NAMES
    for piece in (
        ([f"{block}.layer_norm1"], None),
        ([f"{block}.self_attn.{name}_proj" for name in "qkv"], None),
        ([f"{block}.self_attn.out_proj"], f"{block}.layer_norm1"),
        ([f"{block}.layer_norm2"], None),
        ([f"{block}.mlp.fc1"], None),
        ([f"{block}.mlp.fc2"], f"{block}.layer_norm2"),
    )
]


LITTLE = replace(CONFIG, lam=1e-5, rho=1.0, alpha=0.3, layernorms=False)
PIECEWISE = {
    "refined": replace(CONFIG, recipe="refined", lam=1e-3, alpha=0.6, beta=0.5),
    "refined, maps alone": replace(CONFIG, recipe="refined", lam=0.05, alpha=1.0, beta=1.0, layernorms=False),
    "refined, much ridge": replace(CONFIG, recipe="refined", lam=1.0, alpha=0.0),
    "refined, weighed": replace(CONFIG, recipe="refined", lam=1e-3, alpha=0.6, beta=0.5, weigh_tokens=True),
    "informed": replace(CONFIG, recipe="informed", lam=1e-3, alpha=0.6, beta=0.5, mu=0.1),
    "informed, maps alone, weighed": replace(LITTLE, recipe="informed", mu=3.0, weigh_tokens=True),
}


@pytest.mark.parametrize("name", rows(PIECEWISE, quick=("refined, weighed", "informed"), slow=PIECEWISE))
def test_every_tensor_of_the_recipes_that_go_piece_by_piece(reference: Reference, name: str) -> None:
    config = PIECEWISE[name]
    norms = (nn.LayerNorm,) if config.layernorms else ()
    options = ReferenceOptions(config.lam, config.rho, config.alpha, norms=norms, beta=config.beta, mu=config.mu)
    options = replace(options, weigh_tokens=config.weigh_tokens)
    samples = calibration_samples(reference, config)
    theirs = refine(reference.models, reference.experts, samples, PIECES, options, token_weights)
    assert_calibrated_alike(reference, config, theirs)

"""Encoders of pictures: how they prepare them, and SigLIP, which is given prompts."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import yaml
from own_merges import edit_json
from safetensors.torch import load_file
from tiny_encoders import ROWS, tiny_encoder, write_tokenizer

from featcal import (
    CalibrationConfig,
    InputError,
    calibrate,
    evaluate,
    load_suite,
    measure_drift,
    open_family,
)
from featcal.evaluation.evaluate import task_features
from featcal.evaluation.scoring_heads import prompt_heads
from featcal.models.families import registry
from featcal.testing.checks import CHECKS
from featcal.testing.trial import TASKS, write_trial


def pictures(count: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count, 13, 11, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def with_pictures(root: Path, classes: list[str]) -> Path:
    """The suite of a trial with pictures as people see them in place of pixels."""
    content = yaml.safe_load((root / "suite.yaml").read_text())
    for number, task in enumerate(TASKS):
        parts = {"train_x": pictures(20, number).numpy(), "train_y": np.arange(20) % 2}
        parts |= {"test_x": pictures(6, 9 + number).numpy(), "test_y": np.arange(6) % 2}
        np.savez(root / f"{task}.npz", class_names=np.array(classes), **parts)
        content["tasks"][task] |= {split: {"arrays": f"{task}.npz"} for split in ("calibration", "test")}
    (root / "suite.yaml").write_text(yaml.safe_dump(content))
    return root / "suite.yaml"


PROCESSORS = {
    "vit": transformers.ViTImageProcessor(size={"height": 8, "width": 8}),
    "dinov2": transformers.BitImageProcessor(size={"shortest_edge": 9}, crop_size={"height": 8, "width": 8}),
    "siglip_vision_model": transformers.SiglipImageProcessor(size={"height": 8, "width": 8}),
}


@pytest.mark.slow
def test_height_and_width_may_be_stated_apart(tmp_path: Path) -> None:
    trial = write_trial(tiny_encoder(ROWS["vit"], patch_size=[4, 2]), ROWS["vit"], tmp_path)
    for config in tmp_path.rglob("config.json"):
        edit_json(config, image_size=[8, 8])
    assert CHECKS["replay"](trial)
    adapter = open_family(load_suite(tmp_path / "suite.yaml"), "cpu").adapter
    assert adapter.tokens({"pixel_values": torch.zeros(3, 3, 8, 8)}) == 3 * (2 * 4 + 1)
    assert adapter.misfit({"pixel_values": torch.zeros(3, 3, 8, 8)}) is None
    assert "[3, 8, 6], the model takes [3, 8, 8]" in str(adapter.misfit({"pixel_values": torch.zeros(3, 3, 8, 6)}))


def test_a_vision_tower_that_pools_nothing_is_refused() -> None:
    config = tiny_encoder(ROWS["siglip_vision_model"]).config.to_dict() | {"vision_use_head": False}
    with pytest.raises(InputError, match=r"'head', which pools the states, is missing \(vision_use_head: false\)"):
        registry.adapter_for(config, [], torch.device("cpu"), "base")


@pytest.mark.parametrize("kind", PROCESSORS)
def test_pictures_are_prepared_by_the_processor_that_the_base_names(kind: str, tmp_path: Path) -> None:
    facts = ROWS[kind]
    write_trial(tiny_encoder(facts), facts, tmp_path)
    PROCESSORS[kind].save_pretrained(tmp_path / "base")
    family = open_family(load_suite(with_pictures(tmp_path, ["a", "b"])), "cpu")
    ours = family.samples("left", "test", None, 0).inputs["pixel_values"]
    theirs = PROCESSORS[kind](images=list(pictures(6, 9).movedim(-1, 1)), return_tensors="pt")["pixel_values"]
    assert ours.equal(theirs)
    assert family.preparation()["pictures"].endswith(type(PROCESSORS[kind]).__name__)
    settings = tmp_path / "base" / "preprocessor_config.json"
    edit_json(settings, image_processor_type="ViTFeatureExtractor")
    assert family.preparation()["pictures"].endswith("ViTImageProcessor")
    edit_json(settings, image_processor_type="Code")
    with pytest.raises(InputError, match="names the image processor 'Code'; featcal takes CLIPImageProcessor, ViT"):
        family.samples("left", "test", None, 0)


def test_positions_are_interpolated_where_a_model_does_so(tmp_path: Path) -> None:
    """DINOv2's pictures are rarely of the size that its table of positions is made for."""
    facts = ROWS["dinov2"]
    trial = write_trial(tiny_encoder(facts), facts, tmp_path)
    adapter, inputs = trial.family.adapter, {"pixel_values": torch.randn(2, 3, 12, 16)}
    assert adapter.misfit(inputs) is None
    assert adapter.tokens(inputs) == 2 * (3 * 4 + 1)
    assert "sides of whole patches of 4" in str(adapter.misfit({"pixel_values": torch.randn(2, 3, 12, 15)}))
    with torch.no_grad():
        theirs = trial.scores(trial.library("base", torch.float32), inputs)
    torch.testing.assert_close(trial.compute_scores(trial.family.base, inputs), theirs, rtol=1e-5, atol=1e-5)
    vit = write_trial(tiny_encoder(ROWS["vit"]), ROWS["vit"], tmp_path / "vit").family.adapter
    assert r"the model takes [3, 8, 8]" in str(vit.misfit(inputs))


@pytest.fixture
def siglip(tmp_path: Path) -> Path:
    """Whole models with text towers, image processor and tokenizer; a base, experts, and a recipe."""
    torch.manual_seed(2)
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**vision, "vocab_size": 32, "max_position_embeddings": 9, "projection_size": 16}
    text |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    config = transformers.SiglipConfig(vision_config={**vision, "image_size": 8, "patch_size": 4}, text_config=text)
    base = transformers.SiglipModel(config)
    tasks = {}
    for task in ("base", *TASKS):
        moved = copy.deepcopy(base)
        with torch.no_grad():
            for name, parameter in moved.named_parameters():
                if task != "base" and name.startswith("vision_model."):
                    parameter.add_(0.2 * torch.randn_like(parameter) * parameter.std().nan_to_num(0.1))
        folder = tmp_path / (task if task == "base" else f"experts/{task}")
        moved.save_pretrained(folder)
        if task != "base":
            tasks[task] = {"expert": f"experts/{task}", "templates": ["w1 {}"]}
    PROCESSORS["siglip_vision_model"].save_pretrained(tmp_path / "base")
    write_tokenizer(tmp_path / "base")
    suite = {"name": "siglip", "base": "base", "merged": {"method": "simple-averaging"}, "tasks": tasks}
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(suite))
    return with_pictures(tmp_path, ["w3", "w4 w5"])


def test_prompts_of_siglip_rank_as_its_sigmoid_scores(siglip: Path) -> None:
    family, root = open_family(load_suite(siglip), "cpu"), siglip.parent
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "base")
    ids = tokenizer(["w1 w3", "w1 w4 w5"], padding="max_length", max_length=9, return_tensors="pt")["input_ids"]
    library = transformers.SiglipModel.from_pretrained(root / "experts" / "left").eval()
    pixels = family.samples("left", "test", None, 0).inputs["pixel_values"]
    with torch.no_grad():
        scores = library(input_ids=ids, pixel_values=pixels).logits_per_image
    assert evaluate(family, "expert:left", split="test").tasks["left"].predictions.equal(scores.argmax(1))
    drawn = family.samples("left", "test", None, 0)
    head = prompt_heads(family, {"left": drawn.class_names or ()}, {})["left"]
    ours = head.scores(task_features(family, family.experts["left"], "left", [drawn.inputs]))
    bias = transformers.SiglipModel.from_pretrained(root / "base").logit_bias.detach()
    torch.testing.assert_close(ours + bias, scores, rtol=1e-5, atol=1e-5)


def test_a_whole_siglip_is_written_with_its_text_tower(siglip: Path) -> None:
    family, root = open_family(load_suite(siglip), "cpu"), siglip.parent
    calibrate(family, CalibrationConfig(lam=0.05, rho=2.0, alpha=0.3, samples=20)).save(root / "out")
    model, loaded = transformers.SiglipModel.from_pretrained(root / "out", output_loading_info=True)
    assert not loaded["missing_keys"]
    assert not loaded["mismatched_keys"]
    base = load_file(root / "base" / "model.safetensors")
    own = model.state_dict()
    rest = [name for name in base if not name.startswith("vision_model.")]
    assert rest
    assert all(own[name].equal(base[name]) for name in rest)
    tower = family.model(str(root / "out")).read(family.adapter.tower)
    assert all(own[name].equal(tensor) for name, tensor in tower.items())
    before, after = measure_drift(family), measure_drift(family, str(root / "out"))
    for task in TASKS:
        drifts = [one.tasks[task].layers[-2].relative_drift for one in (after, before)]
        assert drifts[0] < drifts[1]


def test_siglip_2_at_a_fixed_resolution_is_a_siglip(siglip: Path) -> None:
    """Its published configurations are of this type, and name neither a class nor, but for the vocabulary, what is as
    usual; its tokenizer is Gemma's."""
    root = siglip.parent
    for folder in (root / "base", *(root / "experts" / task for task in TASKS)):
        said = json.loads((folder / "config.json").read_text())
        del said["architectures"]
        (folder / "config.json").write_text(json.dumps({**said, "initializer_factor": 1.0}))
    named = json.loads((root / "base" / "tokenizer_config.json").read_text())
    (root / "base" / "tokenizer_config.json").write_text(json.dumps({**named, "processor_class": "SiglipProcessor"}))
    family = open_family(load_suite(siglip), "cpu")
    calibrate(family, CalibrationConfig(lam=0.05, rho=2.0, alpha=0.3, samples=20)).save(root / "out")
    model, loaded = transformers.AutoModel.from_pretrained(root / "out", output_loading_info=True)
    assert type(model) is transformers.SiglipModel
    assert not loaded["missing_keys"]
    drawn = family.samples("left", "test", None, 0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "base")
    ids = tokenizer(["w1 w3", "w1 w4 w5"], padding="max_length", max_length=9, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        scores = model.eval()(input_ids=ids, pixel_values=drawn.inputs["pixel_values"]).logits_per_image
    found = evaluate(family, str(root / "out"), split="test").tasks["left"].predictions
    assert found.equal(scores.argmax(1))


@pytest.mark.parametrize("kind", ["siglip2", "siglip2_vision_model"])
def test_pictures_of_any_shape_are_refused_by_name(kind: str) -> None:
    with pytest.raises(
        InputError, match=f"architecture '{kind}' is not supported: its pictures keep their shape.*fixed"
    ):
        registry.architecture_for({"model_type": kind, "vision_config": {"patch_size": 16}}, "base")

"""A model in memory is read as its saved folder is."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from objects import same_tensors
from safetensors.torch import load_file
from tiny_decoders import ROWS as DECODERS
from tiny_decoders import tiny_decoder
from tiny_encoders import tiny_encoder
from tiny_text import library_model

from featcal.formats.contents import tensor_digests
from featcal.formats.in_memory import HeldModel
from featcal.formats.locate import locate
from featcal.models.families.encoder_facts import ENCODERS
from featcal.system.errors import InputError
from featcal.system.in_memory import register_object

ENCODER_ROWS = {facts.model_type: facts for facts in ENCODERS}


def _clip_tower() -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=12, patch_size=4))


MODELS: dict[str, Callable[[], Any]] = {
    "clip tower": _clip_tower,
    "t5": lambda: library_model("t5"),
    "t5 tied": lambda: library_model("t5-tied"),
    "gpt2": lambda: tiny_decoder(DECODERS["gpt2"]),
    "gemma tied": lambda: tiny_decoder(DECODERS["gemma"]),
    "mixtral": lambda: tiny_decoder(DECODERS["mixtral"]),
    "qwen3_moe": lambda: tiny_decoder(DECODERS["qwen3_moe"]),
    "bert": lambda: tiny_encoder(ENCODER_ROWS["bert"]),
    "vit": lambda: tiny_encoder(ENCODER_ROWS["vit"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_names_and_values_are_those_of_the_saved_folder(name: str, tmp_path: Path) -> None:
    """Names in files are not names in modules, and tied tensors stand in a file once."""
    model = MODELS[name]().half()
    held = HeldModel(model, "base")
    model.save_pretrained(tmp_path / "saved")
    assert same_tensors(dict(held.tensors), load_file(tmp_path / "saved" / "model.safetensors"))
    for file in ("config.json", *(["generation_config.json"] if model.can_generate() else [])):
        assert (held.folder / file).read_text() == (tmp_path / "saved" / file).read_text()
    lines = tensor_digests([tmp_path / "saved" / "model.safetensors"]).items()
    said = "".join(f"{stored} {digest}\n" for stored, digest in lines)
    assert held.content == hashlib.sha256(said.encode()).hexdigest()


@pytest.mark.parametrize("name", ["clip tower", "t5", "bert"])
def test_tensors_are_the_modules_own(name: str) -> None:
    model = MODELS[name]()
    held = HeldModel(model, "base")
    own = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert {tensor.data_ptr() for tensor in held.tensors.values()} <= own
    found = locate(register_object(held), Path.cwd(), "base").open(lambda stored: stored, {})
    assert {tensor.data_ptr() for tensor in found.read(found.info).values()} <= own


def test_what_lies_beside_goes_with_the_model() -> None:
    held = HeldModel(_clip_tower(), "base")
    folder, reference = held.folder, register_object(held)
    assert reference.startswith("memory:CLIPVisionModel-")
    assert locate(reference, Path.cwd(), "base").config["model_type"] == "clip_vision_model"
    del held
    gc.collect()
    assert not folder.exists()
    with pytest.raises(InputError, match=r"base: 'memory:CLIPVisionModel-\w{16}' names an object of a Python process"):
        locate(reference, Path.cwd(), "base")


def test_the_reference_tells_contents_apart() -> None:
    """Of weights, of the configuration, and of what prepares samples."""
    from transformers import CLIPImageProcessor

    first, second, longer, processed = _clip_tower(), _clip_tower(), _clip_tower(), _clip_tower()
    with torch.no_grad():
        next(longer.parameters()).add_(1)
    told = [register_object(HeldModel(one, "base")) for one in (first, second, longer)]
    with_tool = HeldModel(processed, "base", [CLIPImageProcessor()])
    assert told[0] == told[1]
    assert len({*told, register_object(with_tool)}) == 3
    assert with_tool.content == HeldModel(first, "base").content


def test_values_that_are_not_finite_are_refused() -> None:
    model = _clip_tower()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    held = HeldModel(model, "expert 'cars'")
    found = locate(register_object(held), Path.cwd(), "expert 'cars'").open(lambda stored: stored, {})
    with pytest.raises(InputError, match=r"expert 'cars': tensor '.*embedding.*': 16 of 16 values are NaN"):
        found.read(found.info)
    with pytest.raises(InputError, match="expert 'cars': tensor 'other' is missing from the CLIPVisionModel in memory"):
        found.read(["other"])


class _Adapted(torch.nn.Module):
    peft_config = "a LoRA"


def _on_meta() -> Any:
    with torch.device("meta"):
        return _clip_tower()


def _attached() -> Any:
    model = _clip_tower()
    model._hf_peft_config_loaded = True
    return model


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: 7, "base: a int; give a PreTrainedModel of transformers, a folder or an id on the Hub"),
        (lambda: torch.nn.Linear(2, 2), "base: a Linear; give a PreTrainedModel of transformers"),
        (lambda: {"a": torch.zeros(2)}, "base: a dict of tensors, which does not say its architecture; give the model"),
        (_Adapted, r"base: a _Adapted with adapters; give what its merge_and_unload\(\) returns"),
        (_attached, "base: a CLIPVisionModel with adapters"),
        (_on_meta, r"base: a CLIPVisionModel whose weights are not in memory \('.*' is on the meta device\)"),
    ],
)
def test_other_objects_are_refused(made: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        HeldModel(made(), "base")


def test_settings_of_generation_that_no_file_may_hold_are_refused() -> None:
    model = library_model("t5")
    model.generation_config.update(do_sample=False, temperature=0.5)
    with pytest.raises(
        InputError, match=r"base: its generation_config contradicts itself \(.*temperature.*\); correct it"
    ):
        HeldModel(model, "base")


def test_tools_are_those_of_transformers() -> None:
    with pytest.raises(InputError, match="base: a int is not a tokenizer or processor of transformers"):
        HeldModel(_clip_tower(), "base", [3])

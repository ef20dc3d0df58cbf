"""Conversion between the layouts of transformers and open_clip: the same model, said by both libraries."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from open_clip_models import model_cfg, random_state, reference, write_folder
from safetensors.torch import load_file, save_file
from tiny_clip import write_base

from featcal.export.change_layout import convert
from featcal.export.clip_counterparts import hf_config, open_clip_config
from featcal.export.clip_inputs import preprocess_for_open_clip
from featcal.family.opening import open_model
from featcal.formats.locate import locate
from featcal.models.families.registry import adapter_for
from featcal.system.errors import InputError, NumericalError


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "model"
    write_base(folder)
    return folder


@pytest.fixture
def own(hf: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    import shutil

    return Path(shutil.copytree(hf, tmp_path / "own"))


def edit(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
def test_there_and_back_is_the_same_model(own: Path, tmp_path: Path, activation: str) -> None:
    def activate(config: dict[str, Any]) -> None:
        config["vision_config"]["hidden_act"] = config["text_config"]["hidden_act"] = activation

    edit(own / "config.json", activate)
    there = convert(own, tmp_path / "there", "open_clip")
    assert there["parity"].keys() == {"image_features", "text_features", "logit_scale"}
    assert max(there["parity"].values()) < 1e-5
    config = json.loads((tmp_path / "there" / "open_clip_config.json").read_text())
    assert config["model_cfg"]["quick_gelu"] is (activation == "quick_gelu")
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == there["written"]
    assert "library_name: open_clip" in (tmp_path / "there" / "README.md").read_text()
    open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'there'}")

    back = convert(reference(tmp_path / "there"), tmp_path / "back", "hf")
    assert max(back["parity"].values()) < 1e-5
    before, after = load_file(own / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(after[name].equal(before[name]) for name in before)
    settings = [json.loads((folder / "config.json").read_text()) for folder in (own, tmp_path / "back")]
    for tower in ("vision_config", "text_config"):
        for name in ("hidden_act", "num_attention_heads", "layer_norm_eps", "intermediate_size"):
            assert settings[0][tower][name] == settings[1][tower][name]
    record = json.loads((tmp_path / "back" / "featcal.json").read_text())
    assert record["converted"]["from"] == "open_clip"
    assert record["written"] == back["written"]


def test_storage_dtype_stays(own: Path, tmp_path: Path) -> None:
    file = own / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    convert(own, tmp_path / "out", "open_clip")
    written = load_file(tmp_path / "out" / "open_clip_model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.float16}


def test_text_tower_kept_apart_and_eps(tmp_path: Path) -> None:
    """`text.` names of newer open_clip files, norms with another eps and a logit scale of shape [1]."""
    config = model_cfg(False, vision={"norm_kwargs": {"eps": 1e-3}})
    inside = ("visual.", "logit_scale")
    state = {(n if n.startswith(inside) else f"text.{n}"): t for n, t in random_state(config).items()}
    state["logit_scale"] = state["logit_scale"].reshape(1)
    folder = write_folder(tmp_path / "model", config | {"custom_text": True}, state)
    document = convert(reference(folder), tmp_path / "out", "hf")
    assert max(document["parity"].values()) < 1e-5
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["vision_config"]["layer_norm_eps"] == 1e-3
    assert load_file(tmp_path / "out" / "model.safetensors")["logit_scale"].shape == ()


def test_a_suite_says_how_its_base_is_laid_out(own: Path, tmp_path: Path) -> None:
    convert(own, tmp_path / "other", "open_clip")
    folders = {"hf": str(own), "open_clip": reference(tmp_path / "other")}
    for layout, other in (("hf", "open_clip"), ("open_clip", "hf")):
        base = locate(folders[layout], Path("/"), "base")
        adapter = adapter_for(base.config, base.names, torch.device("cpu"), "base")
        with pytest.raises(InputError, match=f"another library than the base; 'featcal export .* --format {layout} "):
            open_model(locate(folders[other], Path("/"), "expert"), adapter, torch.device("cpu"))


@pytest.mark.parametrize("layout", ["hf", "open_clip"])
def test_a_model_that_has_the_layout_is_rewritten(hf: Path, tmp_path: Path, layout: str) -> None:
    config = model_cfg(True)
    source = hf if layout == "hf" else reference(write_folder(tmp_path / "model", config, random_state(config)))
    document = convert(source, tmp_path / "out", layout)
    assert document["format"] == layout
    assert "parity" not in document


def test_what_cannot_be_converted(tiny_expert: Path, own: Path, tmp_path: Path) -> None:
    def error(source: str | Path, layout: str) -> str:
        with pytest.raises(InputError) as caught:
            convert(source, tmp_path / "out", layout)
        assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out")) == []
        return str(caught.value)

    assert "format is one of hf, open_clip" in error(own, "onnx")
    assert "model_type is 'clip_vision_model'; only a whole CLIP" in error(tiny_expert, "open_clip")
    config = model_cfg(True, vision={"ls_init_value": 0.1, "no_ln_pre": True}, embed_cls=True)
    folder = write_folder(tmp_path / "scaled", config, random_state(model_cfg(True)))
    message = error(reference(folder), "hf")
    assert "3 problems" in message
    assert all(part in message for part in ("ls_init_value is 0.1", "no_ln_pre is True", "embed_cls is True"))
    folder = write_folder(tmp_path / "unknown", model_cfg(True), random_state(model_cfg(True)))
    file = folder / "open_clip_config.json"
    file.write_text(json.dumps({"model_cfg": model_cfg(True, vision={"depth": 3})}))
    assert f"{file.name} does not describe a model that can be run" in error(reference(folder), "hf")
    bias = random_state(model_cfg(True)) | {"logit_bias": torch.ones(())}
    assert "without a counterpart: logit_bias" in error(
        reference(write_folder(tmp_path / "b", model_cfg(True), bias)), "hf"
    )
    edit(own / "config.json", lambda c: c["text_config"].update(hidden_act="relu"))
    assert "hidden_act is quick_gelu and relu" in error(own, "open_clip")


@pytest.fixture
def tiny_expert(tiny_suite_file: Path) -> Path:
    return tiny_suite_file.parent / "experts" / "pets"


def test_libraries_that_disagree_leave_nothing(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_activation(*args: Any) -> dict[str, Any]:
        return open_clip_config(*args) | {"quick_gelu": False}

    monkeypatch.setattr("featcal.export.change_layout.open_clip_config", other_activation)
    with pytest.raises(NumericalError, match="image_features of the two libraries differ by"):
        convert(hf, tmp_path / "out", "open_clip")
    assert list(tmp_path.iterdir()) == []


def test_widths_that_do_not_divide() -> None:
    """open_clip rounds `width * mlp_ratio` down: the ratio must still give the very same width."""
    tower = {"hidden_size": 49, "num_attention_heads": 7, "num_hidden_layers": 1}
    for inner in (1, 2, 27, 54, 99, 128, 196, 207):
        both = {
            "vision_config": tower | {"intermediate_size": inner},
            "text_config": tower | {"intermediate_size": inner},
        }
        config = open_clip_config(both, "m")
        assert hf_config(config, "m")["vision_config"]["intermediate_size"] == inner
        assert int(config["vision_cfg"]["width"] * config["vision_cfg"]["mlp_ratio"]) == inner


def test_end_tokens() -> None:
    """transformers pools at one id, or at the highest where that id is 2; open_clip has words for both."""

    def there(eos: int, rows: int) -> dict[str, Any]:
        text = {"eos_token_id": eos, "vocab_size": rows}
        cfg: dict[str, Any] = open_clip_config({"vision_config": {}, "text_config": text}, "m")["text_cfg"]
        back = hf_config({"embed_dim": 8, "vision_cfg": {}, "text_cfg": cfg}, "m")["text_config"]["eos_token_id"]
        return {"pool": cfg.get("pool_type", "argmax"), "eos": cfg.get("eos_id"), "back": back}

    assert there(49407, 49408) == {"pool": "argmax", "eos": None, "back": 49407}
    assert there(2, 40) == {"pool": "argmax", "eos": None, "back": 2}
    assert there(7, 40) == {"pool": "eos", "eos": 7, "back": 7}


@pytest.mark.slow
def test_clips_own_tokenizer_comes_along(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    config = model_cfg(True, vocab_size=49408, context_length=10)
    folder = write_folder(tmp_path / "model", config, random_state(config))
    document = convert(reference(folder), tmp_path / "out", "hf")
    assert document["notes"] == []
    texts = ["a photo of a cat.", "It's 3 o'clock — DOUBLE  space"]
    theirs = open_clip.get_tokenizer(f"local-dir:{folder}")(texts)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = tokenizer(texts, truncation=True)["input_ids"]
    assert [len(ids) for ids in ours] == [8, 10]
    assert all(ids == row[: len(ids)].tolist() for ids, row in zip(ours, theirs, strict=True))
    there = convert(tmp_path / "out", tmp_path / "there", "open_clip")
    assert there["notes"] == []
    assert "hf_tokenizer_name" not in (tmp_path / "there" / "open_clip_config.json").read_text()


def test_a_tokenizer_of_another_kind_comes_along(hf: Path, tmp_path: Path) -> None:
    document = convert(hf, tmp_path / "out", "open_clip")
    assert any("tokenizer lies in the folder" in note for note in document["notes"])
    tokens = open_clip.get_tokenizer(f"local-dir:{tmp_path / 'out'}")(["a photo of a cat."])
    assert tokens.tolist() == [[2, 4, 5, 6, 4, 8, 7, 3, 0, 0, 0, 0]]


def test_missing_tokenizer_is_said(own: Path, tmp_path: Path) -> None:
    for file in own.glob("tokenizer*"):
        file.unlink()
    assert any("11 rows are not CLIP's" in note for note in convert(own, tmp_path / "a", "open_clip")["notes"])
    config = model_cfg(True)
    folder = write_folder(tmp_path / "model", config, random_state(config))
    assert any("20 rows are not CLIP's" in note for note in convert(reference(folder), tmp_path / "b", "hf")["notes"])


@pytest.mark.parametrize("mode", ["shortest", "squash"])
def test_preprocessing_there_and_back(tmp_path: Path, mode: str) -> None:
    how = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4], "interpolation": "bilinear", "resize_mode": mode}
    config = model_cfg(True)
    folder = write_folder(tmp_path / "model", config, random_state(config), **how)
    convert(reference(folder), tmp_path / "out", "hf")
    assert preprocess_for_open_clip(tmp_path / "out", 12) == (how, [])


def test_preprocessing_that_does_not_carry_over(own: Path, tmp_path: Path) -> None:
    config = model_cfg(True)
    folder = write_folder(tmp_path / "model", config, random_state(config), resize_mode="longest")
    document = convert(reference(folder), tmp_path / "out", "hf")
    assert any("cannot resize as 'longest'" in note for note in document["notes"])
    assert "preprocessor_config.json" not in document["written"]
    edit(own / "preprocessor_config.json", lambda c: c.update(do_normalize=False, do_rescale=False, resample=0))
    settings, notes = preprocess_for_open_clip(own, 12)
    assert settings["mean"] == [0.0] * 3
    assert ["does not scale" in notes[0], "resampling 0" in notes[1], "12 pixels" in notes[2]] == [True] * 3
    edit(own / "preprocessor_config.json", lambda c: c.update(do_rescale=True, rescale_factor=1 / 127.5))
    assert "scales pixels by 0.00784314; open_clip always does by 1/255" in preprocess_for_open_clip(own, 12)[1][0]
    (own / "preprocessor_config.json").unlink()
    assert preprocess_for_open_clip(own, 12)[0] == {}
    (own / "preprocessor_config.json").write_text("[")
    with pytest.raises(InputError, match=r"preprocessor_config\.json is not valid JSON"):
        preprocess_for_open_clip(own, 12)

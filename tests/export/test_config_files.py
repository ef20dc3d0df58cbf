"""Configuration beside written weights: transformers 4 and 5 read the same model. `make compat` runs both on these."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_clip import clip_inputs
from tiny_encoders import ROWS, tiny_encoder
from tiny_text import CONFIGS, write_text_suite
from version5 import LENGTH, ROPES, TOKENIZERS, write_saved_by_5, write_tokenizer

from featcal import load_suite, open_family
from featcal.export.change_layout import convert
from featcal.export.config_files import named_dtype, say_tokenizer
from featcal.export.write import rewrite, with_notes
from featcal.formats.output import save_tensors
from featcal.formats.weights import InMemory, TensorInfo
from featcal.models.families.registry import adapter_for
from featcal.system.errors import InputError


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


@pytest.mark.parametrize("rope", ROPES)
def test_rope_is_said_to_both_versions(tmp_path: Path, rope: str) -> None:
    write_saved_by_5(tmp_path / "saved", f"llama-{rope}")
    assert "rope_theta" not in config_of(tmp_path / "saved")
    assert rewrite(tmp_path / "saved", tmp_path / "out")["notes"] == []
    said, theirs = config_of(tmp_path / "out"), ROPES[rope]
    scaling = {name: value for name, value in theirs.items() if name != "rope_theta"}
    assert said["rope_theta"] == theirs["rope_theta"]
    assert said["rope_scaling"] == (None if rope == "default" else scaling)
    assert said["rope_parameters"] == theirs
    assert said.get("original_max_position_embeddings") == (16 if rope == "longrope" else None)
    again = adapter_for(said, ["lm_head.weight"], torch.device("cpu"), "m")
    assert again.settings["rope_parameters"] == theirs


@pytest.mark.parametrize("kind", ["t5-untied", "t5-half", "t5-tied", "t5-gated-tied"])
def test_the_head_of_t5_is_said_to_both_versions(tmp_path: Path, kind: str) -> None:
    """Version 4 ties the head and scales its inputs where `tie_word_embeddings` is true, and else does neither."""
    write_saved_by_5(tmp_path / "saved", kind)
    assert config_of(tmp_path / "saved")["tie_word_embeddings"] is True
    assert rewrite(tmp_path / "saved", tmp_path / "out")["notes"] == []
    untied = "lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")
    assert untied == (kind in ("t5-untied", "t5-half"))
    said = config_of(tmp_path / "out")
    assert said["tie_word_embeddings"] is (not untied)
    assert said["scale_decoder_outputs"] is (not untied)


def test_what_version_4_cannot_be_told_is_said(tmp_path: Path) -> None:
    """Card, `featcal.json` and result name the version that is needed; exporting again does not repeat it."""
    for kind, change, says in (
        ("t5-tied", {"scale_decoder_outputs": False}, "the head is the embedding and its inputs are not scaled"),
        ("t5-untied", {"scale_decoder_outputs": True}, "the head has values of its own and its inputs are scaled"),
        ("llama-longrope", {"rope_parameters": ROPES["longrope"] | {"factor": 2.0}}, "replaces the factor 2 of this"),
    ):
        root = tmp_path / kind
        write_saved_by_5(root / "saved", kind)
        config = root / "saved" / "config.json"
        config.write_text(json.dumps(config_of(root / "saved") | change))
        notes = rewrite(root / "saved", root / "out")["notes"]
        assert len(notes) == 1
        assert notes[0].startswith("needs transformers 5: ")
        assert says in notes[0]
        assert rewrite(root / "out", root / "again")["notes"] == notes
        assert json.loads((root / "again" / "featcal.json").read_text())["notes"] == notes
        assert (root / "again" / "README.md").read_text().count(notes[0]) == 1


def test_an_unknown_rope_needs_version_5() -> None:
    rope = {"rope_type": "proportional", "rope_theta": 10000.0}
    config = CONFIGS["llama"] | {"rope_parameters": rope, "max_position_embeddings": LENGTH}
    adapter = adapter_for(config, ["lm_head.weight"], torch.device("cpu"), "m")
    assert adapter.portable(config, InMemory("m", {}))[1] == [
        "needs transformers 5: version 4 has no rope type 'proportional'"
    ]


FACTORS = {"short_factor": [1.0, 1.5, 1.2, 1.1], "long_factor": [2.0, 3.0, 2.5, 2.2]}
SAID: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "phi3": (
        "Phi3",
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS}, "pad_token_id": 0},
        {"rope_scaling": {"type": "longrope", **FACTORS}, "original_max_position_embeddings": 16},
    ),
    "gpt_neox": (
        "GPTNeoX",
        {"rotary_pct": 0.5, "rotary_emb_base": 20000},
        {"rotary_pct": 0.5, "rotary_emb_base": 20000, "rope_theta": 20000},
    ),
}
"""Settings that version 4 reads under names of its own, of architectures whose classes 4.57 has."""


@pytest.mark.parametrize(("named", "options", "expected"), SAID.values(), ids=SAID)
def test_positions_are_said_in_the_words_of_each_architecture(
    named: str, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    size = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "max_position_embeddings": LENGTH}
    lengths = {"original_max_position_embeddings": 16} if named == "Phi3" else {}
    config = getattr(transformers, f"{named}Config")(**size, **heads, **lengths, **options)
    saved = {**config.to_dict(), "architectures": [f"{named}ForCausalLM"]}
    head = "embed_out.weight" if named == "GPTNeoX" else "lm_head.weight"
    adapter = adapter_for(saved, [head], torch.device("cpu"), "m")
    said, notes = adapter.portable(saved, InMemory("m", {}))
    assert notes == []
    assert {name: said[name] for name in expected} == expected
    again = adapter_for(said, [head], torch.device("cpu"), "m")
    assert again.settings == adapter.settings  # the dead word `type` aside, which nothing reads


def test_the_bases_of_modernberts_positions_are_said_to_both_versions() -> None:
    model = tiny_encoder(ROWS["modernbert"])
    saved = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    assert saved.keys().isdisjoint(("global_rope_theta", "local_rope_theta"))
    adapter = adapter_for(saved, [*model.state_dict()], torch.device("cpu"), "m")
    said, notes = adapter.portable(saved, InMemory("m", {}))
    assert ((said["global_rope_theta"], said["local_rope_theta"]), notes) == ((5000.0, 300.0), [])
    assert adapter_for(said, [*model.state_dict()], torch.device("cpu"), "m").settings == adapter.settings
    saved["rope_parameters"] = {
        kind: {**own, "rope_type": "linear", "factor": 2.0} for kind, own in saved["rope_parameters"].items()
    }
    assert adapter.portable(saved, InMemory("m", {}))[1] == [
        "needs transformers 5: version 4 has no rope type 'linear' in such an encoder"
    ]


def test_a_head_that_repeats_the_embedding_needs_no_note(tmp_path: Path) -> None:
    write_saved_by_5(tmp_path / "saved", "t5-tied")
    file = tmp_path / "saved" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["shared.weight"].clone()}, file, {"format": "pt"})
    assert rewrite(tmp_path / "saved", tmp_path / "out")["notes"] == []
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is True


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_configs_of_version_4_stay_as_they_are(tmp_path: Path, kind: str) -> None:
    base = write_text_suite(tmp_path / "s", kind).parent / "base"
    rope = {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}} if kind == "llama" else {}
    (base / "config.json").write_text(json.dumps(CONFIGS[kind] | rope))
    rewrite(base, tmp_path / "out")
    assert config_of(tmp_path / "out") == CONFIGS[kind] | rope


@pytest.mark.parametrize(("kind", "named"), [("t5", "T5ForConditionalGeneration"), ("llama", "LlamaForCausalLM")])
def test_how_a_written_language_model_is_loaded(kind: str, named: str) -> None:
    adapter = adapter_for(CONFIGS[kind], ["lm_head.weight"], torch.device("cpu"), "m")
    lines = f'from transformers import {named}\n\nmodel = {named}.from_pretrained("out")'
    assert adapter.loading(Path("out"), {}) == lines


def test_a_half_precision_t5_is_loaded_in_half_precision(tmp_path: Path) -> None:
    """transformers keeps `wo` in float32 by itself: config.json goes on naming float16, and the numbers stay."""
    from transformers import T5ForConditionalGeneration

    write_saved_by_5(tmp_path / "saved", "t5-half")
    rewrite(tmp_path / "saved", tmp_path / "out")
    assert config_of(tmp_path / "out")["dtype"] == "float16"
    stored = load_file(tmp_path / "out" / "model.safetensors")
    loaded = T5ForConditionalGeneration.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert {str(stored[name].dtype) for name in stored} == {"torch.float16", "torch.float32"}
    assert all(loaded[name].dtype == stored[name].dtype and loaded[name].equal(stored[name]) for name in stored)


@pytest.mark.parametrize(
    ("wide", "rest", "named"),
    [
        ("wo", torch.float16, torch.float16),
        ("wo", torch.bfloat16, torch.float32),  # which transformers would round
        ("wi_0", torch.float16, torch.float32),
        ("", torch.float16, torch.float16),
    ],
)
def test_the_dtype_in_the_config_rounds_nothing(wide: str, rest: torch.dtype, named: torch.dtype) -> None:
    adapter = adapter_for(CONFIGS["t5"], ["lm_head.weight"], torch.device("cpu"), "m")
    dtypes = {name: torch.float32 if wide in name.split(".") else rest for name in adapter.tower}
    assert named_dtype(adapter, {name: TensorInfo((1,), dtype) for name, dtype in dtypes.items()}) is named


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizers_are_said_in_words_of_both_versions(tmp_path: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path, kind)
    before = AutoTokenizer.from_pretrained(tmp_path)
    say_tokenizer(tmp_path)
    said, after = json.loads((tmp_path / "tokenizer_config.json").read_text()), AutoTokenizer.from_pretrained(tmp_path)
    assert said["tokenizer_class"] == ("T5Tokenizer" if kind == "t5" else "PreTrainedTokenizerFast")
    assert not isinstance(said.get("extra_special_tokens"), list)  # version 4 asks it for its keys
    if kind != "t5":
        ids = {"token_type_ids"} if kind == "bert" else set()  # which version 4 would add to all
        assert {*said["model_input_names"]} == {"input_ids", "attention_mask", *ids}
    assert dict(after("yes", "no")) == dict(before("yes", "no"))
    assert after.padding_side == ("left" if kind in ("llama", "gemma") else "right")
    text = "yes w3 no <extra_id_1> what yes"
    assert dict(after(text)) == dict(before(text))
    for name in ("all_special_tokens", "padding_side", "model_max_length", "extra_special_tokens", "vocab_size"):
        assert getattr(after, name) == getattr(before, name)


def test_other_tokenizers_stay_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer_config.json"
    (tmp_path / "tokenizer.json").write_text("{}")
    for config in (
        {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True},
        {"tokenizer_class": "T5Tokenizer"},
    ):
        file.write_text(json.dumps(config))
        say_tokenizer(tmp_path)
        assert json.loads(file.read_text()) == config
    file.write_text("[")
    with pytest.raises(InputError, match=r"^tokenizer_config\.json beside the weights is not valid JSON"):
        say_tokenizer(tmp_path)


@pytest.fixture
def clip5(tmp_path: Path) -> Path:
    """A CLIP with the `processor_config.json` of version 5's CLIPProcessor, and settings of its own in it."""
    write_saved_by_5(tmp_path / "saved", "clip")
    file = tmp_path / "saved" / "processor_config.json"
    content = json.loads(file.read_text())
    content["image_processor"] |= {"image_mean": [0.1, 0.2, 0.3], "do_resize": True, "size": {"shortest_edge": 12}}
    file.write_text(json.dumps(content))
    return tmp_path / "saved"


def test_the_processor_of_version_5_is_read(clip5: Path, tmp_path: Path) -> None:
    """Pictures, the folder that both versions read, and open_clip's preprocessing."""
    import numpy as np

    picture = np.arange(20 * 12 * 3, dtype=np.uint8).reshape(20, 12, 3)
    pixels = clip_inputs(clip5).pixels([picture])
    assert "preprocessor_config.json" in rewrite(clip5, tmp_path / "out")["written"]
    assert json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())["image_mean"] == [0.1, 0.2, 0.3]
    assert clip_inputs(tmp_path / "out").pixels([picture]).equal(pixels)
    document = convert(clip5, tmp_path / "there", "open_clip")
    assert not any("preprocessing" in note for note in document["notes"])
    there = json.loads((tmp_path / "there" / "open_clip_config.json").read_text())
    assert there["preprocess_cfg"]["mean"] == [0.1, 0.2, 0.3]


def test_no_processor_is_still_said(clip5: Path) -> None:
    import numpy as np

    (clip5 / "processor_config.json").write_text('{"processor_class": "CLIPProcessor"}')
    with pytest.raises(InputError, match=r"no preprocessor_config\.json \(nor processor_config\.json\)"):
        clip_inputs(clip5).pixels([np.zeros((12, 12, 3), np.uint8)])


def test_notes_are_added_to_a_card_once() -> None:
    card = with_notes("# m\n", ["a", "b"])
    assert card == "# m\n\n## Notes\n\n- a\n- b\n"
    assert with_notes(card, ["a", "b"]) == card


@pytest.mark.skipif(os.name == "nt", reason="no permissions of this kind there")
def test_weights_have_the_permissions_of_the_other_files(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    save_tensors({"a": torch.zeros(2)}, tmp_path / "weights.safetensors")
    assert oct((tmp_path / "weights.safetensors").stat().st_mode) == oct((tmp_path / "plain").stat().st_mode)
    save_tensors({"a": torch.ones(2)}, tmp_path / "weights.safetensors")
    assert load_file(tmp_path / "weights.safetensors")["a"].equal(torch.ones(2))


def test_calibrated_models_are_said_to_both_versions_too(tmp_path: Path) -> None:
    """What is true of an export is true of what `calibrate` writes."""
    file = write_text_suite(tmp_path / "s", "llama")
    rope = {"rope_parameters": ROPES["llama3"], "max_position_embeddings": LENGTH}
    for folder in (file.parent / "base", *(file.parent / "experts").iterdir()):
        (folder / "config.json").write_text(json.dumps(config_of(folder) | rope))
    from featcal import calibrate, measure_drift

    family = open_family(load_suite(file), "cpu")
    calibrate(family).save(tmp_path / "out")
    assert config_of(tmp_path / "out")["rope_theta"] == 500000.0
    measure_drift(family, str(tmp_path / "out"), samples=2)  # its rope is still the base's

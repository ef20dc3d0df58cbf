"""Tiny models as transformers 5 saves them, in the forms that version 4 takes for something else or cannot read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tiny_text import WORDS, library_model

LENGTH = 64
"""`max_position_embeddings` of the Llama models."""
_ORIGINAL = {"original_max_position_embeddings": 16}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, **_ORIGINAL},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        **_ORIGINAL,
    },
    "longrope": {
        "rope_type": "longrope", "rope_theta": 10000.0, "long_factor": [2.0, 3.0], "short_factor": [1.0, 1.5],
        **_ORIGINAL,
    },
}  # fmt: skip
TOKENIZERS = ("t5", "llama", "plain")
KINDS = ("clip", "t5-untied", "t5-tied", "t5-gated-tied", "t5-half", *(f"llama-{rope}" for rope in ROPES))


def write_saved_by_5(folder: Path, kind: str) -> None:
    """A checkpoint folder with everything that transformers 5 writes beside the weights."""
    if kind == "clip":
        from conftest import write_base

        write_base(folder)
        own = folder / "preprocessor_config.json"
        processor = {"image_processor": json.loads(own.read_text()), "processor_class": "CLIPProcessor"}
        (folder / "processor_config.json").write_text(json.dumps(processor))  # as CLIPProcessor saves it
        own.unlink()
        return
    family, _, form = kind.partition("-")
    if family == "llama":
        rope = dict(ROPES[form])
        library_model("llama", rope_parameters=rope, max_position_embeddings=LENGTH).save_pretrained(folder)
    else:
        of = {"untied": "t5", "half": "t5", "tied": "t5-tied", "gated-tied": "t5-tied"}[form]
        options = {"tied": {"feed_forward_proj": "relu"}}.get(form, {})
        (library_model(of, **options).half() if form == "half" else library_model(of, **options)).save_pretrained(
            folder
        )
    if form == "half":  # as from_pretrained loads it, and saves it again
        from transformers import T5ForConditionalGeneration

        T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float16).save_pretrained(folder)
    write_tokenizer(folder, family if form != "default" else "plain")


def write_tokenizer(folder: Path, kind: str) -> None:
    """A tokenizer of `TOKENIZERS` in the library's own class."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaTokenizer, PreTrainedTokenizerFast, T5Tokenizer

    if kind == "t5":
        T5Tokenizer(vocab=[(f"\u2581{word}" if i > 2 else word, -float(i)) for i, word in enumerate(WORDS)],
                    extra_ids=2).save_pretrained(folder)  # fmt: skip
    elif kind == "llama":
        vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "\u2581": 3, "y": 4, "e": 5, "s": 6, "ye": 7, "yes": 8}
        merges = [("y", "e"), ("ye", "s")]
        LlamaTokenizer(vocab=vocabulary, merges=merges).save_pretrained(folder)
    else:
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        specials: dict[str, Any] = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
        extra = ["yes", "w3"]
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, **specials, additional_special_tokens=extra, model_max_length=77
        ).save_pretrained(folder)

"""Text as folders of sentence-transformers read it, by files of several of its versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from featcal.formats.sentences import SentenceText

WHOLE = 10**30
"""Length that tokenizers without a limit write."""


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({}, SentenceText("", None, False)),
        ({"sentence_bert_config.json": {"max_seq_length": 256, "do_lower_case": True}}, SentenceText("", 256, True)),
        ({"sentence_roberta_config.json": {"max_seq_length": 128}}, SentenceText("", 128, False)),
        # Version 6 writes the length into the tokenizer's own options.
        ({"tokenizer_config.json": {"model_max_length": 64}}, SentenceText("", 64, False)),
        (
            {"tokenizer_config.json": {"model_max_length": WHOLE}, "config.json": {"max_position_embeddings": 512}},
            SentenceText("", 512, False),
        ),
        (
            {
                "config_sentence_transformers.json": {"prompts": {"q": "query: "}, "default_prompt_name": "q"},
                "sentence_bert_config.json": {"max_seq_length": None},
            },
            SentenceText("query: ", None, False),
        ),
        ({"config_sentence_transformers.json": {"prompts": {"q": "query: "}}}, SentenceText("", None, False)),
        ({"config_sentence_transformers.json": {"default_prompt_name": "query"}}, SentenceText("", None, False)),
    ],
)
def test_prompt_length_and_case_are_read_of_every_version(
    tmp_path: Path, files: dict[str, dict[str, Any]], text: SentenceText
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert SentenceText.from_folder(tmp_path) == text

"""Name the files of a tokenizer, and read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from featcal.formats.in_memory import name_place
from featcal.formats.located_model import Located
from featcal.system.errors import InputError, NoScores
from featcal.system.json_files import read_json

PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""Files of sentencepiece, which only its library can read."""
VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", *PIECES)
"""Files that can hold the vocabulary; one of them is enough."""
TOKENIZER_FILES = (
    *VOCABULARY_FILES, "tokenizer_config.json", "merges.txt", "added_tokens.json", "special_tokens_map.json",
)  # fmt: skip

TEXT_FILES = (*TOKENIZER_FILES, "chat_template.jinja")
"""Files of a tokenizer and its chat template."""


def text_folder(model: Located) -> Path:
    """Return the folder with a model's tokenizer and chat template: its adapter's, if any of them lie there."""
    own = model.adapter_folder
    return own if own is not None and any((own / name).is_file() for name in TEXT_FILES) else model.folder


def has_chat_template(folder: Path) -> bool:
    """Say whether the files of a tokenizer hold a chat template.

    Raises:
        InputError: its settings cannot be read.
    """
    options = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").is_file() or (options.is_file() and "chat_template" in read_json(options))


def open_tokenizer(folder: Path, missing: InputError) -> Any:
    """Read the tokenizer in a base's folder.

    Raises:
        InputError: the files are damaged; if there are none, the message is `missing`.
    """
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in VOCABULARY_FILES):
        raise missing
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        words = set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
    except Exception as error:  # a damaged file makes the tokenizer's own reader raise anything
        raise InputError(f"base: the tokenizer in {folder} cannot be used ({error})") from error
    # Where its class reads other files than there are, the library makes one of special tokens alone.
    if not words:
        raise InputError(f"base: the tokenizer in {folder} cannot be used (its files give it no words)")
    return tokenizer


def open_prompt_tokenizer(folder: Path) -> Any:
    """Read the tokenizer of class prompts, like `open_tokenizer`; raise NoScores if its files are missing."""
    missing = f"base: {name_place(folder)} has no tokenizer files, which class prompts need"
    return open_tokenizer(folder, NoScores(missing))

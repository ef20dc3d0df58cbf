"""Check the files of a tokenizer for programs that convert them to a vocabulary, and compare them with the base's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from featcal.formats.tokenizers import TOKENIZER_FILES, VOCABULARY_FILES
from featcal.preflight.handover.folder import CONFIG, OPTIONS, TOKENIZER, Folder, Obstacle
from featcal.preflight.handover.runtimes import OLLAMA_SPLITS, VOCABULARIES
from featcal.preflight.tokenizers import Disagreement, read_vocabulary, token_text, tokenizer_disagreement
from featcal.system.errors import InputError
from featcal.system.formatting import shorten, some

_STATED = ("add_bos_token", "add_eos_token", "add_prefix_space", "bos_token", "eos_token", "pad_token", "unk_token")
"""Options of a tokenizer that converters read."""
_PROBE = "\n\n \tIt's 3 o'clock, WE'LL pay 12345.67 €!? naïve façade — Привет, мир… 你好 🙂🙃 x==y  //done\n"
"""Text that both tokenizers split: case, numbers, blanks, signs and scripts, on which their rules differ."""


def check_tokenizer(folder: Folder, target: str) -> Iterator[Obstacle]:
    """Yield parts of the tokenizer files that a program's converter lacks, or would convert wrongly."""
    if not any(folder.has(name) for name in VOCABULARY_FILES):
        yield Obstacle("tokenizer", "there is no tokenizer beside the weights; copy the base's", TOKENIZER_FILES)
        return
    tokenizer = _content(folder)
    if folder.has(TOKENIZER) and not tokenizer:
        yield Obstacle("tokenizer", f"{TOKENIZER} is no tokenizer that can be read; copy the base's over it")
    yield from _check_ids(folder, tokenizer)
    if target == "vllm":
        return
    yield from _check_pieces(folder)
    model = tokenizer.get("model") or {}
    kind = str(model.get("type") or ("BPE" if "vocab" in model else ""))
    if kind and kind not in VOCABULARIES:
        yield Obstacle(
            "tokenizer",
            f"{TOKENIZER} holds a {shorten(kind, 30)} vocabulary, for which llama.cpp has no tokenizer (it has "
            f"{', '.join(VOCABULARIES)})",
        )
    if kind == "BPE" and not model.get("merges"):
        yield Obstacle(
            "tokenizer",
            'the tokenizer is BPE without its merges ("merges" of tokenizer.json, or merges.txt): converters stop '
            "there, or every text falls into single bytes; copy the base's",
            (TOKENIZER, "merges.txt"),
        )


def check_against_base(folder: Folder, base: Folder) -> Iterator[Obstacle]:
    """Yield differences between the tokenizer and the base's: llama.cpp's converter recognises published tokenizers by
    the tokens of a sample text, and knows no others (llama.cpp#22700)."""
    found = compare_with_base(folder, base)
    own, theirs = _cut(folder), _cut(base)
    if found is not None and found.changed:
        yield Obstacle("tokenizer", f"{found.sentence}; texts are read as other tokens than those of the base")
    elif own is not None and theirs is not None and own != theirs:
        yield Obstacle(
            "tokenizer",
            f"{TOKENIZER} cuts a text into other tokens than the base's: converters recognise a tokenizer by just "
            f"that; copy the base's {TOKENIZER} over it",
        )
    stated, given = base.json(OPTIONS), folder.json(OPTIONS)
    if stated and not given:
        yield Obstacle("tokenizer", f"{OPTIONS} is missing, or cannot be read; copy the base's", (OPTIONS,))
        return
    differ = [name for name in _STATED if name in stated and token_text(given.get(name)) != token_text(stated[name])]
    if differ:
        first = differ[0]
        yield Obstacle(
            "tokenizer",
            f"{OPTIONS} is not the base's in {some(differ)} ({first} is {token_text(given.get(first))!r}, in the base "
            f"{token_text(stated[first])!r}); copy the base's over it, unless that is meant",
        )


def compare_with_base(folder: Folder, base: Folder) -> Disagreement | None:
    """Describe the difference of the tokenizer from the base's; None if there is none, or if one of them cannot be
    read."""
    return tokenizer_disagreement(base.path, folder.path) if _content(folder) and _content(base) else None


def ollama_reads(folder: Folder) -> bool:
    """Say whether Ollama's own converter recognises the splitting rules of the tokenizer."""
    tokenizer = _content(folder)
    # Those of BERT are known by the model's class.
    if folder.has("tokenizer.model") or (tokenizer.get("model") or {}).get("type") == "WordPiece":
        return True
    return hashlib.sha256("".join(_find_splits(tokenizer)).encode()).hexdigest() in OLLAMA_SPLITS


def token_texts(folder: Folder, ids: Mapping[str, Any]) -> dict[int, str]:
    """Return the text of every token that options such as `eos_token_id` name, by its id."""
    stated = [one for value in ids.values() for one in (value if isinstance(value, list) else [value])]
    wanted = [one for one in stated if isinstance(one, int)]
    return {id: token for token, id in read_vocabulary(_content(folder)).items() if id in wanted}


def _content(folder: Folder) -> dict[str, Any]:
    """Return the content of `tokenizer.json`, or of one made from the two files of older tokenizers."""
    if folder.has(TOKENIZER):
        whole = folder.json(TOKENIZER)
        return whole if _is_sound(whole) else {}
    vocabulary = folder.json("vocab.json")
    merges = (folder.read("merges.txt") or b"").decode("utf-8", "replace").splitlines()
    added = [{"content": one, "id": id} for one, id in folder.json("added_tokens.json").items()]
    whole = {"model": {"vocab": vocabulary, "merges": merges}, "added_tokens": added}
    return whole if vocabulary and _is_sound(whole) else {}


def _is_sound(tokenizer: Mapping[str, Any]) -> bool:
    """Say whether a tokenizer has the parts that are read here, in the form that the library writes."""
    try:
        ids = read_vocabulary(tokenizer).values()
        _find_splits(tokenizer)
    except (InputError, AttributeError, KeyError, TypeError, ValueError):
        return False
    return bool(ids) and all(isinstance(one, int) for one in ids)


def _find_splits(tokenizer: Mapping[str, Any]) -> list[str]:
    """Return the regular expressions by which a tokenizer splits text."""
    parts = (tokenizer.get("pre_tokenizer") or {}).get("pretokenizers") or ()
    return [str((one.get("pattern") or {}).get("Regex") or "") for one in parts if one.get("type") == "Split"]


def _check_pieces(folder: Folder) -> Iterator[Obstacle]:
    """Yield a missing file of sentencepiece."""
    wanted = folder.support.pieces
    stated = folder.json(OPTIONS).get("tokenizer_class")
    if wanted and stated == folder.support.spared_by:
        wanted = ()
    if wanted and not any(folder.has(name) for name in wanted):
        spared = f", unless tokenizer_class is {folder.support.spared_by}" if folder.support.spared_by else ""
        yield Obstacle(
            "tokenizer",
            f"{' or '.join(wanted)} is missing, from which the converter makes the vocabulary of "
            f"{folder.model_class}{spared}; copy the base's",
            wanted,
        )


def _check_ids(folder: Folder, tokenizer: Mapping[str, Any]) -> Iterator[Obstacle]:
    """Yield contradictions between tokenizer, configuration and embedding in the number of tokens."""
    rows, largest = folder.rows, max(read_vocabulary(tokenizer).values(), default=-1)
    stated = folder.config.get("vocab_size")
    if rows and isinstance(stated, int) and stated != rows:
        yield Obstacle("tokens", f"{CONFIG} says vocab_size {stated}, the embedding has {rows} rows; say {rows}")
    if rows and largest >= rows:
        yield Obstacle(
            "tokens",
            f"the tokenizer has ids up to {largest}, the embedding only {rows} rows; take the tokenizer that belongs "
            "to these weights",
        )


def _cut(folder: Folder) -> list[int] | None:
    """Return the ids of the probe text from a folder's own tokenizer.json; None without a readable one."""
    return _encode(folder.path / TOKENIZER) if (folder.path / TOKENIZER).is_file() else None


def _encode(file: Path) -> list[int] | None:
    from tokenizers import Tokenizer

    try:
        ids: list[int] = Tokenizer.from_file(str(file)).encode(_PROBE).ids
    # The library raises plain Exception, for whatever is wrong with a file.
    except Exception:
        return None
    return ids

"""Compare the tokenizers beside two models, as far as their files show."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featcal.formats.tokenizers import PIECES
from featcal.system.errors import InputError
from featcal.system.formatting import some
from featcal.system.json_files import read_json

NAMED = 3
"""Tokens that a sentence names."""


@dataclass(frozen=True)
class Disagreement:
    """Difference of two tokenizers."""

    sentence: str
    changed: bool
    """True if a token of the base has another id or is not there: the model would read other words."""


def tokenizer_disagreement(base: Path, other: Path) -> Disagreement | None:
    """Say how the tokenizer beside a model differs from the base's, with the first tokens that do; None if it does not,
    or if there is none.

    It reads `tokenizer.json`, else `vocab.json` with `merges.txt` and `added_tokens.json`; files of sentencepiece alone
    are compared byte by byte.

    Raises:
        InputError: the base's own is not laid out as a tokenizer.
    """
    if base == other:
        return None
    own, theirs = read_tokenizer(base), read_tokenizer(other)
    if own is None or theirs is None:
        return _pieces(base, other)
    a = read_vocabulary(own)
    try:
        b = read_vocabulary(theirs)
    except InputError as error:
        return Disagreement(str(error), True)
    changed = [token for token in a if b.get(token) != a[token]]
    added = sorted(b.keys() - a.keys(), key=b.__getitem__)
    if changed:
        first = sorted(changed, key=a.__getitem__)[:NAMED]
        examples = ", ".join(f"'{one}' is {a[one]} in the base and {b.get(one, 'missing')} here" for one in first)
        return Disagreement(f"its tokenizer differs in {len(changed)} of the base's {len(a)} tokens ({examples})", True)
    if added:
        examples = ", ".join(f"'{one}' is {b[one]}" for one in added[:NAMED])
        count = "one token" if len(added) == 1 else f"{len(added)} tokens"
        return Disagreement(f"its tokenizer has {count} that the base's does not have ({examples})", False)
    if own != theirs and _cut_otherwise(own, theirs):
        return Disagreement("its tokenizer has the base's tokens but cuts text by other rules", False)
    return None


def _cut_otherwise(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Say whether two tokenizers with the same tokens cut text by other rules, as far as both state them."""
    a, b = _rules(own), _rules(theirs)
    return any(a[name] != b[name] for name in a.keys() & b.keys())


def _rules(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that decides how a tokenizer cuts text, in one form: merges are stored as pairs or as texts, and
    older files lack what newer ones state."""
    # What is made of older files states no version, and how else it cuts stands in no file.
    parsed = _parse(json.dumps(tokenizer)) if "version" in tokenizer else None
    content = tokenizer if parsed is None else json.loads(parsed.to_str())
    model = dict(content.get("model", {}))
    if isinstance(model.get("merges"), list):
        model["merges"] = [one.split(" ") if isinstance(one, str) else one for one in model["merges"]]
    rules = {part: content[part] for part in ("normalizer", "pre_tokenizer", "post_processor") if part in content}
    return rules | model


def _parse(text: str) -> Any | None:
    """Return the library's own tokenizer of what a `tokenizer.json` holds; None if it cannot be made."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(text)
    # The library raises plain Exception, for whatever is wrong with a file.
    except Exception:
        return None


def tokenizer_problem(folder: Path) -> str | None:
    """Say why the `tokenizer.json` of a folder cannot be read; None if it can, or there is none."""
    file = folder / "tokenizer.json"
    try:
        read_vocabulary(read_json(file) if file.is_file() else {})
    except InputError as error:
        return str(error)
    return None


def read_tokenizer(folder: Path) -> dict[str, Any] | None:
    """Read `tokenizer.json`, or make its content of the files that older tokenizers have in its place."""
    whole = _read(folder / "tokenizer.json")
    if whole is not None:
        return whole
    vocabulary, added = _read(folder / "vocab.json"), _read(folder / "added_tokens.json") or {}
    if vocabulary is None:
        return None
    model: dict[str, Any] = {"vocab": vocabulary}
    if (folder / "merges.txt").is_file():
        lines = (folder / "merges.txt").read_text(encoding="utf-8", errors="replace").splitlines()
        model["merges"] = [line for line in lines if line and not line.startswith("#version")]
    return {"model": model, "added_tokens": [{"content": one, "id": id} for one, id in added.items()]}


def _pieces(base: Path, other: Path) -> Disagreement | None:
    """Say which files of sentencepiece differ; None if none does."""
    differ = [
        name
        for name in PIECES
        if (base / name).is_file()
        and (other / name).is_file()
        and (base / name).read_bytes() != (other / name).read_bytes()
    ]
    if not differ:
        return None
    remedy = "which tokens differ shows when both are saved anew with AutoTokenizer, as tokenizer.json"
    return Disagreement(f"its {some(differ)} is another file than the base's; {remedy}", False)


def token_text(token: Any) -> Any:
    """Return a special token as its text, however a file holds it."""
    return token.get("content") if isinstance(token, Mapping) else token


def _read(file: Path) -> dict[str, Any] | None:
    try:
        return read_json(file)
    except InputError:
        return None


def read_vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return token → id, for every kind of model that a `tokenizer.json` may hold.

    Raises:
        InputError: it is not laid out as a tokenizer.
    """
    try:
        vocabulary = tokenizer.get("model", {}).get("vocab", {})
        # Unigram models hold a list of [token, score], whose place is the id.
        if isinstance(vocabulary, list):
            vocabulary = {token: i for i, (token, _) in enumerate(vocabulary)}
        return {**vocabulary, **{one["content"]: one["id"] for one in tokenizer.get("added_tokens", [])}}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(
            "the vocabulary in its tokenizer.json cannot be read; copy the file from its model again"
        ) from error

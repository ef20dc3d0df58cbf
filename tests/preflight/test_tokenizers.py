"""Tokenizers of experts against the base's: added, missing and moved tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from featcal.preflight.tokenizers import tokenizer_disagreement
from featcal.system.errors import InputError


def test_tokenizers_that_disagree(tmp_path: Path) -> None:
    def write(name: str, vocabulary: Any, **rest: Any) -> Path:
        (tmp_path / name).mkdir()
        content = {"model": {"vocab": vocabulary}, "added_tokens": [], **rest}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(content))
        return tmp_path / name

    base = write("base", {"a": 0, "b": 1})
    same = write("list", [["a", -1.0], ["b", -2.0]])
    more = write("more", {"a": 0, "b": 1}, added_tokens=[{"content": "<x>", "id": 2}])
    other = write("other", {"a": 1, "b": 0})
    assert tokenizer_disagreement(base, base) is None
    assert tokenizer_disagreement(base, tmp_path) is None
    found = [tokenizer_disagreement(base, folder) for folder in (same, more, other)]
    assert [one and one.changed for one in found] == [False, False, True]
    assert found[1] is not None
    assert found[1].sentence == "its tokenizer has one token that the base's does not have ('<x>' is 2)"
    older = tmp_path / "older"
    older.mkdir()
    (older / "vocab.json").write_text(json.dumps({"a": 0, "b": 1}))
    (older / "added_tokens.json").write_text(json.dumps({f"<{n}>": 9 - n for n in range(5)}))
    said = tokenizer_disagreement(base, older)
    assert said is not None
    assert not said.changed
    assert (
        said.sentence == "its tokenizer has 5 tokens that the base's does not have ('<4>' is 5, '<3>' is 6, '<2>' is 7)"
    )


@pytest.mark.parametrize("content", [{"model": [1]}, {"model": {"vocab": [1]}}, {"added_tokens": [{"id": 1}]}])
def test_a_tokenizer_that_is_none_is_a_problem(tmp_path: Path, content: dict[str, Any]) -> None:
    for name, written in (("base", {"model": {"vocab": {"a": 0}}}), ("damaged", content)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(written))
    found = tokenizer_disagreement(tmp_path / "base", tmp_path / "damaged")
    assert found is not None
    assert found.changed
    assert found.sentence.startswith("the vocabulary in its tokenizer.json cannot be read")
    with pytest.raises(InputError, match="cannot be read"):
        tokenizer_disagreement(tmp_path / "damaged", tmp_path / "base")


def test_files_of_sentencepiece_are_compared_as_they_are(tmp_path: Path) -> None:
    for name, content in (("base", b"pieces"), ("same", b"pieces"), ("other", b"more pieces")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.model").write_bytes(content)
    assert tokenizer_disagreement(tmp_path / "base", tmp_path / "same") is None
    said = tokenizer_disagreement(tmp_path / "base", tmp_path / "other")
    assert said is not None
    assert not said.changed
    assert said.sentence.startswith("its 'tokenizer.model' is another file than the base's; which tokens differ")

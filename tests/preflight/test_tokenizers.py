"""Tokenizers of experts against the base's: added, missing and moved tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from own_merges import TEMPLATE, exchange_tokens
from safetensors.torch import load_file
from tiny_text import tiny_tokenizer, write_lora, write_text_suite

from featcal.export.write import rewrite
from featcal.preflight.check import check_suite
from featcal.preflight.tokenizers import tokenizer_disagreement
from featcal.suite.schema import load_suite
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


def write_bpe(folder: Path, merges: list[Any], **model: Any) -> Path:
    """A tokenizer of byte pairs, with what the library states of it and other parts of its model."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    own = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "ba": 3}, merges=[("a", "b"), ("b", "a")]))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    content = json.loads(own.to_str())
    content["model"] |= {"merges": merges, **model}
    content["model"] = {name: value for name, value in content["model"].items() if value is not ...}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


PAIRS, TEXTS = [["a", "b"], ["b", "a"]], ["a b", "b a"]


def test_a_tokenizer_saved_in_an_older_form_is_the_same(tmp_path: Path) -> None:
    """Merges were texts before tokenizers 0.20, and what a later version added has its default."""
    base = write_bpe(tmp_path / "base", TEXTS, ignore_merges=..., type=..., fuse_unk=...)
    assert tokenizer_disagreement(base, write_bpe(tmp_path / "same", PAIRS)) is None
    older = tmp_path / "older"
    older.mkdir()
    (older / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "ba": 3}))
    (older / "merges.txt").write_text("#version: 0.2\na b\nb a\n")
    assert tokenizer_disagreement(base, older) is None
    (older / "merges.txt").write_text("#version: 0.2\nb a\na b\n")
    changes = {"order": {"merges": PAIRS[::-1]}, "fewer": {"merges": PAIRS[:1]}, "skip": {"ignore_merges": True}}
    others = [write_bpe(tmp_path / name, **{"merges": PAIRS, **change}) for name, change in changes.items()]
    for other in (older, *others):
        found = tokenizer_disagreement(base, other)
        assert found is not None
        assert (found.sentence, found.changed) == (
            "its tokenizer has the base's tokens but cuts text by other rules",
            False,
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


def test_the_tokenizer_beside_an_adapter_is_looked_at(tmp_path: Path) -> None:
    """It is what the expert was trained with; beside the base lies the base's."""
    file, adapter = write_text_suite(tmp_path, "t5"), tmp_path / "adapter"
    write_lora(adapter, load_file(tmp_path / "base" / "model.safetensors"), 3, 0.1)
    content = yaml.safe_load(file.read_text())
    task = next(iter(content["tasks"]))
    content["tasks"][task]["expert"] = "base+adapter"
    file.write_text(yaml.safe_dump(content))

    def problems() -> list[str]:
        return [one for one in check_suite(load_suite(file), probe=False).problems if "tokenizer" in one]

    def notes(out: str) -> list[str]:
        written = rewrite(f"{tmp_path / 'base'}+{adapter}", tmp_path / out)["notes"]
        return [one for one in written if "beside the adapter" in one]

    tiny_tokenizer("t5").save_pretrained(adapter)
    assert (problems(), notes("same")) == ([], [])
    exchange_tokens(adapter)
    (adapter / "chat_template.jinja").write_text(TEMPLATE)
    assert [one.startswith(f"expert '{task}': its tokenizer differs in 2 of the base's") for one in problems()] == [
        True
    ]
    (note,) = notes("other")
    assert note.startswith("beside the adapter lie 'tokenizer.json', 'chat_template.jinja', other than the base's")

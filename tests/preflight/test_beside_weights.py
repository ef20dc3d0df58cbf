"""Tokenizer, chat template and configuration beside a merge: what is wrong, what should be known, what repairs it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from own_merges import TEMPLATE, edit_json, edit_tensors, exchange_tokens, write_merge, write_parents
from safetensors.torch import load_file, save_file
from tiny_text import TASKS

from featcal.preflight.beside_weights import FileDifference, repair_command
from featcal.preflight.own_merge import open_merge
from featcal.suite.schema import suite_from_dict


@pytest.fixture(scope="module")
def parents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("merges")
    write_parents(root)
    write_merge(root, "merge")
    return root


@pytest.fixture
def root(parents: Path, tmp_path: Path) -> Path:
    """Base, experts and a healthy merge that a test may break."""
    shutil.copytree(parents, tmp_path / "own")
    return tmp_path / "own"


def compare(root: Path) -> list[FileDifference]:
    tasks = {task: {"expert": task, "calibration": {"self_generated": {"prompts": ["w1"], "tokens": 2}}}
             for task in TASKS}  # fmt: skip
    content = {"name": "own", "base": "base", "merged": "merge", "vocabulary": "base", "tasks": tasks}
    return list(open_merge(suite_from_dict(content, root), "cpu").differences)


def configure(**options: Any) -> Callable[[Path], None]:
    return lambda root: edit_json(root / "merge" / "config.json", **options)


def add_template(*names: str, text: str = TEMPLATE) -> Callable[[Path], None]:
    def add(root: Path) -> None:
        for name in names:
            (root / name / "chat_template.jinja").write_text(text)

    return add


def add_tokens(root: Path) -> None:
    """Add a token and its row, as a union of vocabularies does."""
    file = root / "merge" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 32, "content": "<new>"})
    file.write_text(json.dumps(content))
    edit_tensors(
        root / "merge", lambda name, one: torch.cat([one, one[:1]]) if one.shape[:1] == (32,) and one.ndim == 2 else one
    )
    edit_json(root / "merge" / "config.json", vocab_size=33)


def remove_tokenizer(root: Path) -> None:
    for file in (root / "merge").glob("tokenizer*"):
        file.unlink()


def cut_tokenizer(root: Path) -> None:
    file = root / "merge" / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:100])


def end_elsewhere(root: Path) -> None:
    edit_json(root / "left" / "generation_config.json", eos_token_id=[1, 7])


def store_in_half(root: Path) -> None:
    edit_tensors(root / "merge", lambda name, one: one.bfloat16())


FAULT, KNOWN = True, False
CASES: dict[str, tuple[Callable[[Path], None], str, bool, str, tuple[str, ...]]] = {
    "ids": (
        lambda root: exchange_tokens(root / "merge"), "tokenizer", FAULT, "differs in 2 of the base's 32 tokens",
        ("tokenizer.json", "tokenizer_config.json"),
    ),
    "no tokenizer": (
        remove_tokenizer, "tokenizer", FAULT, "There is no tokenizer", ("tokenizer.json", "tokenizer_config.json"),
    ),
    "cut tokenizer": (
        cut_tokenizer, "tokenizer", FAULT, "The tokenizer cannot be read", ("tokenizer.json", "tokenizer_config.json"),
    ),
    "no tokenizer model": (
        lambda root: edit_json(root / "merge" / "tokenizer.json", model=None), "tokenizer", FAULT,
        "The tokenizer cannot be read: the vocabulary", ("tokenizer.json", "tokenizer_config.json"),
    ),
    "base template lost": (
        add_template("base"), "chat template", FAULT, "There is no chat template; the base had one",
        ("chat_template.jinja",),
    ),
    "expert template lost": (
        add_template("left"), "chat template", KNOWN, "There is no chat template; expert 'left' had one", (),
    ),
    "expert template": (
        add_template("left", "merge"), "chat template", KNOWN, "that of expert 'left', not the base's", (),
    ),
    "rope": (
        configure(rope_theta=500000.0), "rope", FAULT, "rope_theta is 500000.0, in the base 10000.0", ("config.json",),
    ),
    "scaling": (
        configure(rope_scaling={"rope_type": "linear", "factor": 4.0}), "rope", FAULT,
        "factor is 4.0, in the base None", ("config.json",),
    ),
    "positions": (
        configure(max_position_embeddings=64), "rope", FAULT, "max_position_embeddings is 64, in the base 2048",
        ("config.json",),
    ),
    "activation": (
        configure(hidden_act="gelu"), "configuration", FAULT, "hidden_act is gelu, in the base silu", ("config.json",),
    ),
    "tied": (
        configure(tie_word_embeddings=True), "configuration", FAULT, "tie_word_embeddings is True, in the base False",
        ("config.json",),
    ),
    "rows": (
        configure(vocab_size=40), "configuration", FAULT, "vocab_size is 40, the embedding has 32 rows",
        ("config.json",),
    ),
    "start": (configure(bos_token_id=5), "special tokens", FAULT, "begin with token 5, those of the base with None",
              ("config.json",)),
    "end": (configure(eos_token_id=9), "special tokens", FAULT, "ends at token 9, but the base ends at 1 too",
            ("config.json",)),
    "end of an expert": (
        end_elsewhere, "special tokens", KNOWN, "ends at token 1, but expert 'left' ends at 7 too: answers may not", (),
    ),
    "dtype": (store_in_half, "dtype", KNOWN, "stored in bfloat16, those of the base in float32", ()),
}  # fmt: skip
"""What is changed, what it is about, whether it is a fault, what is said, the files that put it right."""


@pytest.mark.parametrize("case", CASES)
def test_what_lies_beside_the_weights_is_named(root: Path, case: str) -> None:
    change, about, is_fault, said, files = CASES[case]
    change(root)
    found = [one for one in compare(root) if one.about == about]
    assert any(said in one.sentence for one in found), found
    assert [(one.is_fault, one.files) for one in found if said in one.sentence] == [(is_fault, files)]


def test_nothing_is_said_of_a_healthy_merge_however_its_configuration_is_written(root: Path) -> None:
    assert compare(root) == []
    # transformers 5 writes what version 4 does not, defaults included.
    own = json.loads((root / "merge" / "config.json").read_text())
    rope = {"rope_theta": 10000.0, "rope_type": "default"}
    (root / "merge" / "config.json").write_text(
        json.dumps({**own, "rope_parameters": rope, "head_dim": 4, "max_position_embeddings": 2048, "dtype": "float32"})
    )
    assert compare(root) == []


def test_added_tokens_are_known_and_their_rows_left_out(root: Path) -> None:
    add_tokens(root)
    found = compare(root)
    assert [one.is_fault for one in found] == [False, False]
    said = " ".join(one.sentence for one in found)
    assert "has one token that the base's does not have ('<new>' is 32)" in said
    assert "The embedding has 33 rows, that of the base 32" in said
    # The same tokenizer beside an embedding without the row would fail on the token.
    file = root / "merge" / "model.safetensors"
    cut = {name: one[:32] if len(one) == 33 else one for name, one in load_file(file).items()}
    save_file({name: one.contiguous() for name, one in cut.items()}, file, {"format": "pt"})
    edit_json(root / "merge" / "config.json", vocab_size=32)
    faults = [one.sentence for one in compare(root) if one.is_fault]
    assert faults == ["The tokenizer has ids up to 32, the embedding only 32 rows: texts with others fail."]


def test_the_command_copies_every_file_once_and_no_configuration_of_other_rows(root: Path) -> None:
    configure(rope_theta=5.0, hidden_act="gelu")(root)
    exchange_tokens(root / "merge")
    command = repair_command(compare(root), Path("a base"), Path("merge"))
    names = ("tokenizer.json", "tokenizer_config.json")
    assert command == f"cp 'a base/config.json' {' '.join(repr(f'a base/{name}') for name in names)} merge/"
    add_tokens(root)
    assert "/config.json" not in repair_command(compare(root), Path("a base"), Path("merge"))

"""Files of tokenizers: which of them count, and what damaged ones end in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from featcal.evaluation.evaluate import scoring_heads
from featcal.family.opening import open_family
from featcal.formats.tokenizers import VOCABULARY_FILES, open_prompt_tokenizer, open_tokenizer
from featcal.preflight.check import check_suite
from featcal.suite.schema import load_suite
from featcal.system.errors import InputError, NoScores
from featcal.system.resources import data_path

DAMAGED = {"version": "1.0", "model": {"type": "no such kind"}}


def test_a_folder_without_a_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(InputError, match="which is missing"):
        open_tokenizer(tmp_path, InputError("which is missing"))
    with pytest.raises(NoScores, match="has no tokenizer files, which class prompts need"):
        open_prompt_tokenizer(tmp_path)


@pytest.mark.parametrize("name", VOCABULARY_FILES)
def test_files_that_give_no_words_are_refused_whatever_the_reader_makes_of_them(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    (tmp_path / name).write_text(json.dumps(DAMAGED))
    with pytest.raises(InputError, match=r"base: the tokenizer in .* cannot be used") as caught:
        open_prompt_tokenizer(tmp_path)
    assert not isinstance(caught.value, NoScores)


@pytest.mark.slow
def test_a_damaged_tokenizer_of_class_prompts_is_a_problem(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(data_path("clip-mini", "suite.yaml").parent, tmp_path / "suite"))
    (folder / "base" / "tokenizer.json").write_text(json.dumps(DAMAGED))
    suite = load_suite(folder / "suite.yaml")
    family = open_family(suite, device="cpu")
    with pytest.raises(InputError, match="cannot be used"):
        scoring_heads(family, "test", family.experts)
    (problem,) = check_suite(suite, probe=True).problems
    assert problem.startswith("experts cannot be scored: base: the tokenizer in ")

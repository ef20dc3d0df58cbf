"""Text: rows of JSON Lines, parquet and Hub data sets, templates, and the token ids that are made of them."""

from __future__ import annotations

import gzip
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lanes import cases_by_message
from safetensors.torch import save_file

from featcal.samples import table
from featcal.samples.hub import read_hub
from featcal.samples.pool import TextExample
from featcal.samples.prepare import Preparation, prepare_causal, prepare_seq2seq, prepare_text, prompt_tokens
from featcal.samples.sources import draw_samples, open_pool
from featcal.suite.schema import Suite, suite_from_dict
from featcal.suite.source import Source
from featcal.suite.template import fill_template, template_fields
from featcal.system.errors import InputError

WORDS = ["<pad>", "</s>", "<unk>", "<bos>", "is", "it", "good", "bad", "the", "film", "?", "yes", "no"]
IDS = {word: index for index, word in enumerate(WORDS)}
ROWS: list[dict[str, Any]] = [
    {"text": "the film", "label": 1, "split": "train"},
    {"text": "bad film", "label": 0, "split": "train"},
    {"text": "good good film", "label": 1, "split": "test"},
    {"text": "film", "label": 0, "split": "test"},
]
TEXT: dict[str, Any] = {"input": "is {text} good ?", "targets": ["no", "yes"]}


def write_tokenizer(folder: Path, template: str) -> Path:
    """A word-level tokenizer whose texts look like `template`, and a config of the same vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(template, special_tokens=[("</s>", 1), ("<bos>", 3)])
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "bos_token": "<bos>"}
    PreTrainedTokenizerFast(tokenizer_object=core, **names).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(WORDS), "pad_token_id": 0}))
    return folder


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("t5"), "$A </s>")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("llama"), "<bos> $A")


def write_jsonl(file: Path, rows: Sequence[Mapping[str, Any]] = ROWS) -> Path:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)
    return file


def write_parquet(file: Path, rows: Sequence[Mapping[str, Any]], group: int = 2, **names: list[str]) -> Path:
    """A parquet file in small row groups; `names` are class names by column, stored as the Hub's files do."""
    content = pa.Table.from_pylist(list(rows))
    features = {column: {"names": classes, "_type": "ClassLabel"} for column, classes in names.items()}
    if features:
        content = content.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(content, file, row_group_size=group)
    return file


def pool_of(root: Path, **source: Any) -> Any:
    return open_pool(Source.model_validate(source), "test", root, "t")


def read(root: Path, **source: Any) -> list[tuple[str, str | None]]:
    pool = pool_of(root, **source)
    return [(example.input, example.target) for example in pool.texts(range(pool.size))]


def refusal(root: Path, **source: Any) -> str:
    with pytest.raises(InputError) as caught:
        read(root, **source)
    return str(caught.value)


def suite_of(root: Path, source: Mapping[str, Any], **task: Any) -> Suite:
    content = {"name": "s", "base": "b", "merged": "m", "tasks": {"t": {"expert": "e", "test": dict(source), **task}}}
    return suite_from_dict(content, root)


def drawn(root: Path, folder: Path, modality: Any, source: Mapping[str, Any], **task: Any) -> Any:
    return draw_samples(suite_of(root, source, **task), "t", "test", None, 0, Preparation(folder, modality))


# -------------------------------------------------------------------------------------------------- templates


def test_templates_take_fields_and_number_formats() -> None:
    assert template_fields("{a} {b} {a}") == ("a", "b")
    assert fill_template("{a}: {b:.1f}, {{c}}", {"a": "x", "b": 2}) == "x: 2.0, {c}"
    assert fill_template("'{a}'", {"a": "{b} {0}"}) == "'{b} {0}'"  # values are never templates themselves


@pytest.mark.parametrize(
    "template", ["{a.__class__}", "{a[0]}", "{a!r}", "{}", "{0}", "{a", "a}", "{a:>99999}", "{a:{b}}"]
)
def test_templates_are_names_and_nothing_else(template: str) -> None:
    with pytest.raises(ValueError, match="'"):
        template_fields(template)


@pytest.mark.parametrize(
    ("value", "message"), cases_by_message({"holds nothing": None, "holds a list": [[1]], "'.1f' does not fit": "x"})
)
def test_values_that_are_no_text(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fill_template("{a:.1f}", {"a": value})


# ------------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.parquet"])
def test_the_same_rows_from_every_file(tmp_path: Path, name: str) -> None:
    (write_parquet if name.endswith("parquet") else write_jsonl)(tmp_path / name, ROWS)
    kind = "parquet" if name.endswith("parquet") else "jsonl"
    assert read(tmp_path, **{kind: name}, split="test", **TEXT) == [
        ("is good good film good ?", "yes"),
        ("is film good ?", "no"),
    ]
    assert len(read(tmp_path, **{kind: name}, **TEXT)) == 4
    assert read(tmp_path, **{kind: name}, split="train", input="{text}", target="{label:.1f}") == [
        ("the film", "1.0"),
        ("bad film", "0.0"),
    ]
    assert read(tmp_path, **{kind: name}, split="train", input="{text}")[0] == ("the film", None)


def test_answers_by_label_of_any_kind(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl", [{"text": "a", "mark": "bad"}, {"text": "b", "mark": "good"}])
    answers = {"bad": "no", "good": "yes"}
    assert read(tmp_path, jsonl="x.jsonl", input="{text}", label="mark", targets=answers) == [("a", "no"), ("b", "yes")]


def test_shards_in_a_folder(tmp_path: Path) -> None:
    """Files of a split by the Hub's names; without such names the column "split" decides."""
    write_parquet(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet", ROWS[:2])
    write_parquet(tmp_path / "hub" / "data" / "test-00000-of-00002.parquet", ROWS[2:3])
    write_parquet(tmp_path / "hub" / "data" / "test-00001-of-00002.parquet", ROWS[3:])
    assert [text for text, _ in read(tmp_path, parquet="hub", split="test", input="{text}")] == [
        "good good film",
        "film",
    ]
    assert len(read(tmp_path, parquet="hub", input="{text}")) == 4
    # On the Hub these are a split of their own.
    write_parquet(tmp_path / "hub" / "data" / "test_hard-00000-of-00001.parquet", ROWS[:1])
    assert len(read(tmp_path, parquet="hub", split="test", input="{text}")) == 2
    assert len(read(tmp_path, parquet="hub", split="test_hard", input="{text}")) == 1
    write_parquet(tmp_path / "own" / "a.parquet", ROWS[1:])
    assert [text for text, _ in read(tmp_path, parquet="own", split="train", input="{text}")] == ["bad film"]
    write_parquet(tmp_path / "own" / "b.parquet", [{"other": 1}])
    assert "b.parquet has columns other" in refusal(tmp_path, parquet="own", input="{text}")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "x.txt").touch()
    assert "has no .parquet files" in refusal(tmp_path, parquet="none", input="{text}")


def test_rows_across_row_groups_keep_their_order(tmp_path: Path) -> None:
    write_parquet(tmp_path / "x.parquet", [{"text": f"w{i}"} for i in range(23)], group=5)
    pool = pool_of(tmp_path, parquet="x.parquet", input="{text}")
    wanted = [22, 0, 4, 5, 14, 0]
    assert [example.input for example in pool.texts(wanted)] == [f"w{i}" for i in wanted]


UNFIT: dict[str, Any] = {
    "'input' needs the column 'words', which is not there (columns: text, label, split)": {"input": "{words}"},
    "Did you mean 'text'?": {"input": "{txt}"},
    "'target' needs the column 'answer'": {"input": "{text}", "target": "{answer}"},
    "'targets' needs the column 'mark'": {"input": "{text}", "targets": ["a"], "label": "mark"},
    "label 1 has no answer in 'targets', which has 0": {"input": "{text}", "targets": ["no"]},
    "in 'targets', which has '0', '1'": {"input": "{text}", "targets": {"0": "no", "1": "yes"}},
    "the target is empty": {"input": "{text}", "targets": [" ", "yes"]},
    "no row has split 'tset', only test, train. Did you mean 'test'?": {"input": "{text}", "split": "tset"},
    "there is no column 'split' (columns: text)": {"rows": [{"text": "a"}], "input": "{text}", "split": "test"},
    "label -1 has no answer": {"rows": [{"text": "a", "label": -1}], **TEXT},  # not counted from the end
}


@pytest.mark.parametrize(("source", "message"), cases_by_message(UNFIT))
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_that_do_not_fit(tmp_path: Path, kind: str, source: dict[str, Any], message: str) -> None:
    options = {"rows": ROWS, **source}
    (write_jsonl if kind == "jsonl" else write_parquet)(tmp_path / f"x.{kind}", options.pop("rows"))
    assert message in refusal(tmp_path, **{kind: f"x.{kind}"}, **options)


WHOLE = gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode(), mtime=0)
NO_ROWS = {
    "line 2 holds a list": b'{"text": "a"}\n[1]\n',
    "line 3 is not valid JSON": b'{"text": "a"}\n\n{"text": \n',
    "line 2 is not valid JSON": b'{"text": "a"}\n\xff\xfe\n',
    "line 3 has no field 'text'": b'{"text": "a"}\n\n{"other": "b"}\n',
    "line 2: field 'text' holds nothing (null)": b'{"text": "a"}\n{"text": null}\n',
    "line 1: the input is empty": b'{"text": "  "}\n',
    "cannot be read to its end": [WHOLE[:10], WHOLE[:-5], b"no gzip at all"],
    "not a whole parquet file": b"PAR1 and no more",
}


@pytest.mark.parametrize(("content", "message"), cases_by_message(NO_ROWS))
def test_files_that_hold_no_rows(tmp_path: Path, content: bytes, message: str) -> None:
    kind, name = {"c": ("jsonl", "x.jsonl.gz"), "n": ("parquet", "x.parquet")}.get(message[0], ("jsonl", "x.jsonl"))
    (tmp_path / name).write_bytes(content)
    assert message in refusal(tmp_path, **{"input": "{text}", kind: name})


def test_a_file_is_parsed_once_and_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    loads = json.loads
    monkeypatch.setattr(table.json, "loads", lambda line: (parsed.append(""), loads(line))[1])
    file = write_jsonl(tmp_path / "x.jsonl")
    for _ in range(3):
        read(tmp_path, jsonl="x.jsonl", input="{text}")
    assert len(parsed) == 4
    write_jsonl(file, ROWS[:2])
    os.utime(file, ns=(time.time_ns(), time.time_ns() + 1))
    assert len(read(tmp_path, jsonl="x.jsonl", input="{text}")) == 2
    assert len(parsed) == 6


# ----------------------------------------------------------------------------------------------------- tokens


def words(ids: Any) -> list[str]:
    return [WORDS[index] for index in ids.tolist()]


def test_encoder_decoder_inputs(tmp_path: Path, t5: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl")
    samples = drawn(tmp_path, t5, "seq2seq", {"jsonl": "x.jsonl", "split": "test", **TEXT})
    ids, mask, labels = (samples.inputs[name] for name in ("input_ids", "attention_mask", "labels"))
    assert {tensor.dtype for tensor in samples.inputs.values()} == {torch.int64}
    assert words(ids[0]) == ["is", "good", "good", "film", "good", "?", "</s>"]
    assert words(ids[1]) == ["is", "film", "good", "?", "</s>", "<pad>", "<pad>"]
    assert mask.tolist() == [[1] * 7, [1] * 5 + [0] * 2]
    assert labels.tolist() == [[IDS["yes"], 1], [IDS["no"], 1]]
    assert samples.texts == ("is good good film good ?", "is film good ?")
    assert samples.targets == ("yes", "no")
    assert (samples.labels, samples.class_names, samples.images, samples.truncated) == (None, None, None, 0)


def test_targets_are_padded_with_what_is_ignored(t5: Path) -> None:
    examples = [TextExample("it", "yes"), TextExample("it", "no good film")]
    labels = prepare_seq2seq(examples, t5).inputs["labels"]
    assert labels.tolist() == [[IDS["yes"], 1, -100, -100], [IDS["no"], IDS["good"], IDS["film"], 1]]


def test_long_texts_are_cut_and_counted(t5: Path) -> None:
    examples = [
        TextExample("it is good", "yes"),
        TextExample("it is good film", "yes"),
        TextExample("it", "yes yes yes"),
        TextExample("it is the film ?", "no no no"),
    ]
    made = prepare_seq2seq(examples, t5, max_length=4, max_target_length=3)
    assert made.truncated == 3
    assert made.inputs["input_ids"].shape == (4, 4)
    assert words(made.inputs["input_ids"][1]) == ["it", "is", "good", "</s>"]
    assert made.inputs["labels"][2].tolist() == [IDS["yes"], IDS["yes"], 1]


@pytest.mark.parametrize("template", ["<bos> $A", "<bos> $A </s>"], ids=["begins", "begins and ends"])
def test_decoder_inputs(tmp_path: Path, template: str) -> None:
    """An end token that the tokenizer puts after every text does not come between prompt and answer."""
    folder = write_tokenizer(tmp_path / "m", template)
    made = prepare_causal([TextExample("is it good ?", "yes"), TextExample("it", "no good")], folder)
    assert words(made.inputs["input_ids"][0]) == ["<bos>", "is", "it", "good", "?", "yes", "</s>"]
    assert words(made.inputs["input_ids"][1]) == ["<bos>", "it", "no", "good", "</s>", "<pad>", "<pad>"]
    assert made.inputs["attention_mask"].tolist() == [[1] * 7, [1] * 5 + [0] * 2]
    assert made.inputs["completion_mask"].tolist() == [[0] * 5 + [1, 1], [0, 0, 1, 1, 1, 0, 0]]


@pytest.mark.parametrize(
    ("adds", "text", "read"),
    [
        pytest.param("<bos> $A", "<bos> is it", "<bos> is it", id="the text's own is enough"),
        pytest.param("<bos> $A", "<bos> <bos> it", "<bos> <bos> it", id="what the text says twice stays"),
        pytest.param("$A </s>", "<bos> <bos> it", "<bos> <bos> it </s>", id="nothing was added"),
        pytest.param("<bos> $A </s>", "it it", "<bos> it it </s>", id="no start token in the text"),
    ],
)
def test_a_text_that_begins_with_the_start_token_gets_no_second_one(
    tmp_path: Path, adds: str, text: str, read: str
) -> None:
    """As `apply_chat_template(tokenize=False)` writes texts; the same ids wherever a text is read."""
    folder = write_tokenizer(tmp_path, adds)
    example, ends = [TextExample(text, None), TextExample("no good", None)], read.removesuffix(" </s>")
    for prepare in (prepare_causal, prepare_text):
        made = prepare(example, folder)
        assert words(made.inputs["input_ids"][0][: len(read.split())]) == read.split()
        assert made.inputs["attention_mask"].sum(1).tolist()[0] == len(read.split())
    made = prepare_seq2seq([TextExample(text, text)], folder)
    assert words(made.inputs["input_ids"][0]) == read.split()
    assert words(made.inputs["labels"][0]) == [*ends.split(), "</s>"]
    assert [words(torch.tensor(ids)) for ids in prompt_tokens([text], folder, "causal")] == [ends.split()]


def test_a_start_token_that_is_left_out_takes_no_room_from_a_classifiers_text(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, "<bos> $A </s>")
    examples = [TextExample("<bos> is it good", None), TextExample("<bos> is it good ? yes", None)]
    made = prepare_text(examples, folder, max_length=5)
    assert [words(ids) for ids in made.inputs["input_ids"]] == [["<bos>", "is", "it", "good", "</s>"]] * 2
    assert made.truncated == 1


def test_decoder_text_without_answers_counts_whole(llama: Path) -> None:
    inputs = prepare_causal([TextExample("is it good ?", None), TextExample("it", None)], llama).inputs
    assert words(inputs["input_ids"][0]) == ["<bos>", "is", "it", "good", "?"]
    assert inputs["completion_mask"].equal(inputs["attention_mask"])
    assert inputs["attention_mask"].sum(1).tolist() == [5, 2]


@pytest.mark.parametrize(
    ("prompt", "answer", "limit", "cut", "kept", "answered"),
    [
        pytest.param("is it the good film ?", "yes", 5, 1, "<bos> film ? yes </s>", 2, id="beginning of the prompt"),
        pytest.param("is it the good film ?", "yes", 3, 1, "<bos> yes </s>", 2, id="all of the prompt"),
        pytest.param("is it the good film ?", "yes no " * 5, 8, 1, "<bos> ? yes no yes no yes no", 6, id="answer"),
        pytest.param("it", "yes no", 5, 0, "<bos> it yes no </s>", 3, id="nothing"),
    ],
)
def test_what_is_cut_of_a_long_text(
    llama: Path, prompt: str, answer: str, limit: int, cut: int, kept: str, answered: int
) -> None:
    """The beginning of a prompt before its answer; an answer that is too long leaves a quarter to the prompt."""
    made = prepare_causal([TextExample(prompt, answer), TextExample("it", "no")], llama, max_length=limit)
    assert made.truncated == cut + (limit < 4)  # the other has four tokens
    ids, counted = made.inputs["input_ids"][0], made.inputs["completion_mask"][0]
    assert words(ids) == kept.split()
    assert counted.tolist() == [0] * (len(ids) - answered) + [1] * answered


def test_limits_of_the_task_are_used(tmp_path: Path, t5: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl")
    source = {"jsonl": "x.jsonl", "split": "test", **TEXT}
    samples = drawn(tmp_path, t5, "seq2seq", source, max_length=6)
    assert samples.inputs["input_ids"].shape == (2, 6)
    assert samples.truncated == 1
    assert samples.texts[0] == "is good good film good ?"  # the text itself stays whole


def test_draws_repeat_themselves(tmp_path: Path, t5: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl", [{"text": "good " * (i % 4 + 1), "label": i % 2} for i in range(50)])
    suite = suite_of(tmp_path, {"jsonl": "x.jsonl", **TEXT})
    first, again, other = (draw_samples(suite, "t", "test", 8, seed, Preparation(t5, "seq2seq")) for seed in (3, 3, 4))
    assert first.indices == again.indices != other.indices
    assert first.inputs["input_ids"].equal(again.inputs["input_ids"])


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no tokenizer \(such as tokenizer.json\)"):
        prepare_causal([TextExample("a", "b")], tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"the tokenizer in .* cannot be used"):
        prepare_causal([TextExample("a", "b")], tmp_path)


ROWS_OF = {"jsonl": "x.jsonl", "input": "{text}"}
UNSUITED = {
    "an encoder-decoder needs answers; give the source 'target' or 'targets'": ("seq2seq", ROWS_OF),
    "the source holds text, the base takes pictures": ("pixels", ROWS_OF),
    "the source holds pictures, the base takes text": ("causal", {"embedded": "digits"}),
}


@pytest.mark.parametrize(("given", "message"), cases_by_message(UNSUITED))
def test_sources_that_do_not_suit_the_model(tmp_path: Path, t5: Path, given: tuple[str, Any], message: str) -> None:
    write_jsonl(tmp_path / "x.jsonl")
    with pytest.raises(InputError, match=f"^task 't', test samples: .*{message}"):
        drawn(tmp_path, t5, *given)


# ---------------------------------------------------------------------------------------- token ids in a file

ROW = [[4, 5, 6, 1], [5, 6, 1, 0]]
MASK = [[1, 1, 1, 1], [1, 1, 1, 0]]


def tokens_file(root: Path, **content: list[list[int]]) -> dict[str, Any]:
    save_file({name: torch.tensor(value) for name, value in content.items()}, root / "x.safetensors")
    return {"tensors": "x.safetensors", "key": "ids", **{n: n for n in ("mask", "labels") if n in content}}


TARGETS, MARKED = [[11, 1, -100], [12, 6, 1]], [[-100, -100, 6, 1], [-100, 6, 1, -100]]


@pytest.mark.parametrize(
    ("modality", "content", "made"),
    [
        pytest.param("seq2seq", {"mask": MASK, "labels": TARGETS}, {"labels": TARGETS}, id="encoder-decoder"),
        pytest.param(
            "causal", {"mask": MASK, "labels": MARKED}, {"completion_mask": [[0, 0, 1, 1], [0, 1, 1, 0]]}, id="decoder"
        ),
        pytest.param("causal", {"mask": MASK}, {"completion_mask": MASK}, id="decoder without answers"),
        pytest.param(
            "causal", {"ids": ROW[:1]}, {"attention_mask": [[1] * 4], "completion_mask": [[1] * 4]}, id="no mask"
        ),
    ],
)
def test_token_ids(tmp_path: Path, t5: Path, modality: str, content: dict[str, Any], made: dict[str, Any]) -> None:
    samples = drawn(tmp_path, t5, modality, tokens_file(tmp_path, **{"ids": ROW, **content}))
    masked = {"attention_mask": MASK} if "mask" in content else {}
    expected = {"input_ids": content.get("ids", ROW), **masked, **made}
    assert {name: tensor.tolist() for name, tensor in samples.inputs.items()} == expected
    assert samples.labels is None


NO_TOKENS = {
    "rows end with the padding id 0; give 'mask'": ("causal", {"mask": None}),
    "padding belongs on the right": [
        ("causal", {"mask": [[1, 1, 1, 1], second]}) for second in ([0, 1, 1, 1], [1, 2, 1, 1])
    ],
    "the mask of row 1 is 0 everywhere: it has no token": ("causal", {"mask": [[1, 1, 1, 1], [0] * 4]}),
    "'mask' has shape [2, 2], the token ids [2, 4]": ("causal", {"mask": [[1, 1], [1, 1]]}),
    "are its token ids with -100": [
        ("causal", {"labels": rows}) for rows in ([[4, 5, 6, 7], [5, 6, 1, -100]], [[4, 5, 6, 1], [5, 6, 1, 0]])
    ],
    "-100 throughout": ("causal", {"labels": [[4, 5, 6, 1], [-100] * 4]}),
    "give 'labels', target ids [n, U]": ("seq2seq", {}),
    "target ids and then -100": [
        ("seq2seq", {"labels": rows}) for rows in ([[1, -100, 1], [1, 1, 1]], [[-100], [1]], [[-1], [1]])
    ],
    "'labels' is torch.int64 [1, 2], expected whole": ("seq2seq", {"labels": [[1, 1]]}),
    "the source holds text, the base takes pictures": ("pixels", {}),
}


@pytest.mark.parametrize(("given", "message"), cases_by_message(NO_TOKENS))
def test_token_ids_that_do_not_fit(tmp_path: Path, t5: Path, given: tuple[str, dict[str, Any]], message: str) -> None:
    modality, change = given
    content = {name: rows for name, rows in {"ids": ROW, "mask": MASK, **change}.items() if rows is not None}
    with pytest.raises(InputError) as caught:
        drawn(tmp_path, t5, modality, tokens_file(tmp_path, **content))
    assert message in str(caught.value)


# -------------------------------------------------------------------------------------------------- the Hub


def test_without_the_package_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = refusal(tmp_path, hub="owner/name", split="test", input="{text}")
    assert "data set 'owner/name': datasets is not installed; install it with: pip install \"featcal[hub]\"" in message


@pytest.fixture
def hub_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set in the Hub's layout with two configurations, read without the Hub and with a cache of its own."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    folder = tmp_path / "glue"
    for config in ("sst2", "cola"):
        write_parquet(folder / config / "train-00000-of-00001.parquet", ROWS[:2], label=["negative", "positive"])
        write_parquet(folder / config / "test-00000-of-00001.parquet", ROWS[2:], label=["negative", "positive"])
    listed = "".join(
        f"- config_name: {config}\n  data_files:\n"
        + "".join(f"  - split: {split}\n    path: {config}/{split}-*\n" for split in ("train", "test"))
        for config in ("sst2", "cola")
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{listed}---\n")
    return folder


@pytest.mark.filterwarnings("ignore")
def test_a_local_folder_in_the_hubs_layout(hub_folder: Path, t5: Path) -> None:
    source = {"hub": "glue", "config": "sst2", "split": "test", **TEXT}
    assert read(hub_folder.parent, **source) == [("is good good film good ?", "yes"), ("is film good ?", "no")]
    assert drawn(hub_folder.parent, t5, "seq2seq", source).targets == ("yes", "no")
    assert "needs the column 'words'" in refusal(hub_folder.parent, **{**source, "input": "{words}"})
    message = refusal(hub_folder.parent, **{**source, "split": "dev"})
    assert "data set 'glue', configuration 'sst2', split 'dev' cannot be loaded" in message
    assert "cannot be loaded" in refusal(hub_folder.parent, **{**source, "config": "qqp"})
    assert "HF_HUB_OFFLINE is set" in refusal(hub_folder.parent, **{**source, "hub": "owner/nowhere"})


def test_a_changed_tokenizer_is_read_again(tmp_path: Path) -> None:
    example = [TextExample("film ?", None)]
    assert prepare_causal(example, write_tokenizer(tmp_path, "<bos> $A")).inputs["input_ids"].tolist() == [[3, 9, 10]]
    assert prepare_causal(example, write_tokenizer(tmp_path, "$A </s>")).inputs["input_ids"].tolist() == [[9, 10, 1]]


def test_a_local_folder_of_the_kind_hub_is_read_again_when_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` itself is stood in for: what is asked here is how often it is."""
    loaded = []

    class Opened:
        def with_format(self, kind: str) -> Opened:
            return self

        def __getitem__(self, rows: slice) -> pa.Table:
            return pa.Table.from_pylist(ROWS[: len(loaded)])

    def load_dataset(place: str, **options: Any) -> Opened:
        loaded.append(place)
        return Opened()

    stand_in = SimpleNamespace(
        load_dataset=load_dataset,
        exceptions=SimpleNamespace(DatasetsError=KeyError),
        are_progress_bars_disabled=lambda: True,
        disable_progress_bars=lambda: None,
    )
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    file = tmp_path / "set" / "data" / "test.parquet"
    write_parquet(file, ROWS)
    sizes = [len(read_hub("set", tmp_path, None, "test", None)) for _ in range(2)]
    write_parquet(file, ROWS[:3])
    os.utime(file, ns=(10**18, 10**18))
    assert [*sizes, len(read_hub("set", tmp_path, None, "test", None))] == [1, 1, 2]
    assert loaded == [str(tmp_path / "set")] * 2


def test_unpinned_data_sets_are_known(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()

    def unpinned(**source: Any) -> tuple[str, ...]:
        return suite_of(tmp_path, {"split": "test", "input": "{a}", **source}).unpinned_data()

    assert unpinned(hub="owner/name") == ("owner/name",)
    assert unpinned(hub="owner/name", revision="v1") == ()
    assert unpinned(hub="local") == ()

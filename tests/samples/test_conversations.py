"""Conversations: held against the ids that transformers' own `apply_chat_template` makes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import PLAIN, write_base
from lanes import cases_by_message

from featcal.samples.prepare import Preparation
from featcal.samples.sources import Samples, draw_samples, preview_samples
from featcal.suite.schema import Suite, suite_from_dict
from featcal.system.errors import InputError

THOUGHTS = (  # of the last answer alone, and empty ones where it has none, as Qwen3's
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if loop.last and m['role'] == 'assistant' %}<think>\n"
    "{{ m['reasoning_content'] or '' }}\n</think>\n\n{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKS = (  # for thoughts that it does not write, as DeepSeek-R1's
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'].split('</think>')[-1] }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
FORGETS = PLAIN.replace("{{ m['content'] }}", "{{ m['content'] if loop.revindex < 3 else '…' }}")
ALTERNATES = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + PLAIN
DATED = "{{ strftime_now('%d %b %Y') }}, {{ strftime_now('%Y-%m-%d') }}\n" + PLAIN

ASKED = [{"role": "user", "content": "Is it so?"}]
SHORT = [*ASKED, {"role": "assistant", "content": "Hardly."}]
LONG = [{"role": "system", "content": "Be kind."}, *SHORT, *ASKED, {"role": "assistant", "content": "Yes, Now"}]
SHARED = [
    {"from": "system", "value": "Be kind."}, {"from": "human", "value": "Is it so?"},
    {"from": "gpt", "value": "Hardly.", "weight": 1.0},
]  # fmt: skip


def suite_of(root: Path, rows: Sequence[dict[str, Any]], columns: Any = "messages") -> Suite:
    (root / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"expert": "e", "test": {"jsonl": "x.jsonl", "conversation": columns}}
    return suite_from_dict({"name": "s", "base": "b", "merged": "m", "tasks": {"t": task}}, root)


def drawn(root: Path, rows: Sequence[dict[str, Any]], columns: Any = "messages", modality: Any = "causal") -> Samples:
    return draw_samples(suite_of(root, rows, columns), "t", "test", None, 0, Preparation(root, modality))


def ids_of(samples: Samples, answer: bool | None = None) -> list[int]:
    """Ids of the first sample: all of them, its answer's or its prompt's."""
    ids, mask, counted = (samples.inputs[name][0] for name in ("input_ids", "attention_mask", "completion_mask"))
    return list(ids[(mask == 1) if answer is None else (mask == 1) & (counted == int(answer))].tolist())


def ids_by(made: Any, turns: Sequence[dict[str, str]], asks: bool = False) -> list[int]:
    return list(made.apply_chat_template([*turns], add_generation_prompt=asks, return_dict=False))


@pytest.mark.parametrize("adds", ["<s> $A", "<s> $A </s>", "$A"])
@pytest.mark.parametrize("template", [PLAIN, THOUGHTS], ids=["plain", "empty thoughts"])
@pytest.mark.parametrize("turns", [SHORT, LONG], ids=["short", "long"])
def test_ids_are_those_of_the_chat_template(
    tmp_path: Path, adds: str, template: str, turns: list[dict[str, str]]
) -> None:
    made = write_base(tmp_path, template, adds)
    samples = drawn(tmp_path, [{"messages": turns}])
    assert ids_of(samples) == ids_by(made, turns)
    assert ids_of(samples, answer=False) == ids_by(made, turns[:-1], asks=True)
    begun = "<think>\n\n</think>\n\n" if template is THOUGHTS else ""
    assert samples.targets == (begun + turns[-1]["content"],)  # what `generate` is held against
    assert samples.texts is not None
    assert samples.texts[0] + made.decode(ids_of(samples, answer=True)) == made.decode(ids_by(made, turns))


def test_thoughts_beside_a_turn_reach_the_template(tmp_path: Path) -> None:
    made = write_base(tmp_path, THOUGHTS)
    turns = [*ASKED, {"role": "assistant", "content": "No.", "reasoning_content": "Hm.", "tool_calls": None}]
    samples = drawn(tmp_path, [{"messages": turns, "tools": []}])
    assert (ids_of(samples), samples.targets) == (ids_by(made, turns), ("<think>\nHm.\n</think>\n\nNo.",))


def test_a_piece_across_the_border_belongs_to_the_answer(tmp_path: Path) -> None:
    made = write_base(tmp_path, PLAIN, merges=[("Ċ", "H")])
    samples = drawn(tmp_path, [{"messages": SHORT}])
    assert ids_of(samples) == ids_by(made, SHORT)
    asked = ids_by(made, ASKED, asks=True)
    assert ids_of(samples, answer=False) == asked[:-1]  # the line break went into one piece with the answer's H
    assert samples.targets == ("Hardly.",)


def test_a_template_that_asks_otherwise_than_it_writes(tmp_path: Path) -> None:
    made = write_base(tmp_path, ASKS)
    turns = [*ASKED, {"role": "assistant", "content": "<think>Hm.</think><b>No"}]
    samples = drawn(tmp_path, [{"messages": turns}])
    assert (ids_of(samples), samples.targets) == (ids_by(made, turns), ("b>No",))
    turns[-1]["content"] = "No"
    samples = drawn(tmp_path, [{"messages": turns}])
    assert (ids_of(samples), samples.targets) == (ids_by(made, turns), ("No",))
    assert made.decode(ids_of(samples, answer=False)).endswith("<|im_start|>assistant\n")


def test_the_day_does_not_change_the_text(tmp_path: Path) -> None:
    made = write_base(tmp_path, DATED)
    day = made.apply_chat_template(SHORT, tokenize=False).partition("\n")
    read = made.decode(ids_of(drawn(tmp_path, [{"messages": SHORT}]))).partition("\n")
    assert read[0] == "26 Jul 2024, 2024-07-26"
    assert read[1:] == day[1:]


def test_a_conversation_without_an_answer_is_a_prompt(tmp_path: Path) -> None:
    made = write_base(tmp_path, PLAIN)
    samples = drawn(tmp_path, [{"messages": LONG[:-1]}])
    assert ids_of(samples) == ids_of(samples, answer=True) == ids_by(made, LONG[:-1], asks=True)
    assert samples.targets is None
    with pytest.raises(InputError, match=r"x\.jsonl, line 2: ends with an answer, unlike .*line 1"):
        drawn(tmp_path, [{"messages": LONG[:-1]}, {"messages": LONG}])


SYSTEM, FIRST = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Add."}
NO = {"role": "assistant", "content": "No."}
READ = {
    "sharegpt": (["conversations"], {"conversations": SHARED}, [LONG[0], *SHORT]),
    "parts of text": (
        ["messages"],
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Ad"}, {"type": "text", "text": "d."}]},
                NO,
            ]
        },
        [FIRST, NO],
    ),
    "texts": (["prompt", "completion"], {"prompt": "Add.", "completion": "No."}, [FIRST, NO]),
    "turns": (["prompt", "completion"], {"prompt": [SYSTEM, FIRST], "completion": [NO]}, [SYSTEM, FIRST, NO]),
    "turns and a text": (["prompt", "completion"], {"prompt": [FIRST], "completion": "No."}, [FIRST, NO]),
    "alpaca": (
        ["instruction", "input", "output"],
        {"instruction": "Add.", "input": "1, 2", "output": "No."},
        [{"role": "user", "content": "Add.\n1, 2"}, NO],
    ),
    "nothing said": (
        ["system", "instruction", "input", "output"],
        {"system": " ", "instruction": "Add.", "input": "", "output": "No."},
        [FIRST, NO],
    ),
    "system": (["system", "conversations"], {"system": "Be kind.", "conversations": [FIRST, NO]}, [SYSTEM, FIRST, NO]),
    "no such field": (["system", "prompt", "completion"], {"prompt": "Add.", "completion": "No."}, [FIRST, NO]),
}


@pytest.mark.parametrize(("columns", "row", "turns"), READ.values(), ids=READ)
def test_columns_of_conversations(
    tmp_path: Path, columns: list[str], row: dict[str, Any], turns: list[dict[str, str]]
) -> None:
    made = write_base(tmp_path, PLAIN)
    rows = [row, {**dict.fromkeys(columns, ""), **row}]
    samples = drawn(tmp_path, rows, columns if len(columns) > 1 else columns[0])
    assert ids_of(samples) == ids_by(made, turns)
    assert ids_of(samples, answer=False) == ids_by(made, turns[:-1], asks=True)


def test_parquet_rows_and_rows_in_memory_are_the_same(tmp_path: Path) -> None:
    made, rows = write_base(tmp_path / "b", PLAIN), [{"id": i, "messages": LONG[: 3 + 2 * i]} for i in range(2)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    parquet = {"parquet": "x.parquet", "conversation": "messages"}
    content = {"name": "s", "base": "b", "merged": "m", "tasks": {"t": {"expert": "e", "test": parquet}}}
    held = Suite.of(base="b", experts={"t": "e"}, test={"t": rows})
    assert held.tasks["t"].test is not None
    assert held.tasks["t"].test.conversation == "messages"
    for suite in (suite_from_dict(content, tmp_path), held):
        samples = draw_samples(suite, "t", "test", None, 0, Preparation(tmp_path / "b", "causal"))
        assert [sum(row) for row in samples.inputs["attention_mask"].tolist()] == [
            len(ids_by(made, row["messages"])) for row in rows
        ]
        assert samples.targets == ("Hardly.", "Yes, Now")
        assert suite.tasks["t"].metric == "exact_match"
        seen = preview_samples(suite, "t", "test", 1, 0)
        assert seen.texts is not None
        assert seen.texts[0].startswith("system: Be kind.\nuser: Is it so?")


def said(role: str = "user", content: Any = "Add.", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content, **more}, NO]}


REFUSED = {
    "line 2: turn 1 is empty": [said(content=" "), said(content=None), said(content=[])],
    r"line 2: turn 1 holds 'text', 'image_url'; only text is read": said(
        content=[{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    ),
    "line 2: turn 1 holds 'text'; only text is read": [said(content=5), said(content=[{"type": "text"}])],
    "line 2: turn 1 calls a tool": [said("tool"), said(tool_calls=[{"name": "f"}]), said("observation")],
    "line 2: the conversation uses tools": {**said(), "tools": [{"name": "f"}]},
    "line 2: turn 1 is of 'narrator'": said("narrator"),
    "line 2: turn 1 has the keys 'speaker', 'text'": {"messages": [{"speaker": "a", "text": "b"}]},
    "line 2: turn 1 is a str": {"messages": ["Add."]},
    "line 2: column 'messages' holds a str, expected a list": {"messages": "Add."},
    "line 2: column 'messages' is empty": [{"messages": []}, {"messages": None}],
    "line 2: there is no turn before the answer": {"messages": [NO]},
    r"line 2: the base's chat template does not take this conversation \(no system here\)": {"messages": LONG},
    "line 2: the text holds half of a surrogate pair": said(content="\ud800"),
}


@pytest.mark.parametrize(("row", "message"), cases_by_message(REFUSED))
def test_what_is_no_conversation_is_refused_by_its_line(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    write_base(tmp_path, ALTERNATES)
    with pytest.raises(InputError, match=rf"task 't', test samples: .*x\.jsonl, {message}"):
        drawn(tmp_path, [{"messages": SHORT}, row])


@pytest.mark.parametrize(
    ("template", "modality", "message"),
    [
        (FORGETS, "causal", "line 1: the base's chat template writes the turns before the last answer differently"),
        ("{{ 1 + messages[0]['content'] }}", "causal", r"line 1: .* does not take this conversation \(unsupported"),
        (
            PLAIN.replace("m['content']", "m['content'] if m['role'] == 'user' else ''"),
            "causal",
            "leaves the answer out",
        ),
        (None, "causal", "has no chat template, which conversations need; put the chat_template.jinja of the experts"),
        (PLAIN, "seq2seq", "conversations are for decoders; give the source 'input'"),
        (PLAIN, "text", "conversations are for decoders"),
    ],
    ids=["forgets", "raises", "drops", "no template", "encoder-decoder", "classifier"],
)
def test_templates_and_models_that_take_no_conversation(
    tmp_path: Path, template: str | None, modality: Any, message: str
) -> None:
    write_base(tmp_path, template)
    with pytest.raises(InputError, match=message):
        drawn(tmp_path, [{"messages": LONG}], modality=modality)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"jsonl": "x.jsonl"}, "needs 'input', the template of the model's input, or 'conversation'"),
        ({"jsonl": "x.jsonl", "conversation": "m", "input": "{a}", "target": "{b}"}, "leave out input, target"),
        ({"jsonl": "x.jsonl", "conversation": "m", "label": "a"}, "gives input and answer itself; leave out label"),
        ({"imagefolder": "x", "conversation": "m"}, "conversation is not an option of a source of kind 'imagefolder'"),
        ({"jsonl": "x.jsonl", "conversation": []}, "conversation"),
    ],
)
def test_a_source_says_once_what_the_answer_is(tmp_path: Path, source: dict[str, Any], message: str) -> None:
    content = {"name": "s", "base": "b", "merged": "m", "tasks": {"t": {"expert": "e", "test": source}}}
    with pytest.raises(InputError, match=re.escape(message)):
        suite_from_dict(content, tmp_path)


def test_a_column_that_is_not_there(tmp_path: Path) -> None:
    write_base(tmp_path, PLAIN)
    with pytest.raises(InputError, match=r"'conversation' needs the column 'mesages'.*messages"):
        drawn(tmp_path, [{"messages": SHORT}], "mesages")

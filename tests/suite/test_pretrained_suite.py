"""The script of the pretrained suite on a tiny BERT: splits, batches, adapters, and suites that featcal opens."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import minilm
import pytest
import tables
import text_rows
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from featcal import evaluate, load_suite, open_family

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
WORDS = tuple("abcdefghij")


def write_base(folder: Path) -> None:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate((*SPECIAL, *WORDS))}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    reads = ["input_ids", "token_type_ids", "attention_mask"]
    PreTrainedTokenizerFast(tokenizer_object=core, model_input_names=reads, **names).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(SPECIAL) + len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=32,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)


def text(number: int) -> str:
    """Another one for every number up to 100, of three to five words."""
    return " ".join([WORDS[number % 10], WORDS[number // 10], *WORDS[: 1 + number % 3]])


def write_texts(folder: Path) -> None:
    folder.mkdir()
    for task in minilm.TASKS:
        lines = []
        for number in range(100):
            one = {"split": "test" if number % 3 == 0 else "train", "label": ("no", "yes")[number % 2]}
            pair = task in ("mrpc", "rte", "sick")
            said = {"text_a": text(number), "text_b": text(99 - number)} if pair else {"text": text(number)}
            lines.append(json.dumps(one | said))
        (folder / f"{task}.jsonl.gz").write_bytes(gzip.compress("\n".join([*lines, lines[0], ""]).encode()))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    steps = dict.fromkeys(minilm.TASKS, 2)
    small = {"CALIBRATION": 12, "VALIDATION": 8, "TEST": 10, "STEPS": steps, "BATCH": 4, "BUCKETS": 3}
    for name, value in small.items():
        monkeypatch.setattr(minilm, name, value)
    write_texts(tmp_path / "texts")
    return tmp_path / "texts"


def test_splits_are_disjoint_and_hold_a_text_once(data: Path) -> None:
    one = minilm.read(data, "rte")
    parts = [one.train, one.validation, one.calibration, one.test]
    assert [*map(len, parts)] == [66 - 20, 8, 12, 10]
    seen = [text_rows.texts(row) for part in parts for row in part]
    assert len({*seen}) == len(seen)
    assert {row["split"] for row in one.test} == {"test"}
    assert one.labels == ("no", "yes")


def test_a_batch_is_of_like_lengths_and_padded_to_its_longest(data: Path) -> None:
    encoded = [([1] * length, [0] * length, length % 2) for length in range(1, 13)]
    lengths = [[len(ids) for ids, _, _ in minilm.drawn(encoded, step, 0)] for step in range(20)]
    assert {tuple(one) for one in lengths} == {(1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)}
    batch = minilm.collate(minilm.drawn(encoded, 0, 0))
    assert batch["attention_mask"].sum(1).tolist() == lengths[0]
    assert batch["input_ids"].equal(batch["attention_mask"])
    assert batch["labels"].tolist() == [length % 2 for length in lengths[0]]


def test_an_update_of_low_rank_starts_at_nothing_and_is_alpha_over_r_times_b_a() -> None:
    linear = nn.Linear(5, 3)
    made = minilm.Adapted(linear)
    x = torch.randn(4, 5)
    assert made(x).equal(linear(x))
    nn.init.normal_(made.lora_B.weight)
    change = 2 * made.lora_B.weight @ made.lora_A.weight
    torch.testing.assert_close(made(x), x @ (linear.weight + change).T + linear.bias)
    assert [name for name, one in made.named_parameters() if one.requires_grad] == ["lora_A.weight", "lora_B.weight"]


def test_other_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / minilm.WEIGHTS).write_bytes(b"others")
    with pytest.raises(SystemExit, match=hashlib.sha256(b"others").hexdigest()):
        minilm.write_base(str(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "file"), [("experts", "suite.yaml"), ("adapters", "lora.yaml")])
def test_a_suite_scores_its_experts_as_the_script_does(
    data: Path, tmp_path: Path, kind: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (out / "training").mkdir(parents=True)
    write_base(out / "base")
    minilm.write_suites(data, out)
    minilm.write_experts(data, out, kind, seed=0)
    assert not [*(out / "training").iterdir()]
    found = evaluate(load_suite(out / file), "expert", split="validation").tasks
    assert {one.n for one in found.values()} == {8}
    said = [f"{kind}, {task}, validation: {100 * one.value:.1f}" for task, one in found.items()]
    assert capsys.readouterr().out.splitlines() == said
    before = [(path, path.stat().st_mtime_ns) for path in sorted((out / kind).rglob("*"))]
    minilm.write_experts(data, out, kind, seed=1)
    assert "is finished and stays as it is" in capsys.readouterr().out
    assert before == [(path, path.stat().st_mtime_ns) for path in sorted((out / kind).rglob("*"))]


def test_an_adapter_is_read_as_the_model_that_was_trained(data: Path, tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    minilm.write_suites(data, tmp_path)
    for task in minilm.TASKS:
        model = minilm.make_model(tmp_path / "base", ["no", "yes"], seed=1)
        plain = {name: one.clone() for name, one in model.state_dict().items()}
        minilm.adapt(model)
        for part in model.modules():
            if isinstance(part, minilm.Adapted):
                nn.init.normal_(part.lora_B.weight)
        minilm.write_adapter(model, tmp_path / "adapters" / task)
    family = open_family(load_suite(tmp_path / "lora.yaml"), "cpu")
    name = "bert.encoder.layer.1.output.dense"
    low = model.get_submodule(name)
    weight = f"{name}.weight"
    expected = plain[weight] + 2 * low.lora_B.weight @ low.lora_A.weight
    torch.testing.assert_close(family.experts["sick"].read([weight])[weight], expected)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "base")
    one = minilm.read(data, "sick")
    batch = minilm.collate(minilm.encode(tokenizer, one, minilm.by_length(one.test)))
    score = evaluate(family, "expert:sick", split="test").tasks["sick"]
    assert score.predictions.equal(model.eval()(**batch).logits.argmax(1))


def test_what_is_measured_first_is_a_part_of_all() -> None:
    assert {*tables.recipes()} < {*tables.pretrained()}

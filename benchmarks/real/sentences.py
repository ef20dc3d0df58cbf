"""The real text suite: `python benchmarks/real/sentences.py --data FOLDER --out FOLDER [--step base|experts|suite]`.

A small T5 learns on the training texts of six sets to fill in what was cut out of them, and a little of what the
prompts ask: from a few rows of each set, some of which are labelled wrongly ("base"). Every expert is the base
trained on one set, embedding and output layer frozen ("experts"). What is written is a suite like any other, with its
own copy of the texts. A killed run goes on where it was. A data folder holds one `NAME.jsonl.gz` per set, whose rows
have `split` (train or test), `label`, and `text` or `text_a` and `text_b`.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import random
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, T5ForConditionalGeneration

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "data" / "t5-mini"))
import build  # noqa: E402
import training  # noqa: E402

TUNED = ("ag_news", "sst2", "subjectivity", "sick")
UNTUNED = ("trec6", "answer_selection")
"""Their validation and test texts are looked at once, when everything is chosen."""
TASKS = TUNED + UNTUNED
PROMPTS = {
    "ag_news": "Which topic has this news? {text}",
    "sst2": "Is this review positive or negative? {text}",
    "subjectivity": "Is this subjective or objective? {text}",
    "sick": "Does the second follow from the first? {text_a} | {text_b}",
    "trec6": "What does this question ask for? {text}",
    "answer_selection": "Does the second answer the first? {text_a} | {text_b}",
}
CALIBRATION, VALIDATION = 288, 320

VOCABULARY, LENGTH = 4000, 64
"""Pieces of words, and the most of them in one text."""
GAPS = 8
"""Names that stand for what was cut out of a text."""
SHAPE = dict(build.SHAPE) | {"dropout_rate": 0.1}
BASE_STEPS, BASE_BATCH, BASE_RATE = 1500, 48, 2e-3
ASKED, ASKED_ROWS, ASKED_WRONG = 0.4, 320, 0.4
"""Share of the base's rows that are tasks; of which rows of each set; share of their labels that is wrong."""
EXPERT_STEPS, EXPERT_BATCH, EXPERT_RATE = 450, 32, 7e-4

Row = dict[str, str]


@dataclass(frozen=True)
class Texts:
    """Rows of one set: what trains, what chooses, what calibrates and what is held back, disjoint."""

    labels: tuple[str, ...]
    train: tuple[Row, ...]
    validation: tuple[Row, ...]
    calibration: tuple[Row, ...]
    test: tuple[Row, ...]


@cache
def read(folder: Path, task: str) -> Texts:
    """A set of the data folder, its training rows split three ways by a shuffle of its name; texts that stand in
    several rows are in the first of them alone."""
    with gzip.open(folder / f"{task}.jsonl.gz", "rt", encoding="utf-8") as lines:
        every = {PROMPTS[task].format(**row): row for row in reversed([json.loads(line) for line in lines])}
    rows = list(reversed(every.values()))
    test = tuple(row for row in rows if row["split"] == "test")
    rest = [row for row in rows if row["split"] == "train"]
    random.Random(zlib.crc32(task.encode())).shuffle(rest)
    held = CALIBRATION + VALIDATION
    parts = (rest[held:], rest[CALIBRATION:held], rest[:CALIBRATION], test)
    return Texts(tuple(sorted({row["label"] for row in rows})), *map(tuple, parts))


def asked(task: str, rows: Sequence[Row]) -> list[str]:
    return [PROMPTS[task].format(**row) for row in rows]


def gap(number: int) -> str:
    return f"<gap{number}>"


def make_tokenizer(data: Path) -> PreTrainedTokenizerFast:
    """Pieces of the words of the training texts."""
    core = Tokenizer(models.Unigram())
    core.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation(behavior="isolated"), pre_tokenizers.Metaspace()]
    )
    core.decoder = decoders.Metaspace()
    texts = [text for task in TASKS for text in asked(task, read(data, task).train)]
    texts += [label for task in TASKS for label in read(data, task).labels for _ in range(2000)]
    special = ["<pad>", "</s>", "<unk>", *map(gap, range(GAPS))]
    core.train_from_iterator(
        texts,
        trainers.UnigramTrainer(vocab_size=VOCABULARY, special_tokens=special, unk_token="<unk>", show_progress=False),
    )
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", build.END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=LENGTH, model_input_names=["input_ids", "attention_mask"],
        pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
    )  # fmt: skip


def encode(tokenizer: PreTrainedTokenizerFast, task: str, rows: Sequence[Row]) -> build.Pairs:
    """Token numbers of prompts and answers."""
    prompts = tokenizer(asked(task, rows), truncation=True)["input_ids"]
    answers = tokenizer([row["label"] for row in rows])["input_ids"]
    return list(zip(prompts, answers, strict=True))


def with_gaps(tokens: list[int], first_gap: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """A text with up to `GAPS` pieces of one to three tokens cut out, and what stood there (Raffel et al. 2020)."""
    inside, wanted = tokens[:-1], max(1, len(tokens) // 12)
    starts = sorted(rng.sample(range(len(inside)), min(wanted, GAPS, len(inside))))
    left, cut, at = list[int](), list[int](), 0
    for number, start in enumerate(starts):
        if start < at:
            continue
        end = min(start + rng.randint(1, 3), len(inside))
        left += [*inside[at:start], first_gap + number]
        cut += [first_gap + number, *inside[start:end]]
        at = end
    return [*left, *inside[at:], build.END], [*cut, build.END]


def partly_wrong(rows: Sequence[Row], labels: Sequence[str], rng: random.Random) -> list[Row]:
    """The same rows, a share of them with another label."""
    return [
        row | {"label": rng.choice([one for one in labels if one != row["label"]])}
        if rng.random() < ASKED_WRONG
        else row
        for row in rows
    ]


def train_base(data: Path, tokenizer: PreTrainedTokenizerFast, seed: int, file: Path) -> T5ForConditionalGeneration:
    """All sets at once."""
    torch.manual_seed(seed)
    model = build.make_model(len(tokenizer), SHAPE)
    rng = random.Random(seed)
    plain = [pair[0] for task in TASKS for pair in encode(tokenizer, task, read(data, task).train)]
    few = []
    for task in TASKS:
        one = read(data, task)
        few.append(encode(tokenizer, task, partly_wrong(one.train[:ASKED_ROWS], one.labels, rng)))
    first_gap = tokenizer.convert_tokens_to_ids(gap(0))

    def loss(step: int) -> Tensor:
        torch.manual_seed(seed + step)
        drawn = random.Random(seed * 1_000_003 + step)
        count = round(ASKED * BASE_BATCH)
        batch = [drawn.choice(drawn.choice(few)) for _ in range(count)]
        batch += [with_gaps(drawn.choice(plain), first_gap, drawn) for _ in range(BASE_BATCH - count)]
        return value(model.eval(), batch)

    optimizer = torch.optim.AdamW(model.parameters(), lr=BASE_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    training.train(model, [optimizer], loss, BASE_STEPS, file)
    return model


def train_expert(
    base: T5ForConditionalGeneration, pairs: build.Pairs, seed: int, file: Path
) -> T5ForConditionalGeneration:
    """The base trained on one set; embedding and output layer stay."""
    model = copy.deepcopy(base)
    model.shared.requires_grad_(False)
    model.lm_head.requires_grad_(False)

    def loss(step: int) -> Tensor:
        torch.manual_seed(seed + step)
        return value(model.train(), random.Random(seed * 1_000_003 + step).sample(pairs, EXPERT_BATCH))

    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=EXPERT_RATE, betas=(0.9, 0.98), weight_decay=0.05)
    training.train(model, [optimizer], loss, EXPERT_STEPS, file)
    return model


def value(model: T5ForConditionalGeneration, pairs: build.Pairs) -> Tensor:
    """Loss of a batch."""
    found: Tensor = model(**build.collate(pairs)).loss
    return found


@torch.no_grad()
def accuracy(model: T5ForConditionalGeneration, pairs: build.Pairs) -> float:
    """Share of texts whose answer is the likeliest token by token."""
    right = 0
    for start in range(0, len(pairs), 100):
        batch = build.collate(pairs[start : start + 100])
        best, wanted = model.eval()(**batch).logits.argmax(-1), batch["labels"]
        right += int(((best == wanted) | (wanted < 0)).all(1).sum())
    return right / len(pairs)


def write_suite(data: Path, out: Path) -> None:
    """Texts beside the models, and the suite file."""
    (out / "data").mkdir(parents=True, exist_ok=True)
    tasks: dict[str, object] = {}
    for task in TASKS:
        one, file = read(data, task), f"data/{task}.jsonl.gz"
        splits = {"calibration": one.calibration, "validation": one.validation, "test": one.test}
        lines = [json.dumps(row | {"split": name}) for name, rows in splits.items() for row in rows]
        (out / file).write_bytes(gzip.compress("\n".join([*lines, ""]).encode(), mtime=0))
        source = {"jsonl": file, "input": PROMPTS[task], "target": "{label}"}
        tasks[task] = {"expert": f"experts/{task}", "metric": "exact_match"} | {
            name: source | {"split": name} for name in splits
        }
    content = {
        "name": "real-texts",
        "description": "A small T5 and six experts on real texts.",
        "base": "base",
        "merged": {"method": "task-arithmetic", "scale": 0.3},
        "tasks": tasks,
    }
    (out / "suite.yaml").write_text(yaml.safe_dump(content, sort_keys=False))


def write_experts(data: Path, out: Path, seed: int) -> None:
    """Train all experts; what an earlier run finished is only written again."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "base")
    for task in TASKS:
        one, base = read(data, task), build.load(out / "base")
        held = encode(tokenizer, task, one.validation)
        before = accuracy(base, held)
        model = train_expert(base, encode(tokenizer, task, one.train), seed, out / "training" / f"{task}.pt")
        build.write_model(model, out / "experts" / task, SHAPE)
        if task in TUNED:
            print(f"{task}, validation: base {100 * before:.1f}, expert {100 * accuracy(model, held):.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with one .jsonl.gz per set")
    parser.add_argument("--out", type=Path, required=True, help="folder of the suite")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step", choices=("base", "experts", "suite"), action="append", help="these alone")
    options = parser.parse_args()
    wanted = options.step or ["base", "experts", "suite"]
    (options.out / "training").mkdir(parents=True, exist_ok=True)
    (options.out / "base").mkdir(exist_ok=True)
    if "base" in wanted:
        tokenizer = make_tokenizer(options.data)
        build.write_tokenizer(tokenizer, options.out / "base")
        model = train_base(options.data, tokenizer, options.seed, options.out / "training" / "base.pt")
        build.write_model(model, options.out / "base", SHAPE)
    if "suite" in wanted:
        write_suite(options.data, options.out)
    if "experts" in wanted:
        write_experts(options.data, options.out, options.seed)


if __name__ == "__main__":
    main()

"""The real text suite: `python benchmarks/real/sentences.py --data FOLDER --out FOLDER [--step base|experts|suite]`.

A small T5 is trained on six sets at once, for so short a time that it is mediocre on all of them ("base"). Every
expert is the base trained on one set, embedding and output layer frozen ("experts"). What is written is a suite like
any other, with its own copy of the texts. A killed run goes on where it was. A data folder holds one `NAME.jsonl.gz`
per set, whose rows have `split` (train or test), `label`, and `text` or `text_a` and `text_b`.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, T5ForConditionalGeneration

HERE = Path(__file__).resolve().parent
T5_MINI = str(HERE.parents[1] / "data" / "t5-mini")
sys.path.insert(0, T5_MINI)
import build  # noqa: E402

sys.path.remove(T5_MINI)  # its measure.py would hide that of the benchmarks
import text_rows  # noqa: E402
import training  # noqa: E402

TUNED = ("ag_news", "sst2", "subjectivity", "sick")
UNTUNED = ("trec6", "answer_selection")
"""Their validation and test texts are looked at once, when everything is chosen."""
TASKS = TUNED + UNTUNED
GROUPS = {"tuned": TUNED, "untuned": UNTUNED}
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
SHAPE = dict(build.SHAPE) | {"dropout_rate": 0.1}
BASE_STEPS, BASE_BATCH, BASE_RATE = 500, 48, 1e-3
EXPERT_STEPS, EXPERT_BATCH, EXPERT_RATE = 500, 32, 1e-3


@cache
def read(folder: Path, task: str) -> text_rows.Texts:
    """The rows of one set."""
    return text_rows.read(folder, task, VALIDATION, CALIBRATION)


def asked(task: str, several: Sequence[text_rows.Row]) -> list[str]:
    return [PROMPTS[task].format(**row) for row in several]


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
    special = ["<pad>", "</s>", "<unk>"]
    core.train_from_iterator(
        texts,
        trainers.UnigramTrainer(vocab_size=VOCABULARY, special_tokens=special, unk_token="<unk>", show_progress=False),
    )
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", build.END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=LENGTH, model_input_names=["input_ids", "attention_mask"],
        pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
    )  # fmt: skip


def encode(tokenizer: PreTrainedTokenizerFast, task: str, several: Sequence[text_rows.Row]) -> build.Pairs:
    """Token numbers of prompts and answers."""
    prompts = tokenizer(asked(task, several), truncation=True)["input_ids"]
    answers = tokenizer([row["label"] for row in several])["input_ids"]
    return list(zip(prompts, answers, strict=True))


def train_base(data: Path, tokenizer: PreTrainedTokenizerFast, seed: int, file: Path) -> T5ForConditionalGeneration:
    """All sets at once, each as often."""
    torch.manual_seed(seed)
    model = build.make_model(len(tokenizer), SHAPE)
    pairs = [encode(tokenizer, task, read(data, task).train) for task in TASKS]

    def loss(step: int) -> Tensor:
        drawn = random.Random(seed * 1_000_003 + step)
        return value(model.eval(), [drawn.choice(drawn.choice(pairs)) for _ in range(BASE_BATCH)])

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
    tasks: dict[str, object] = {}
    for task in TASKS:
        file = f"data/{task}.jsonl.gz"
        text_rows.write_splits(read(data, task), out / file)
        source = {"jsonl": file, "input": PROMPTS[task], "target": "{label}"}
        tasks[task] = {"expert": f"experts/{task}", "metric": "exact_match"} | {
            name: source | {"split": name} for name in text_rows.SPLITS
        }
    text_rows.write_suite(out / "suite.yaml", "real-texts", "A small T5 and six experts on real texts.", tasks)


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

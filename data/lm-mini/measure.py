"""Exact match on the test texts with transformers alone: ``python data/lm-mini/measure.py [--suite DIR] [FOLDER...]``.

Base, simple average, Task Arithmetic 0.3, experts, and every further model folder that is named.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
from pathlib import Path

import torch
from build import HERE, PROMPTS, TASKS, load
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3ForCausalLM

from featcal.system.formatting import percent

Model = Qwen3ForCausalLM


def task_arithmetic(base: Model, experts: list[Model], scale: float) -> Model:
    """The base and ``scale`` times the sum of what the experts changed, rounded to fp16 as it would be stored."""
    merged = copy.deepcopy(base)
    others = [dict(expert.named_parameters()) for expert in experts]
    with torch.no_grad():
        for name, weight in merged.named_parameters():
            start = weight.clone()
            weight += scale * sum(other[name] - start for other in others)
            weight.copy_(weight.half())
    return merged


def exact_match(model: Model, tokenizer: PreTrainedTokenizerBase, suite: Path, task: str, split: str) -> float:
    """Share of greedy answers that are the right text."""
    with gzip.open(suite / f"{task}.jsonl.gz", "rt") as lines:
        rows = [row for row in map(json.loads, lines) if row["split"] == split]
    prompts = [PROMPTS[task].format(**row) for row in rows]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    said = model.generate(**batch, max_new_tokens=24, do_sample=False)[:, batch["input_ids"].shape[1] :]
    answers = tokenizer.batch_decode(said, skip_special_tokens=True)
    return sum(answer == row["label"] for answer, row in zip(answers, rows, strict=True)) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path, nargs="*")
    parser.add_argument("--suite", type=Path, default=HERE)
    parser.add_argument("--split", default="test")
    arguments = parser.parse_args()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.suite / "base")
    base = load(arguments.suite / "base")
    experts = {task: load(arguments.suite / "experts" / task) for task in TASKS}
    average = task_arithmetic(base, list(experts.values()), 1 / len(experts))
    table = {
        "base": dict.fromkeys(TASKS, base),
        "simple average": dict.fromkeys(TASKS, average),
        "Task Arithmetic 0.3": dict.fromkeys(TASKS, task_arithmetic(base, list(experts.values()), 0.3)),
        "experts": experts,
    } | {folder.name: dict.fromkeys(TASKS, load(folder)) for folder in arguments.models}
    print(" | ".join(["model", *TASKS, "average"]))
    for name, models in table.items():
        scores = [exact_match(models[t], tokenizer, arguments.suite, t, arguments.split) for t in TASKS]
        print(" | ".join([name, *(percent(score) for score in [*scores, sum(scores) / len(scores)])]), flush=True)


if __name__ == "__main__":
    main()

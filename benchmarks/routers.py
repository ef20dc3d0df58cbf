"""Measure what calibrated routers bring: ``python benchmarks/routers.py DIR [--seeds 0,1,2]``.

Trains a mixture per seed with the texts and steps of `lm-mini` (8 experts of inner width 96 in every block, of which a
token passes 2, and a loss for an even load) into DIR, about seven minutes of one core each; goes on where it was
stopped. Every one is calibrated by every recipe, with its routers and without. Agreement is the share of the experts
that a task's expert chooses for the tokens of its test texts, in all blocks, which the model chooses too.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import featcal
from featcal.calibration.calibrate import config_for
from featcal.family.opening import batches_of
from featcal.models.adapter import Batch, walking
from featcal.models.capture import capture_inputs
from featcal.models.families.mixture import SHARES
from featcal.models.lane import run_block
from featcal.system.resources import data_path

sys.path.insert(0, str(data_path("lm-mini")))
import build

RECIPES, TEXTS = ("paper", "refined", "informed"), 128
BALANCE = 0.01
"""Weight of the loss for an even load."""


def train(out: Path, seed: int) -> None:
    """Train base and experts as `data/lm-mini/build.py` does, with another kind of model."""
    plain_loss: Callable[..., Tensor] = build.loss_of
    mixture = {"moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    build.SHAPE = {**build.SHAPE, **mixture, "decoder_sparse_step": 1, "mlp_only_layers": []}
    build.Qwen3Config, build.Qwen3ForCausalLM = Qwen3MoeConfig, Qwen3MoeForCausalLM

    def balanced_loss(model: Any, pairs: Any) -> Tensor:
        seen: list[Any] = []

        def call(**inputs: Any) -> Any:
            seen.append(model(**inputs, output_router_logits=True))
            return seen[-1]

        return plain_loss(call, pairs) + BALANCE * seen[-1].aux_loss

    build.loss_of = balanced_loss
    (out / "base").mkdir(parents=True, exist_ok=True)
    build.write_texts(out)
    tokenizer = build.make_tokenizer()
    build.t5_mini.write_tokenizer(tokenizer, out / "base")
    for name in ("base", *(f"experts/{task}" for task in build.TASKS)):
        if not (out / name / "model.safetensors").is_file():
            made = (
                build.train_base(tokenizer, seed) if name == "base" else build.train_expert(out, Path(name).name, seed)
            )
            save(made.half(), out / name)
    build.loss_of = plain_loss
    shutil.copy(data_path("lm-mini") / "suite.yaml", out)


def save(model: Any, folder: Path) -> None:
    """Write a model whose weights, which say that it is done, appear last and whole."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    model.save_pretrained(unfinished)
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(unfinished.iterdir(), key=lambda one: one.name == "model.safetensors"):
        file.replace(folder / file.name)
    unfinished.rmdir()


def chosen_experts(family: featcal.Family, model: Any, batches: list[Batch]) -> Iterator[Tensor]:
    """Yield, for every batch and block, which experts of the mixture a model chooses: `[tokens, experts]`."""
    (stage,), place = family.adapter.stages, family.compute.place
    with walking(family.adapter):
        for batch in batches:
            call, counted = stage.first_call(place(model.read(stage.outer)), batch, None), batch["attention_mask"] > 0
            for block in stage.blocks:
                asked = {name: mixture.get_submodule(SHARES) for name, mixture in block.mixtures.items()}
                with capture_inputs(asked) as shares:
                    call = run_block(stage, block, block.local(place(model.read(block.names))), call)
                yield from (one[counted.flatten()] > 0 for one in shares.values())


def agreement(family: featcal.Family, model: Any) -> float:
    """Return the share of every expert's choices that are the model's too, averaged over tasks."""
    found = []
    for task, expert in family.experts.items():
        batches = batches_of(family.samples(task, "test", TEXTS, 42), TEXTS, family.compute.device)
        both = [*zip(chosen_experts(family, expert, batches), chosen_experts(family, model, batches), strict=True)]
        found.append(sum(int((a & b).sum()) for a, b in both) / sum(int(a.sum()) for a, _ in both))
    return statistics.mean(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for seed in options.seeds.split(","):
        train(options.out / seed, int(seed))
        session = featcal.Session(featcal.open_family(featcal.load_suite(options.out / seed / "suite.yaml"), "cpu"))
        family = session.family
        rows: dict[str, Any] = {"merged": family.merged}
        for recipe in RECIPES:
            for routers in (False, True):
                made = featcal.calibrate(family, config_for(family, recipe=recipe, routers=routers))
                rows[f"{recipe}, with routers" if routers else recipe] = made.weights
        for name, model in rows.items():
            tasks = featcal.measure_drift(session, model, split="test", samples=TEXTS).tasks.values()
            drift = statistics.mean(float(task.layers[-1].relative_drift) for task in tasks)
            score = 100 * featcal.evaluate(session, model).average
            found[name].append((drift, 100 * agreement(family, model), score))
            print(seed, name, *(f"{value:.3f}" for value in found[name][-1]), flush=True)
    print("\n| | final drift | experts chosen alike | exact match |\n|---|---|---|---|")
    for name, own in found.items():
        drift, alike, score = (statistics.mean(values) for values in zip(*own, strict=True))
        print(f"| {name} | {drift:.3f} | {alike:.1f} | {score:.1f} |")


if __name__ == "__main__":
    main()

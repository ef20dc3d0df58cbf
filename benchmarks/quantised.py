"""Measure the cost of rounding to 8 and 4 bits, in one pass and afterwards: ``python benchmarks/quantised.py [SUITE]``.

Rows are one calibration each: as it is, rounded while it is solved (`quantize`), and rounded afterwards, every weight
for itself or by GPTQ (its published order of columns and damping, written here on hooks alone) on the calibrated model
and the same samples. Where llmcompressor can be imported, its own GPTQ is a row too, read back from the folder that it
writes. Scores are of the whole test split in %, drift of final features on 64 validation samples; both are means over
calibration seeds.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import featcal
from featcal.calibration.calibrate import config_for
from featcal.calibration.column_rounding import round_to_nearest
from featcal.formats.grid import QuantizationGrid

SEEDS = (42, 43, 44)
READ = ("input_ids", "attention_mask", "token_type_ids")
DAMPING = 0.01
"""Share of the mean diagonal that GPTQ adds to its matrix (Frantar et al., section 3.3)."""


def gptq(weight: Tensor, moments: Tensor, grid: QuantizationGrid) -> Tensor:
    """Round a weight `[m, d]` as GPTQ publishes it, columns from the first to the last; float64."""
    weight, columns = weight.double().clone(), weight.shape[1]
    damped = moments + DAMPING * moments.diagonal().mean() * torch.eye(columns, dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    rounded, size = torch.empty_like(weight), grid.columns(columns)
    scale = grid.scale(weight)
    for j in range(columns):
        if j % size == 0:
            scale = grid.scale(weight[:, j : j + size])
        rounded[:, j] = grid.round(weight[:, j : j + 1], scale)[:, 0]
        error = (weight[:, j] - rounded[:, j]) / upper[j, j]
        weight[:, j + 1 :] -= error[:, None] * upper[j, j + 1 :]
    return rounded


def inputs_of(maps: dict[str, nn.Linear], model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what the maps are given on a batch, by name."""
    seen: dict[str, Tensor] = {}
    handles = [
        one.register_forward_pre_hook(lambda _, given, name=name: seen.__setitem__(name, given[0]))
        for name, one in maps.items()
    ]
    model(**batch)
    for handle in handles:
        handle.remove()
    return seen


def blocks_of(model: Any) -> Any:
    """Return the blocks of a decoder, or of an encoder such as BERT's."""
    return model.encoder.layer if hasattr(model, "encoder") else model.model.layers


def load(folder: Path) -> Any:
    """Load a written model in float32, by the class that its configuration names."""
    kind, _ = kind_of(folder)
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def kind_of(folder: Path) -> tuple[Any, Any]:
    """Return the class that a model's configuration names, and the configuration."""
    config = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, config.architectures[0]), config


def has_known_blocks(folder: Path) -> bool:
    """Return whether `blocks_of` finds the blocks of a model like the one in a folder."""
    kind, config = kind_of(folder)
    with torch.device("meta"):
        model = kind(config)
    try:
        blocks_of(model)
    except AttributeError:
        return False
    return True


def round_afterwards(model: Any, batches: list[dict[str, Tensor]], grid: QuantizationGrid) -> None:
    """Round the linear maps by GPTQ, block by block; what a map is given comes from rounded blocks."""
    for block in blocks_of(model):
        maps = {name: one for name, one in block.named_modules() if isinstance(one, nn.Linear)}
        moments = {name: torch.zeros(one.in_features, one.in_features).double() for name, one in maps.items()}
        for batch in batches:
            for name, given in inputs_of(maps, model, batch).items():
                rows = given[batch["attention_mask"].bool()].double()
                moments[name] += rows.T @ rows
        for name, one in maps.items():
            one.weight.copy_(gptq(one.weight, moments[name], grid))


def round_by_llmcompressor(source: Path, out: Path, batches: list[dict[str, Tensor]], grid: QuantizationGrid) -> None:
    """Write a folder that llmcompressor's GPTQ makes of one, at its defaults."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    texts = [
        ids[m.bool()].tolist() for b in batches for ids, m in zip(b["input_ids"], b["attention_mask"], strict=True)
    ]
    args = QuantizationArgs(num_bits=grid.bits, type="int", symmetric=True, strategy="group", group_size=grid.group)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    oneshot(
        model=transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32),
        dataset=Dataset.from_list([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in texts]),
        recipe=GPTQModifier(config_groups={"group_0": scheme}, ignore=["lm_head"]),
        num_calibration_samples=len(texts),
        max_seq_length=max(map(len, texts)),
        tokenizer=transformers.AutoTokenizer.from_pretrained(source),
        output_dir=str(out),
    )


def rows(
    session: featcal.Session, asked: dict[str, Any], grid: QuantizationGrid, place: Path
) -> Iterator[tuple[str, Any]]:
    """Yield every row's name and model: a name, or a folder."""
    family = session.family
    config = config_for(family, **asked)
    plain = place / "calibrated"
    featcal.calibrate(family, config).save(plain)
    yield "calibrated", str(plain)
    for kind in ("int8", "int4", "int8-nearest", "int4-nearest"):
        made = featcal.calibrate(family, config_for(family, quantize=kind, group_size=grid.group, **asked))
        yield kind, made
    batches = [
        {name: drawn.inputs[name] for name in drawn.inputs if name in READ}
        for task in family.suite.tasks
        for drawn in [family.samples(task, "calibration", config.samples, config.seed)]
    ]
    for name in ("int4 nearest afterwards", "int4 GPTQ afterwards"):
        model = load(plain)
        with torch.no_grad():
            if "GPTQ" in name:
                round_afterwards(model, batches, grid)
            else:
                for one in blocks_of(model).modules():
                    if isinstance(one, nn.Linear):
                        one.weight.copy_(round_to_nearest(one.weight, grid, torch.float32)[0])
        out = place / name.replace(" ", "-")
        model.save_pretrained(out)
        yield name, str(out)
    if importlib.util.find_spec("llmcompressor") and "CausalLM" in type(load(plain)).__name__:
        with torch.enable_grad():
            round_by_llmcompressor(plain, place / "llmcompressor", batches, grid)
        yield "int4 llmcompressor's GPTQ afterwards", str(place / "llmcompressor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", nargs="?", default="lm-mini")
    parser.add_argument("--recipe", default="informed")
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    options = parser.parse_args()
    suite = featcal.load_suite(options.suite)
    if not has_known_blocks(featcal.open_family(suite).container.folder):
        parser.error(f"{options.suite}: GPTQ is written here for decoders and for encoders such as BERT's alone")
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in options.seeds:
        session = featcal.Session(featcal.open_family(suite))
        asked = {"recipe": options.recipe, "samples": options.samples, "seed": seed}
        with tempfile.TemporaryDirectory() as place:
            for name, model in rows(session, asked, QuantizationGrid(4, options.group_size), Path(place)):
                score = featcal.evaluate(session, model).average
                tasks = featcal.measure_drift(session, model).to_json()["tasks"].values()
                drift = statistics.mean(task["final"]["drift"] for task in tasks)
                found.setdefault(name, []).append((100 * score, drift))
                print(seed, name, *(f"{one:.4f}" for one in found[name][-1]), flush=True)
    print(f"\n| {options.recipe}, groups of {options.group_size} | average | drift | drift by rounding |")
    print("|---|---|---|---|")
    plain = statistics.mean(drift for _, drift in found["calibrated"])
    for name, own in found.items():
        score, drift = (statistics.mean(values) for values in zip(*own, strict=True))
        print(f"| {name} | {score:.1f} | {drift:.3f} | {drift - plain:+.3f} |")


if __name__ == "__main__":
    main()

"""Does an exported folder mean the same model to transformers 4.57? Run by `make compat`, in an environment of its own.

python tests/export/compat_transformers4.py write FOLDER  # with featcal installed: export, save what 5 computes
python tests/export/compat_transformers4.py read FOLDER   # with any transformers: load, compute, compare
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel, CLIPVisionModel

TEXT = "yes w3 no yes w26 what </s>"


def outputs(folder: Path) -> dict[str, Any]:
    """What a model computes on fixed inputs, and what its tokenizer and its image processor make of theirs."""
    family = folder.name.split("-")[0]
    if family == "decoder":
        return logits(folder, (folder / "class.txt").read_text())
    if family == "pictured":
        return seen(folder, (folder / "class.txt").read_text())
    if family == "encoder":
        return classes(folder, (folder / "class.txt").read_text())
    found: dict[str, Any] = images(folder) if family == "clip" else logits(folder, family)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer([TEXT, "yes"], padding=tokenizer.pad_token is not None)
    return found | {f"tokens {name}": list(ids) for name, ids in encoded.items()}


def images(folder: Path) -> dict[str, Any]:
    """Pooled features of noise by both classes of CLIP, and the settings of the image processor."""
    processor = CLIPImageProcessor.from_pretrained(folder)
    crop, side = processor.crop_size["height"], getattr(processor.size, "shortest_edge", None)
    found: dict[str, Any] = {"processor": (list(processor.image_mean), int(processor.resample), crop)}
    assert side is None or side == processor.size["shortest_edge"]
    for loader in (CLIPModel, CLIPVisionModel):
        model = complete(loader, folder, torch.float32)
        tower = getattr(model, "vision_model", model)
        pixels = torch.randn(4, 3, crop, crop, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            found[loader.__name__] = tower(pixel_values=pixels).pooler_output
    return found


def logits(folder: Path, family: str) -> dict[str, Any]:
    """Scores on fixed token ids beyond every length that a rope setting names; tensors in the dtype that is loaded, if
    they are called as in the file: version 5 stacks the experts of a mixture."""
    named = {"t5": "T5ForConditionalGeneration", "llama": "LlamaForCausalLM", "lm": "Qwen3ForCausalLM"}
    loader = named.get(family, family)
    length = 70 if family in ("t5", "llama") else 15  # GPT-2's table of positions ends there
    ids = torch.randint(3, 32, (2, length), generator=torch.Generator().manual_seed(0))
    answers = {"labels": ids[:, :5].contiguous()} if family == "t5" else {}
    model = complete(getattr(transformers, loader), folder, torch.float32)
    with torch.no_grad():
        scores = model(input_ids=ids, attention_mask=torch.ones_like(ids), **answers).logits
    loaded = complete(getattr(transformers, loader), folder, "auto").state_dict()
    names = {name for file in folder.glob("*.safetensors") for name in load_file(file)}
    return {"logits": scores, "stored": {name: loaded[name] for name in sorted(names & loaded.keys())}}


def classes(folder: Path, name: str) -> dict[str, Any]:
    """Scores of a classifier on fixed inputs of the kind that it takes."""
    model = complete(getattr(transformers, name), folder, torch.float32)
    generator = torch.Generator().manual_seed(0)
    if hasattr(model.config, "image_size"):
        side = model.config.image_size
        inputs = {"pixel_values": torch.randn(4, 3, side, side, generator=generator)}
    else:
        ids = torch.randint(3, 32, (2, 12), generator=generator)
        inputs = {"input_ids": ids, "attention_mask": (torch.arange(12) < torch.tensor([[12], [7]])).long()}
    with torch.no_grad():
        found = model(**inputs)
    return {"logits": found.logits if "logits" in found else found.pooler_output}


def seen(folder: Path, name: str) -> dict[str, Any]:
    """Scores on a text with a picture of two by four merged patches; version 4 finds its tokens by itself."""
    model = complete(getattr(transformers, name), folder, torch.float32)
    ids = torch.cat([torch.tensor([3]), torch.full((8,), 5), torch.arange(7, 20)])[None]
    patches = torch.randn(32, 96, generator=torch.Generator().manual_seed(0))
    kinds = {"mm_token_type_ids": (ids == 5).int()} if transformers.__version__.startswith("5") else {}
    with torch.no_grad():
        given = {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 8]]), **kinds}
        return {"logits": model(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits}


def complete(loader: Any, folder: Path, dtype: Any) -> Any:
    """The model; exits if a weight would be re-initialised."""
    plain = (
        {"attn_implementation": "eager"} if folder.name.startswith(("decoder", "encoder", "pictured")) else {}
    )  # of 4 only that has soft caps
    model, report = loader.from_pretrained(folder, output_loading_info=True, dtype=dtype, **plain)
    if report["missing_keys"] or report["mismatched_keys"]:
        sys.exit(f"{folder}: {transformers.__version__} re-initialises {sorted(report['missing_keys'])[:4]}")
    return model.eval()


def difference(wanted: Any, found: Any) -> float:
    """Largest difference of tensors, relative to their largest value; infinite where anything else is not equal."""
    if isinstance(wanted, dict):
        return max((difference(wanted[name], found.get(name)) for name in wanted), default=0.0)
    if isinstance(wanted, torch.Tensor) and isinstance(found, torch.Tensor) and wanted.dtype == found.dtype:
        return float((wanted - found).abs().max() / wanted.abs().max().clamp_min(1e-30))
    return 0.0 if type(wanted) is type(found) and wanted == found else float("inf")


def write(root: Path) -> None:
    """Export every kind of model that version 5 saves, and a calibrated one."""
    from version5 import KINDS, write_saved_by_5

    import featcal
    from featcal.export.write import rewrite

    for kind in KINDS:
        write_saved_by_5(root / "saved" / kind, kind)
        rewrite(root / "saved" / kind, root / kind)
    featcal.calibrate(featcal.load_suite("clip-mini"), featcal.CalibrationConfig(samples=16)).save(root / "clip-mini")
    for suite in ("t5-mini", "lm-mini"):
        featcal.calibrate(featcal.load_suite(suite), featcal.CalibrationConfig(samples=4)).save(root / suite)
    told = [*write_told(root)]
    minis = [root / f"{kind}-mini" for kind in ("clip", "t5", "lm")]
    for folder in (*(root / kind for kind in KINDS), *minis, *told):
        torch.save(outputs(folder), folder / "outputs.pt")


def write_told(root: Path) -> Iterator[Path]:
    """A calibrated model of every architecture of the tables of facts, with the name of its class beside it."""
    from tiny_decoders import ROWS, tiny_decoder
    from tiny_encoders import VARIANTS, tiny_encoder
    from tiny_vision_language import ROWS as PICTURED
    from tiny_vision_language import write_pictured

    import featcal
    from featcal.testing.trial import write_trial

    models = {f"decoder-{kind}": (facts, tiny_decoder(facts)) for kind, facts in ROWS.items()}
    models |= {f"encoder-{kind}": (facts, tiny_encoder(facts, **own)) for kind, (facts, own) in VARIANTS.items()}
    for name, (facts, model) in models.items():
        trial, folder = write_trial(model, facts, root / "saved" / name), root / name
        featcal.calibrate(trial.family, trial.config()).save(folder)
        (folder / "class.txt").write_text(str(facts.model))
        yield folder
    for kind, pictured in PICTURED.items():
        family, folder = write_pictured(pictured, root / "saved" / f"pictured-{kind}").family, root / f"pictured-{kind}"
        featcal.calibrate(family).save(folder)
        (folder / "class.txt").write_text(str(pictured.model))
        yield folder


def main() -> None:
    action, root = sys.argv[1], Path(sys.argv[2])
    if action == "write":
        write(root)
        return
    differ = []
    for file in sorted(root.glob("*/outputs.pt")):
        named = file.parent / "class.txt"
        if named.is_file() and not hasattr(transformers, named.read_text()):
            print(f"{file.parent.name}: transformers {transformers.__version__} has no {named.read_text()}")
            continue
        ours, theirs = outputs(file.parent), torch.load(file, weights_only=True)
        found = {name: difference(theirs[name], ours.get(name)) for name in theirs}
        print(f"{file.parent.name}: " + ", ".join(f"{name} {value:.1e}" for name, value in found.items()))
        differ += [f"{file.parent.name} ({name})" for name, value in found.items() if not value <= 1e-5]
    if differ:
        sys.exit(f"transformers {transformers.__version__} computes something else: {', '.join(differ)}")
    print(f"transformers {transformers.__version__} computes the same")


if __name__ == "__main__":
    main()

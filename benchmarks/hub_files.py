"""Random models and sets of samples in files as the Hub has them, for benchmarks of whole commands.

A CLIP with text tower, tokenizer and processor and vision-only experts, on pictures in folders and in Parquet; or a
FLAN-T5, or a decoder, on the texts of an embedded suite. All is written once below a work folder and used again.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import families
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as Pillow
from safetensors.torch import save_file
from torch import nn

from featcal.system.resources import data_path

Pictures = NDArray[np.uint8]
"""`[n, H, W, 3]`."""
CLASSES = 10
JPEG, PNG = (200, 500), 32
"""Least and largest side of a picture in JPEG, side of one in PNG."""
NATURAL = -1.0
"""Power of the frequency by which amplitudes of natural pictures fall."""


@dataclass(frozen=True)
class Files:
    """Files that a suite is made of."""

    base: Path
    experts: Mapping[str, Path]
    data: Mapping[str, str]
    """By task what `featcal suite init --data` is given."""


def write_clip(work: Path, shape: families.ClipShape, tasks: int, count: int, source: Path | None) -> Files:
    """Write a CLIP, its experts and `count` pictures a split for every task.

    Of four tasks two have JPEG and two PNG, of each two one has folders and one Parquet.

    Args:
        source: folder of `.npz` files with pictures (`train_x`, `train_y`), one for every task; None for noise with the
            spectrum of natural pictures.
    """
    root = work / f"hub-clip-{shape.width}x{shape.blocks}-{tasks}x{count}-{'given' if source else 'made'}"

    def write(folder: Path) -> None:
        from transformers import CLIPConfig, CLIPModel

        mini = data_path("clip-mini") / "base"
        text = json.loads((mini / "config.json").read_text(encoding="utf-8"))["text_config"]
        large = {"vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
        large |= {"num_attention_heads": 8, "max_position_embeddings": 77, "projection_dim": 512}
        text |= large if shape == families.B32 else {"projection_dim": 512}
        config = {"architectures": ["CLIPModel"], "model_type": "clip", "projection_dim": 512, "text_config": text}
        config["vision_config"] = vision = shape.config()
        with torch.device("meta"):
            model = CLIPModel(CLIPConfig(**config))
        _write_models(folder, model, config, mini, tasks, vision, lambda name: name.startswith("vision_model."))
        side = {"size": {"shortest_edge": shape.image}, "crop_size": {"height": shape.image, "width": shape.image}}
        processor = json.loads((mini / "preprocessor_config.json").read_text(encoding="utf-8")) | side
        (folder / "base" / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
        for task, pictures in enumerate(_sets_of_pictures(tasks, 2 * count, source)):
            _write_pictures(folder / "data" / f"t{task}", task, pictures)

    families._once(root, write)
    return Files(root / "base", _experts(root, tasks), {f"t{i}": str(root / "data" / f"t{i}") for i in range(tasks)})


def write_text(work: Path, family: str, tasks: int, small: bool) -> Files:
    """Write a FLAN-T5-base ("t5") or a decoder of 0.6 billion parameters ("decoder"), and its experts; their texts are
    those of an embedded suite."""
    suite = {"t5": "t5-mini", "decoder": "lm-mini"}[family]
    root, mini = work / f"hub-{family}-{tasks}{'-small' if small else ''}", data_path(suite)

    def write(folder: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

        config = json.loads((mini / "base" / "config.json").read_text(encoding="utf-8"))
        config |= {} if small else {"t5": _FLAN_T5_BASE, "decoder": _QWEN3_06B}[family]
        made_by: Any = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
        kind = config["model_type"]
        with torch.device("meta"):
            model = made_by.from_config(AutoConfig.for_model(**config))
        assert kind == model.config.model_type
        _write_models(folder, model, config, mini / "base", tasks, config, lambda name: True)

    families._once(root, write)
    texts = mini / "sentiment.jsonl.gz"
    source = f'{{jsonl: {texts}, split: calibration, input: "{{text}}", target: "{{label}}"}}'
    data = {f"t{task}": source for task in range(tasks)}
    return Files(root / "base", _experts(root, tasks), data)


_FLAN_T5_BASE = {
    "d_model": 768, "d_ff": 2048, "d_kv": 64, "num_heads": 12, "num_layers": 12, "num_decoder_layers": 12,
    "vocab_size": 32128,
}  # fmt: skip
_QWEN3_06B = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip


def _experts(root: Path, tasks: int) -> dict[str, Path]:
    return {f"t{task}": root / "experts" / f"t{task}" for task in range(tasks)}


def _write_models(
    folder: Path,
    model: nn.Module,
    config: Mapping[str, Any],
    mini: Path,
    tasks: int,
    own_config: Mapping[str, Any],
    is_own: Callable[[str], bool],
) -> None:
    """Write a base with the other files of an embedded one, and experts.

    Args:
        own_config: content of an expert's `config.json`.
        is_own: says whether an expert has a tensor.
    """
    noise = torch.Generator().manual_seed(0)
    base = {name: families._random(name, tensor.shape, noise) for name, tensor in model.named_parameters()}
    shutil.copytree(mini, folder / "base", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    save_file(base, folder / "base" / "model.safetensors", {"format": "pt"})
    (folder / "base" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for task in range(tasks):
        place = folder / "experts" / f"t{task}"
        place.mkdir(parents=True)
        own = {name: families._moved(tensor, noise) for name, tensor in base.items() if is_own(name)}
        save_file(own, place / "model.safetensors", {"format": "pt"})
        (place / "config.json").write_text(json.dumps(own_config), encoding="utf-8")


def _sets_of_pictures(tasks: int, count: int, source: Path | None) -> Iterator[tuple[Pictures, NDArray[np.int64]]]:
    """Yield `count` pictures and their classes for every task."""
    files = [] if source is None else sorted(source.glob("*.npz"))[:tasks]
    for file in files:
        with np.load(file) as content:
            yield content["train_x"][:count], content["train_y"][:count]
    for task in range(len(files), tasks):
        drawn = np.random.default_rng(task)
        frequency = np.hypot(np.fft.fftfreq(64)[:, None], np.fft.rfftfreq(64)[None]).clip(1 / 64)
        waves = np.fft.rfft2(drawn.standard_normal((count, 3, 64, 64))) * frequency**NATURAL
        pictures = np.fft.irfft2(waves)
        pictures = 128 + 48 * pictures / pictures.std(axis=(1, 2, 3), keepdims=True)
        yield pictures.clip(0, 255).astype(np.uint8).transpose(0, 2, 3, 1), drawn.integers(0, CLASSES, count)


def _write_pictures(folder: Path, task: int, given: tuple[Pictures, NDArray[np.int64]]) -> None:
    """Write one set with the splits "train" and "test"."""
    drawn, half = np.random.default_rng(task), len(given[0]) // 2
    for split, part in (("train", slice(half)), ("test", slice(half, None))):
        rows = []
        for number, (picture, label) in enumerate(zip(*(one[part] for one in given), strict=True)):
            kind = "png" if task % 4 > 1 else "jpg"
            size = (PNG, PNG) if kind == "png" else tuple(drawn.integers(JPEG[0], JPEG[1] + 1, 2).tolist())
            content = io.BytesIO()
            resized = Pillow.fromarray(picture).resize(size, Pillow.Resampling.BICUBIC)
            resized.save(content, "PNG" if kind == "png" else "JPEG", quality=90)
            rows.append((content.getvalue(), int(label), f"{number}.{kind}"))
        if task % 2:
            _write_parquet(folder, split, rows)
            continue
        for picture_bytes, label, name in rows:
            file = folder / split / f"class {label}" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(picture_bytes)


def _write_parquet(folder: Path, split: str, rows: list[tuple[bytes, int, str]]) -> None:
    """Write a file of pictures as `datasets` does, with the names of the classes in its schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = [f"class {label}" for label in range(1 + max(label for _, label, _ in rows))]
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    schema = pa.schema(
        [("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), ("label", pa.int64())],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    cells = [{"image": {"bytes": content, "path": name}, "label": label} for content, label, name in rows]
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(cells, schema), folder / f"{split}-00000-of-00001.parquet", row_group_size=100)

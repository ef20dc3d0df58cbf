"""Tiny models made on the fly: a CLIP with text tower, tokenizer and processor, and experts near it."""

from __future__ import annotations

import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"  # no test may look outside
os.environ["STREAMLIT_BROWSER_GATHER_USAGE_STATS"] = "false"
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ["FEATCAL_CACHE"] = tempfile.mkdtemp(prefix="featcal-tests-")  # never the user's own

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import cpu_seconds
import pytest
import torch
import yaml
from command_line import Run
from safetensors.torch import load_file, save_file
from torch import Tensor

from featcal.evaluation import generation_check
from featcal.family.opening import Family, open_family
from featcal.formats.weights import InMemory, Overlay
from featcal.models.compute import Compute
from featcal.models.families.clip import ClipVision
from featcal.samples.prepare import Preparation
from featcal.suite.schema import Suite, load_suite

torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(cpu_seconds)


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Content of files by its size: compressed bytes can hold the time, and every process must see the same names."""
    return f"{len(val)} bytes" if isinstance(val, bytes) else None


def clip_inputs(folder: Path) -> Preparation:
    """What makes inputs of pictures with the image processor in a folder, as for a CLIP."""
    return Preparation(folder, "pixels", ClipVision.image_processor)


def saying(cases: Mapping[str, Any]) -> list[Any]:
    """Parameters (given, message) of a table by message, which names the case; a list holds several that are given."""
    return [
        pytest.param(one, message, id=message if len(several) == 1 else f"{message} ({number})")
        for message, given in cases.items()
        for several in [given if isinstance(given, list) else [given]]
        for number, one in enumerate(several)
    ]


SIDE, WIDTH, BLOCKS, CLASSES = 12, 16, 3, ("cat", "dog", "fish")
TASKS = ("pets", "signs")
TOKENS = generation_check.TOKENS


def write_base(folder: Path) -> dict[str, Tensor]:
    """A full CLIP checkpoint folder with random weights; returns its tensors."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, PreTrainedTokenizerFast

    words = ["<pad>", "<unk>", "<bos>", "<eos>", "a", "photo", "of", ".", *CLASSES]
    vision = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": BLOCKS}
    vision |= {"num_attention_heads": 2, "image_size": SIDE, "patch_size": 4}
    text = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"vocab_size": len(words), "max_position_embeddings": 12}
    text |= {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(vision_config=vision, text_config=text, projection_dim=8))
    with torch.no_grad():  # as built, biases are 0 and norms 1: nothing that a test could tell apart
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
            elif "vision_model.encoder" in name:
                parameter *= 8
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        "<bos> $A <eos>", special_tokens=[("<bos>", 2), ("<eos>", 3)]
    )
    specials = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **specials, model_max_length=12).save_pretrained(folder)
    size = {"height": SIDE, "width": SIDE}
    CLIPImageProcessor(do_resize=False, do_center_crop=False, size=size, crop_size=size).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def write_expert(folder: Path, base: Mapping[str, Tensor], base_config: Path, seed: int, distance: float) -> None:
    """A vision-tower folder near the base: every tensor moved by noise of relative size `distance`."""
    generator = torch.Generator().manual_seed(seed)
    tower = {}
    for name, tensor in base.items():
        if name.startswith("vision_model.") and tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            tower[name] = tensor + distance * noise * tensor.norm() / noise.norm()
    folder.mkdir(parents=True)
    save_file(tower, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((base_config / "config.json").read_text())["vision_config"]
    config |= {"architectures": ["CLIPVisionModel"], "model_type": "clip_vision_model", "projection_dim": 8}
    (folder / "config.json").write_text(json.dumps(config))


def write_suite(root: Path, distance: float = 0.3) -> Path:
    """A whole suite folder; returns its suite file."""
    base = write_base(root / "base")
    generator = torch.Generator().manual_seed(7)
    samples: dict[str, Tensor] = {}
    tasks: dict[str, Any] = {}
    for seed, task in enumerate(TASKS):
        write_expert(root / "experts" / task, base, root / "base", seed + 1, distance)
        for split in ("calibration", "validation", "test"):
            samples[f"{task}.{split}"] = torch.randn(12, 3, SIDE, SIDE, generator=generator) + seed
            samples[f"{task}.{split}.y"] = torch.randint(0, len(CLASSES), (12,), generator=generator)
        sources = {
            split: {"tensors": "samples.safetensors", "key": f"{task}.{split}", "labels": f"{task}.{split}.y"}
            for split in ("calibration", "validation", "test")
        }
        tasks[task] = {"expert": f"experts/{task}", "classes": list(CLASSES), **sources}
    save_file(samples, root / "samples.safetensors")
    merged = {"method": "task-arithmetic", "scale": 0.5}
    file = root / "suite.yaml"
    file.write_text(yaml.safe_dump({"name": "tiny", "base": "base", "merged": merged, "tasks": tasks}))
    return file


@pytest.fixture(scope="session", autouse=True)
def few_tokens() -> Iterator[None]:
    """Every calibration of a text model that is written has its generation checked, whose 64 tokens per answer take
    four times as long as all else of a tiny one: a few show as much of what is not about them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(generation_check, "TOKENS", 4)
        yield


@pytest.fixture
def all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as users get, where answers themselves are looked at."""
    monkeypatch.setattr(generation_check, "TOKENS", TOKENS)


@pytest.fixture(scope="session")
def tiny_suite_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Suite file of the tiny models; shared, so never to be changed."""
    return write_suite(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def instant_maps() -> Iterator[None]:
    """The app without its process for maps, pages whole at once; what it keeps of a suite lasts for a module, as it
    does for visitors."""
    from functools import cache

    import streamlit
    from app_pages import InstantMaps
    from streamlit.components.v2 import manifest_scanner
    from streamlit.runtime.scriptrunner.script_cache import ScriptCache
    from streamlit.testing.v1 import local_script_runner

    from app import afterwards, state

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(state, "MapWorker", InstantMaps)
        patched.setattr(
            afterwards, "draw_later", lambda key, version, meanwhile, draw: draw()
        )  # no browser asks for it
        # every AppTest would look through all installed packages again, which takes longer than most pages
        patched.setattr(manifest_scanner, "scan_component_manifests", cache(manifest_scanner.scan_component_manifests))
        patched.setattr(local_script_runner, "ScriptCache", cache(ScriptCache))
        yield
    streamlit.cache_resource.clear()


@pytest.fixture
def own_suite_file(tmp_path: Path, tiny_suite_file: Path) -> Path:
    """A copy of the tiny suite that a test may break."""
    import shutil

    shutil.copytree(tiny_suite_file.parent, tmp_path / "own")
    return tmp_path / "own" / "suite.yaml"


@pytest.fixture(scope="session")
def tiny_suite(tiny_suite_file: Path) -> Suite:
    return load_suite(tiny_suite_file)


@pytest.fixture(scope="session")
def tiny(tiny_suite: Suite) -> Family:
    """The tiny suite opened, float32."""
    return open_family(tiny_suite, device="cpu")


@pytest.fixture(scope="session")
def tiny64(tiny: Family) -> Family:
    """The tiny suite with every tensor in float64, for identities that hold to rounding."""
    return in_float64(tiny)


def in_float64(family: Family) -> Family:
    """The same models resident in float64 and computed in float64."""

    def double(weights: Overlay) -> InMemory:
        return InMemory(weights.label, {name: tensor.double() for name, tensor in weights.replaced.items()})

    held: Any = family.resident()
    return replace(
        family,
        compute=Compute(torch.device("cpu"), torch.float64),
        base=double(held.base),
        merged=double(held.merged),
        experts={task: double(expert) for task, expert in held.experts.items()},
    )


@pytest.fixture
def edit_suite(own_suite_file: Path) -> Callable[[Callable[[dict[str, Any]], None]], Path]:
    """Change the content of a suite file and write it back."""

    def edit(change: Callable[[dict[str, Any]], None]) -> Path:
        content = yaml.safe_load(own_suite_file.read_text())
        change(content)
        own_suite_file.write_text(yaml.safe_dump(content))
        return own_suite_file

    return edit


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process: (exit status, stdout, stderr)."""

    def command(*arguments: object) -> tuple[int, str, str]:
        from featcal import cli

        monkeypatch.setattr(sys, "argv", ["featcal", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return command

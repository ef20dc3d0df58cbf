"""Text towers that are merged too (`text_tower: own`): CLIP's and SigLIP's as a stage of their own, on class prompts of
several lengths; held against the library's forward and against a second computation with hooks alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
import yaml
from lanes import rows
from safetensors.torch import load_file, save_file
from tiny_clip import SIDE, in_float64, write_base
from torch import Tensor
from torch.nn.functional import normalize
from transformers import CLIPModel, PreTrainedTokenizerFast, SiglipModel

from featcal import CalibrationConfig, Family, InputError, calibrate, evaluate, load_suite, measure_drift, open_family
from featcal.calibration.calibrate import calibrate_to_folder, config_for
from featcal.export.write import verify_reload
from featcal.family.opening import batches_of
from featcal.family.outside_tower import note_left_out
from featcal.formats.load_pretrained import load_pretrained
from featcal.formats.weights import InMemory
from featcal.models.adapter import Call, walking
from featcal.models.families.text_tower import TextStage
from featcal.models.features import final_features
from featcal.models.lane import run_block
from featcal.preflight.check import check_suite
from featcal.samples.prompts import prompt_positions
from featcal.session.feature_maps import visible_layers
from featcal.session.session import Session
from featcal.studies.replay.again import replay_record
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import NumericalError
from featcal.testing.reference import ReferenceOptions, refine

TASKS, COUNT, LONGEST = ("left", "right"), 6, 12
CLASSES = {"left": ("cat", "dog of a fish", "fish"), "right": ("photo", "cat dog")}
TEMPLATES = ("a photo of a {} .", "{}")


@dataclass(frozen=True)
class Towers:
    """A suite of whole models near each other, both towers moved."""

    root: Path
    whole: Any
    """Class of the library."""

    @cached_property
    def family(self) -> Family:
        return open_family(load_suite(self.root / "suite.yaml"), "cpu")

    @cached_property
    def exact(self) -> Family:
        """The same in float64."""
        return in_float64(self.family)

    def library(self, folder: str | Path, dtype: torch.dtype = torch.float64) -> Any:
        """As the library loads it, with its own plainest attention."""
        return self.whole.from_pretrained(self.root / folder, dtype=dtype, attn_implementation="eager").eval()

    def prompts(self, task: str) -> list[str]:
        """One with every sample, in the order in which featcal draws them, told without featcal."""
        texts = [template.format(name) for name in CLASSES[task] for template in TEMPLATES]
        return [texts[position % len(texts)] for position in range(COUNT)]

    def ids(self, text: str) -> Tensor:
        """Of one prompt `[1, tokens]`, by the library's tokenizer; SigLIP's padded to its full length."""
        tokenizer = PreTrainedTokenizerFast.from_pretrained(self.root / "base")
        full = {"padding": "max_length", "max_length": LONGEST} if self.whole is SiglipModel else {}
        ids: Tensor = tokenizer(text, return_tensors="pt", **full)["input_ids"]
        return ids


def tiny(whole: Any) -> Any:
    small = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    vision = {**small, "image_size": SIDE, "patch_size": 4}
    text = {**small, "vocab_size": 11, "max_position_embeddings": LONGEST}
    text |= {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    torch.manual_seed(0)
    return whole(whole.config_class(vision_config=vision, text_config=text))


@torch.no_grad()
def moved(model: Any, distance: float, seed: int) -> Any:
    """Every tensor moved by noise of this relative size."""
    generator, other = torch.Generator().manual_seed(seed), deepcopy(model)
    for name, parameter in other.named_parameters():
        if name not in ("logit_scale", "logit_bias", "visual_projection.weight"):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(distance * noise * parameter.norm() / noise.norm())
    return other


@torch.no_grad()
def scattered(model: Any) -> Any:
    """Random weights of a size that makes every layer matter."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            parameter.copy_((1.0 if "norm" in name and name.endswith("weight") else 0.0) + 0.2 * noise)
        elif parameter.ndim > 1:
            parameter.copy_(noise * (1.0 if "embedding" in name else 0.3))
    return model


def write_towers(root: Path, whole: Any) -> Towers:
    write_base(root / "base")  # for its tokenizer and its processor
    base = scattered(tiny(whole))
    base.save_pretrained(root / "base")
    generator = torch.Generator().manual_seed(7)
    samples: dict[str, Tensor] = {}
    tasks: dict[str, Any] = {}
    for seed, task in enumerate(TASKS):
        moved(base, 0.15, seed + 1).save_pretrained(root / "experts" / task)
        for split in ("calibration", "test"):
            samples[f"{task}.{split}"] = torch.randn(COUNT, 3, SIDE, SIDE, generator=generator)
            samples[f"{task}.{split}.y"] = torch.randint(0, len(CLASSES[task]), (COUNT,), generator=generator)
        sources = {
            split: {"tensors": "samples.safetensors", "key": f"{task}.{split}", "labels": f"{task}.{split}.y"}
            for split in ("calibration", "test")
        }
        said = {"classes": list(CLASSES[task]), "templates": list(TEMPLATES)}
        tasks[task] = {"expert": f"experts/{task}", **said, **sources}
    save_file(samples, root / "samples.safetensors")
    merged = {"method": "simple-averaging"}
    content = {"name": "towers", "base": "base", "merged": merged, "tasks": tasks, "text_tower": "own"}
    (root / "suite.yaml").write_text(yaml.safe_dump(content))
    return Towers(root, whole)


KINDS = {"clip": CLIPModel, "siglip": SiglipModel}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Towers]:
    """By kind, each written once."""
    return cache(lambda kind: write_towers(tmp_path_factory.mktemp(kind), KINDS[kind]))


@pytest.fixture(params=rows(KINDS, quick=("clip",), slow=("siglip",)))
def towers(request: pytest.FixtureRequest, written: Callable[[str], Towers]) -> Towers:
    return written(request.param)


@pytest.fixture
def clip(written: Callable[[str], Towers]) -> Towers:
    return written("clip")


def options(family: Family, **given: Any) -> CalibrationConfig:
    return config_for(family, **{"lam": 0.05, "rho": 1.5, "alpha": 0.3, "batch_size": 4, **given})


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).double().norm() / other.double().norm())


def base_only(towers: Towers, file: Path) -> Family:
    """The same suite without the option."""
    content = yaml.safe_load((towers.root / "suite.yaml").read_text())
    del content["text_tower"]
    (towers.root / file).write_text(yaml.safe_dump(content))
    return open_family(load_suite(towers.root / file), "cpu")


@torch.no_grad()
def test_long_prompts_are_cut_to_the_towers_positions_and_keep_their_end(clip: Towers, tmp_path: Path) -> None:
    """Whether the tokenizer's files name a limit or not, and whether the text tower is merged or the base's."""
    prompt = "a photo of a cat . a photo of a dog . a photo of a fish ."
    for said, kept in ((None, LONGEST), (8, 8)):
        towers = Towers(tmp_path / str(said), CLIPModel)
        copytree(clip.root, towers.root)
        file = towers.root / "base" / "tokenizer_config.json"
        settings = json.loads(file.read_text())
        settings.pop("model_max_length")
        file.write_text(json.dumps(settings | ({} if said is None else {"model_max_length": said})))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(towers.root / "base")
        ids = tokenizer(prompt, verbose=False)["input_ids"]
        ids = torch.tensor([[*ids[: kept - 1], ids[-1]]])
        library = towers.library("base", torch.float32)
        theirs = library.text_projection(library.text_model(input_ids=ids).pooler_output)
        own, base = towers.family, base_only(towers, Path("base.yaml"))
        encoders = (own.adapter.prompt_encoder_of(own.origin, own.base)[0], base.adapter.prompt_encoder(base.origin)[0])
        for encode in encoders:
            torch.testing.assert_close(encode([prompt]), theirs, rtol=1e-4, atol=1e-5)
        assert own.adapter.prompt_inputs(own.origin, [prompt])["input_ids"].equal(ids)


# ------------------------------------------------------------------------------------------------------ samples


def test_every_sample_comes_with_a_prompt_of_its_task(towers: Towers) -> None:
    for task in TASKS:
        drawn = towers.family.samples(task, "calibration", None, 0)
        for row, text in enumerate(towers.prompts(task)):
            ids = towers.ids(text)[0]
            assert drawn.inputs["input_ids"][row, : len(ids)].equal(ids)
            if "attention_mask" in drawn.inputs:
                assert int(drawn.inputs["attention_mask"][row].sum()) == len(ids)
    whole, part = (towers.family.samples("left", "calibration", None, 0, one) for one in (slice(None), slice(4, 6)))
    tokens = part.inputs["input_ids"].shape[1]
    assert part.inputs["input_ids"].equal(whole.inputs["input_ids"][4:, :tokens])
    assert part.inputs["pixel_values"].equal(whole.inputs["pixel_values"][4:])


@torch.no_grad()
def test_replay_is_the_librarys_forward(towers: Towers) -> None:
    """State by state on padded prompts; pictures as ever."""
    family, model = towers.family, towers.family.experts["left"]
    library, place = towers.library("experts/left", torch.float32), family.compute.place
    (batch,) = batches_of(family.samples("right", "calibration", None, 0), COUNT, family.compute.device)
    text = family.adapter.stages[0]
    assert [stage.name for stage in family.adapter.stages] == ["text", "vision"]
    asked = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    seen: dict[str, Tensor] = {}
    for block in text.blocks:
        keep = lambda _, __, output, name=block.name: seen.__setitem__(  # noqa: E731
            name, output[0] if isinstance(output, tuple) else output
        )
        library.get_submodule(block.path).register_forward_hook(keep)
    library.text_model(**asked)
    with walking(family.adapter):
        call: Call = text.first_call(place(model.read(text.outer)), batch, None)
        for block in text.blocks:
            call = run_block(text, block, block.local(place(model.read(block.names))), call)
            assert apart(text.state(call, batch), text.state(call.with_state(seen[block.name]), batch)) < 1e-5
    assert len(text.blocks) == len(seen) > 0
    read = library.text_model(**asked).pooler_output
    encode, scale = family.adapter.prompt_encoder_of(family.origin, model)
    own = encode(towers.prompts("right"))
    assert apart(own, library.text_projection(read) if towers.whole is CLIPModel else read) < 1e-5
    assert scale == pytest.approx(float(library.logit_scale.exp()), rel=1e-6)
    features = final_features(family.adapter, model, family.head(), [batch], family.compute)
    alone = base_only(towers, Path("alone.yaml"))
    pictures = {"pixel_values": batch["pixel_values"]}
    assert features.equal(final_features(alone.adapter, alone.experts["left"], alone.head(), [pictures], alone.compute))


@pytest.mark.parametrize("end", [2, 3])
@torch.no_grad()
def test_the_token_that_counts_is_the_one_that_is_read(clip: Towers, end: int) -> None:
    """The first end token, or where the configuration says 2 the largest id: only it moves the library's features."""
    model = clip.library("base")
    model.config.text_config.eos_token_id = model.text_model.eos_token_id = end
    ids = torch.tensor([[4, 9, 3, 3, 0], [5, 3, 10, 6, 3]])
    inputs = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])}
    last = model.text_model(**inputs).last_hidden_state
    read = TextStage(model).read(inputs)
    assert read.tolist() == ([1, 2] if end == 2 else [2, 1])
    assert model.text_model(**inputs).pooler_output.equal(last[torch.arange(2), read])


# -------------------------------------------------------------------------------------------------- calibration


@pytest.mark.parametrize("recipe", rows(["paper", "refined"], quick=("paper",), slow=("refined",)))
def test_calibrated_tensors_are_those_of_a_second_computation(towers: Towers, recipe: str) -> None:
    """Of the text tower: whole text models, hooks, float64, every prompt alone and, but for SigLIP, without padding."""
    family = towers.family
    config = options(family, recipe=recipe, patch_weight=0.1, **({"beta": 0.5} if recipe == "refined" else {}))
    merged = moved(towers.library("base"), 0.0, 0)
    experts = {task: towers.library(f"experts/{task}") for task in TASKS}
    for name, parameter in merged.named_parameters():
        parameter.data.copy_(sum(expert.get_parameter(name) for expert in experts.values()) / 2)
    models = {"base": towers.library("base"), "merged": merged}
    samples = {task: [{"input_ids": towers.ids(text)} for text in towers.prompts(task)] for task in TASKS}
    blocks = [f"encoder.layers.{i}" for i in range(len(family.adapter.stages[0].blocks))]

    def counted(sample: Mapping[str, Tensor], module: str, tokens: int) -> Tensor:
        if not module.startswith(f"{blocks[-1]}.") or module.endswith(("k_proj", "v_proj")):
            return torch.ones(tokens, dtype=torch.float64)
        weights = torch.full((tokens,), 0.1, dtype=torch.float64)
        weights[-1] = 1.0  # the end token of a prompt alone, or the last of the full length
        return weights

    pieces: list[Any] = [([block], None) for block in blocks]
    if recipe == "refined":
        pieces = [
            ([f"{block}.{name}" for name in names], stream and f"{block}.{stream}")
            for block in blocks
            for names, stream in (
                (["layer_norm1"], None),
                ([f"self_attn.{one}_proj" for one in "qkv"], None),
                (["self_attn.out_proj"], "layer_norm1"),
                (["layer_norm2"], None),
                (["mlp.fc1"], None),
                (["mlp.fc2"], "layer_norm2"),
            )
        ]
    told = ReferenceOptions(config.lam, config.rho, config.alpha, norms=(torch.nn.LayerNorm,), beta=config.beta)
    towers_of = {name: model.text_model for name, model in models.items()}
    theirs = refine(
        towers_of, {task: expert.text_model for task, expert in experts.items()}, samples, pieces, told, counted
    )
    ours = calibrate(family, config).weights.read(family.adapter.tower)
    assert len(theirs) == 16 * len(blocks)
    worst = {name: apart(ours[f"text_model.{name}"], tensor) for name, tensor in theirs.items()}
    assert max(worst.values()) < 1e-4, sorted(worst.items(), key=lambda one: -one[1])[:5]
    before = family.merged.read(family.adapter.tower)
    still = [name for name in before if name.startswith("text_") and name.removeprefix("text_model.") not in theirs]
    assert all(ours[name].equal(before[name]) for name in still)
    assert any(name.startswith("text_model.embeddings.") for name in still)


def test_the_picture_tower_is_calibrated_as_without_the_option(towers: Towers) -> None:
    """To the last bit."""
    alone = base_only(towers, Path("without.yaml"))
    config = options(alone)
    ours, theirs = (calibrate(one, config).weights.read(alone.adapter.tower) for one in (towers.family, alone))
    assert all(ours[name].equal(theirs[name]) for name in theirs)


@pytest.mark.slow
def test_one_model_everywhere_is_a_fixed_point(towers: Towers) -> None:
    family = towers.exact
    same = replace(family, merged=family.base, experts=dict.fromkeys(family.experts, family.base))
    for recipe in ({}, {"recipe": "refined", "beta": 0.5}):
        done = calibrate(same, options(family, eps=0.0, **recipe)).weights.read(family.adapter.tower)
        base = same.base.read(family.adapter.tower)
        assert max(apart(done[name], base[name]) for name in base) < 1e-6


def test_the_drift_identity_and_its_fall(towers: Towers) -> None:
    """e = m + p in both towers; features of the calibrated model's prompts are nearer to the experts'."""
    family = towers.exact
    whole = measure_drift(family, split="test", attribution=True)
    parts = measure_drift(family, split="test", sublayers=True)
    for one in (*whole.tasks.values(), *parts.tasks.values()):
        assert one.identity_residual < 1e-6
    calibrated = calibrate(family, options(family)).weights
    for task in TASKS:
        ends = {layer.layer: layer.drift for layer in parts.tasks[task].layers}
        for layer in whole.tasks[task].layers:
            assert apart(ends.get(f"{layer.layer} mlp", ends.get(layer.layer)), layer.drift) < 1e-6
        assert [layer.layer for layer in whole.tasks[task].layers] == family.adapter.layers()
        prompts = towers.prompts(task)
        expert, merged, repaired = (
            normalize(family.adapter.prompt_encoder_of(family.origin, model)[0](prompts), dim=-1)
            for model in (family.experts[task], family.merged, calibrated)
        )
        assert apart(repaired, expert) < apart(merged, expert)


# ------------------------------------------------------------------------------------------ scores and what is written


@torch.no_grad()
@pytest.mark.slow
def test_what_is_written_is_the_librarys_again_and_scored_through_its_own_text_tower(
    towers: Towers, tmp_path: Path
) -> None:
    family, out = towers.family, tmp_path / "out"
    assert note_left_out(family) == {}
    assert note_left_out(base_only(towers, Path("left.yaml"))).keys() == {*TASKS}
    calibrate(family, options(family)).save(out)
    base = towers.library("base", torch.float32)
    model, report = load_pretrained(towers.whole, out)
    assert not [kind for kind, names in report.items() if names and "keys" in kind]
    written, origin = (load_file(folder / "model.safetensors") for folder in (out, towers.root / "base"))
    assert {n: (t.dtype, t.shape) for n, t in written.items()} == {n: (t.dtype, t.shape) for n, t in origin.items()}
    for which, library in {str(out): model, "base": base}.items():
        scores = evaluate(family, which, split="test")
        for task in TASKS:
            drawn = family.samples(task, "test", None, 0)
            found = []
            for pixels in drawn.inputs["pixel_values"]:
                seen = picture(towers, library, pixels[None], base)
                unit = [normalize(prompt(towers, library, name), dim=-1).mean(0) for name in CLASSES[task]]
                rows = normalize(torch.stack(unit), dim=-1)
                found.append(int((rows @ normalize(seen[0], dim=-1)).argmax()))
            assert scores.tasks[task].predictions.tolist() == found


def test_a_written_text_tower_that_is_another_is_found(towers: Towers, tmp_path: Path) -> None:
    """By the library's own outputs, which the verification of a written folder reads in both towers."""
    family = towers.family
    calibrate(family, options(family)).save(tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    verify_reload(tmp_path / "out", family.adapter, family.model(str(tmp_path / "out")))
    held = InMemory("as calibrated", {name: tensors[name] for name in family.adapter.tower})
    name = "text_model.encoder.layers.0.mlp.fc1.weight"
    save_file(tensors | {name: 1.01 * tensors[name]}, file, {"format": "pt"})
    with pytest.raises(NumericalError, match="reloaded outputs differ"):
        verify_reload(tmp_path / "out", family.adapter, held)


def picture(towers: Towers, library: Any, pixels: Tensor, base: Any) -> Tensor:
    """Final features, by the base's projection where there is one."""
    seen: Tensor = library.vision_model(pixel_values=pixels).pooler_output
    return base.visual_projection(seen) if towers.whole is CLIPModel else seen


def prompt(towers: Towers, library: Any, name: str) -> Tensor:
    """Features of the prompts of one class."""
    read = torch.cat([library.text_model(input_ids=towers.ids(t.format(name))).pooler_output for t in TEMPLATES])
    return library.text_projection(read) if towers.whole is CLIPModel else read


def test_heads_of_a_session_are_the_models_own(clip: Towers) -> None:
    """Margins and quick scores too; the expert's are its own."""
    session, view = Session(clip.family), EvaluationSamples(None, "test")
    for model in ("base", "merged", "expert"):
        assert (
            session.measure.quick_scores(model, view)
            .tasks["left"]
            .predictions.equal(session.measure.scores(model, view).tasks["left"].predictions)
        )
    expert, own, _ = session.measure.judges("merged", view)["left"]
    assert apart(expert.prompts, own.prompts) > 1e-3  # type: ignore[attr-defined]


def test_what_is_told_of_prompts_reads_no_class_token(clip: Towers) -> None:
    """A prompt's first token is the same for all of them; the mean over its tokens is not."""
    session, view = Session(clip.family), EvaluationSamples(None, "calibration")
    layers = session.measure.layer_features("merged", "left", view)
    assert [*layers] == clip.family.adapter.layers()
    distinct = len({*clip.prompts("left")})
    for layer in ("text embeddings", "text block 1"):
        assert len(layers[layer].round(decimals=4).unique(dim=0)) == distinct
    assert visible_layers(session) == [layer for layer in layers if layer != "vision embeddings"]
    whole, first = (measure_drift(clip.family, split="calibration", tokens=tokens) for tokens in ("all", "class"))
    for one, other in zip(whole.tasks["left"].layers, first.tasks["left"].layers, strict=True):
        assert one.drift.equal(other.drift) == (one.layer.startswith("text") or one.layer == "head")


def test_many_prompts_are_spread_over_few_samples() -> None:
    assert prompt_positions(3, range(2, 6), 8) == [2, 0, 1, 2]
    assert prompt_positions(10, range(4), 4) == [0, 2, 5, 7]
    assert prompt_positions(10, range(2, 4), 4) == [5, 7]


@pytest.mark.slow
def test_a_folder_is_calibrated_checked_and_run_again(clip: Towers, tmp_path: Path) -> None:
    suite = load_suite(clip.root / "suite.yaml")
    found = check_suite(suite)
    assert found.problems == ()
    calibrate_to_folder(suite, CalibrationConfig(samples=4), tmp_path / "out")
    assert replay_record(tmp_path / "out", clip.root / "suite.yaml").same


def test_models_without_a_text_tower_are_refused(clip: Towers, own_suite_file: Path) -> None:
    content = yaml.safe_load(own_suite_file.read_text())
    own_suite_file.write_text(yaml.safe_dump({**content, "text_tower": "own"}))
    with pytest.raises(
        InputError,
        match=r"expert 'pets': config.json calls it CLIPVisionModel: a bare model, .*save the whole CLIPModel",
    ):
        open_family(load_suite(own_suite_file), "cpu")
    content["base"] = content["tasks"]["pets"]["expert"]
    own_suite_file.write_text(yaml.safe_dump({**content, "text_tower": "own"}))
    with pytest.raises(InputError, match="'text_tower: own' is for whole models of type clip and siglip"):
        open_family(load_suite(own_suite_file), "cpu")
    named = yaml.safe_load((clip.root / "suite.yaml").read_text())
    del named["tasks"]["left"]["classes"]
    (clip.root / "nameless.yaml").write_text(yaml.safe_dump(named))
    with pytest.raises(InputError, match="no class names, from which prompts for the text tower are made"):
        open_family(load_suite(clip.root / "nameless.yaml"), "cpu").samples("left", "calibration", None, 0)

"""Models of pictures and text: what must hold for any of them, on tiny models of the library's own making with pictures
of several sizes; held against the library's processor and forward, and against a second computation of the calibration
in float64 with hooks alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from clip_config import clip_config
from lanes import pairs, rows
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_clip import in_float64
from tiny_vision_language import COUNT, MARK, ROWS, TASKS, PicturedTrial, tiny_vision_language, write_pictured
from torch import Tensor

from featcal import CalibrationConfig, Family, InputError, calibrate, evaluate, load_suite, measure_drift, open_family
from featcal.calibration.calibrate import config_for, expert_passes
from featcal.drift.inside import map_mismatches
from featcal.evaluation.generation_check import compare_generation
from featcal.family.opening import batches_of
from featcal.formats.load_pretrained import load_pretrained
from featcal.models.adapter import Call, walking
from featcal.models.features import final_features
from featcal.models.lane import run_block
from featcal.preflight.check import check_suite
from featcal.session.feature_maps import FeatureMaps
from featcal.session.fingerprint import suite_stamp
from featcal.session.session import Session
from featcal.suite.views import EvaluationSamples
from featcal.testing.reference import Piece, ReferenceOptions, every_token, refine

IMAGE = 5
MERGER = "model.visual.merger"


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PicturedTrial]:
    """By kind, each written once."""
    return cache(lambda kind: write_pictured(ROWS[kind], tmp_path_factory.mktemp(kind)))


@pytest.fixture(params=rows(sorted(ROWS), quick=("qwen2_5_vl",), slow=("qwen2_vl",)))
def trial(request: pytest.FixtureRequest, trials: Callable[[str], PicturedTrial]) -> PicturedTrial:
    return trials(request.param)


@pytest.fixture
def qwen(trials: Callable[[str], PicturedTrial]) -> PicturedTrial:
    return trials("qwen2_5_vl")


@pytest.fixture(autouse=True)
def without_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a test of its own, and takes longer than all else here."""
    monkeypatch.setattr("featcal.calibration.calibrate._generation", lambda *_: {})


def options(family: Family, **given: Any) -> CalibrationConfig:
    return config_for(family, **{"lam": 0.05, "rho": 1.5, "alpha": 0.3, "batch_size": 2, **given})


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).double().norm() / other.double().norm())


# ------------------------------------------------------------------------------------------------------ samples


def test_samples_are_those_of_the_librarys_processor(trial: PicturedTrial) -> None:
    drawn = trial.family.samples(TASKS[0], "calibration", None, 0)
    for row, theirs in enumerate(trial.alone(TASKS[0])):
        tokens, patches = theirs["input_ids"].shape[1], len(theirs["pixel_values"])
        assert drawn.inputs["input_ids"][row, :tokens].equal(theirs["input_ids"][0])
        assert int(drawn.inputs["attention_mask"][row].sum()) == tokens
        assert int(drawn.inputs["completion_mask"][row].sum()) == 3  # two words and the end
        assert drawn.inputs["image_grid_thw"][row].equal(theirs["image_grid_thw"][0])
        assert drawn.inputs["pixel_values"][row, :patches].equal(theirs["pixel_values"])
        assert not drawn.inputs["pixel_values"][row, patches:].any()


def changed(trial: PicturedTrial, tmp_path: Path, change: Mapping[str, Any]) -> Family:
    """The suite with other options of every source and task."""
    content = yaml.safe_load((trial.root / "suite.yaml").read_text())
    for name in ("base", "merged"):
        content[name] = str(trial.root / content[name])
    for task in content["tasks"].values():
        task["expert"] = str(trial.root / task["expert"])
        for split in ("calibration", "test"):
            task[split] = {**task[split], "jsonl": str(trial.root / task[split]["jsonl"])}
            task[split] |= {name: value for name, value in change.items() if name != "max_length"}
            task[split] = {name: value for name, value in task[split].items() if value is not None}
        task |= {name: value for name, value in change.items() if name == "max_length"}
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(content))
    return open_family(load_suite(tmp_path / "suite.yaml"), "cpu")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"input": "{question}"}, r"a text has 0 places for its picture, expected one: write <\|image_pad\|>"),
        ({"input": f"{MARK} {MARK} {{question}}"}, "a text has 2 places for its picture"),
        ({"input": "<|image_pad|> {question}"}, "a text begins with its picture; put a token in front of it"),
        ({"input": f"{MARK} <|video_pad|> {{question}}"}, "tokens of a film"),
        ({"image": None}, "the texts come with no pictures, the base takes one with every text"),
        (
            {"max_length": 18},
            r"1 of 5 texts have more than 18 tokens with their pictures \(the largest has 12\)",
        ),
        ({"image": "question"}, "is not a readable picture"),
    ],
)
def test_samples_that_the_model_cannot_read_are_refused(
    qwen: PicturedTrial, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    family = changed(qwen, tmp_path, change)
    with pytest.raises(InputError, match=says):
        family.samples(TASKS[0], "calibration", None, 0)


def test_preflight_counts_both_stages(qwen: PicturedTrial) -> None:
    report = check_suite(qwen.family.suite)
    assert report.problems == ()
    assert [stage.name for stage in qwen.family.adapter.stages] == ["vision", "decoder"]
    drawn = qwen.family.samples(TASKS[0], "test", None, 0)
    assert qwen.family.adapter.tokens(drawn.inputs) == 5 * 20 + 4 * (6 + 12 + 4 + 8 + 6)


def test_a_picture_that_changes_is_a_changed_suite(qwen: PicturedTrial, tmp_path: Path) -> None:
    family = changed(qwen, tmp_path, {})
    before = suite_stamp(family.suite)
    picture = qwen.root / f"{TASKS[0]}-test-0.png"
    content = picture.read_bytes()
    picture.write_bytes(content + b" ")
    after = suite_stamp(family.suite)
    picture.write_bytes(content)
    assert before != after


# ------------------------------------------------------------------------------------------------------- replay


def library_inputs(batch: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """A padded batch as the library takes it: patches of all pictures in one row."""
    counts = batch["image_grid_thw"].prod(1).tolist()
    rows = [row[:count] for row, count in zip(batch["pixel_values"], counts, strict=True)]
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "mm_token_type_ids": (batch["input_ids"] == IMAGE).int(),
        "pixel_values": torch.cat(rows).to(dtype),
        "image_grid_thw": batch["image_grid_thw"],
    }


@torch.no_grad()
def test_every_state_and_the_scores_are_the_librarys(trial: PicturedTrial) -> None:
    """On a padded batch of pictures of different sizes, in float32, the merger among the blocks."""
    family, task = trial.family, TASKS[1]
    adapter, place = family.adapter, family.compute.place
    library = trial.library(f"experts/{task}", torch.float32)
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda _, __, output: seen.setdefault(name, output[0] if isinstance(output, tuple) else output)

    handles = [library.get_submodule(block.path).register_forward_hook(keep(block.path)) for block in adapter.blocks()]
    (batch,) = batches_of(family.samples(task, "calibration", None, 0), COUNT, family.compute.device)
    logits = library(**library_inputs(batch, torch.float32), use_cache=False).logits
    for handle in handles:
        handle.remove()
    expert, call = family.experts[task], None
    with walking(adapter):
        for stage in adapter.stages:
            call = stage.first_call(place(expert.read(stage.outer)), batch, call)
            for block in stage.blocks:
                call = run_block(stage, block, block.local(place(expert.read(block.names))), call)
                own, theirs = stage.state(call, batch), stage.state(call.with_state(seen[block.path]), batch)
                assert apart(own, theirs) < 1e-5, block.name
    features = final_features(adapter, expert, {}, [batch], family.compute)
    scores = adapter.output(place(expert.read(adapter.scoring)), features)
    asked = batch["attention_mask"].sum(1) - 1 - batch["completion_mask"].sum(1)
    assert apart(scores, logits[torch.arange(COUNT), asked]) < 1e-5


def test_states_of_pictures_lie_apart_and_together(trial: PicturedTrial) -> None:
    """`with_state` is the inverse of `state`, in front of the merger and after it, and of any size of batch."""
    family = trial.family
    (vision, _), place = family.adapter.stages, family.compute.place
    drawn = family.samples(TASKS[0], "calibration", None, 0)
    (batch,) = batches_of(drawn, COUNT, family.compute.device)
    with walking(family.adapter):
        call = vision.first_call(place(family.base.read(vision.outer)), batch, None)
        for block in vision.blocks:
            for one in (call, call.with_state(torch.randn_like(call.hidden_state))):
                state = vision.state(one, batch)
                assert vision.with_state(call, state).hidden_state.equal(one.hidden_state)
            call = run_block(vision, block, block.local(place(family.base.read(block.names))), call)
    assert len(call.hidden_state) == 6 + 12 + 4 + 8 + 6
    merged = vision.state(call, batch)
    assert merged.shape == (COUNT, 12, 16)
    assert merged.abs().sum(2).ne(0).sum(1).tolist() == [6, 12, 4, 8, 6]


# -------------------------------------------------------------------------------------------------- calibration


COMPUTED: dict[str, dict[str, Any]] = {
    "paper": {},
    "norms": {"rmsnorms": True, "lam": 1e-5},
    "refined": {"rmsnorms": True, "recipe": "refined", "beta": 0.5},
    "image_weight": {"image_weight": 0.1},
}


def order(trial: PicturedTrial, recipe: str) -> list[Piece]:
    """What is fitted together, in order: blocks of the tower, merger, blocks of the language model."""
    names = [block.path for block in trial.family.adapter.blocks()]
    if recipe == "paper":
        return [([name], None) for name in names]
    gated = "2_5" in trial.facts.model_type
    pieces: list[Piece] = []
    for name in names:
        if name == MERGER:
            pieces += [([f"{name}.{one}"], None) for one in ("ln_q", "mlp.0", "mlp.2")]
            continue
        vision = "visual" in name
        first, second = ("norm1", "norm2") if vision else ("input_layernorm", "post_attention_layernorm")
        inner = "attn.qkv" if vision else "self_attn."
        qkv = [inner] if vision else [f"{inner}{one}_proj" for one in "qkv"]
        out = "attn.proj" if vision else "self_attn.o_proj"
        wide = ["mlp.gate_proj", "mlp.up_proj"] if gated or not vision else ["mlp.fc1"]
        down = "mlp.down_proj" if gated or not vision else "mlp.fc2"
        for norm, inside, last in ((first, qkv, out), (second, wide, down)):
            pieces += [([f"{name}.{norm}"], None), ([f"{name}.{one}" for one in inside], None)]
            pieces.append(([f"{name}.{last}"], f"{name}.{norm}"))
    return pieces


@pytest.mark.parametrize(
    ("kind", "name"),
    pairs(
        sorted(ROWS),
        COMPUTED,
        quick=[("qwen2_5_vl", "image_weight")],
        slow=[("qwen2_5_vl", "norms"), ("qwen2_5_vl", "refined"), ("qwen2_vl", "refined")],
    ),
)
def test_every_tensor_is_that_of_the_second_computation(
    trials: Callable[[str], PicturedTrial], kind: str, name: str
) -> None:
    """Every sample alone and unpadded through the library's whole model, in float64, for every piece anew."""
    trial = trials(kind)
    family, config = trial.family, options(trial.family, **COMPUTED[name])
    samples = {
        task: [{**one, "pixel_values": one["pixel_values"].double()} for one in trial.alone(task)] for task in TASKS
    }
    models = {name: trial.library(name) for name in ("base", "merged")}
    experts = {task: trial.library(f"experts/{task}") for task in TASKS}
    kinds = {type(module) for module in models["base"].modules() if "RMSNorm" in type(module).__name__}
    norms = (torch.nn.LayerNorm, *(kinds if config.rmsnorms else ()))
    told = ReferenceOptions(config.lam, config.rho, config.alpha, norms=norms, beta=config.beta)

    def counted(sample: Mapping[str, Tensor], module: str, tokens: int) -> Tensor:
        if not module.startswith("model.language_model."):
            return every_token(sample, module, tokens)
        return torch.where(sample["input_ids"][0] == IMAGE, config.image_weight, 1.0).double()

    theirs = refine(models, experts, samples, order(trial, config.recipe), told, counted)
    ours = calibrate(family, config).weights.read(family.adapter.tower)
    found = {family.adapter.canonical(name): tensor for name, tensor in theirs.items()}
    assert set(found) <= set(ours)
    assert {
        "visual.merger.mlp.2.bias",
        "visual.blocks.0.attn.qkv.weight",
        "model.layers.1.mlp.down_proj.weight",
    } <= set(found)
    worst = {name: apart(ours[name], tensor) for name, tensor in found.items()}
    assert max(worst.values()) < 1e-4, sorted(worst.items(), key=lambda one: -one[1])[:5]
    merged = family.merged.read(family.adapter.tower)
    assert all(ours[name].equal(merged[name]) for name in set(merged) - set(found))


def test_maps_count_the_rows_of_every_picture_by_itself(qwen: PicturedTrial) -> None:
    """Pictures of several sizes lie in one row of the tower; together they have what they have alone."""
    family = qwen.family
    alone, together = (
        map_mismatches(
            family.run(), family.merged, expert_passes(family, options(family, batch_size=size)), family.base
        )
        for size in (1, COUNT)
    )
    for task in TASKS:
        assert any(one.layer.startswith("vision") for one in alone[task]), {one.layer for one in alone[task]}
        for one, other in zip(alone[task], together[task], strict=True):
            assert (one.layer, one.map) == (other.layer, other.map)
            torch.testing.assert_close(one.mismatch, other.mismatch, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(one.expert_norm, other.expert_norm, rtol=1e-4, atol=1e-6)


def test_tokens_of_pictures_weigh_what_is_asked(qwen: PicturedTrial) -> None:
    """In the language model alone; answers alone leave no picture to weigh."""
    family = qwen.family
    vision, language = family.adapter.stages
    (batch,) = batches_of(family.samples(TASKS[0], "calibration", None, 0), COUNT, family.compute.device)
    call = Call((torch.zeros(1, 1),), {})
    given = clip_config(image_weight=0.25)
    weights = language.token_weights("tokens", call, batch, given)
    assert weights is not None
    pictures = batch["input_ids"] == IMAGE
    assert weights[pictures].tolist() == [0.25] * 36
    assert weights[~pictures].equal(batch["attention_mask"][~pictures].double())
    alone = language.token_weights("tokens", call, batch, replace(given, completion_only=True))
    assert alone is not None
    assert not alone[pictures].any()
    assert alone.sum() == 3 * COUNT
    assert vision.weighting(2, "ln_q") == "patches"
    assert vision.weighting(2, "mlp.0") == vision.weighting(2, "mlp.2") == "merged patches"
    before = calibrate(family, options(family)).weights.read(family.adapter.tower)
    after = calibrate(family, options(family, image_weight=0.05)).weights.read(family.adapter.tower)
    moved = {name for name in before if not before[name].equal(after[name])}
    assert moved
    assert all(name.startswith("model.layers.") for name in moved)


@pytest.mark.parametrize("weight", [0.0, -1.0, 1.5, float("nan")])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(InputError, match="image_weight"):
        CalibrationConfig(image_weight=weight)


@pytest.mark.slow
def test_one_model_everywhere_is_a_fixed_point(trial: PicturedTrial) -> None:
    family = in_float64(trial.family)
    same = replace(family, merged=family.base, experts=dict.fromkeys(family.experts, family.base))
    for recipe in ({}, {"recipe": "refined", "beta": 0.5}):
        config = options(family, rmsnorms=True, eps=0.0, **recipe)
        done = calibrate(same, config).weights.read(family.adapter.tower)
        base = same.base.read(family.adapter.tower)
        assert max(apart(done[name], base[name]) for name in base) < 1e-6


def test_the_drift_identity_and_its_shares(trial: PicturedTrial) -> None:
    """e = m + p, states computed a second time alone."""
    family = in_float64(trial.family)
    whole = measure_drift(family, split="test", attribution=True)
    parts = measure_drift(family, split="test", sublayers=True)
    for task, one in whole.tasks.items():
        assert one.attribution is not None
        assert one.identity_residual < 1e-6
        assert abs(float(one.attribution.shares.sum()) - 1) < 1e-6
        assert [layer.layer for layer in one.layers] == family.adapter.layers()
        ends = {layer.layer: layer.drift for layer in parts.tasks[task].layers}
        for layer in one.layers:
            end = ends.get(f"{layer.layer} mlp", ends.get(layer.layer))
            assert end is not None
            assert apart(end, layer.drift) < 1e-6
    merger = whole.tasks[TASKS[0]].layers[3]
    assert merger.response is None
    assert merger.skip_residual is None


# -------------------------------------------------------------------------------------------------- what is written


def stored(folder: Path) -> dict[str, tuple[Any, tuple[int, ...]]]:
    with safe_open(folder / "model.safetensors", "pt") as handle:
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
        return {name: (one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}


@pytest.mark.slow
def test_what_is_written_is_the_librarys_again(trial: PicturedTrial, tmp_path: Path) -> None:
    family, out = trial.family, tmp_path / "out"
    settings = {"temperature": 0.3, "do_sample": True, "eos_token_id": 1}
    (trial.root / "merged" / "generation_config.json").write_text(json.dumps(settings))
    calibrate(family, options(family)).save(out)
    before, after = measure_drift(family), measure_drift(family, str(out))
    for task in TASKS:
        assert after.tasks[task].layers[-1].relative_drift < before.tasks[task].layers[-1].relative_drift
    assert stored(out) == stored(trial.root / "merged")
    for name in ("preprocessor_config.json", "tokenizer.json", "generation_config.json"):
        assert (out / name).read_bytes() == (trial.root / "merged" / name).read_bytes(), name
    said = json.loads((out / "config.json").read_text())["text_config"]  # as version 4 looks for it
    assert said["rope_theta"] == 10000.0
    assert said["rope_scaling"] == {"rope_type": "default", "mrope_section": [1, 1, 2]}
    model, report = load_pretrained(type(tiny_vision_language(trial.facts)), out)
    assert not [kind for kind, names in report.items() if names and "keys" in kind]
    (batch,) = batches_of(family.samples(TASKS[0], "test", None, 0), COUNT, family.compute.device)
    with torch.no_grad():
        logits = model(**library_inputs(batch, torch.float32), use_cache=False).logits
    written = family.model(str(out))
    features = final_features(family.adapter, written, {}, [batch], family.compute)
    scores = family.adapter.output(written.read(family.adapter.scoring), features)
    asked = batch["attention_mask"].sum(1) - 1 - batch["completion_mask"].sum(1)
    assert apart(scores, logits[torch.arange(COUNT), asked]) < 1e-5


@pytest.mark.slow
def test_half_precision_is_kept(tmp_path: Path) -> None:
    trial = write_pictured(ROWS["qwen2_5_vl"], tmp_path, torch.bfloat16)
    calibrate(trial.family, options(trial.family)).save(tmp_path / "out")
    assert stored(tmp_path / "out") == stored(tmp_path / "merged")
    assert {dtype for dtype, _ in stored(tmp_path / "out").values()} == {"BF16"}


@pytest.mark.slow
@torch.no_grad()
def test_a_head_that_is_the_embedding(tmp_path: Path) -> None:
    trial = write_pictured(ROWS["qwen2_5_vl"], tmp_path, tie_word_embeddings=True)
    family = trial.family
    assert family.adapter.vocabulary == family.adapter.scoring == ("model.embed_tokens.weight",)
    calibrate(family, options(family)).save(tmp_path / "out")
    assert "lm_head.weight" not in stored(tmp_path / "out")
    (batch,) = batches_of(family.samples(TASKS[0], "test", None, 0), COUNT, family.compute.device)
    logits = trial.library("out", torch.float32)(**library_inputs(batch, torch.float32), use_cache=False).logits
    written = family.model(str(tmp_path / "out"))
    features = final_features(family.adapter, written, {}, [batch], family.compute)
    asked = batch["attention_mask"].sum(1) - 1 - batch["completion_mask"].sum(1)
    scores = family.adapter.output(written.read(family.adapter.scoring), features)
    assert apart(scores, logits[torch.arange(COUNT), asked]) < 1e-5


def test_files_with_the_names_of_the_classes_are_read(qwen: PicturedTrial, tmp_path: Path) -> None:
    """As the library wrote them for a while."""
    root = tmp_path / "renamed"
    shutil.copytree(qwen.root, root)
    file = root / "merged" / "model.safetensors"
    renamed = {}
    for name, tensor in load_file(file).items():
        long = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
        renamed[f"model.{long}" if name.startswith("visual.") else long] = tensor
    save_file(renamed, file, {"format": "pt"})
    family = open_family(load_suite(root / "suite.yaml"), "cpu")
    ours, theirs = (one.merged.read(family.adapter.tower) for one in (family, qwen.family))
    assert all(ours[name].equal(theirs[name]) for name in theirs)


# ------------------------------------------------------------------------------------------------------ generation


@torch.no_grad()
def test_answers_to_pictures_are_the_librarys(trial: PicturedTrial) -> None:
    """Padded on the left for generation, pictures of several sizes; tokens that stand for pictures are no answers."""
    family, task = trial.family, TASKS[0]
    generator = family.adapter.generating(family.base.read(family.adapter.tower), family.base_folder)
    (batch,) = batches_of(family.samples(task, "calibration", None, 0), COUNT, family.compute.device)
    given = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    ours = generator.answers(batch, **given)
    library = trial.library("base", torch.float32)
    for row, one in enumerate(trial.alone(task, answered=False)):
        theirs = library.generate(**one, **given, suppress_tokens=[IMAGE, 6])[0, one["input_ids"].shape[1] :]
        assert ours[row, : len(theirs)].equal(theirs)
    scores = evaluate(family, "base", split="calibration").tasks[task]
    assert scores.metric == "exact_match"


@torch.no_grad()
def test_the_canary_reads_pictures(qwen: PicturedTrial) -> None:
    """Log-probabilities along answers are those of the library on prompt and answer."""
    family, task = qwen.family, TASKS[0]
    found = compare_generation(family, family.merged)
    assert found.tasks[task].prompts == COUNT
    generator = family.adapter.generating(family.base.read(family.adapter.tower), family.base_folder)
    (batch,) = batches_of(family.samples(task, "calibration", None, 0), COUNT, family.compute.device)
    answers = [torch.tensor([7, 8 + i]) for i in range(COUNT)]
    ours = generator.log_probabilities(batch, answers)
    library = qwen.library("base", torch.float32)
    for row, one in enumerate(qwen.alone(task, answered=False)):
        ids = torch.cat([one["input_ids"], answers[row][None]], dim=1)
        whole = {
            **one,
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == IMAGE).int(),
        }
        logits = library(**whole, use_cache=False).logits[0, -3:-1]
        assert apart(ours[row], torch.log_softmax(logits, dim=-1)) < 1e-5


def test_layers_of_two_widths_are_on_one_map(qwen: PicturedTrial) -> None:
    """Cosines and distances are those of the features themselves: zeros after narrower ones change none."""
    shown = FeatureMaps.from_names(Session(qwen.family), ["merged"], EvaluationSamples(4, "calibration"))
    frame = shown.to_frame([TASKS[0]])
    assert [*dict.fromkeys(frame["layer"])] == qwen.family.adapter.layers()
    assert not frame[["x", "y", "cosine", "distance"]].isna().any().any()
    features = shown.features(TASKS[0], "vision block 0")
    for layer, width in {"vision block 1": 12, "vision block 2": 16}.items():
        own = features[layer]
        assert own["merged"].shape == (4, width)
        cosines = torch.cosine_similarity(own["merged"].double(), own["expert"].double())
        told = frame[(frame["layer"] == layer) & (frame["model"] == "merged")]["cosine"]
        torch.testing.assert_close(torch.tensor([*told], dtype=torch.float64), cosines, rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------------------------- refusals


def test_models_of_other_windows_are_refused(qwen: PicturedTrial, tmp_path: Path) -> None:
    root = tmp_path / "other"
    shutil.copytree(qwen.root, root)
    file = root / "experts" / TASKS[0] / "config.json"
    content = json.loads(file.read_text())
    content["vision_config"]["window_size"] = 32
    file.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"vision window_size is 32 in .*config.json, the base has 16"):
        open_family(load_suite(root / "suite.yaml"), "cpu")

"""Recipes of other tools as suites: what is taken over, what is asked for, and how each refusal is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from lanes import cases_by_message

from featcal.authoring.common import read_recipe
from featcal.authoring.recipes import Imported, export_pool_to_file, import_recipe, import_to_file
from featcal.authoring.to_fusion_bench import export_fusion_bench
from featcal.suite.recipe import MergeRecipe
from featcal.suite.schema import Suite, load_suite, suite_from_dict, task_catalogue
from featcal.system.errors import InputError


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


def written(folder: Path, content: Any, name: str = "recipe.yml") -> Path:
    file = folder / name
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return file


def taken_over(folder: Path, content: Any, merged: str | None = None) -> Imported:
    return import_recipe(written(folder, content), merged)


def refused(folder: Path, content: Any, merged: str | None = None) -> str:
    with pytest.raises(InputError) as caught:
        taken_over(folder, content, merged)
    return str(caught.value)


TIES = """
merge_method: ties
base_model: org/base@v2
models:
  - model: org/base@v2
  - model: org/math
    parameters: {weight: 0.5, density: 0.3}
  - model: {model: {path: org/code, revision: v1}, lora: org/code-lora}
    parameters: {weight: 1e-1}
parameters: {density: 0.5, lambda: 1.3, int8_mask: true}
dtype: float32
out_dtype: bfloat16
"""


def mergekit(**changes: Any) -> dict[str, Any]:
    """A configuration of task arithmetic with some keys changed; None leaves one out."""
    models = [{"model": "org/a", "parameters": {"weight": 0.5}}, {"model": "org/b", "parameters": {"weight": 0.25}}]
    content = {"merge_method": "task_arithmetic", "base_model": "org/base", "models": models, "dtype": "float32"}
    return {key: value for key, value in {**content, **changes}.items() if value is not None}


def test_ties_with_parameters_of_models_and_of_the_file(tmp_path: Path) -> None:
    imported = taken_over(tmp_path, TIES)
    assert imported.suite == {
        "name": "recipe",
        "description": "Imported from recipe.yml (mergekit, ties).",
        "base": "org/base@v2",
        "merged": {
            "method": "ties-per-tensor",
            "scale": 1.3,
            "weights": {"math": 0.5, "code-lora": 0.1},
            "density": {"math": 0.3, "code-lora": 0.5},
            "normalize": True,
            "dtype": "bfloat16",
        },
        "tasks": {"math": {"expert": "org/math"}, "code-lora": {"expert": "org/code@v1+org/code-lora"}},
    }
    assert len(imported.missing) == 1
    assert imported.missing[0].startswith("calibration samples of math, code-lora:")
    assert imported.notes == ()
    assert isinstance(suite_from_dict(imported.suite, tmp_path).merged, MergeRecipe)


@pytest.mark.parametrize(
    ("changes", "recipe"),
    [
        pytest.param({}, {"scale": 1.0, "normalize": False}, id="task arithmetic"),
        pytest.param(
            {"parameters": {"lambda": 0.4, "normalize": 1}}, {"scale": 0.4, "normalize": True}, id="normalized"
        ),
        pytest.param(
            {"merge_method": "linear", "base_model": None}, {"method": "linear", "normalize": True}, id="linear"
        ),
        pytest.param(
            {"merge_method": "linear", "base_model": None, "parameters": {"normalize": False}},
            {"method": "linear", "normalize": False},
            id="linear, not normalized",
        ),
        # mergekit averages base_model too: (0.25 base + 0.5 a + 0.25 b) / 1
        pytest.param({"merge_method": "linear", "parameters": {"weight": 0.25}}, {"scale": 1.0}, id="linear with base"),
    ],
)
def test_methods_that_are_recipes(tmp_path: Path, changes: dict[str, Any], recipe: dict[str, Any]) -> None:
    common = {"method": "task-arithmetic", "weights": {"a": 0.5, "b": 0.25}, "dtype": "float32"}
    assert taken_over(tmp_path, mergekit(**changes)).suite["merged"] == {**common, **recipe}


def test_linear_does_not_say_what_the_experts_come_from(tmp_path: Path) -> None:
    unnamed = taken_over(tmp_path, mergekit(merge_method="linear", base_model=None))
    assert "base" not in unnamed.suite
    assert unnamed.missing[0].startswith("base: the model that the experts were fine-tuned from")
    named = taken_over(tmp_path, mergekit(merge_method="linear", parameters={"weight": 1}))
    assert named.suite["base"] == "org/base"
    assert "which linear merges like any other" in named.notes[0]


def test_the_output_folder_stands_for_every_other_method(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    slices = [{"sources": [{"model": m, "layer_range": [0, 2]} for m in ("org/base", "org/a")]}]
    sliced = mergekit(merge_method="breadcrumbs", models=None, slices=slices, parameters={"gamma": [0, 1]})
    imported = taken_over(tmp_path, sliced, "out")
    assert imported.suite["base"] == "org/base"
    assert imported.suite["merged"] == str(tmp_path / "out")
    assert imported.suite["tasks"] == {"a": {"expert": "org/a"}}
    modules = {"text": {"models": [{"model": "org/a"}]}, "vision": {"slices": slices}}
    assert set(taken_over(tmp_path, mergekit(models=None, modules=modules), "hub/id").suite["tasks"]) == {"a"}


def test_the_base_of_slerp_is_one_of_the_merged_models(tmp_path: Path) -> None:
    imported = taken_over(tmp_path, mergekit(merge_method="slerp", parameters={"t": 0.5}), "hub/id")
    assert list(imported.suite["tasks"]) == ["a", "b", "base"]
    assert imported.missing[0].startswith("base: ")


def test_a_base_that_no_method_names_is_the_one_that_the_experts_name(tmp_path: Path) -> None:
    for name in ("origin", "x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"_name_or_path": "../origin"}))
    content = {"merge_method": "slerp", "base_model": "x", "models": [{"model": "y"}], "parameters": {"t": 0.5}}
    imported = taken_over(tmp_path, content, "hub/id")
    assert imported.suite["base"] == str(tmp_path / "origin")
    assert [*imported.suite["tasks"]] == ["y", "x"]
    assert not [one for one in imported.missing if one.startswith("base")]
    assert [one for one in imported.notes if one.startswith(f"base is {tmp_path / 'origin'}, ")]
    (tmp_path / "y" / "config.json").write_text("{}")  # one that names none
    assert taken_over(tmp_path, content, "hub/id").missing[0].startswith("base: ")


def test_folders_become_absolute_and_names_unique(tmp_path: Path) -> None:
    for folder in ("base", "x/final", "y/final", "elsewhere/z/final"):
        (tmp_path / folder).mkdir(parents=True)
    models = [{"model": f"{place}/final", "parameters": {"weight": 1}} for place in "xyz"]
    suite = taken_over(tmp_path, mergekit(base_model="base", models=models)).suite
    assert suite["base"] == str(tmp_path / "base")
    assert suite["tasks"] == {
        "final": {"expert": str(tmp_path / "x" / "final")},
        "final-2": {"expert": str(tmp_path / "y" / "final")},
        "final-3": {"expert": str(tmp_path / "elsewhere" / "z" / "final")},
    }


def test_notes_say_where_the_suite_is_not_quite_the_recipe(tmp_path: Path) -> None:
    imported = taken_over(tmp_path, mergekit(dtype="bfloat16", chat_template="auto"))
    assert imported.suite["merged"]["dtype"] == "bfloat16"
    assert "chat_template is not taken over" in imported.notes[0]
    assert "in float64 where mergekit computes in bfloat16" in imported.notes[1]


def of_one(**parameters: Any) -> dict[str, Any]:
    """A configuration of one model with these parameters."""
    return mergekit(models=[{"model": "org/a", "parameters": parameters}])


SPARSE = [{"filter": "mlp", "value": 1}]
NOT_OF_MERGEKIT = {
    "modles: unknown key. Did you mean 'modules'?": mergekit(modles=[]),
    "models.0.modle: unknown key. Did you mean 'model'?": mergekit(models=[{"modle": "a"}]),
    "give exactly one of models, slices, modules (found none)": mergekit(models=None),
    "give exactly one of models, slices, modules (found models, slices)": mergekit(slices=[]),
    "merge_method 'dare_ties' has no recipe in featcal": mergekit(merge_method="dare_ties"),
    "a merge of slices or modules has no recipe in featcal": mergekit(models=None, slices=[{"sources": []}]),
    "base_model: task_arithmetic needs one": mergekit(base_model=None),
    "no model besides base_model": mergekit(models=[{"model": "org/base"}]),
    "weight of 'org/a': missing": mergekit(models=[{"model": "org/a"}]),
    "weight of 'org/a': gradients and filtered values": [of_one(weight=[0, 1]), of_one(weight=SPARSE)],
    "weight of 'org/a': 'half' is not a number": of_one(weight="half"),
    "unknown parameter 'densty' of 'org/a'. Did you mean 'density'?": of_one(weight=1, densty=1),
    "unknown parameter 'normalise'. Did you mean 'normalize'?": mergekit(parameters={"normalise": True}),
    "normalize: true or false, not 'no way'": mergekit(parameters={"normalize": "no way"}),
    "rescale: true has no recipe in featcal": mergekit(parameters={"rescale": True}),
    "models: 'org/a' is named twice": mergekit(models=[{"model": "org/a", "parameters": {"weight": 1}}] * 2),
    "density is 0; it lies in (0, 1]": mergekit(merge_method="ties", parameters={"density": 0}),
    "dtype 'float64' is not one of float32, bfloat16, float16": mergekit(dtype="float64"),
    "linear with base_model and without normalized weights has no recipe in featcal": mergekit(
        merge_method="linear", parameters={"weight": 1, "normalize": False}
    ),
    "tokenizer_source: union: every model must have the base's vocabulary": mergekit(tokenizer_source="union"),
    "tokenizer.source: union": mergekit(tokenizer={}),
    "its ids need not be the base's": mergekit(tokenizer_source="org/a"),
    "tokens and pad_to_multiple_of change the vocabulary": mergekit(
        tokenizer={"source": "base", "tokens": {"<x>": {}}}
    ),
}
OF_NO_TOOL = {
    "neither a configuration of mergekit": {"gate_mode": "hidden", "experts": []},
    "is a mapping": "- a\n- b\n",
    "not valid YAML": ["a: [", "a: *nothing\n"],
    "occurs twice": "merge_method: ties\nmerge_method: linear\n",
    # mergekit's own multi-merge files hold a recipe per document
    "a second document begins in line 2": "merge_method: linear\n---\nmerge_method: slerp\n",
    "give each a file of its own": "merge_method: linear\n---\nmerge_method: slerp\n",
}


def test_every_reason_is_listed_at_once(tmp_path: Path) -> None:
    said = refused(tmp_path, mergekit(merge_method="della", tokenizer_source="union", models=[{"model": "org/base"}]))
    assert said.startswith("3 problems")
    assert "with --merged" in said


@pytest.mark.parametrize("source", ["base", "org/base"], ids=["word", "id"])
def test_the_bases_own_tokenizer_is_no_problem(tmp_path: Path, source: str) -> None:
    assert taken_over(tmp_path, mergekit(tokenizer_source=source)).suite["base"] == "org/base"
    assert taken_over(tmp_path, mergekit(tokenizer={"source": source})).suite["base"] == "org/base"


POOL = """
_target_: fusion_bench.modelpool.CLIPVisionModelPool
_recursive_: false
processor: openai/clip
models:
  _pretrained_: openai/clip
  _merged_: someone/merged
  leaves: someone/clip_leaves
  birds:
    _target_: transformers.CLIPVisionModel.from_pretrained
    pretrained_model_name_or_path: someone/clip_birds
    revision: v1
  cars:
    _target_: fusion_bench.models.linearized.vision_model.load_lora_vision_model_hf
    base_model_name: openai/clip
    peft_name: someone/cars-lora
    merge_and_unload: true
train_datasets:
  leaves: someone/leaves
  birds: {_target_: datasets.load_dataset, _args_: [someone/birds, small], split: train, revision: abc}
  cars: {_target_: fusion_bench.dataset.load_cars, split: train}
test_datasets:
  leaves: {_target_: datasets.load_dataset, path: someone/leaves, name: big, split: contrast}
  fish: {_target_: datasets.load_dataset, path: someone/fish, split: test}
platform: hf
"""


def pool(**changes: Any) -> dict[str, Any]:
    content = {"_target_": "fusion_bench.modelpool.CLIPVisionModelPool", "models": {"_pretrained_": "a/b", "t": "a/t"}}
    return {**content, **changes}


def test_a_model_pool_with_data_sets(tmp_path: Path) -> None:
    imported = taken_over(tmp_path, POOL)
    assert imported.suite == {
        "name": "recipe",
        "description": "Imported from recipe.yml (FusionBench, CLIPVisionModelPool).",
        "base": "openai/clip",
        "merged": {"method": "task-arithmetic", "scale": 0.3},
        "tasks": {
            "leaves": {
                "expert": "someone/clip_leaves",
                "calibration": {"hub": "someone/leaves", "split": "train"},
                "test": {"hub": "someone/leaves", "config": "big", "split": "contrast"},
            },
            "birds": {
                "expert": "someone/clip_birds@v1",
                "calibration": {"hub": "someone/birds", "config": "small", "split": "train", "revision": "abc"},
            },
            "cars": {"expert": "openai/clip+someone/cars-lora"},
        },
    }
    assert [line.partition(":")[0] for line in imported.missing] == ["calibration samples of cars"]
    assert [line.partition(" ")[0] for line in imported.notes] == [
        "train_datasets.cars",
        "test_datasets.fish",
        "models._merged_",
        "a",
    ]
    suite_from_dict(imported.suite, tmp_path)


def test_tasks_of_the_catalogue_are_complete(tmp_path: Path) -> None:
    data = {"sun397": {"_target_": "datasets.load_dataset", "path": "mirror/sun397", "split": "train"}}
    models = {"_pretrained_": "a/b", "sun397": "a/sun"}
    pictures = suite_from_dict(taken_over(tmp_path, pool(models=models, train_datasets=data)).suite, tmp_path)
    sun = pictures.tasks["sun397"]
    assert sun.calibration is not None
    assert (sun.expert, sun.calibration.hub) == ("a/sun", "mirror/sun397")
    assert sun.classes == tuple(task_catalogue()["sun397"]["classes"])
    loader = {"_target_": "fusion_bench.tasks.flan_t5_text_generation.load_glue_dataset", "name": "cola"}
    text = pool(_target_="fusion_bench.modelpool.Seq2SeqLMPool", models={"_pretrained_": "a/b", "glue-cola": "a/cola"})
    imported = taken_over(tmp_path, {**text, "test_datasets": {"glue-cola": loader}})
    assert imported.missing == ()
    assert imported.suite["tasks"] == {"glue-cola": {"use": "glue-cola", "expert": "a/cola"}}
    assert suite_from_dict(imported.suite, tmp_path).tasks["glue-cola"].metric == "exact_match"


def test_a_picture_task_is_not_taken_for_text(tmp_path: Path) -> None:
    causal = pool(_target_="fusion_bench.modelpool.CausalLMPool", models={"_pretrained_": "a/b", "sun397": "a/sun"})
    assert "use" not in taken_over(tmp_path, causal).suite["tasks"]["sun397"]


def test_text_needs_templates_that_a_pool_lacks(tmp_path: Path) -> None:
    data = {"t": {"_target_": "datasets.load_dataset", "path": "a/text", "split": "train"}}
    imported = taken_over(
        tmp_path,
        pool(
            _target_="fusion_bench.modelpool.CausalLMPool",
            train_datasets=data,
            model_kwargs={"torch_dtype": "bfloat16"},
            tokenizer={
                "_target_": "transformers.AutoTokenizer.from_pretrained",
                "pretrained_model_name_or_path": "a/c",
            },
        ),
    )
    assert [line.partition(":")[0] for line in imported.missing] == ["text of t"]
    assert [line.partition(" ")[0] for line in imported.notes] == ["tokenizer:", "model_kwargs", "a"]


def loaded(target: str, **options: str) -> dict[str, Any]:
    """A pool whose only model is made by calling `target`."""
    return pool(models={"t": {"_target_": target, **options}})


DEFAULTS = ["CLIPVisionModelPool@: _template", {"/model/clip-vit@models": ["base", "sun397"]}, "_self_"]
NOT_OF_FUSION_BENCH = {
    "'defaults' refer to other files (defaults: CLIPVisionModelPool@: _template; "
    "/model/clip-vit@models: base, sun397)": pool(defaults=DEFAULTS),
    "models._pretrained_ is '${base_model}'; models.t is": pool(models={"_pretrained_": "${base_model}", "t": "???"}),
    "'fusion_bench.modelpool.OpenCLIPVisionModelPool'": pool(_target_="fusion_bench.modelpool.OpenCLIPVisionModelPool"),
    "modles: unknown key. Did you mean 'models'?": pool(modles={"a": "b"}),
    "models: must be a mapping from names": pool(models=["a"]),
    "models: no expert is named": pool(models={"_pretrained_": "a/b"}),
    "models.t: 'os.system' is not called by featcal": loaded("os.system", command="true"),
    "models.t: 'variant' may change which weights are loaded": loaded(
        "x.from_pretrained", pretrained_model_name_or_path="a", variant="b"
    ),
    "models.t: pretrained_model_name_or_path is missing": loaded("x.from_pretrained"),
}


@pytest.mark.parametrize(("content", "message"), cases_by_message(NOT_OF_MERGEKIT | NOT_OF_FUSION_BENCH | OF_NO_TOOL))
def test_refusals(tmp_path: Path, content: Any, message: str) -> None:
    said = refused(tmp_path, content)
    assert message in said
    assert str(tmp_path / "recipe.yml") in said


def test_variables_of_a_pool_and_a_missing_base(tmp_path: Path) -> None:
    imported = taken_over(tmp_path, pool(base_model="a/b", models={"t": "a/t"}), "someone/merged")
    assert imported.suite["merged"] == "someone/merged"
    assert imported.missing[0].startswith("base: ")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        import_recipe(tmp_path / "nothing.yml")


def test_the_file_says_what_to_fill_in_and_is_never_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "suite.yaml"
    document = import_to_file(written(tmp_path, mergekit(dtype="float16")), None, out)
    assert json.loads(json.dumps(document)) == document
    assert document["out"] == str(out)
    head = out.read_text().partition("name:")[0]
    assert head.startswith("# To be filled in:\n# - calibration samples of a, b:")
    assert "# Not quite the recipe:\n# - featcal merges in float64" in head
    assert load_suite(out).tasks["a"].expert == "org/a"
    with pytest.raises(InputError, match="already exists"):
        import_to_file(tmp_path / "recipe.yml", None, out)
    with pytest.raises(InputError, match="cannot write"):
        import_to_file(tmp_path / "recipe.yml", None, tmp_path / "no" / "suite.yaml")


CONFIGS = {
    "CLIPVisionModelPool": {"model_type": "clip"},
    "Seq2SeqLMPool": {"model_type": "t5"},
    "CausalLMPool": {"model_type": "llama"},
}


def suite_on_disk(folder: Path, model_type: str) -> Suite:
    from safetensors.torch import save_file
    from torch import ones

    for name in ("base", "expert"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"model_type": model_type}))
        save_file({"w": ones(1)}, folder / name / "model.safetensors")
    hub = {"hub": "a/data", "config": "small", "split": "train", "revision": "abc"}
    lora = "base+a/lora" if model_type != "llama" else "a/plain/sub/folder@v1"
    tasks = {
        "one": {"expert": "expert", "calibration": hub, "test": {"hub": "a/data", "split": "test"}},
        "two": {"expert": lora, "calibration": {"imagefolder": "pictures"}},
    }
    return suite_from_dict({"name": "recipe", "base": "base", "merged": "expert", "tasks": tasks}, folder)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_pool_that_was_exported_is_the_same_suite(tmp_path: Path, name: str) -> None:
    suite = suite_on_disk(tmp_path, CONFIGS[name]["model_type"])
    content = export_fusion_bench(suite)
    assert content["_target_"] == f"fusion_bench.modelpool.{name}"
    for model in (*content["models"].values(), content.get("tokenizer", {"_target_": ""})):
        assert isinstance(model, dict) or name != "Seq2SeqLMPool"  # which takes no plain references
    again = taken_over(tmp_path, content, "expert")
    assert again.suite["base"] == str(tmp_path / "base")
    one, two = suite.tasks["one"], again.suite["tasks"]["two"]
    assert again.suite["tasks"]["one"] == {
        "expert": str(tmp_path / "expert"),
        "calibration": one.calibration and one.calibration.model_dump(exclude_none=True),
        "test": one.test and one.test.model_dump(exclude_none=True),
    }
    expected = f"{tmp_path / 'base'}+a/lora" if name != "CausalLMPool" else "a/plain/sub/folder@v1"
    assert two == {"expert": expected}
    assert any(line.startswith("calibration samples of two") for line in again.missing)


def test_a_pool_of_encoder_decoders_names_functions(tmp_path: Path) -> None:
    """FusionBench's Seq2SeqLMPool instantiates what it is given, and asks for a tokenizer."""
    suite = suite_on_disk(tmp_path, "t5")
    base = str(tmp_path / "base")
    loader = "transformers.AutoModelForSeq2SeqLM.from_pretrained"
    content = export_fusion_bench(suite)
    assert content["models"]["_pretrained_"] == {"_target_": loader, "pretrained_model_name_or_path": base}
    tokenizer = {"_target_": "transformers.AutoTokenizer.from_pretrained", "pretrained_model_name_or_path": base}
    assert content["tokenizer"] == tokenizer
    assert not any("tokenizer" in note for note in taken_over(tmp_path, content, "expert").notes)


def test_a_pool_is_written_once_and_reads_back(tmp_path: Path) -> None:
    out = tmp_path / "pool.yaml"
    document = export_pool_to_file(load_suite("clip-mini"), out)
    assert document["models"][0] == "_pretrained_"
    assert list(read_recipe(out)["models"]) == document["models"]
    with pytest.raises(InputError, match="already exists"):
        export_pool_to_file(load_suite("clip-mini"), out)


def test_models_that_a_pool_has_no_place_for(tmp_path: Path) -> None:
    suite = suite_on_disk(tmp_path, "llama")
    lora = suite.model_copy(update={"tasks": {"t": suite.tasks["one"].model_copy(update={"expert": "base+a/lora"})}})
    lora._root = tmp_path
    with pytest.raises(InputError, match=r"model 't': a pool of FusionBench cannot name 'base\+a/lora'"):
        export_fusion_bench(lora)
    with pytest.raises(InputError, match="model '_pretrained_': export it to transformers' layout"):
        export_fusion_bench(suite.model_copy(update={"base": "open_clip:ViT-B-32:file"}))

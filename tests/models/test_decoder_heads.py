"""Decoders with a classifier per task, which reads the last token of a text: what must hold for any architecture, their
heads, bases that are language models, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from checked import checks
from lanes import rows
from safetensors.torch import load_file, save_file
from tiny_decoders import CLASSIFIERS, ROWS, tiny_decoder

from featcal import InputError, Suite, calibrate, evaluate, load_suite, measure_drift, open_family
from featcal.authoring.from_paths import SuiteParts, write_suite_text
from featcal.authoring.to_fusion_bench import export_fusion_bench
from featcal.baselines.regmean import RegMean
from featcal.evaluation.scoring_heads import head_of
from featcal.export.write import rewrite
from featcal.models.families.decoder_facts import with_classifier
from featcal.models.features import final_features
from featcal.preflight.check import check_suite
from featcal.session.model_ref import resolve_model
from featcal.studies.requirements import needs
from featcal.system.errors import NoScores
from featcal.testing import check_adapter
from featcal.testing.checks import CHECKS
from featcal.testing.trial import TASKS, Trial, write_trial

WHOLE = ("gemma2", "gpt2", "mistral")
"""Everything is tested of these: a soft cap, weights `[inputs, outputs]`, a window. Of the others scores."""


QUICK = ("gpt2",)


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trial]:
    """By kind, each written once."""

    @cache
    def written(kind: str) -> Trial:
        return write_trial(tiny_decoder(CLASSIFIERS[kind]), CLASSIFIERS[kind], tmp_path_factory.mktemp(kind))

    return written


@pytest.fixture(params=rows(WHOLE, quick=QUICK, slow=WHOLE))
def trial(request: pytest.FixtureRequest, trials: Callable[[str], Trial]) -> Trial:
    return trials(request.param)


@pytest.fixture
def gpt2(tmp_path: Path) -> Trial:
    return write_trial(tiny_decoder(CLASSIFIERS["gpt2"]), CLASSIFIERS["gpt2"], tmp_path / "suite")


@pytest.mark.parametrize(("kind", "name"), checks(WHOLE, QUICK, WHOLE[:1]))
def test_what_must_hold(trials: Callable[[str], Trial], kind: str, name: str) -> None:
    assert CHECKS[name](trials(kind))


@pytest.mark.parametrize("kind", rows(CLASSIFIERS, quick=("gpt2",), slow=("mistral", "gemma2", "phi3", "qwen3_moe")))
def test_scores_of_padded_batches_are_the_librarys(kind: str, tmp_path: Path) -> None:
    facts = CLASSIFIERS[kind]
    trial = write_trial(tiny_decoder(facts), facts, tmp_path)
    family, inputs = trial.family, trial.padded_inputs(TASKS[0])
    assert int(inputs["attention_mask"].sum(1).min()) < inputs["input_ids"].shape[1]
    for task, expert in family.experts.items():
        with torch.no_grad():
            logits = trial.library(f"experts/{task}", torch.float32)(**inputs).logits
        features = final_features(family.adapter, expert, {}, [inputs], family.compute)
        torch.testing.assert_close(head_of(family, expert, task).scores(features), logits, atol=1e-5, rtol=1e-5)


def test_the_architectures_are_those_of_the_library() -> None:
    assert ROWS.keys() - CLASSIFIERS.keys() == {"ernie4_5", "olmoe"}
    assert {one.classifier for one in CLASSIFIERS.values()} == {"score"}
    assert CLASSIFIERS["gpt2"].model == "GPT2ForSequenceClassification"


@pytest.mark.slow
def test_one_call_checks_it() -> None:
    assert check_adapter(tiny_decoder(CLASSIFIERS["gpt2"]), CLASSIFIERS["gpt2"])["repair"]["drift"] < 1


def test_every_model_is_scored_by_the_classifier_of_the_tasks_expert(trial: Trial) -> None:
    """The merged model's features through an expert's classifier are what the library gives where that is put on the
    merged stack."""
    scores = evaluate(trial.family, "merged", split="test")
    for task in TASKS:
        library = trial.library("merged", torch.float32)
        library.score.load_state_dict(trial.library(f"experts/{task}").score.state_dict())
        with torch.no_grad():
            said = library(**trial.padded_inputs(task, "test")).logits.argmax(1)
        assert scores.tasks[task].metric == "accuracy"
        assert scores.tasks[task].predictions.equal(said)
        assert scores.tasks[task].value == float((said == torch.arange(5) % 2).double().mean())


def test_classifiers_are_no_part_of_what_is_merged_or_calibrated(gpt2: Trial, tmp_path: Path) -> None:
    adapter = gpt2.family.adapter
    assert adapter.classifier == ("score",)
    assert not [name for name in (*adapter.tower, *adapter.vocabulary, *adapter.scoring) if "score" in name]
    assert (adapter.modality, adapter.answers, adapter.generates) == ("text", "classes", False)
    calibrate(gpt2.family, gpt2.config()).save(tmp_path / "out")
    own, merged = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", gpt2.root / "merged"))
    assert own["score.weight"].equal(merged["score.weight"])
    assert not own["transformer.h.1.mlp.c_fc.weight"].equal(merged["transformer.h.1.mlp.c_fc.weight"])


def test_padding_changes_no_score(gpt2: Trial) -> None:
    family = gpt2.family
    inputs, expert = gpt2.padded_inputs(TASKS[0]), family.experts[TASKS[0]]
    together = final_features(family.adapter, expert, {}, [inputs], family.compute)
    for row, count in enumerate(inputs["attention_mask"].sum(1).tolist()):
        one = {name: tensor[row : row + 1, :count] for name, tensor in inputs.items()}
        torch.testing.assert_close(final_features(family.adapter, expert, {}, [one], family.compute)[0], together[row])


# ------------------------------------------------------------------------------------------ bases and experts


def language_base(trial: Trial, kind: str, **options: Any) -> Suite:
    """The suite with a language model of the same stack as its base, merged by a recipe."""
    facts, folder = ROWS[kind], trial.root / "base"
    stack = trial.library("base", torch.float32).base_model.state_dict()
    model = tiny_decoder(facts, **options)
    model.base_model.load_state_dict(stack)
    shutil.rmtree(folder)
    model.save_pretrained(folder)
    content = yaml.safe_load((trial.root / "suite.yaml").read_text())
    content["merged"] = {"method": "task-arithmetic", "scale": 0.4}
    (trial.root / "suite.yaml").write_text(yaml.safe_dump(content))
    return load_suite(trial.root / "suite.yaml")


@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        ("gpt2", True),
        pytest.param("mistral", False, marks=pytest.mark.slow),
        pytest.param("mistral", True, marks=pytest.mark.slow),
    ],
)
def test_the_base_may_be_the_language_model_they_were_made_from(kind: str, tied: bool, tmp_path: Path) -> None:
    """What is written is that language model with the calibrated stack; its head, if it has one of its own, stays."""
    facts, options = CLASSIFIERS[kind], {"tie_word_embeddings": tied}
    trial = write_trial(tiny_decoder(facts, **options), facts, tmp_path / "suite")
    classified = open_family(load_suite(trial.root / "suite.yaml"), "cpu")
    suite = language_base(trial, kind, **options)
    family = open_family(suite, "cpu")
    assert type(family.adapter) is type(classified.adapter)
    assert check_suite(suite).problems == ()
    done = calibrate(family, trial.config())
    done.save(tmp_path / "out")
    library = getattr(transformers, str(ROWS[kind].model))
    model, report = library.from_pretrained(tmp_path / "out", output_loading_info=True, dtype=torch.float32)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    inputs = trial.padded_inputs(TASKS[0])
    with torch.no_grad():
        states = model.eval().base_model(**inputs).last_hidden_state
    last = states[torch.arange(len(states)), inputs["attention_mask"].sum(1) - 1]
    torch.testing.assert_close(final_features(family.adapter, done.weights, {}, [inputs], family.compute), last)
    base = library.from_pretrained(trial.root / "base")
    assert model.lm_head.weight.equal(base.lm_head.weight) != tied
    before, after = (measure_drift(family, one, split="calibration") for one in ("merged", str(tmp_path / "out")))
    assert all(after.tasks[task].layers[-1].relative_drift < before.tasks[task].layers[-1].relative_drift
               for task in TASKS)  # fmt: skip
    assert evaluate(family, str(tmp_path / "out"), split="test").tasks[TASKS[0]].metric == "accuracy"


def test_a_lora_for_classes_brings_its_classifier(gpt2: Trial) -> None:
    """As peft saves it: factors of maps that are stored `[inputs, outputs]`, and the classifier whole."""
    language_base(gpt2, "gpt2")
    generator, key = torch.Generator().manual_seed(5), "transformer.h.0.attn.c_attn"
    down, up = torch.randn(2, 16, generator=generator), torch.randn(48, 2, generator=generator)
    score = torch.randn(3, 16, generator=generator)
    tensors = {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up, "score.weight": score}
    config = {"peft_type": "LORA", "task_type": "SEQ_CLS", "r": 2, "lora_alpha": 4, "target_modules": ["c_attn"],
              "modules_to_save": ["classifier", "score"], "bias": "none", "fan_in_fan_out": True}  # fmt: skip
    (gpt2.root / "adapter").mkdir()
    save_file({f"base_model.model.{n}": t for n, t in tensors.items()}, gpt2.root / "adapter/adapter_model.safetensors")
    (gpt2.root / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    file = gpt2.root / "suite.yaml"
    file.write_text(file.read_text().replace("experts/left", "base+adapter"))
    family = open_family(load_suite(file), "cpu")
    assert check_suite(load_suite(file)).problems == ()
    features = torch.randn(4, 16, generator=generator)
    torch.testing.assert_close(head_of(family, family.merged, "left").scores(features), features @ score.T)
    base, moved = (model.read([f"{key}.weight"])[f"{key}.weight"] for model in (family.base, family.experts["left"]))
    torch.testing.assert_close(moved, base + 2 * (up @ down).T)
    with pytest.raises(InputError, match=r"the adapter contains a classifier, which the base's .* does not describe"):
        rewrite(f"{gpt2.root / 'base'}+{gpt2.root / 'adapter'}", gpt2.root / "out")


def test_language_models_among_experts_are_refused(gpt2: Trial) -> None:
    """One expert that classifies does not make classifiers of the others."""
    suite = language_base(gpt2, "gpt2")
    shutil.rmtree(gpt2.root / "experts" / "right")
    shutil.copytree(gpt2.root / "base", gpt2.root / "experts" / "right")
    said = "expert 'left': config.json calls it GPT2ForSequenceClassification: a classifier"
    with pytest.raises(InputError, match=said):
        open_family(suite, "cpu")
    assert any(problem.startswith(said) for problem in check_suite(suite).problems)


def test_an_expert_without_its_classifier_is_named(gpt2: Trial) -> None:
    file = gpt2.root / "experts" / "left" / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if n != "score.weight"}, file, {"format": "pt"})
    with pytest.raises(NoScores, match=r"task 'left': .*no score in its files"):
        evaluate(load_suite(gpt2.root / "suite.yaml"), "merged", split="test")


@pytest.mark.parametrize("kind", ["ernie4_5", "olmoe"])
def test_what_the_library_has_no_class_for_is_refused(kind: str, tmp_path: Path) -> None:
    trial = write_trial(tiny_decoder(ROWS[kind]), ROWS[kind], tmp_path)
    for task in TASKS:
        file = tmp_path / "experts" / task / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": ["OwnForSequenceClassification"]}))
    assert with_classifier(ROWS[kind]) is None
    with pytest.raises(InputError, match=f"base: transformers has no class with a classifier of type '{kind}'"):
        open_family(load_suite(trial.root / "suite.yaml"), "cpu")


def test_regmean_takes_the_value_for_gpt2(gpt2: Trial) -> None:
    options = resolve_model("regmean", gpt2.family).baseline
    assert isinstance(options, RegMean)
    assert options.reduce == 0.6


def test_a_model_is_written_again_with_its_classifier(gpt2: Trial, tmp_path: Path) -> None:
    rewrite(gpt2.root / "experts" / "left", tmp_path / "out")
    written, own = (
        transformers.GPT2ForSequenceClassification.from_pretrained(folder).state_dict()
        for folder in (tmp_path / "out", gpt2.root / "experts" / "left")
    )
    assert written.keys() == own.keys()
    assert all(tensor.equal(own[name]) for name, tensor in written.items())


def test_calibration_needs_no_labels(gpt2: Trial) -> None:
    assert needs("calibrated", gpt2.family.adapter.modality) == ("samples",)
    assert needs("calibrated", "causal") == ("samples", "labels")


# ------------------------------------------------------------------------------------------------- suite files


def test_init_asks_for_classes_where_all_experts_have_classifiers(gpt2: Trial) -> None:
    language_base(gpt2, "gpt2")
    rows = [{"question": "w1 w2", "sentence": "w3", "label": 1}]
    (gpt2.root / "left.jsonl").write_text("\n".join(map(json.dumps, rows)))
    root, data = gpt2.root, {"left": str(gpt2.root / "left.jsonl")}
    experts = {task: str(root / "experts" / task) for task in TASKS}
    text = write_suite_text(SuiteParts(str(root / "base"), experts, data), root / "mine.yaml").text
    source = yaml.safe_load(text)["tasks"]["left"]["calibration"]
    assert source == {"jsonl": "left.jsonl", "input": "{question}", "pair": "{sentence}", "label": "label"}
    answers = SuiteParts(str(root / "base"), experts | {"right": str(root / "base")}, data)
    assert "pair" not in write_suite_text(answers, root / "mine.yaml").text


def test_fusion_bench_has_no_pool_that_is_known(gpt2: Trial) -> None:
    language_base(gpt2, "gpt2")
    (gpt2.root / "left.jsonl").write_text(json.dumps({"a": "w1", "label": 0}))
    content = yaml.safe_load((gpt2.root / "suite.yaml").read_text())
    content["tasks"]["left"]["calibration"] = {"jsonl": "left.jsonl", "input": "{a}", "label": "label"}
    (gpt2.root / "suite.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(InputError, match="FusionBench has no known pool for models of type 'gpt2' with a classifier"):
        export_fusion_bench(load_suite(gpt2.root / "suite.yaml"))

"""Encoders with a head of every task's own: what must hold for any architecture, and what is theirs alone: heads,
classes, pairs of texts, files of the Hub."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
import yaml
from checked import checks
from lanes import rows
from safetensors.torch import load_file, save_file
from tiny_encoders import ROWS, VARIANTS, WORDS, tiny_encoder, write_tokenizer

from featcal import (
    CalibrationConfig,
    InputError,
    calibrate,
    evaluate,
    load_suite,
    measure_drift,
    open_family,
    register_encoder,
)
from featcal.authoring.from_paths import SuiteParts, write_suite_text
from featcal.baselines.common.fit import fit
from featcal.baselines.react import React
from featcal.calibration.block_statistics import likely_groups
from featcal.evaluation.evaluate import likeness, task_features
from featcal.evaluation.heads import ClassificationHead, ModuleHead, PooledHead
from featcal.evaluation.scoring_heads import head_of
from featcal.export.change_layout import convert
from featcal.figures.verdict.measure import diagnose_model
from featcal.models.adapter import walking
from featcal.models.capture import capture_inputs
from featcal.models.families import registry
from featcal.preflight.check import check_suite
from featcal.session.session import Session
from featcal.studies.recording import measure_model
from featcal.suite.schema import Suite
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import NoScores
from featcal.testing.checks import CHECKS
from featcal.testing.trial import TASKS, Trial, write_trial

QUICK = ("bert", "vit")
"""One of texts, one of pictures."""
REST = [kind for kind in VARIANTS if kind not in QUICK]


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trial]:
    """By kind, each written once."""

    @cache
    def written(kind: str) -> Trial:
        facts, options = VARIANTS[kind]
        return write_trial(tiny_encoder(facts, **options), facts, tmp_path_factory.mktemp(kind))

    return written


@pytest.fixture(params=rows(sorted(VARIANTS), quick=QUICK, slow=REST))
def trial(request: pytest.FixtureRequest, trials: Callable[[str], Trial]) -> Trial:
    return trials(request.param)


@pytest.fixture
def classified(trial: Trial) -> Trial:
    if not trial.facts.classifier:
        pytest.skip("class prompts score it")
    return trial


@pytest.mark.parametrize(("kind", "name"), checks(sorted(VARIANTS), QUICK, REST))
def test_what_must_hold(trials: Callable[[str], Trial], kind: str, name: str) -> None:
    assert CHECKS[name](trials(kind))


@torch.no_grad()
def test_maps_that_share_an_input_are_those_of_the_facts(trial: Trial) -> None:
    """What estimates count with is what a run finds."""
    family = trial.family
    (stage,) = family.adapter.stages
    place = family.compute.place
    with walking(family.adapter):
        call = stage.first_call(place(family.base.read(stage.outer)), trial.padded_inputs(TASKS[0]), None)
        for index, block in enumerate(stage.blocks):
            with capture_inputs(block.linears) as given:
                output = block.run(block.local(place(family.base.read(block.names))), call)
            found = {frozenset(n for n in given if given[n] is given[name]) for name in given}
            assert {frozenset(names) for names in stage.sharing(index) or ()} == found
            assert {name for group in likely_groups(stage, index) for name in group.names} == set(block.linears)
            assert {stage.part(name) for name in block.linears} == {"attention", "mlp"}
            assert set(trial.facts.keys) <= set(block.linears)
            call = stage.advance(call, output)


def test_every_model_is_scored_by_the_head_of_the_tasks_expert(classified: Trial) -> None:
    """The merged model's features through an expert's head are what the library gives where that head is put on the
    merged stack; whatever head the merged model's own folder has."""
    scores = evaluate(classified.family, "merged", split="test")
    for task in TASKS:
        library = classified.library("merged", torch.float32)
        for name in getattr(classified.facts, "head", ()) or classified.family.adapter.classifier:
            library.get_submodule(name).load_state_dict(
                classified.library(f"experts/{task}").get_submodule(name).state_dict()
            )
        said = classified.scores(library, classified.padded_inputs(task, "test")).argmax(1)
        assert scores.tasks[task].metric == "accuracy"
        assert scores.tasks[task].predictions.equal(said)
        assert scores.tasks[task].value == float((said == torch.arange(5) % 2).double().mean())


def test_no_score_of_a_head_of_modules_moves_faster_than_its_bound() -> None:
    torch.manual_seed(0)
    library = tiny_encoder(ROWS["modernbert"]).double().eval()
    module = torch.nn.Sequential(library.head, library.classifier)
    tensors = {name: tensor.detach() for name, tensor in module.named_parameters()}
    head = ModuleHead(module, tensors, ("a", "b", "c"))
    first, second = torch.randn(2, 50, 16, dtype=torch.float64)
    torch.testing.assert_close(head.scores(first), library.classifier(library.head(first)), rtol=1e-12, atol=0)
    parts = (library.head.dense.weight, library.classifier.weight)
    maps = math.prod(float(torch.linalg.matrix_norm(one.detach(), ord=2)) for one in parts)
    largest = 1.128904145  # of |gelu'|, at the square root of two
    expected = maps * largest * float(library.head.norm.weight.detach().abs().max()) / math.sqrt(library.head.norm.eps)
    assert head.lipschitz(first, second).tolist() == pytest.approx([expected] * 50, rel=1e-6)
    moved = (head.scores(second) - head.scores(first)).norm(dim=1) / (second - first).norm(dim=1)
    assert float(moved.max()) < expected


def test_propositions_of_scores_hold_with_heads_of_ones_own(classified: Trial) -> None:
    """Eq. (7): no score moves farther than the head's constant allows; model and expert share the task's head."""
    ledger = measure_drift(classified.family, split="test", output=True)
    for task in TASKS:
        one = ledger.tasks[task].output
        assert one is not None
        assert bool((one.score_drift <= one.bound * (1 + 1e-6)).all())
        assert float(one.head_mismatch.abs().max()) == 0


def test_a_head_behind_a_pooler() -> None:
    torch.manual_seed(0)
    pooler, last = torch.nn.Linear(4, 5).double(), torch.nn.Linear(5, 3).double()
    head = PooledHead(
        pooler.weight.detach(), pooler.bias.detach(), ClassificationHead(last.weight.detach(), last.bias.detach())
    )
    a, b = torch.randn(2, 64, 4, dtype=torch.float64)
    torch.testing.assert_close(head.scores(a), last(torch.tanh(pooler(a))).detach())
    assert bool(((head.scores(a) - head.scores(b)).norm(dim=1) <= head.lipschitz(a, b) * (a - b).norm(dim=1)).all())
    product = torch.linalg.matrix_norm(pooler.weight, ord=2) * torch.linalg.matrix_norm(last.weight, ord=2)
    torch.testing.assert_close(head.lipschitz(a, b), product.detach().expand(64))


def sentences(seed: int, count: int = 8) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (count, 2), generator=generator).tolist()
    words = [
        [" ".join(WORDS[5 + int(i)] for i in torch.randint(27, (n,), generator=generator)) for n in row]
        for row in lengths
    ]
    return [{"a": a, "b": b, "label": ("no", "yes", "maybe")[i % 3]} for i, (a, b) in enumerate(words)]


def edited(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """As the Hub has it: the base as it was pretrained, with names of the first checkpoints and a head of its own,
    experts with classifiers and the names of their classes, pairs of texts with labels in words."""
    torch.manual_seed(1)
    model = tiny_encoder(ROWS["bert"])
    trial = write_trial(model, ROWS["bert"], tmp_path)
    shutil.rmtree(tmp_path / "merged")
    config = transformers.BertConfig.from_pretrained(tmp_path / "base")
    pretrained = transformers.BertForMaskedLM(config)
    pretrained.bert.load_state_dict(trial.library("base", torch.float32).bert.state_dict(), strict=False)
    pretrained.save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    old = {n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
           for n, t in load_file(file).items()}  # fmt: skip
    save_file(old | {"bert.embeddings.position_ids": torch.arange(16)[None]}, file, {"format": "pt"})
    tasks: dict[str, Any] = {}
    for number, task in enumerate(TASKS):
        edited(
            tmp_path / "experts" / task / "config.json",
            lambda c: c.update(id2label={"0": "no", "1": "yes", "2": "maybe"}),
        )
        tasks[task] = {"expert": f"experts/{task}", "classes": ["no", "yes", "maybe"]}
        for split in ("calibration", "test"):
            lines = sentences(2 * number + (split == "test"))
            (tmp_path / f"{task}-{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
            tasks[task][split] = {"jsonl": f"{task}-{split}.jsonl", "input": "{a}", "pair": "{b}", "label": "label"}
    write_tokenizer(tmp_path / "base")
    suite = {"name": "hub", "base": "base", "merged": {"method": "task-arithmetic", "scale": 0.5}, "tasks": tasks}
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(suite))
    return tmp_path / "suite.yaml"


@pytest.mark.parametrize("together", [128, 2])
def test_pairs_of_texts_with_classes_are_scored_as_the_library_scores_them(
    hub: Path, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where samples of a length share a batch."""
    monkeypatch.setattr("featcal.evaluation.evaluate.BATCH_SIZE", together)
    family, root = open_family(load_suite(hub), "cpu"), hub.parent
    tokenizer = transformers.BertTokenizer.from_pretrained(root / "base")
    rows = sentences(1)
    inputs = tokenizer([r["a"] for r in rows], [r["b"] for r in rows], padding=True, return_tensors="pt")
    library = transformers.BertForSequenceClassification.from_pretrained(root / "experts" / "left").eval()
    with torch.no_grad():
        said = library(**inputs).logits.argmax(1)
    drawn = family.samples("left", "test", None, 0)
    assert all(drawn.inputs[name].equal(inputs[name]) for name in ("input_ids", "attention_mask", "token_type_ids"))
    assert int(drawn.inputs["token_type_ids"].sum()) > 0
    assert drawn.texts is not None
    assert drawn.texts[0] == f"{rows[0]['a']}\n{rows[0]['b']}"
    score = evaluate(family, "expert:left", split="test").tasks["left"]
    assert score.predictions.equal(said)
    assert score.labels.tolist() == [("no", "yes", "maybe").index(r["label"]) for r in rows]
    assert head_of(family, family.merged, "left").classes == ("no", "yes", "maybe")


def test_how_alike_two_texts_are_does_not_depend_on_their_batch(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = open_family(load_suite(hub), "cpu")
    first, second = (family.samples("left", split, None, 0) for split in ("test", "calibration"))
    drawn = replace(first, targets=tuple(map(str, range(len(first)))))
    at_once = likeness(family, family.merged, drawn, second.inputs)
    monkeypatch.setattr("featcal.evaluation.evaluate.BATCH_SIZE", 2)
    in_pairs = likeness(family, family.merged, drawn, second.inputs)
    cosines = [float(said) for said in at_once.predictions]
    assert [float(said) for said in in_pairs.predictions] == pytest.approx(cosines, abs=1e-6)
    assert max(cosines) - min(cosines) > 1e-4


def test_what_is_written_over_a_pretrained_base_is_that_model_again(hub: Path) -> None:
    """The stack is the calibrated one under the names that every version reads; the base's own head stays."""
    report = check_suite(load_suite(hub))
    assert report.problems == ()
    assert not any("left out" in note for note in report.notes)
    assert report.diagonal is not None
    assert set(report.diagonal.accuracy) == set(TASKS)
    family, root = open_family(load_suite(hub), "cpu"), hub.parent
    calibrate(family, CalibrationConfig(lam=0.05, rho=2.0, alpha=0.3, samples=8)).save(root / "out")
    model, loaded = transformers.BertForMaskedLM.from_pretrained(root / "out", output_loading_info=True)
    assert not loaded["missing_keys"]
    assert not loaded["mismatched_keys"]
    written, base = (load_file(root / name / "model.safetensors") for name in ("out", "base"))
    base = {n.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias"): t
            for n, t in base.items()}  # fmt: skip
    heads = [name for name in base if name.startswith("cls.")]
    assert heads
    assert all(written[name].equal(base[name]) for name in heads)
    assert not any(name.endswith(("gamma", "beta", "position_ids")) for name in written)
    ours = family.model(str(root / "out")).read(family.adapter.tower)
    assert all(model.state_dict()[name].equal(tensor) for name, tensor in ours.items())
    assert (root / "out" / "vocab.txt").read_text() == (root / "base" / "vocab.txt").read_text()
    before, after = (measure_drift(family, one, split="calibration") for one in ("merged", str(root / "out")))
    for task in TASKS:
        assert after.tasks[task].layers[-1].relative_drift < before.tasks[task].layers[-1].relative_drift


def test_a_stack_without_its_pooler_is_written_as_it_is(tmp_path: Path) -> None:
    """transformers makes a pooler when it loads one, and no state goes through it."""
    torch.manual_seed(0)
    bare = transformers.BertModel(tiny_encoder(ROWS["bert"]).config, add_pooling_layer=False)
    bare.save_pretrained(tmp_path / "bare")
    convert(str(tmp_path / "bare"), tmp_path / "out", "hf")
    again = transformers.BertModel.from_pretrained(tmp_path / "out", add_pooling_layer=False).state_dict()
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == len(again)
    assert all(again[name].equal(tensor) for name, tensor in bare.state_dict().items())


def test_long_pairs_lose_the_end_of_the_longer_text(hub: Path) -> None:
    content = yaml.safe_load(hub.read_text())
    for task in content["tasks"].values():
        task["max_length"] = 8
    hub.write_text(yaml.safe_dump(content))
    family = open_family(load_suite(hub), "cpu")
    drawn, rows = family.samples("left", "test", None, 0), sentences(1)
    lengths = [3 + len(r["a"].split()) + len(r["b"].split()) for r in rows]
    assert drawn.truncated == sum(n > 8 for n in lengths) > 0
    assert drawn.inputs["attention_mask"].sum(1).tolist() == [min(n, 8) for n in lengths]
    assert ((drawn.inputs["input_ids"] == 3).sum(1) == 2).all()


MNLI = ("entailment", "neutral", "contradiction")
"""In the order of the data set; heads on the Hub count them the other way round, in capitals."""


def label_left(
    hub: Path, names: tuple[str, ...], head: tuple[str, ...], kind: str, classes: tuple[str, ...] | None = None
) -> Suite:
    """The suite with the samples of 'left' labelled by what its expert says of them, so that it scores 100 %: by names
    of a Parquet file's classes, by names as text, or by numbers that the suite names.

    Args:
        names: in the order of the data; the same classes as `head`, the expert's own, in another.
        classes: names that the suite gives to numbers, if not these.
    """
    root, content = hub.parent, yaml.safe_load(hub.read_text())
    edited(root / "experts" / "left" / "config.json", lambda c: c.update(id2label=dict(enumerate(head))))
    task = content["tasks"]["left"]
    task.pop("classes", None)
    library = transformers.BertForSequenceClassification.from_pretrained(root / "experts" / "left").eval()
    # What the head says is spread over all classes, so that no order but one is right.
    file = root / "experts" / "left" / "model.safetensors"
    tokenizer = transformers.BertTokenizer.from_pretrained(root / "base")
    rows = sentences(1, 30)
    inputs = tokenizer([r["a"] for r in rows], [r["b"] for r in rows], padding=True, return_tensors="pt")
    with torch.no_grad():
        middle = library(**inputs).logits.mean(0)
        library.classifier.bias -= middle
        said = library(**inputs).logits.argmax(1).tolist()
    save_file(load_file(file) | {"classifier.bias": library.classifier.bias.detach()}, file, {"format": "pt"})
    assert len({*said}) == 3
    keys = [name.lower() for name in names]
    labels = [keys.index(head[one].lower()) for one in said]
    source = {"input": "{a}", "pair": "{b}", "label": "label"}
    table = {name: [row[name] for row in rows] for name in "ab"} | {"label": labels}
    if kind == "ClassLabel":
        features = {"label": {"names": list(names), "_type": "ClassLabel"}}
        about = {"huggingface": json.dumps({"info": {"features": features}})}
        pq.write_table(pa.table(table).replace_schema_metadata(about), root / "left.parquet")
        source["parquet"] = "left.parquet"
    else:
        table["label"] = [names[one] for one in labels] if kind == "text" else labels
        lines = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
        (root / "left.jsonl").write_text("\n".join(map(json.dumps, lines)))
        source["jsonl"] = "left.jsonl"
    task |= {"calibration": source, "test": source} | ({"classes": [*(classes or names)]} if kind == "numbers" else {})
    hub.write_text(yaml.safe_dump(content))
    return load_suite(hub)


@pytest.mark.parametrize("kind", ["ClassLabel", "text", "numbers"])
def test_classes_are_found_by_their_names_whatever_order_the_head_has(hub: Path, kind: str) -> None:
    """Of MNLI two orders are in use; by places accuracy would be that of chance without a word."""
    suite = label_left(hub, MNLI, ("CONTRADICTION", "Neutral", "ENTAILMENT"), kind)
    family = open_family(suite, "cpu")
    found = evaluate(family, "expert:left", split="test").tasks["left"]
    assert (found.value, found.notes) == (1.0, ())
    seen = family.viewable_samples("left", "test", None, 0)
    assert seen.class_names == MNLI[::-1]
    assert torch.equal(seen.labels, found.labels)  # type: ignore[arg-type]


def test_swapped_experts_are_looked_for_by_names(hub: Path) -> None:
    report = check_suite(label_left(hub, MNLI, tuple(map(str.upper, MNLI[::-1])), "text"), probe=True)
    assert report.problems == ()
    assert report.diagonal is not None
    assert report.diagonal.accuracy["left"]["left"] == 1.0


def test_labels_in_words_of_a_head_without_names_are_its_numbers(hub: Path) -> None:
    """A split that lacks a class says which classes it has all the same."""
    head = ("LABEL_0", "LABEL_1", "LABEL_2")
    family = open_family(label_left(hub, ("Label_2", "Label_0", "Label_1"), head, "text"), "cpu")
    assert evaluate(family, "expert:left", split="test").tasks["left"].value == 1.0
    rows = [
        row
        for row in map(json.loads, (hub.parent / "left.jsonl").read_text().splitlines())
        if row["label"] != "Label_1"
    ]
    (hub.parent / "left.jsonl").write_text("\n".join(json.dumps({**row, "label": row["label"][-1]}) for row in rows))
    found = evaluate(family, "expert:left", split="test").tasks["left"]
    assert (found.value, {*found.labels.tolist()}) == (1.0, {0, 2})  # type: ignore[union-attr]


def test_classes_that_share_nothing_are_matched_by_place_with_a_note(hub: Path) -> None:
    suite = label_left(hub, MNLI, tuple(map(str.upper, MNLI)), "numbers", ("yes", "maybe", "no"))
    found = evaluate(suite, "expert:left", split="test")
    assert found.tasks["left"].value == 1.0
    (note,) = found.notes
    assert note.endswith("by their places: 'yes' is 'ENTAILMENT', 'maybe' is 'NEUTRAL', 'no' is 'CONTRADICTION'")
    assert any(note.partition(": ")[2] in one for one in check_suite(suite).notes)


def test_classes_that_are_the_same_in_part_are_a_problem_with_both_lists(hub: Path) -> None:
    """Scores and checks refuse them; a calibration, which asks for no labels, does not."""
    suite = label_left(hub, MNLI, tuple(map(str.upper, MNLI)), "numbers", (*MNLI[:2], "other"))
    both = r"\('entailment', 'neutral', 'other'\) and the head 3 classes \('ENTAILMENT', 'NEUTRAL', 'CONTRADICTION'\)"
    with pytest.raises(InputError, match=both):
        evaluate(suite, "expert:left", split="test")
    assert re.search(both, " ".join(check_suite(suite, probe=False).problems))
    assert open_family(suite, "cpu").samples("left", "calibration", 4, 0).class_names == (*MNLI[:2], "other")


def test_classes_that_samples_lack_are_asked_for(hub: Path) -> None:
    """Names alone are counted in their own order, which a head without names does not know."""
    content = yaml.safe_load(hub.read_text())
    for task in content["tasks"].values():
        del task["classes"]
    hub.write_text(yaml.safe_dump(content))
    rows = [row for row in sentences(1) if row["label"] != "no"]
    (hub.parent / "left-test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = evaluate(load_suite(hub), "expert:left", split="test").tasks["left"]
    assert found.labels.tolist() == [("no", "yes", "maybe").index(row["label"]) for row in rows]  # type: ignore[union-attr]
    edited(hub.parent / "experts" / "left" / "config.json", lambda c: c.pop("id2label"))
    notes = evaluate(load_suite(hub), "expert:left", split="test").tasks["left"].notes
    assert "matched by their places: 'maybe' is 'LABEL_0', 'no' is 'LABEL_1', 'yes' is 'LABEL_2'" in notes[-1]
    for split in ("calibration", "validation"):  # what no split has is known to none
        (hub.parent / f"left-{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(InputError, match=r"2 classes \('maybe', 'yes'\) and the head 3 classes .*give 'classes'"):
        evaluate(load_suite(hub), "expert:left", split="test")


def test_an_expert_without_a_classifier_is_named(hub: Path) -> None:
    file = hub.parent / "experts" / "left" / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if not n.startswith("classifier.")}, file, {"format": "pt"})
    with pytest.raises(NoScores, match=r"no bert\.pooler\.dense and classifier in its files"):
        evaluate(load_suite(hub), "merged", split="test")
    assert measure_drift(load_suite(hub)).tasks["left"].layers  # drift needs no head


def test_text_of_experts_is_refused_where_they_write_none(hub: Path) -> None:
    content = yaml.safe_load(hub.read_text())
    content["tasks"]["left"]["calibration"] = {"self_generated": {"prompts": 2, "tokens": 4}}
    content["tasks"]["left"]["metric"] = "accuracy"
    hub.write_text(yaml.safe_dump(content))
    with pytest.raises(InputError, match="classifiers of text write none"):
        open_family(load_suite(hub), "cpu").samples("left", "calibration", 2, 0)


def test_a_regression_is_not_scored(hub: Path) -> None:
    """The largest of one score is always the first class."""
    file = hub.parent / "experts" / "left" / "model.safetensors"
    cut = {n: t[:1].contiguous() if n.startswith("classifier.") else t for n, t in load_file(file).items()}
    save_file(cut, file, {"format": "pt"})
    with pytest.raises(NoScores, match="classifier has one output, a regression"):
        evaluate(load_suite(hub), "merged", split="test")
    report = check_suite(load_suite(hub), probe=False)
    assert report.problems == ()
    said = "task 'left', test samples: the expert's head has one output, a regression, which is not scored"
    assert said in report.notes


def test_a_lora_brings_a_classifier_that_the_base_lacks(hub: Path) -> None:
    """As peft saves it for a task of classes: factors, and the classifier whole; the pooler is the base's."""
    root = hub.parent
    generator, factors = torch.Generator().manual_seed(5), {}
    for block in open_family(load_suite(hub), "cpu").adapter.blocks():
        key = f"base_model.model.{block.name}.attention.self.query"
        factors |= {f"{key}.lora_{one}.weight": torch.randn(shape, generator=generator)
                    for one, shape in (("A", (2, 16)), ("B", (16, 2)))}  # fmt: skip
    own = {f"classifier.{kind}": torch.randn(shape, generator=generator)
           for kind, shape in (("weight", (3, 16)), ("bias", (3,)))}  # fmt: skip
    (root / "adapter").mkdir()
    file = root / "adapter" / "adapter_model.safetensors"
    save_file(factors | {f"base_model.model.{name}": tensor for name, tensor in own.items()}, file)
    config = {"peft_type": "LORA", "task_type": "SEQ_CLS", "r": 2, "lora_alpha": 4, "target_modules": ["query"],
              "modules_to_save": ["classifier", "score"], "bias": "none"}  # fmt: skip
    (root / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    transformers.BertModel.from_pretrained(root / "base").save_pretrained(root / "base")  # with a pooler
    hub.write_text(hub.read_text().replace("experts/left", "base+adapter"))
    family = open_family(load_suite(hub), "cpu")
    head, base = head_of(family, family.merged, "left"), load_file(root / "base" / "model.safetensors")
    assert isinstance(head, PooledHead)
    assert head.head.weight.equal(own["classifier.weight"])
    assert head.weight.equal(base["pooler.dense.weight"])
    query = "bert.encoder.layer.0.attention.self.query"
    product = factors[f"base_model.model.{query}.lora_B.weight"] @ factors[f"base_model.model.{query}.lora_A.weight"]
    moved = family.experts["left"].read([f"{query}.weight"])[f"{query}.weight"]
    torch.testing.assert_close(moved, base[f"{query.removeprefix('bert.')}.weight"] + 2 * product)
    assert check_suite(load_suite(hub)).problems == ()
    edited(root / "adapter" / "adapter_config.json", lambda c: c.update(modules_to_save=None))
    with pytest.raises(InputError, match="tensors for which the base has none"):
        open_family(load_suite(hub), "cpu")


def test_a_sharded_folder_has_the_names_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file per block where a model is large, under names that the library's class does not have."""
    monkeypatch.setattr("featcal.export.write.SHARD_BYTES", 1000)
    trial = write_trial(tiny_encoder(ROWS["vit"]), ROWS["vit"], tmp_path)
    calibrate(trial.family, trial.config()).save(tmp_path / "out")
    places = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert places.keys() == load_file(tmp_path / "merged" / "model.safetensors").keys()
    assert len({file for name, file in places.items() if name.startswith("vit.encoder.layer.")}) == 2
    _, loaded = transformers.ViTForImageClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not loaded["missing_keys"]


@pytest.fixture
def sentence_folders(hub: Path) -> Path:
    """The suite of pairs as folders of sentence-transformers, pooled by the mean."""
    root = hub.parent
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    for folder in (root / "base", root / "experts" / "left", root / "experts" / "right"):
        transformers.BertModel.from_pretrained(folder).save_pretrained(folder)
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        options = {"word_embedding_dimension": 16, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(options))
    return hub


def test_embeddings_of_sentences_are_means_over_tokens(sentence_folders: Path) -> None:
    family, root = open_family(load_suite(sentence_folders), "cpu"), sentence_folders.parent
    (stage,), last = family.adapter.stages, "output.dense"
    assert not family.adapter.class_token
    assert stage.weighting(1, last) == "tokens"
    drawn = family.samples("left", "test", None, 0)
    library = transformers.BertModel.from_pretrained(root / "experts" / "left").eval()
    mask = drawn.inputs["attention_mask"][:, :, None]
    with torch.no_grad():
        states = library(**drawn.inputs).last_hidden_state
    theirs = (states * mask).sum(1) / mask.sum(1)
    ours = task_features(family, family.experts["left"], "left", [drawn.inputs])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    calibrate(family, CalibrationConfig(lam=0.05, rho=2.0, alpha=0.3, samples=8)).save(root / "out")
    for name in ("modules.json", "1_Pooling/config.json"):
        assert (root / "out" / name).read_text() == (root / "base" / name).read_text()
    before, after = (measure_drift(family, one, split="calibration") for one in ("merged", str(root / "out")))
    for task in TASKS:
        assert after.tasks[task].layers[-1].relative_drift < before.tasks[task].layers[-1].relative_drift
    with pytest.raises(NoScores, match="nor has the task's expert; give Model"):
        evaluate(family, "merged", split="test")


def compared(suite: Path) -> Path:
    """The suite with a number for every pair in place of its class."""
    content = yaml.safe_load(suite.read_text())
    for number, task in enumerate(content["tasks"].values()):
        del task["classes"]
        for split in ("calibration", "test"):
            lines = [{**row, "like": f"{(7 * i + number) % 8 / 2}"} for i, row in enumerate(sentences(number))]
            (suite.parent / f"alike-{number}.jsonl").write_text("\n".join(map(json.dumps, lines)))
            task[split] = {"jsonl": f"alike-{number}.jsonl", "input": "{a}", "pair": "{b}", "target": "{like}"}
    suite.write_text(yaml.safe_dump(content))
    return suite


def test_pairs_of_sentences_are_scored_by_their_cosines(sentence_folders: Path) -> None:
    """Every text runs alone through the library, and is the mean of its states; ranks are counted by hand."""
    family, root = open_family(load_suite(compared(sentence_folders)), "cpu"), sentence_folders.parent
    assert family.suite.task("left").metric == "spearman"
    tokenizer = transformers.BertTokenizer.from_pretrained(root / "base")
    library = transformers.BertModel.from_pretrained(root / "experts" / "left", dtype=torch.float64).eval()

    @torch.no_grad()
    def embedded(text: str) -> torch.Tensor:
        return library(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)

    rows = sentences(0)
    cosines = [torch.cosine_similarity(embedded(r["a"]), embedded(r["b"]), dim=0).item() for r in rows]
    score = evaluate(family, "expert:left", split="test").tasks["left"]
    torch.testing.assert_close([float(one) for one in score.predictions], cosines, rtol=0, atol=1e-5)
    numbers = [7 * i % 8 / 2 for i in range(len(rows))]
    ranks = np.stack([np.argsort(np.argsort(one)) for one in (cosines, numbers)])  # all numbers differ
    assert score.value == pytest.approx(np.corrcoef(ranks)[0, 1], abs=1e-9)
    assert (score.metric, score.n, score.right) == ("spearman", 8, None)
    drawn = family.samples("left", "test", None, 0)
    assert drawn.second is not None
    assert drawn.texts == tuple(f"{row['a']}\n{row['b']}" for row in rows)
    assert int(drawn.inputs["token_type_ids"].sum()) == 0
    checked = check_suite(family.suite)
    assert checked.problems == ()
    assert not [note for note in checked.notes if "scored" in note]


def test_everything_that_shows_scores_shows_those_of_pairs(sentence_folders: Path) -> None:
    """The history, the verdict and sweeps ask for the same scores as `evaluate`."""
    session, on = Session(open_family(load_suite(compared(sentence_folders)), "cpu")), EvaluationSamples(8, "test")
    expected = {task: one.value for task, one in session.measure.scores("merged", on).tasks.items()}
    found = measure_model(session, "merged", on)
    assert (found.how, {task: one.value for task, one in found.scores.items()}) == ("answers", expected)
    verdict = diagnose_model(session, "merged", on)
    assert not any("no labels" in line for line in verdict.lines)
    with pytest.raises(NoScores, match="pairs of texts have no classes"):
        session.measure.judges("merged", on)


def read_otherwise(root: Path, folders: tuple[str, ...] = ("base", "experts/left", "experts/right")) -> None:
    """Say in folders of sentence-transformers that texts have a prompt in front, are cut and in lower case."""
    for folder in folders:
        prompts = {"prompts": {"query": "the dog: ", "plain": ""}, "default_prompt_name": "query"}
        (root / folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
        (root / folder / "sentence_bert_config.json").write_text(
            json.dumps({"max_seq_length": 7, "do_lower_case": True})
        )


@pytest.mark.parametrize("own", [None, 6])
def test_sentences_are_read_with_prompt_length_and_case_of_their_folder(
    sentence_folders: Path, own: int | None
) -> None:
    """Scores are those of `encode()`, text by text: the prompt in front, lower case, cut by the library's tokenizer. A
    length in the suite file goes before the folder's, and `check` says so."""
    root = sentence_folders.parent
    suite = compared(sentence_folders)
    for file in root.glob("alike-*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("\n".join(json.dumps({**row, "a": row["a"].upper()}) for row in rows))
    tokens = json.loads((root / "base" / "tokenizer.json").read_text())
    tokens["normalizer"] = None  # reads upper case as unknown
    (root / "base" / "tokenizer.json").write_text(json.dumps(tokens))
    without = evaluate(open_family(load_suite(suite), "cpu"), "expert:left", split="test").tasks["left"]
    read_otherwise(root)
    if own is not None:
        content = yaml.safe_load(suite.read_text())
        for task in content["tasks"].values():
            task["max_length"] = own
        suite.write_text(yaml.safe_dump(content))
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "base")
    library = transformers.BertModel.from_pretrained(root / "experts" / "left", dtype=torch.float64).eval()

    @torch.no_grad()
    def embedded(text: str) -> torch.Tensor:
        given = tokenizer(f"the dog: {text}".lower(), truncation=True, max_length=own or 7, return_tensors="pt")
        return library(**given).last_hidden_state[0].mean(0)

    rows = [{**row, "a": row["a"].upper()} for row in sentences(0)]
    cosines = [torch.cosine_similarity(embedded(r["a"]), embedded(r["b"]), dim=0).item() for r in rows]
    family = open_family(load_suite(suite), "cpu")
    score = evaluate(family, "expert:left", split="test").tasks["left"]
    torch.testing.assert_close([float(one) for one in score.predictions], cosines, rtol=0, atol=1e-5)
    assert score.predictions != without.predictions
    notes = [one for one in check_suite(family.suite, probe=False).notes if "max_length" in one and "encode()" in one]
    assert len(notes) == (0 if own is None else 4)
    assert any(f"max_length {own or 7} tokens" in one for one in check_suite(family.suite, probe=False).notes)


def test_models_that_read_texts_otherwise_than_the_base_are_refused(sentence_folders: Path) -> None:
    root, suite = sentence_folders.parent, compared(sentence_folders)
    read_otherwise(root)
    edited(
        root / "experts" / "left" / "config_sentence_transformers.json", lambda c: c.update(default_prompt_name=None)
    )
    edited(root / "experts" / "right" / "sentence_bert_config.json", lambda c: c.update(max_seq_length=5))
    prompt = "expert 'left': prompt is '' by its config_sentence_transformers.json, 'the dog: ' by the base's"
    length = "expert 'right': max_seq_length is 5 by its sentence_bert_config.json or tokenizer, 7 by the base's"
    with pytest.raises(InputError) as refused:
        open_family(load_suite(suite), "cpu")
    assert all(one.startswith(start) for one, start in zip(refused.value.problems, (prompt, length), strict=True))
    assert {*refused.value.problems} <= {*check_suite(load_suite(suite)).problems}
    content = yaml.safe_load(suite.read_text())
    for task in content["tasks"].values():
        task["max_length"] = 6
    suite.write_text(yaml.safe_dump(content))
    with pytest.raises(InputError) as refused:
        open_family(load_suite(suite), "cpu")
    assert [one.startswith(prompt) for one in refused.value.problems] == [True]


@pytest.mark.parametrize(
    ("file", "options", "said"),
    [
        ("1_Pooling/config.json", {"include_prompt": False}, "a default prompt that include_prompt: false keeps out"),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {"max_length": 3}}}, "processing_kwargs in sent"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "the transformer_task 'fill-mask'"),
        ("sentence_bert_config.json", {"max_seq_length": "long"}, "max_seq_length is 'long', not a number of tokens"),
        ("config_sentence_transformers.json", {"prompts": ["query: "]}, "prompts are a mapping of names to texts"),
        ("config_sentence_transformers.json", {"truncate_dim": 8}, "truncate_dim in config_sentence_transformers"),
        (
            "config_sentence_transformers.json",
            {"default_prompt_name": "none"},
            "default_prompt_name is 'none', the pro",
        ),
    ],
)
def test_what_is_not_done_to_sentences_is_refused(
    sentence_folders: Path, file: str, options: dict[str, Any], said: str
) -> None:
    root = sentence_folders.parent
    read_otherwise(root)
    edited(root / "base" / file, lambda c: c.update(options))
    with pytest.raises(InputError) as refused:
        open_family(load_suite(sentence_folders), "cpu")
    assert said in str(refused.value)


def test_either_text_of_a_pair_counts_where_it_is_cut(sentence_folders: Path) -> None:
    suite, most = compared(sentence_folders), 6
    content = yaml.safe_load(suite.read_text())
    content["tasks"]["left"]["max_length"] = most
    suite.write_text(yaml.safe_dump(content))
    drawn = open_family(load_suite(suite), "cpu").samples("left", "test", None, 0)
    cut = [sum(2 + len(row[side].split()) > most for row in sentences(0)) for side in "ab"]
    assert drawn.truncated == sum(cut) > max(cut)


def test_maps_of_embeddings_are_modules_of_sentence_transformers(sentence_folders: Path) -> None:
    """What the library's states become after pooling and `Dense` are the embeddings of the row, read back too."""
    family, root = open_family(load_suite(compared(sentence_folders)), "cpu"), sentence_folders.parent
    found = fit(family, React(samples=8))
    assert found.save(root / "out")["heads"] == dict.fromkeys(TASKS)
    dense = root / "out" / "heads" / "left"
    options = json.loads((dense / "config.json").read_text())
    assert options == {
        "in_features": 16,
        "out_features": 16,
        "bias": True,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    linear = torch.nn.Linear(16, 16)
    stored = load_file(dense / "model.safetensors")
    linear.load_state_dict({name.removeprefix("linear."): tensor for name, tensor in stored.items()})
    drawn = family.samples("left", "test", None, 0)
    mask = drawn.inputs["attention_mask"][:, :, None]
    with torch.no_grad():
        states = transformers.BertModel.from_pretrained(root / "out").eval()(**drawn.inputs).last_hidden_state
        theirs = linear((states * mask).sum(1) / mask.sum(1))
    ours = task_features(family, found.weights, "left", [drawn.inputs])
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
    row, again = evaluate(family, found.weights, split="test"), evaluate(family, str(root / "out"), split="test")
    assert {task: one.value for task, one in again.tasks.items()} == {t: one.value for t, one in row.tasks.items()}
    with pytest.raises(InputError, match="has no head in its files; write all tasks"):
        found.save(root / "one", "left")


def test_pairs_to_compare_need_embeddings_and_numbers(hub: Path, sentence_folders: Path) -> None:
    suite = compared(sentence_folders)
    content = yaml.safe_load(suite.read_text())
    content["tasks"]["left"]["test"]["target"] = "{a}"
    suite.write_text(yaml.safe_dump(content))
    with pytest.raises(InputError, match="spearman needs numbers as right answers"):
        evaluate(open_family(load_suite(suite), "cpu"), "base", split="test")
    for folder in ("base", "experts/left", "experts/right"):
        (suite.parent / folder / "modules.json").unlink()
    with pytest.raises(InputError, match="the base must be a folder of sentence-transformers"):
        open_family(load_suite(suite), "cpu").samples("left", "test", None, 0)
    content["tasks"]["left"]["metric"] = "exact_match"
    suite.write_text(yaml.safe_dump(content))
    with pytest.raises(InputError, match=r"pairs of texts with a number .* are scored by spearman"):
        load_suite(suite)


def test_sentence_folders_that_pool_otherwise_are_refused(sentence_folders: Path) -> None:
    root = sentence_folders.parent
    edited(root / "experts" / "left" / "1_Pooling" / "config.json",
           lambda c: c.update(pooling_mode_cls_token=True, pooling_mode_mean_tokens=False))  # fmt: skip
    with pytest.raises(InputError, match=r"expert 'left': pooling is 'first' in .*, the base has 'mean'"):
        open_family(load_suite(sentence_folders), "cpu")
    file = root / "base" / "1_Pooling" / "config.json"
    file.write_text(json.dumps({"pooling_mode": "weightedmean"}))
    with pytest.raises(InputError, match="base: a sentence-transformers folder with weightedmean"):
        open_family(load_suite(sentence_folders), "cpu")
    modules = json.loads((root / "base" / "modules.json").read_text())
    modules[2] |= {"type": "sentence_transformers.models.Dense"}
    (root / "base" / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(InputError, match=r"base: a sentence-transformers folder with Dense in modules\.json"):
        open_family(load_suite(sentence_folders), "cpu")


def test_a_bare_encoder_is_read(hub: Path) -> None:
    """`BertModel` alone has no prefix."""
    family, root = open_family(load_suite(hub), "cpu"), hub.parent
    expected = family.base.read(family.adapter.tower)
    transformers.BertModel.from_pretrained(root / "base").save_pretrained(root / "bare")
    found = family.model(str(root / "bare")).read(family.adapter.tower)
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("bert", {"layer_norm_eps": 0.1}, "layer_norm_eps is 0.1"),
        ("roberta", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
    ],
)
def test_experts_whose_forward_differs_are_refused(
    kind: str, options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    write_trial(tiny_encoder(ROWS[kind]), ROWS[kind], tmp_path)
    edited(tmp_path / "experts" / "left" / "config.json", lambda c: c.update(options))
    with pytest.raises(InputError, match=f"expert 'left': {says}"):
        open_family(load_suite(tmp_path / "suite.yaml"), "cpu")


@pytest.mark.slow
def test_an_encoder_that_its_configuration_calls_a_decoder_keeps_no_cache(tmp_path: Path) -> None:
    trial = write_trial(tiny_encoder(ROWS["bert"], is_decoder=True), ROWS["bert"], tmp_path)
    assert CHECKS["paper"](trial)
    assert CHECKS["drift"](trial)


def test_texts_longer_than_the_table_of_positions_are_refused(trial: Trial) -> None:
    adapter = trial.family.adapter
    if adapter.modality == "text":
        ids = torch.full((1, 17), 5)
        assert adapter.misfit({"input_ids": ids[:, :16]}) is None
        assert "texts of 17 tokens, the model has 16 positions" in str(adapter.misfit({"input_ids": ids}))


@pytest.mark.parametrize(
    ("options", "check", "says"),
    [
        ({"parts": ROWS["bert"].parts[::-1]}, "informed", "its residual parts are not the whole block"),
        ({"pooling": "mean"}, "replay", "scores"),
        ({"classifier": ("classifier",)}, "replay", "scores"),
    ],
)
def test_facts_that_are_not_true_are_found(
    options: dict[str, Any], check: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    false = replace(ROWS["bert"], **options)
    monkeypatch.setitem(registry._FACTS, "bert", false)
    trial = write_trial(tiny_encoder(false), false, tmp_path)
    with pytest.raises((AssertionError, InputError), match=says):
        CHECKS[check](trial)


def test_tensors_keep_the_names_of_files(trial: Trial) -> None:
    """What version 5 calls otherwise in its classes keeps the names that files of all versions have; scales of layers
    are merged and not calibrated."""
    names = trial.family.adapter.tower
    stored = load_file(trial.root / "base" / "model.safetensors")
    assert set(names) <= set(stored) | {f"vision_model.{name}" for name in stored}
    scales = [name for name in names if name.endswith("lambda1")]
    assert trial.family.adapter.uncalibrated_names() == scales
    assert bool(scales) == trial.facts.model_type.startswith("dinov2")
    done = calibrate(trial.family, trial.config()).weights.read(scales)
    assert all(done[name].equal(tensor) for name, tensor in trial.family.merged.read(scales).items())


def test_rows_of_featcals_own_are_not_replaced() -> None:
    with pytest.raises(InputError, match="'bert' is an architecture of featcal's own"):
        register_encoder(replace(ROWS["bert"], pooling="mean"))


def test_dtype_is_kept(tmp_path: Path) -> None:
    trial = write_trial(tiny_encoder(ROWS["roberta"]), ROWS["roberta"], tmp_path, torch.bfloat16)
    calibrate(trial.family, trial.config()).save(tmp_path / "out")
    written, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "merged"))
    assert {n: (t.dtype, t.shape) for n, t in written.items()} == {n: (t.dtype, t.shape) for n, t in merged.items()}
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}


@pytest.mark.usefixtures("instant_maps")
@pytest.mark.parametrize(
    "page",
    rows(["drift", "calibrate", "features", "accuracy", "models"], quick=(), slow=("drift", "accuracy", "models")),
)
def test_pages_show_texts_with_classes(page: str, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from app_pages import opened

    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "cache"))
    app = opened(hub, page)
    assert not app.exception
    assert not app.error
    if page == "models":
        shown = [frame.value for frame in app.dataframe]
        assert any("class names" in frame and "prompts" not in frame for frame in shown)
        (texts,) = [frame for frame in shown if "answer" in frame]
        assert set(texts["answer"]) == {"no", "yes", "maybe"}


def test_a_suite_file_is_begun_with_the_classes_of_the_heads(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels in words, pairs of texts: what `init` writes is scored as the suite that was written by hand."""
    root = hub.parent
    monkeypatch.chdir(root)
    for task in TASKS:
        rows = {split: (root / f"{task}-{split}.jsonl").read_text() for split in ("calibration", "test")}
        lines = [{**json.loads(line), "split": split} for split, text in rows.items() for line in text.splitlines()]
        renamed = [{"sentence1": r["a"], "sentence2": r["b"], "label": r["label"], "split": r["split"]} for r in lines]
        (root / f"{task}.jsonl").write_text("\n".join(map(json.dumps, renamed)))
    parts = SuiteParts("base", {t: f"experts/{t}" for t in TASKS}, {t: f"{t}.jsonl" for t in TASKS})
    begun = write_suite_text(parts, root / "begun.yaml")
    assert begun.missing == ()
    assert any(
        "classes are in column 'label', counted as the experts' heads count them" in one for one in begun.assumed
    )
    (root / "begun.yaml").write_text(begun.text)
    suite = load_suite(root / "begun.yaml")
    source = suite.task("left").test
    assert source is not None
    assert (source.input, source.pair, source.label) == ("{sentence1}", "{sentence2}", "label")
    assert source.targets is None
    ours = evaluate(open_family(suite, "cpu"), "expert:left", split="test").tasks["left"]
    by_hand = evaluate(open_family(load_suite(hub), "cpu"), "expert:left", split="test").tasks["left"]
    assert ours.predictions.equal(by_hand.predictions)
    assert ours.labels.equal(by_hand.labels)


def test_a_suite_file_of_sentences_is_begun_with_numbers(
    sentence_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = sentence_folders.parent
    monkeypatch.chdir(root)
    rows = [{"sentence1": r["a"], "sentence2": r["b"], "score": i / 2} for i, r in enumerate(sentences(0))]
    (root / "alike.jsonl").write_text("\n".join(map(json.dumps, rows)))
    begun = write_suite_text(SuiteParts("base", {"left": "experts/left"}, {"left": "alike.jsonl"}), root / "begun.yaml")
    (root / "begun.yaml").write_text(begun.text)
    task = load_suite(root / "begun.yaml").task("left")
    assert task.metric == "spearman"
    assert task.calibration is not None
    assert (task.calibration.pair, task.calibration.target) == ("{sentence2}", "{score}")
    assert task.max_length == 16  # as many as the model has positions
    read_otherwise(root)
    begun = write_suite_text(SuiteParts("base", {"left": "experts/left"}, {"left": "alike.jsonl"}), root / "begun.yaml")
    (root / "begun.yaml").write_text(begun.text)
    assert load_suite(root / "begun.yaml").task("left").max_length == 7
    assert "every text has the base's default prompt in front of it, 'the dog: '" in begun.assumed
    (root / "alike.jsonl").write_text(json.dumps({"text": "a", "id": 1}))
    asked = write_suite_text(
        SuiteParts("base", {"left": "experts/left"}, {"left": "alike.jsonl"}), root / "begun.yaml"
    ).missing
    assert any("which columns are the two texts" in one for one in asked)
    assert any("which column holds the number that says how alike" in one for one in asked)

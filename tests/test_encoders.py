"""Encoders with a head of every task's own: what must hold for any architecture, and what is theirs alone: heads,
classes, pairs of texts, files of the Hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from tiny_encoders import ROWS, tiny_encoder

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
from featcal.calibration.moments import likely_groups
from featcal.errors import NoScores
from featcal.evaluation.heads import ClassificationHead, PooledHead
from featcal.evaluation.judges import head_of
from featcal.models import architectures
from featcal.models.adapter import walking
from featcal.models.capture import capture_inputs
from featcal.preflight import check
from featcal.testing.checks import CHECKS
from featcal.testing.trial import TASKS, Trial, write_trial


@pytest.fixture(scope="module", params=sorted(ROWS))
def trial(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    facts = ROWS[request.param]
    return write_trial(tiny_encoder(facts), facts, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("name", CHECKS)
def test_what_must_hold(trial: Trial, name: str) -> None:
    assert CHECKS[name](trial)


@torch.no_grad()
def test_maps_that_share_an_input_are_those_of_the_facts(trial: Trial) -> None:
    """What estimates count with is what a run finds."""
    family = trial.family
    (stage,) = family.adapter.stages
    place = family.compute.place
    with walking(family.adapter):
        call = stage.first_call(place(family.base.read(stage.outer)), trial.padded(TASKS[0]), None)
        for index, block in enumerate(stage.blocks):
            with capture_inputs(block.linears) as given:
                output = block.run(block.local(place(family.base.read(block.names))), call)
            found = {frozenset(n for n in given if given[n] is given[name]) for name in given}
            assert {frozenset(names) for names in stage.sharing(index) or ()} == found
            assert {name for group in likely_groups(stage, index) for name in group.names} == set(block.linears)
            assert {stage.part(name) for name in block.linears} == {"attention", "mlp"}
            assert set(trial.facts.keys) <= set(block.linears)
            call = stage.advance(call, output)


def test_every_model_is_scored_by_the_head_of_the_tasks_expert(trial: Trial) -> None:
    """The merged model's features through an expert's head are what the library gives where that head is put on the
    merged stack; whatever head the merged model's own folder has."""
    scores = evaluate(trial.family, "merged", split="test")
    for task in TASKS:
        library = trial.library("merged", torch.float32)
        for name in trial.family.adapter.classifier:
            library.get_submodule(name).load_state_dict(
                trial.library(f"experts/{task}").get_submodule(name).state_dict()
            )
        said = trial.scores(library, trial.padded(task, "test")).argmax(1)
        assert scores.tasks[task].metric == "accuracy"
        assert scores.tasks[task].predictions.equal(said)
        assert scores.tasks[task].value == float((said == torch.arange(5) % 2).double().mean())


def test_propositions_of_scores_hold_with_heads_of_ones_own(trial: Trial) -> None:
    """Eq. (7): no score moves farther than the head's constant allows; model and expert share the task's head."""
    ledger = measure_drift(trial.family, split="test", output=True)
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


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *[f"w{i}" for i in range(27)]]


def write_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)


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


def test_pairs_of_texts_with_classes_are_scored_as_the_library_scores_them(hub: Path) -> None:
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


def test_what_is_written_over_a_pretrained_base_is_that_model_again(hub: Path) -> None:
    """The stack is the calibrated one under the names that every version reads; the base's own head stays."""
    report = check(load_suite(hub))
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
    before, after = measure_drift(family), measure_drift(family, str(root / "out"))
    for task in TASKS:
        assert after.tasks[task].layers[-1].relative_drift < before.tasks[task].layers[-1].relative_drift


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


def test_classes_in_another_order_than_the_experts_are_refused(hub: Path) -> None:
    """Of MNLI two orders are in use; accuracy would be that of chance without a word."""
    edited(
        hub.parent / "experts" / "left" / "config.json",
        lambda c: c.update(id2label={"0": "yes", "1": "no", "2": "maybe"}),
    )
    with pytest.raises(InputError, match="the same classes in another order"):
        evaluate(load_suite(hub), "merged", split="test")


def test_an_expert_without_a_classifier_is_named(hub: Path) -> None:
    file = hub.parent / "experts" / "left" / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if not n.startswith("classifier.")}, file, {"format": "pt"})
    with pytest.raises(NoScores, match=r"no bert\.pooler\.dense and classifier in its files"):
        evaluate(load_suite(hub), "merged", split="test")
    assert measure_drift(load_suite(hub)).tasks["left"].layers  # drift needs no head


def test_a_regression_is_not_scored(hub: Path) -> None:
    """The largest of one score is always the first class."""
    file = hub.parent / "experts" / "left" / "model.safetensors"
    cut = {n: t[:1].contiguous() if n.startswith("classifier.") else t for n, t in load_file(file).items()}
    save_file(cut, file, {"format": "pt"})
    with pytest.raises(NoScores, match="classifier has one output, a regression"):
        evaluate(load_suite(hub), "merged", split="test")


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


def test_texts_longer_than_the_table_of_positions_are_refused(trial: Trial) -> None:
    adapter = trial.family.adapter
    if adapter.modality == "text":
        ids = torch.full((1, 17), 5)
        assert adapter.misfit({"input_ids": ids[:, :16]}) is None
        assert "texts of 17 tokens, the model has 16 positions" in str(adapter.misfit({"input_ids": ids}))


@pytest.mark.parametrize(
    ("options", "check", "says"),
    [
        ({"parts": ROWS["bert"].parts[::-1]}, "refined", "its residual parts are not the whole block"),
        ({"pooling": "mean"}, "replay", "scores"),
        ({"classifier": ("classifier",)}, "replay", "scores"),
    ],
)
def test_facts_that_are_not_true_are_found(
    options: dict[str, Any], check: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    false = replace(ROWS["bert"], **options)
    monkeypatch.setitem(architectures._TOLD, "bert", false)
    trial = write_trial(tiny_encoder(false), false, tmp_path)
    with pytest.raises((AssertionError, InputError), match=says):
        CHECKS[check](trial)


def test_rows_of_featcals_own_are_not_replaced() -> None:
    with pytest.raises(InputError, match="'bert' is an architecture of featcal's own"):
        register_encoder(replace(ROWS["bert"], pooling="mean"))


def test_dtype_is_kept(tmp_path: Path) -> None:
    trial = write_trial(tiny_encoder(ROWS["roberta"]), ROWS["roberta"], tmp_path, torch.bfloat16)
    calibrate(trial.family, trial.config()).save(tmp_path / "out")
    written, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "merged"))
    assert {n: (t.dtype, t.shape) for n, t in written.items()} == {n: (t.dtype, t.shape) for n, t in merged.items()}
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}

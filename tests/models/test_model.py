"""A model with maps of features and heads per task, wherever weights are taken."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from tiny_clip import CLASSES, TASKS
from tiny_text import ROWS, write_text_suite
from torch import Tensor

from featcal import Family, InputError, calibrate, evaluate, load_suite, measure_drift, open_family
from featcal.calibration.calibrate import config_for
from featcal.evaluation.evaluate import score_model, task_features
from featcal.evaluation.heads import ClassificationHead, LinearHead
from featcal.evaluation.language import generate_answers
from featcal.evaluation.scoring_heads import answers_of, head_of, judges, prompt_heads
from featcal.family.opening import batches_of
from featcal.formats.weights import FirstRows, InMemory, Overlay, Weights
from featcal.models.features import final_features
from featcal.models.model import Model, map_features, own_head
from featcal.preflight.probe import measure_diagonal

PETS, SIGNS = TASKS
WIDTH = 8
"""Of the tiny model's final features."""


@dataclass(frozen=True)
class Surgery:
    """h + W_up relu(W_down h)"""

    down: Tensor
    up: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        return features + torch.relu(features @ self.down.to(features).mT) @ self.up.to(features).mT


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def surgery(seed: int) -> Surgery:
    return Surgery(random(seed, 3, WIDTH), random(seed + 1, WIDTH, 3))


def heads(classes: int = len(CLASSES)) -> dict[str, ClassificationHead]:
    return {
        task: ClassificationHead(random(10 + seed, classes, WIDTH), random(20 + seed, classes))
        for seed, task in enumerate(TASKS)
    }


def with_heads(family: Family, brought: Mapping[str, ClassificationHead]) -> Family:
    """The same models of an architecture without prompts, each expert with the head of its own task."""
    adapter = copy.copy(family.adapter)
    adapter.scores_with = "own"
    experts = {
        task: Model(expert, heads={task: brought[task]} if task in brought else {})
        for task, expert in family.experts.items()
    }
    return replace(family, adapter=adapter, experts=experts)


def features_of(family: Family, model: Weights, task: str) -> Tensor:
    drawn = family.samples(task, "test", None, 42)
    batches = batches_of(drawn, 128, family.compute.device)
    return final_features(family.adapter, model, family.head(), batches, family.compute)


def plain(label: str = "plain") -> InMemory:
    return InMemory(label, {"w": torch.ones(4, 2)})


def test_a_model_is_weights(tiny: Family) -> None:
    expert = tiny.experts[PETS]
    model = Model(expert)
    assert isinstance(model, Weights)
    assert (model.label, model.info, model.files) == (expert.label, expert.info, expert.files)  # type: ignore[attr-defined]
    assert model.changes == expert.info
    name = tiny.adapter.tower[0]
    assert model.read([name])[name].equal(expert.read([name])[name])
    assert tiny.model(model) is model
    assert Model(plain()).files == ()


def test_maps_apply_to_their_tasks_alone() -> None:
    model, features = Model(plain(), maps={PETS: surgery(0)}), random(5, 6, WIDTH).double()
    one = surgery(0)
    for row, found in zip(features, map_features(model, PETS, features), strict=True):
        hidden = [max(0.0, float((one.down[i].double() * row).sum())) for i in range(3)]
        expected = [float(row[j]) + sum(float(one.up[j, i]) * hidden[i] for i in range(3)) for j in range(WIDTH)]
        assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert map_features(model, SIGNS, features) is features
    assert map_features(plain(), PETS, features) is features


def test_what_lies_over_a_model_keeps_its_maps_and_heads() -> None:
    own = heads()
    inner = Model(plain(), {PETS: surgery(0)}, own)
    over = Overlay("calibrated", inner, {"w": torch.zeros(4, 2)})
    outer = Model(over, {SIGNS: surgery(4)}, {SIGNS: own[PETS]})
    features = random(5, 6, WIDTH)
    assert map_features(over, PETS, features).equal(surgery(0)(features))
    assert map_features(outer, PETS, features).equal(surgery(0)(features))
    assert map_features(outer, SIGNS, features).equal(surgery(4)(features))
    assert own_head(over, SIGNS) is own[SIGNS]
    assert own_head(outer, SIGNS) is own[PETS]
    assert own_head(FirstRows(inner, {"w": 2}), PETS) is own[PETS]  # type: ignore[arg-type]
    assert own_head(plain(), PETS) is None


def test_a_resident_family_and_a_calibrated_model_keep_them(tiny: Family) -> None:
    family = with_heads(tiny, heads()).resident()
    assert own_head(family.experts[PETS], PETS) is not None
    changed = replace(tiny, merged=Model(tiny.merged, {PETS: surgery(0)}))
    calibrated = calibrate(changed, config_for(changed, samples=4)).weights
    features = random(5, 6, WIDTH)
    assert map_features(calibrated, PETS, features).equal(surgery(0)(features))


def test_mapped_features_are_scored(tiny: Family) -> None:
    model, shared = Model(tiny.merged, {PETS: surgery(0)}), prompt_heads(tiny, dict.fromkeys(TASKS, CLASSES), {})
    for task in TASKS:
        features = features_of(tiny, tiny.merged, task).float()
        expected = surgery(0)(features) if task == PETS else features
        drawn = tiny.samples(task, "test", None, 42)
        found = score_model(tiny, model, [drawn], shared[task])
        assert torch.as_tensor(found.predictions).equal(shared[task].scores(expected).argmax(1))
        assert task_features(tiny, model, task, batches_of(drawn, 128, torch.device("cpu"))).equal(expected)


def test_a_classification_head_per_task_scores(tiny: Family) -> None:
    """Accuracy by hand; expert and merged model are scored with the head of the task's expert."""
    family, brought = with_heads(tiny, heads()), heads()
    for which in ("expert", "merged"):
        scores = evaluate(family, which)
        for task in TASKS:
            features = features_of(tiny, tiny.experts[task] if which == "expert" else tiny.merged, task)
            labels = tiny.samples(task, "test", None, 42).labels
            assert labels is not None
            right = 0
            for row, label in zip(features, labels, strict=True):
                each = [float((brought[task].weight[c] * row).sum() + brought[task].bias[c]) for c in range(3)]  # type: ignore[index]
                right += each.index(max(each)) == int(label)
            found = scores.tasks[task]
            assert (found.metric, found.n) == ("accuracy", 12)
            assert found.value == pytest.approx(right / 12)


def test_a_models_own_head_comes_first(tiny: Family) -> None:
    own = heads()[PETS]
    shared = prompt_heads(tiny, {PETS: CLASSES}, {})[PETS]
    assert head_of(tiny, Model(tiny.merged, heads={PETS: own}), PETS, shared) is own
    assert head_of(tiny, tiny.merged, PETS, shared) is shared
    family = with_heads(tiny, heads())
    assert head_of(family, Model(tiny.merged, heads={PETS: own}), PETS) is own
    assert head_of(family, family.experts[SIGNS], PETS) is own_head(family.experts[PETS], PETS)


def test_scores_drift_through_classification_heads(tiny: Family) -> None:
    """Through one head for expert and model, and through two, whose difference on the expert's features is delta."""
    family, brought = with_heads(tiny, heads()), heads()
    other = ClassificationHead(random(30, 3, WIDTH), random(31, 3))
    for model, head in ((tiny.merged, brought[PETS]), (Model(tiny.merged, heads={PETS: other}), other)):
        found = measure_drift(family, model, samples=6, output=True).tasks[PETS]
        output, features = found.output, found.expert_features.double()
        assert output is not None
        torch.testing.assert_close(output.expert_scores, brought[PETS].scores(features))
        torch.testing.assert_close(output.model_scores, head.scores(found.model_features.double()))
        delta = (head.scores(features) - brought[PETS].scores(features)).norm(dim=1)
        torch.testing.assert_close(output.head_mismatch, delta)
        largest = torch.linalg.svdvals(head.weight.double())[0]
        torch.testing.assert_close(output.bound, largest * output.feature_drift + delta, rtol=1e-6, atol=0)
        assert float(output.tightness.max()) <= 1


def test_models_with_heads_need_no_text_tower_to_be_judged(tiny: Family) -> None:
    from featcal.formats.locate import locate

    tower_alone = locate("experts/pets", tiny.suite.root, "base")
    family = replace(with_heads(tiny, heads()), adapter=tiny.adapter, origin=tower_alone)
    drawn = {task: tiny.samples(task, "test", None, 42) for task in TASKS}
    found = judges(family, Model(tiny.merged, heads=heads()), drawn)
    for task in TASKS:
        expert, model, labels = found[task]
        assert expert is own_head(family.experts[task], task)
        assert model is not expert
        assert labels is drawn[task].labels
    with pytest.raises(InputError, match="no text tower"):
        judges(family, tiny.merged, drawn)


def test_a_task_without_a_head_is_refused(tiny: Family) -> None:
    family = with_heads(tiny, {SIGNS: heads()[SIGNS]})
    with pytest.raises(
        InputError, match=r"task 'pets': .*no head for it.*give Model\(weights, heads=\{'pets': Classif"
    ):
        evaluate(family)
    drawn = {PETS: family.samples(PETS, "test", None, 42)}
    with pytest.raises(InputError, match="no head for it"):
        judges(family, family.merged, drawn)
    with pytest.raises(InputError, match="no class names for the zero-shot head"):
        head_of(tiny, tiny.merged, PETS)


def test_labels_that_count_other_classes_are_refused(tiny: Family) -> None:
    drawn = tiny.samples(PETS, "test", None, 42)
    turned = ClassificationHead(random(0, 3, WIDTH), classes=tuple(reversed(CLASSES)))
    with pytest.raises(InputError, match="the same classes in another order"):
        score_model(tiny, Model(tiny.merged, heads={PETS: turned}), [drawn], None)
    with pytest.raises(InputError, match="label 2 has no class, the head scores 2"):
        score_model(tiny, Model(tiny.merged, heads=heads(2)), [drawn], None)
    with pytest.raises(InputError, match="does not score the classes of the expert's"):
        judges(with_heads(tiny, heads()), Model(tiny.merged, heads=heads(4)), {PETS: drawn})
    with pytest.raises(InputError, match="at least two classes"):
        judges(with_heads(tiny, heads(1)), tiny.merged, {PETS: drawn})


def test_swapped_experts_are_looked_for_with_the_heads_of_the_tasks(tiny: Family) -> None:
    family, brought = with_heads(tiny, heads()), heads()
    found = measure_diagonal(family, 42)
    assert found is not None
    for expert in TASKS:
        for task in TASKS:
            drawn = family.samples(task, "validation", 64, 42)
            batches = batches_of(drawn, 64, family.compute.device)
            features = final_features(family.adapter, tiny.experts[expert], family.head(), batches, family.compute)
            right = (brought[task].scores(features).argmax(1) == drawn.labels).double().mean()
            assert found.accuracy[expert][task] == pytest.approx(float(right))


def test_what_a_decision_is_depends_on_the_head(tiny: Family, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = open_family(load_suite(write_text_suite(tmp_path_factory.mktemp("text"), "t5")), "cpu")
    task = next(iter(text.suite.tasks))
    assert answers_of(tiny, tiny.merged, PETS) == "classes"
    assert answers_of(text, text.merged, task) == "text"
    classifier = ClassificationHead(random(0, 2, 16))
    assert answers_of(text, Model(text.merged, heads={task: classifier}), task) == "classes"
    head = head_of(text, text.merged, task)
    (name,) = text.adapter.scoring
    assert isinstance(head, LinearHead)
    weight = text.merged.read([name])[name].double()
    features = random(1, 3, 16).double()
    expected = torch.einsum("nk,ck->nc", text.adapter.scale * features, weight)
    torch.testing.assert_close(head.scores(features), expected, rtol=1e-12, atol=1e-12)
    assert weight.shape == (ROWS, 16)
    with pytest.raises(InputError, match="no labels to score against"):
        score_model(
            text, Model(text.merged, heads={task: classifier}), [text.samples(task, "calibration", None, 0)], None
        )


def test_maps_and_heads_are_not_lost_in_writing(tiny: Family, tmp_path: Path) -> None:
    """A checkpoint has no place for them: nothing is written, and the message says what can be."""
    result = calibrate(replace(tiny, merged=Model(tiny.merged, maps={PETS: torch.relu})), config_for(tiny, samples=4))
    with pytest.raises(InputError, match=r"its adapters, maps or heads of 'pets' have no place in a checkpoint"):
        result.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_drift_is_measured_behind_the_map(tiny64: Family) -> None:
    """Final features go through the task's map on both runs, and the derivative of the map carries contributions."""
    plain = measure_drift(tiny64, split="test", attribution=True)
    surgery = Surgery(random(1, 3, WIDTH), random(2, WIDTH, 3))
    found = measure_drift(tiny64, Model(tiny64.merged, maps={PETS: surgery}), split="test", attribution=True)
    own, before = found.tasks[PETS], plain.tasks[PETS]
    torch.testing.assert_close(own.model_features, surgery(before.model_features), rtol=1e-12, atol=1e-12)
    assert own.expert_features.equal(before.expert_features)
    assert own.identity_residual < 1e-10
    assert own.attribution is not None
    assert float(own.attribution.shares.sum()) == pytest.approx(1, abs=1e-9)
    torch.testing.assert_close(
        own.layers[-1].drift, (surgery(before.model_features) - before.expert_features).norm(dim=1).double()
    )
    assert found.tasks[SIGNS].layers[-1].drift.equal(plain.tasks[SIGNS].layers[-1].drift)


def test_answers_are_not_generated_past_a_map_or_a_head(tmp_path: Path) -> None:
    family = open_family(load_suite(write_text_suite(tmp_path / "suite", "t5")), "cpu")
    task = next(iter(family.suite.tasks))
    model = Model(family.merged, maps={task: torch.zeros_like})
    with pytest.raises(InputError, match="generate\\(\\) would ignore"):
        generate_answers(family, model, family.samples(task, "test", 2, 0), 2)

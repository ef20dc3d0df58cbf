"""Candidates are fitted on three quarters of the calibration samples and judged on one."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from clip_config import clip_config
from safetensors.torch import load_file, save_file
from scipy.optimize import brentq
from scipy.special import softmax
from selecting import ASKED, COUNT, contest_of
from tiny_clip import TASKS
from tiny_text import distributions, library, text_suite

from featcal import calibrate, load_suite, open_family
from featcal.calibration.calibrate import config_for
from featcal.family.opening import Family
from featcal.session.session import Session
from featcal.studies.selection.candidates import CandidateModel
from featcal.studies.selection.held_out_samples import FOLDS, Fold, draw_unlabelled_samples, folds
from featcal.studies.selection.judge import (
    SURE,
    Judge,
    Score,
    answer_probability,
    criterion_of,
    decision_probability,
    margin,
    sharpness,
)
from featcal.suite.views import EvaluationSamples


def test_folds_are_disjoint_and_cover() -> None:
    for count in (8, 9, 64):
        dealt = folds(count, 42, "pets")
        assert sorted(position for fold in dealt for position in fold) == list(range(count))
        assert {len(fold) for fold in dealt} <= {count // FOLDS, count // FOLDS + 1}
        assert len(dealt) == FOLDS == 4
        assert folds(count, 42, "pets") == dealt
    assert len({str(folds(64, seed, task)) for seed in (1, 2) for task in TASKS}) == 4


def test_every_sample_is_judged_once_by_models_that_have_not_seen_it(many: Family) -> None:
    contest = contest_of(many)
    for task in TASKS:
        judged = []
        for number in range(FOLDS):
            fold = Fold(contest, number)
            held, fitted = folds(COUNT, ASKED.seed, task)[number], set(fold.fitted[task].indices)
            judged += [contest.drawn[task].indices[position] for position in held]
            assert fitted == set(contest.drawn[task].indices) - set(judged[-len(held) :])
            assert len(fitted) == COUNT * 3 // 4
        assert sorted(judged) == sorted(contest.drawn[task].indices)


@pytest.mark.parametrize("recipe", ["paper", "informed"])
def test_a_value_is_the_softmax_of_a_suite_without_the_held_out_samples(
    many: Family, many_file: Path, tmp_path: Path, recipe: str
) -> None:
    """Fitted and held-out part as calibration and validation of another suite, taken by the public functions; cosine,
    scale and softmax are written out in numpy."""
    shutil.copytree(many_file.parent, tmp_path / "two")
    pictures, parts = load_file(many_file.parent / "calibration.safetensors"), {}
    content, number, dealt = yaml.safe_load(many_file.read_text()), 2, {}
    for task in TASKS:
        drawn = [*many.samples(task, "calibration", COUNT, ASKED.seed).indices]
        dealt[task] = [drawn[position] for position in folds(COUNT, ASKED.seed, task)[number]]
        rest = [one for one in drawn if one not in dealt[task]]
        for split, rows in (("calibration", rest), ("validation", dealt[task])):
            parts[f"{task}.{split}"] = pictures[task][rows]
            content["tasks"][task][split] = {"tensors": "parts.safetensors", "key": f"{task}.{split}"}
    save_file(parts, tmp_path / "two" / "parts.safetensors")
    (tmp_path / "two" / "suite.yaml").write_text(yaml.safe_dump(content))
    other = open_family(load_suite(tmp_path / "two" / "suite.yaml"), device="cpu")
    config = clip_config(recipe=recipe, samples=COUNT, layernorms=False)
    session, fitted = Session(other), calibrate(other, config)
    found = session.measure.features(fitted.weights, EvaluationSamples(None, "validation"))
    values = Fold(contest_of(many), number).values(CandidateModel("merged", config))
    heads = contest_of(many).criterion.heads
    assert heads is not None
    for task in TASKS:
        (head, _), own = heads[task], found.tasks[task]
        prompts, scale = head.prompts.double().numpy(), head.scale  # type: ignore[attr-defined]
        expert, model = (
            scale * (one / np.linalg.norm(one, axis=1, keepdims=True)) @ prompts.T
            for one in (own.expert_features.double().numpy(), own.model_features.double().numpy())
        )
        # Sharpened until the expert is sure of its own decisions.
        factor = brentq(lambda factor, own: softmax(factor * own, 1).max(1).mean() - SURE, 1e-3, 1e5, (expert,))
        chances = softmax(max(1.0, factor) * model, 1)
        expected = dict(zip(own.indices, chances[np.arange(len(model)), expert.argmax(1)], strict=True))
        assert values[task] == pytest.approx([expected[row] for row in range(COUNT // 4)], rel=1e-4)
        assert len(values[task]) == COUNT // 4
    score = Score("decision", {"a": (0.5, 1.0), "b": (0.25,)})
    assert score.value == pytest.approx(0.5)  # mean over tasks of their means, not over samples


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_an_answer_is_as_probable_as_its_tokens_one_by_one(kind: str, tmp_path: Path) -> None:
    """Greedy answers of the experts and their probability under another model, token by token through the library."""
    family = open_family(load_suite(text_suite(tmp_path / "text", kind)), "cpu")
    session, asked = Session(family), clip_config(samples=8)
    drawn = draw_unlabelled_samples(session, asked)
    task, one = next(iter(drawn.items()))
    assert one.targets is None  # right answers are not even there
    values = Judge(family, {task: one}, criterion_of(family, {task: one})).values(family.base)[task]
    expert, base = library(family, family.experts[task]), library(family, family.base)
    limit = family.suite.task(task).max_target_length
    for row, value in enumerate(values):
        kept = one.inputs["attention_mask"][row].bool()
        if "completion_mask" in one.inputs:
            kept &= ~one.inputs["completion_mask"][row].bool()
        prompt, said = one.inputs["input_ids"][row][kept], list[int]()
        while len(said) < limit and said[-1:] != [1]:
            said.append(int(distributions(expert, prompt, [*said, 0], kind == "t5")[-1].argmax()))
        under = distributions(base, prompt, said, kind == "t5")
        chances = [float(theirs[token]) for theirs, token in zip(under, said, strict=True)]
        whole = math.prod(chances)
        assert value == pytest.approx(whole if said[-1] == 1 else whole ** (1 / len(said)), rel=1e-4)


def test_text_that_was_cut_off_counts_by_token() -> None:
    along = torch.log(torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.2, 0.8]]))
    answer = torch.tensor([0, 0, 1])
    assert float(answer_probability(answer, along, frozenset([1]))) == pytest.approx(0.5 * 0.9 * 0.8)
    assert float(answer_probability(answer, along, frozenset([0]))) == pytest.approx((0.5 * 0.9 * 0.8) ** (1 / 3))
    assert float(answer_probability(answer, along, frozenset())) == pytest.approx(0.5 * 0.9 * 0.8)


def test_without_heads_drift_takes_the_place_and_says_so(many: Family) -> None:
    nameless = {task: spec.model_copy(update={"classes": None}) for task, spec in many.suite.tasks.items()}
    contest = contest_of(replace(many, suite=many.suite.model_copy(update={"tasks": nameless})))
    assert contest.criterion.name == "drift"
    assert "no class names" in contest.criterion.note
    values = Fold(contest, 0).values(CandidateModel("merged", None))
    features = Session(many).measure.features("merged", EvaluationSamples(COUNT, "calibration", ASKED.seed)).tasks
    for task in TASKS:
        rows, own = folds(COUNT, ASKED.seed, task)[0], features[task]
        expert, model = own.expert_features.double(), own.model_features.double()
        apart = (model - expert).norm(dim=1) / expert.norm(dim=1)
        assert values[task] == pytest.approx((1 - apart[rows]).tolist(), rel=1e-4)


@pytest.mark.slow
def test_varied_copies_are_fitted_on_and_never_held_out() -> None:
    """Pictures in front, then as many of every copy; a copy lies where its picture does."""
    family = open_family(load_suite("clip-mini"), "cpu")
    asked = config_for(family, samples=8, augment=2, tasks=("digits",))
    contest = contest_of(family, asked)
    for number in range(FOLDS):
        fold = Fold(contest, number)
        fitted, held = fold.fitted["digits"].indices, fold.held["digits"].indices
        assert len(held) == 2
        assert len(fitted) == 3 * 6
        assert fitted[:6] == fitted[6:12] == fitted[12:]
        assert not {*fitted} & {*held}


def test_the_margin_is_a_paired_difference() -> None:
    rng = np.random.default_rng(0)
    before = {task: tuple(rng.uniform(0, 1, 400)) for task in TASKS}
    shift = {task: rng.normal(0.1, 0.3, 400) for task in TASKS}
    after = {task: tuple(np.array(before[task]) + shift[task]) for task in TASKS}
    one, other = Score("decision", before), Score("decision", after)
    found, back = margin(one, other), margin(other, one)
    assert found.difference == pytest.approx(np.mean([shift[task].mean() for task in TASKS]))
    assert (found.n, found.is_within_noise) == (800, False)
    error = np.sqrt(sum(shift[task].var() / 400 for task in TASKS)) / len(TASKS)
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.05)
    assert (back.low, back.high) == pytest.approx((-found.high, -found.low))
    same = margin(one, one)
    assert (same.difference, same.low, same.high, same.is_within_noise) == (0, 0, 0, True)


def test_the_criterion_does_not_depend_on_the_scale_of_scores() -> None:
    expert, model = torch.randn(2, 20, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = decision_probability(expert, model)
    for factor in (0.01, 0.5):
        torch.testing.assert_close(decision_probability(factor * expert, factor * model), found, rtol=1e-6, atol=0)
    sure = torch.softmax(sharpness(expert) * expert, dim=1).amax(1).mean()
    assert float(sure) == pytest.approx(SURE, abs=1e-6)
    # An expert that is sure anyhow is taken as it is; one that cannot tell is not sharpened for ever.
    assert (sharpness(50 * expert), sharpness(torch.zeros(2, 3))) == (1.0, 2.0**16)
    own = (50 * expert).argmax(1, keepdim=True)
    torch.testing.assert_close(
        decision_probability(50 * expert, 50 * model), torch.softmax(50 * model, 1).gather(1, own).flatten()
    )

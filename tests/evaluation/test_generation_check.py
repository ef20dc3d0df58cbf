"""Whether a model still generates, against the library's own model taken one prompt at a time."""

from __future__ import annotations

import gc
import json
import math
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from lanes import rows
from tiny_text import TASKS, distributions, library, scaled, text_suite

from featcal import Family, InputError, load_suite, open_family, open_session
from featcal.calibration.calibrate import calibrate_to_folder, config_for
from featcal.cli import featcal_command as featcal
from featcal.evaluation import generation_check as module
from featcal.evaluation.generation_check import GRAM, PROMPTS, Reading, TaskCanary, compare_generation, repetition
from featcal.family.opening import batches_of
from featcal.formats.weights import Weights
from featcal.models.generation import Generator, TextAnswerer, answer_together, prompt_batch

FINE = Reading(repetition=0.1, loops=0.0, ended=1.0, perplexity=2.0, distance=0.2)
FEW = 10
"""New tokens per answer, where the reference takes them one by one."""
BROKEN = "calibrated:lam=1e-9,samples=4"


@pytest.fixture(scope="module", params=rows(["t5", "llama"], quick=("t5",), slow=("llama",)))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return open_family(load_suite(text_suite(tmp_path_factory.mktemp("text"), request.param)), "cpu")


def prompt_of(family: Family, task: str, row: int) -> torch.Tensor:
    """The tokens of one prompt, without padding and without its answer."""
    inputs = family.samples(task, "calibration", PROMPTS, 42).inputs
    kept = inputs["attention_mask"][row].bool()
    if "completion_mask" in inputs:
        kept &= ~inputs["completion_mask"][row].bool()
    return inputs["input_ids"][row][kept]


def answered(model: Any, prompt: torch.Tensor, seq2seq: bool, most: int = FEW) -> list[int]:
    """Greedy tokens, one argmax after the other, up to the end or the limit."""
    said: list[int] = []
    while len(said) < most and said[-1:] != [1]:
        said.append(int(distributions(model, prompt, [*said, 0], seq2seq)[-1].argmax()))
    return said


def test_readings_are_those_of_the_library_prompt_by_prompt(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOKENS", FEW)
    seq2seq, found = family.adapter.modality == "seq2seq", compare_generation(family, family.base)
    for task in TASKS:
        expert, base = library(family, family.experts[task]), library(family, family.base)
        nats, apart, own, by_prompt = [], [], [], []
        count = found.tasks[task].prompts
        for row in range(count):
            prompt = prompt_of(family, task, row)
            answer = answered(expert, prompt, seq2seq)
            theirs, ours = (distributions(one, prompt, answer, seq2seq) for one in (expert, base))
            by_prompt.append([-math.log(ours[place, token]) for place, token in enumerate(answer)])
            nats += by_prompt[-1]
            apart += ((theirs - ours).abs().sum(1) / 2).tolist()
            own.append(answered(base, prompt, seq2seq))
        model = found.tasks[task].model
        assert model.perplexity == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-5)
        left_over = [sum(one) - len(one) * sum(nats) / len(nats) for one in by_prompt]
        spread = math.sqrt(sum(one**2 for one in left_over) / (count - 1) / count)
        assert model.error == pytest.approx(spread / (len(nats) / count), rel=1e-4)
        assert model.distance == pytest.approx(sum(apart) / len(apart), rel=1e-5)
        assert model.ended == pytest.approx(sum(one[-1] == 1 for one in own) / count)
        assert model.empty == pytest.approx(sum(one[0] == 1 for one in own) / count)
        assert model.repetition == pytest.approx(sum(map(repetition, own)) / count)


def test_prompts_and_answers_end_at_the_last_position_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotary positions go on after it, where no model was trained; prompts of several lengths have answers of several
    lengths, of which none ends because another is longer."""
    monkeypatch.setattr(module, "TOKENS", FEW)
    file = text_suite(tmp_path, "llama")
    config = tmp_path / "base" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 10}))
    family = open_family(load_suite(file), "cpu")
    found = compare_generation(family, family.base)
    for task in TASKS:
        expert, base = library(family, family.experts[task]), library(family, family.base)
        nats, ended, lengths = [], 0, set()
        for row in range(found.tasks[task].prompts):
            prompt = prompt_of(family, task, row)
            prompt = torch.cat([prompt[:1], prompt[-4:]]) if len(prompt) > 5 else prompt  # leaves half of the positions
            answer = answered(expert, prompt, False, 11 - len(prompt))  # the last token is not read
            lengths.add(len(prompt))
            ended += answer[-1] == 1
            ours = distributions(base, prompt, answer, False)
            nats += [-math.log(ours[place, token]) for place, token in enumerate(answer)]
        assert len(lengths) > 1
        assert found.tasks[task].expert.ended == pytest.approx(ended / found.tasks[task].prompts)
        assert found.tasks[task].model.perplexity == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-5)


def test_every_token_of_the_answers_counts_alike() -> None:
    """An answer of three tokens with chance 1/2 each and one of a token with chance 1/4; means over answers would be
    1.5 in place of 1.25 bits, and 0.625 in place of 0.5625."""
    chances = [torch.full((3, 2), 0.5), torch.tensor([[0.75, 0.25]])]
    own = [torch.tensor([5, 5, 5]), torch.tensor([1])]
    pupil: Any = SimpleNamespace(answers=own, ends={1}, log_probabilities=lambda _: [one.log() for one in chances])
    theirs = [torch.tensor([[1.0, 0.0]] * 3), torch.tensor([[0.0, 1.0]])]
    found = module._reading(pupil, [torch.tensor([0, 0, 0]), torch.tensor([1])], theirs)
    assert found.perplexity == pytest.approx(2**1.25, rel=1e-6)
    assert found.distance == pytest.approx(0.5625, rel=1e-6)
    assert (found.ended, found.empty, found.loops) == (0.5, 0.5, 0.0)


def test_an_expert_is_no_distance_from_itself_and_a_model_no_worse_than_itself(family: Family) -> None:
    found = compare_generation(family, family.merged)
    for one in found.tasks.values():
        assert one.expert.distance == pytest.approx(0, abs=1e-6)
        assert one.model == one.against
        assert one.model.perplexity > one.expert.perplexity >= 1
    assert not found.is_broken


def test_answers_are_the_same_together_and_apart(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Join what fits, but neither what has pictures nor what would leave no room for answers, wherever it stands."""
    whole, sizes = family.generator(family.base), list[int]()
    texts = [family.samples(task, "calibration", 8, 42) for task in TASKS]
    batches = [prompt_batch(one) for drawn in texts for one in batches_of(drawn, 4, family.compute.device)]
    apart = [TextAnswerer(whole, [batch], FEW).answers for batch in batches]
    original = type(whole).each_answer

    def noted(own: Generator, batch: Any, **options: Any) -> list[torch.Tensor]:
        sizes.append(len(batch["input_ids"]))
        return original(own, batch, **options)

    monkeypatch.setattr(type(whole), "each_answer", noted)
    shapes = sorted((tuple(batch["input_ids"].shape) for batch in batches), key=lambda one: -one[1])
    widest, counts = shapes[0][1], [prompts for prompts, _ in shapes]
    wide = sum(width == widest for _, width in shapes)
    assert 0 < wide < len(shapes)
    narrow = replace(whole, positions=widest + FEW - 1)
    for generator, most, wanted in (
        (whole, 10**6, [sum(counts)]),
        (whole, 0, counts),
        (narrow, 10**6, [*counts[:wide], sum(counts[wide:])]),
    ):
        sizes.clear()
        found = answer_together(generator, batches, FEW, most)
        assert [[one.tolist() for one in own] for own in found] == [[one.tolist() for one in own] for own in apart]
        assert sizes == wanted


def test_one_whole_model_is_in_memory_at_a_time(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []
    whole = Family.generator

    def generator(own: Family, weights: Weights) -> Any:
        gc.collect()
        assert [one for one in made if one() is not None] == []
        found = whole(own, weights)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(Family, "generator", generator)
    monkeypatch.setattr(module, "TOKENS", FEW)
    compare_generation(family, family.base)
    assert len(made) == len(TASKS) + 2  # the model and the merged model once for all tasks
    made.clear()
    monkeypatch.setattr(module, "ROOM", 0)
    compare_generation(family, family.base)
    assert len(made) == 3 * len(TASKS)


def test_the_same_model_answers_and_is_shown_once(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    original = Family.generator

    def noted(of: Family, model: Weights) -> Any:
        opened.append(model.label)
        return original(of, model)

    monkeypatch.setattr(Family, "generator", noted)
    suite = ["study", "canary", str(family.suite.root / "suite.yaml"), "--device", "cpu"]
    for against, shown in (("merged", ["merged"]), ("base", ["base", "merged"])):
        opened.clear()
        said = CliRunner().invoke(featcal, [*suite, "--against", against], catch_exceptions=False)
        rows = [line.split()[:2] for line in said.stdout.splitlines()[1:]]
        assert rows == [[task, who] for task in TASKS for who in ("expert", *shown)]
        assert len(opened) == len(TASKS) + len(shown)


@pytest.mark.parametrize(
    ("answer", "share"),
    [([], 0), ([1, 2, 3], 0), ([1, 2, 3, 4, 5], 0), ([7] * 13, 0.9), ([1, 2] * 5, 5 / 7), ([1, 2, 3, 4] * 2, 1 / 5)],
)
def test_repetition_is_the_share_of_runs_that_were_there_before(answer: list[int], share: float) -> None:
    assert GRAM == 4
    assert repetition(answer) == pytest.approx(share)


@pytest.mark.parametrize(
    ("worse", "said"),
    [
        ({"loops": 0.25}, "25% of the answers are loops, 0% before"),
        ({"empty": 0.25}, "25% of the answers are empty, 0% before"),
        ({"ended": 0.75}, "75% of the answers end, 100% before"),
        ({"perplexity": 2.6}, "perplexity 2.6, 2 before"),
        ({"distance": 0.26}, "0.260 from the expert's, 0.200 before"),
    ],
)
def test_what_is_clearly_worse_is_said(worse: dict[str, float], said: str) -> None:
    expert = Reading(0.0, 0.0, 1.0, 1.1, 0.0)
    (reason,) = TaskCanary(16, expert, FINE, replace(FINE, **worse)).reasons
    assert said in reason
    nearly = {name: value + (getattr(FINE, name) - value) * 0.3 for name, value in worse.items()}
    assert TaskCanary(16, expert, FINE, replace(FINE, **nearly)).reasons == ()


def test_answers_that_are_unlikelier_by_chance_are_no_reason() -> None:
    """A factor of 1.3 is 0.04 above the 1.25 that is allowed, in nats."""
    expert = Reading(0.0, 0.0, 1.0, 1.1, 0.0)
    for error, reasons in ((0.015, 1), (0.025, 0)):
        assert len(TaskCanary(16, expert, FINE, replace(FINE, perplexity=2.6, error=error)).reasons) == reasons


def test_an_expert_that_loops_excuses_a_model_that_does() -> None:
    looping = Reading(0.9, 0.8, 0.1, 1.1, 0.0)
    assert TaskCanary(16, looping, FINE, replace(FINE, loops=0.9, ended=0.1)).reasons == ()


def test_an_expert_without_answers_excuses_a_model_without_them() -> None:
    silent = Reading(0.0, 0.0, 1.0, 1.1, 0.0, empty=0.8)
    assert TaskCanary(16, silent, FINE, replace(FINE, empty=0.9)).reasons == ()


def test_a_model_that_names_no_end_is_not_asked_for_one() -> None:
    endless = replace(FINE, ended=None)
    assert TaskCanary(16, endless, endless, endless).reasons == ()


def test_pictures_have_no_canary(tiny: Family) -> None:
    with pytest.raises(InputError, match="generate no text"):
        compare_generation(tiny, tiny.merged)


@pytest.mark.slow
@pytest.mark.usefixtures("all_tokens")
def test_a_planted_broken_repair_is_red_and_the_defaults_are_green() -> None:
    session = open_session("t5-mini")
    for good in ("calibrated", "calibrated:recipe=refined"):
        assert session.measure.canary(session.resolve(good)).reasons == ()
    for bad in (BROKEN, scaled(session.fit.weights("merged"), 0.5)):
        found = session.measure.canary(session.resolve(bad))
        assert found.is_broken
        assert any("perplexity" in reason for reason in found.reasons)


@pytest.mark.slow
def test_a_task_without_samples_is_not_asked_and_said(family: Family, tmp_path: Path) -> None:
    """A calibration on the other task alone is written: it needs no samples of this one."""
    left, kept = TASKS
    tasks = {**family.suite.tasks, left: family.suite.tasks[left].model_copy(update={"calibration": None})}
    part = replace(family, suite=family.suite.model_copy(update={"tasks": tasks}))
    record = calibrate_to_folder(part, config_for(part, samples=4, lam=0.1, tasks=(kept,)), tmp_path / "out")
    assert [*record["canary"]["tasks"]] == [kept]
    assert f"generation was not checked on '{left}': no calibration samples, so no prompts" in record["notes"]
    none = {task: one.model_copy(update={"calibration": None}) for task, one in tasks.items()}
    with pytest.raises(InputError, match="no task has calibration samples"):
        compare_generation(replace(part, suite=part.suite.model_copy(update={"tasks": none})), part.base)


@pytest.mark.slow
@pytest.mark.usefixtures("all_tokens")
def test_a_broken_repair_is_written_with_its_warnings(tmp_path: Path) -> None:
    options = ["calibrate", "t5-mini", "--lam", "1e-9", "--samples", "4", "--json"]
    written = CliRunner().invoke(featcal, [*options, "--out", str(tmp_path / "out")], catch_exceptions=False)
    assert written.exit_code == 0
    record = json.loads((tmp_path / "out" / "featcal.json").read_text())
    reasons = record["canary"]["reasons"]
    assert record["canary"]["broken"]
    assert [f"generation is broken: {reason}" for reason in reasons] == record["warnings"][-len(reasons) :]
    card = (tmp_path / "out" / "README.md").read_text()
    assert all(f"**Warning:** generation is broken: {reason}." in card for reason in reasons)
    assert all(f"warning: generation is broken: {reason}" in written.stderr for reason in reasons)
    refused = CliRunner().invoke(featcal, [*options, "--out", str(tmp_path / "again"), "--require-canary"])
    assert refused.exit_code == 1
    assert (tmp_path / "again" / "featcal.json").is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("all_tokens")
def test_the_command_says_what_the_function_says() -> None:
    asked = CliRunner().invoke(featcal, ["study", "canary", "t5-mini", "--model", BROKEN, "--require", "--json"])
    session = open_session("t5-mini")
    assert asked.exit_code == 1
    assert json.loads(asked.stdout) == json.loads(json.dumps(session.measure.canary(session.resolve(BROKEN)).to_json()))

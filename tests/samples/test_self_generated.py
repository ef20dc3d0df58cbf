"""Calibration text that experts write themselves: how it is drawn, what it becomes, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_text import ROWS, TASKS, WORDS, distributions, text_suite

from featcal import CalibrationConfig, Family, InputError, calibrate, load_suite, open_family, open_session
from featcal.evaluation.generation_check import compare_generation
from featcal.export.merge import merge_to_folder
from featcal.formats.weights import Overlay
from featcal.models.families.language import IGNORED
from featcal.preflight.check import check_suite
from featcal.preflight.places import Places
from featcal.preflight.samples import check_samples
from featcal.session.session import Session
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import NoScores

END, START = 1, 2
ASKED = ["w3 w4", "w5", "w6 w7 w8 w9"]


def written(root: Path, kind: str, prompts: Any, tokens: int = 4, **task: Any) -> Family:
    """The tiny suite, its calibration text written by its experts; a decoder's start token is `<unk>`."""
    file = text_suite(root, kind)
    config = root / "base" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "bos_token_id": START}))
    content = yaml.safe_load(file.read_text())
    for one in content["tasks"].values():
        one |= {"calibration": {"self_generated": {"prompts": prompts, "tokens": tokens}}, **task}
    file.write_text(yaml.safe_dump(content))
    return open_family(load_suite(file), "cpu")


def whole(family: Family, task: str) -> Any:
    return family.adapter.whole(family.experts[task].read(family.adapter.tower), family.base_folder)  # type: ignore[attr-defined]


def test_texts_from_nothing_begin_with_the_start_token_and_are_whole(tmp_path: Path) -> None:
    family = written(tmp_path, "llama", 40)
    drawn = family.samples("left", "calibration", None, 42)
    ids, mask = drawn.inputs["input_ids"], drawn.inputs["attention_mask"]
    assert len(drawn) == 40
    assert bool((ids[:, 0] == START).all())
    assert int(mask.sum(1).max()) == 1 + 4
    assert torch.equal(drawn.inputs["completion_mask"], mask)
    assert not bool((ids[mask == 1] == END).any())
    assert drawn.targets is None
    kept = [row[own.bool()][1:].tolist() for row, own in zip(ids, mask, strict=True)]
    assert drawn.texts == tuple(" ".join(WORDS[i] for i in row if i > START) for row in kept)


def test_draws_are_the_experts_own_distribution(tmp_path: Path) -> None:
    """Total variation of 4000 first tokens from the library's probabilities; those of temperature 2 are farther. What
    the model's folder says of sampling is left aside."""
    family = written(tmp_path, "llama", 4000, tokens=1)
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps({"top_k": 3, "temperature": 0.1}))
    drawn = family.samples("left", "calibration", None, 42).inputs
    found = torch.where(drawn["attention_mask"].sum(1) == 1, END, drawn["input_ids"][:, -1])
    shares = torch.bincount(found, minlength=ROWS).double() / 4000
    own = distributions(whole(family, "left"), torch.tensor([START]), [0], False)[0]
    flatter = own.sqrt() / own.sqrt().sum()
    assert float((shares - own).abs().sum() / 2) < 0.05
    assert float((shares - flatter).abs().sum() / 2) > 0.1


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_answers_to_prompts_are_those_of_each_prompt_alone(kind: str, tmp_path: Path) -> None:
    """An expert that is sure of itself draws what it says greedily: prompts of several lengths do not mix."""
    family = written(tmp_path, kind, ASKED)
    expert = family.experts["left"]
    sure = Overlay("sure", expert, {"lm_head.weight": 1e4 * expert.read(["lm_head.weight"])["lm_head.weight"]})
    family = replace(family, experts={**family.experts, "left": sure})
    drawn, model = family.samples("left", "calibration", None, 42), whole(family, "left")
    seq2seq = kind == "t5"
    for row, text in enumerate(ASKED):
        prompt = torch.tensor([WORDS.index(word) for word in text.split()] + [END] * seq2seq)
        said: list[int] = []
        while len(said) < 4 and said[-1:] != [END]:
            said.append(int(distributions(model, prompt, [*said, 0], seq2seq)[-1].argmax()))
        ids = drawn.inputs["input_ids"][row][drawn.inputs["attention_mask"][row].bool()].tolist()
        if seq2seq:
            labels = drawn.inputs["labels"][row]
            assert (ids, labels[labels != IGNORED].tolist()) == (prompt.tolist(), said)
        else:
            assert ids == prompt.tolist() + said
            assert drawn.inputs["completion_mask"][row].sum() == len(said)
    assert drawn.texts == tuple(ASKED)


@pytest.mark.parametrize("prompts", [20, ASKED * 3])
def test_the_same_again_bit_for_bit_whatever_was_drawn_before(prompts: Any, tmp_path: Path) -> None:
    families = [written(tmp_path / name, "llama", prompts) for name in ("a", "b")]
    torch.manual_seed(1)
    first = families[0].samples("left", "calibration", None, 42)
    other = families[1].samples("right", "calibration", None, 42)
    state = torch.get_rng_state()
    again = families[1].samples("left", "calibration", 5, 43)
    assert torch.equal(state, torch.get_rng_state())
    assert [first.texts[i] for i in again.indices] == list(again.texts)  # type: ignore[index, arg-type]
    one, two = (family.samples("left", "calibration", None, 42).inputs for family in families)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert (other.texts, other.targets) != (first.texts, first.targets)


def test_an_expert_writes_once_in_a_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    genuine = written(tmp_path, "llama", 6).adapter.__class__.generating

    def counted(self: Any, *args: Any) -> Any:
        calls.append(args)
        return genuine(self, *args)

    session = open_session(tmp_path / "suite.yaml")
    monkeypatch.setattr(session.family.adapter.__class__, "generating", counted)
    session.fit.calibrate(CalibrationConfig(samples=4))
    session.fit.calibrate(CalibrationConfig(samples=5, seed=7))
    assert len(session.viewable_samples("left", EvaluationSamples(3, "calibration")).texts or ()) == 3
    assert len(calls) == len(TASKS)


def test_record_and_card_say_where_the_text_is_from(tmp_path: Path) -> None:
    family = written(tmp_path, "llama", 9)
    made = calibrate(family, CalibrationConfig(samples=4))
    said = "9 texts that the task's expert wrote from its start token, at most 4 new tokens each"
    assert [one["text"] for one in made.record["tasks"].values()] == [said, said]
    made.save(tmp_path / "out")
    assert f"| text of left | {said} |" in (tmp_path / "out" / "README.md").read_text()
    plain = calibrate(load_suite(text_suite(tmp_path / "plain", "llama")), CalibrationConfig(samples=4))
    assert not any("text" in one for one in plain.record["tasks"].values())


@pytest.mark.usefixtures("all_tokens")
def test_the_canary_goes_on_from_the_first_half_of_a_whole_text(tmp_path: Path) -> None:
    family = written(tmp_path, "llama", 9)
    longer = max(
        len(prompt) for prompt in family.samples("left", "calibration", None, 42).inputs["attention_mask"].tolist()
    )
    assert longer == 5
    found = compare_generation(family, family.merged)
    assert not found.is_broken
    assert all(one.expert.distance == pytest.approx(0, abs=1e-6) for one in found.tasks.values())


@pytest.mark.parametrize(
    ("kind", "prompts", "tokens", "task", "said"),
    [
        ("t5", 4, 4, {}, "an encoder-decoder answers what it reads"),
        ("t5", ASKED, 5, {}, "answers of 5 tokens, 'max_target_length' is 4"),
        ("llama", ASKED, 4, {"max_length": 7}, "prompt 2 has 4 tokens, with 4 new ones more than 'max_length' 7"),
        ("llama", 3, 9, {"max_length": 9}, "prompt 0 has 1 tokens, with 9 new ones"),
        ("llama", ["  "], 4, {}, "prompt 0 has no tokens"),
    ],
)
def test_what_cannot_be_written_is_refused(
    kind: str, prompts: Any, tokens: int, task: dict[str, Any], said: str, tmp_path: Path
) -> None:
    family = written(tmp_path, kind, prompts, tokens, **task)
    with pytest.raises(InputError, match=f"task 'left', calibration samples: {said}"):
        family.samples("left", "calibration", 2, 42)


def test_a_base_without_a_start_token_needs_prompts(tmp_path: Path) -> None:
    family = written(tmp_path, "llama", 3)
    config = tmp_path / "base" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "bos_token_id": None}))
    with pytest.raises(InputError, match="names no start token"):
        family.samples("left", "calibration", 2, 42)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"prompts": 0, "tokens": 4}, "greater than 0"),
        ({"prompts": [], "tokens": 4}, "at least 1 item"),
        ({"prompts": 3, "tokens": 0}, "greater than 0"),
        ({"prompts": 3}, "tokens"),
    ],
)
def test_the_suite_file_is_checked(source: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = text_suite(tmp_path, "llama")
    content = yaml.safe_load(file.read_text())
    content["tasks"]["left"]["calibration"] = {"self_generated": source}
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(InputError, match=said):
        load_suite(file)


def test_nobody_is_measured_on_what_experts_wrote(tmp_path: Path) -> None:
    file = text_suite(tmp_path, "llama")
    content = yaml.safe_load(file.read_text())
    content["tasks"]["left"]["test"] = {"self_generated": {"prompts": 3, "tokens": 4}}
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(InputError, match="is for calibration alone"):
        load_suite(file)


def test_what_an_expert_wrote_is_no_right_answer(tmp_path: Path) -> None:
    """Not even its own: it drew its text. The card promises no scores."""
    family = written(tmp_path, "llama", ASKED, validation=None, test=None)
    with pytest.raises(NoScores, match="'left', calibration samples: texts that its expert wrote have no right answ"):
        Session(family).measure.scores("expert", EvaluationSamples(2))
    merge_to_folder(family, "ties", None, tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "Not measured. Texts that experts wrote have no right answers." in text
    assert "featcal evaluate" not in text


def test_check_counts_what_will_be_written_and_asks_nobody_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = written(tmp_path, "llama", ASKED, 4)
    monkeypatch.setattr(Family, "write_texts", None)
    found = check_suite(load_suite(tmp_path / "suite.yaml"), probe=False)
    assert found.problems == ()
    (reports, sizes) = check_samples(family.suite, family, Places(tmp_path), CalibrationConfig(samples=64))
    assert {task: (one.samples, one.tokens, one.bytes) for task, one in sizes.items()} == dict.fromkeys(
        TASKS, (3, 8, 3 * 8 * 8)
    )
    assert all("all 3 will be used" in " ".join(report.notes) for report in reports.values())


def test_check_names_what_cannot_be_written(tmp_path: Path) -> None:
    written(tmp_path, "t5", 3)
    found = check_suite(load_suite(tmp_path / "suite.yaml"), probe=False)
    assert sum("an encoder-decoder answers" in problem for problem in found.problems) == 1

"""Scores of language models against transformers' own generate, and the metrics."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import PLAIN, write_base
from clip_config import clip_config
from tiny_text import ROWS, TASKS, WORDS, text_suite, write_text_suite

from featcal import Family, InputError, Suite, evaluate, load_suite, measure_drift, open_family
from featcal.evaluation.language import exact_match, first_answers, note_unreachable, spearman, writable_targets
from featcal.family.opening import batches_by_length
from featcal.models.adapter import Call
from featcal.models.generation import prompt_batch, prompts
from featcal.samples.prepare import tokenizer_of
from featcal.samples.sources import Samples


@pytest.fixture(scope="module", params=["t5", "llama"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return open_family(load_suite(text_suite(tmp_path_factory.mktemp("text"), request.param)), "cpu")


def library_answers(family: Family, task: str) -> list[str]:
    """One sample at a time through the library's own loader, tokenizer and generate."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(family.base_folder)
    seq2seq = family.adapter.modality == "seq2seq"
    loader: Any = AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM
    model = loader.from_pretrained(family.base_folder, dtype=torch.float32).eval()
    texts = family.samples(task, "test", None, 0).texts
    assert texts is not None
    found = []
    for text in texts:
        encoded = tokenizer(text, return_tensors="pt")
        inputs = {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}
        with torch.no_grad():
            tokens = model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0)
        new = tokens if seq2seq else tokens[:, inputs["input_ids"].shape[1] :]
        found.append(tokenizer.decode(new[0], skip_special_tokens=True).strip())
    return found


@pytest.mark.parametrize("together", [64, 2])
def test_answers_are_the_librarys(family: Family, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where samples of a length share a batch."""
    monkeypatch.setattr("featcal.evaluation.language.BATCH_SIZE", together)
    scores = evaluate(family, "base")
    for task in TASKS:
        assert list(scores.tasks[task].predictions) == library_answers(family, task)
        targets = family.samples(task, "test", None, 0).targets
        assert scores.tasks[task].labels == targets
        assert scores.tasks[task].value == exact_match(scores.tasks[task].predictions, targets or ())
        assert scores.tasks[task].metric == "exact_match"


def write_successors(folder: Path, tokenizer: Any) -> None:
    """Write a model of known successors: after a line break it writes "No." and a token for which its configuration
    names no end, and goes on."""
    from transformers import LlamaConfig, LlamaForCausalLM

    # "\n" stands at the end of the prompt.
    chain = tokenizer("\nNo.<|im_end|>!\nNo", add_special_tokens=False)["input_ids"]
    size = len(tokenizer)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size, hidden_size=size + size % 2, intermediate_size=2, num_hidden_layers=1,
            num_attention_heads=1, bos_token_id=0, eos_token_id=1, pad_token_id=1, tie_word_embeddings=False,
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.fill_diagonal_(1.0)
        for token, following in pairwise(chain):
            model.lm_head.weight[following, token] = 1.0
    model.save_pretrained(folder)


@pytest.mark.parametrize("after", ["", "</s>"])
def test_an_answer_ends_where_the_chat_template_ends_it(tmp_path: Path, after: str) -> None:
    write_successors(tmp_path, write_base(tmp_path, PLAIN + after))
    rows = [{"messages": [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "No."}]}]
    suite = Suite.of(base=str(tmp_path), experts={"t": str(tmp_path)}, merged=str(tmp_path), test={"t": rows})
    found = evaluate(suite, "base").tasks["t"]
    assert (found.predictions, found.labels, found.value) == (("No.",), ("No.",), 1.0)


def test_an_answer_ends_where_the_tokenizer_ends_it(tmp_path: Path) -> None:
    """Scripts of training set the tokenizer's end token and leave the configuration's."""
    tokenizer = write_base(tmp_path, PLAIN)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained(tmp_path)
    write_successors(tmp_path, tokenizer)
    rows = [{"input": "So?\n", "target": "No."}]
    suite = Suite.of(base=str(tmp_path), experts={"t": str(tmp_path)}, merged=str(tmp_path), test={"t": rows})
    found = evaluate(suite, "base").tasks["t"]
    assert (found.predictions, found.labels, found.value) == (("No.",), ("No.",), 1.0)


def test_answers_are_compared_as_the_tokenizer_writes_them() -> None:
    """That of t5-mini knows no capitals, so that an expert that gives the very tokens of "Positive" was never right."""
    family = open_family(load_suite("t5-mini"), "cpu")
    drawn = family.samples("sentiment", "test", 3, 42)
    assert writable_targets(family, drawn) == (drawn.targets, ())
    capital = replace(drawn, targets=tuple(f" {text.capitalize()}" for text in drawn.targets or ()))
    written, (note,) = writable_targets(family, capital)
    assert written == drawn.targets
    first = (capital.targets or ())[0]
    assert f"({first!r} becomes {written[0]!r})" in note
    nothing = replace(drawn, targets=("☃", "", "yes"))
    assert writable_targets(family, nothing)[0][0] == "☃"


def test_texts_that_are_cut_are_said_beside_the_score(tmp_path: Path) -> None:
    file = text_suite(tmp_path, "llama")
    assert not evaluate(load_suite(file), "base", samples=2).notes
    suite = load_suite(file)
    tasks = {task: one.model_copy(update={"max_length": 2}) for task, one in suite.tasks.items()}
    found = evaluate(suite.model_copy(update={"tasks": tasks}), "base", samples=2)
    assert all("longer than the task's limits and are cut" in " ".join(found.tasks[task].notes) for task in TASKS)


def test_right_answers_longer_than_a_model_may_write_are_said(tmp_path: Path) -> None:
    """The tiny texts' answers are one token each, so that with none to write no answer equals them."""
    drawn = open_family(load_suite(text_suite(tmp_path, "llama")), "cpu").samples(TASKS[0], "test", None, 0)
    family = open_family(load_suite(tmp_path / "suite.yaml"), "cpu")
    assert note_unreachable(family, drawn, 1) == ()
    (note,) = note_unreachable(family, drawn, 0)
    assert note.startswith("right answers have up to 1 tokens, and a model may write 0")


def test_numbers_are_asked_for_before_a_model_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = text_suite(tmp_path, "llama")
    file.write_text(file.read_text().replace("exact_match", "spearman"))
    monkeypatch.delattr("featcal.evaluation.evaluate.generate_answers")
    with pytest.raises(InputError, match=f"task '{TASKS[0]}', test samples: spearman needs numbers"):
        evaluate(load_suite(file))


def test_blanks_before_marks_stay_whatever_the_tokenizer_would_clean_up(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    tokenizer = type(tokenizer_of(family.base_folder))
    monkeypatch.setattr(tokenizer, "batch_decode", lambda _, ids, **options: asked.append(options) or [""] * len(ids))
    evaluate(family, "base", samples=2)
    assert {options["clean_up_tokenization_spaces"] for options in asked} == {False}


def test_output_drift_of_language_heads(family: Family) -> None:
    ledger = measure_drift(family, split="test", output=True)
    for task in TASKS:
        output = ledger.tasks[task].output
        assert output is not None
        assert output.expert_scores.shape == (6, ROWS)
        assert float(output.tightness.max()) <= 1 + 1e-9
        assert float(output.head_mismatch.min()) > 0
        assert not bool((output.is_certified & ~output.agrees).any())
        change = output.loss_change
        cross_entropy = torch.nn.functional.cross_entropy
        losses = [
            cross_entropy(s, output.labels, reduction="none") for s in (output.model_scores, output.expert_scores)
        ]
        torch.testing.assert_close(change, losses[0] - losses[1], rtol=1e-6, atol=1e-6)


def test_first_answers_are_the_targets_first_tokens(family: Family) -> None:
    drawn = family.samples(TASKS[0], "test", None, 0)
    assert drawn.targets is not None
    assert [WORDS[int(i)] for i in first_answers(drawn)] == list(drawn.targets)


def test_identical_models_have_no_output_drift(family: Family) -> None:
    same = Family(**{**vars(family), "experts": dict.fromkeys(family.experts, family.base)})
    ledger = measure_drift(same, "base", split="test", output=True)
    for drift in ledger.tasks.values():
        assert drift.output is not None
        assert float(drift.output.score_drift.max()) == 0
        assert float(drift.output.head_mismatch.max()) == 0
        assert bool(drift.output.agrees.all())


def test_without_answers_there_is_nothing_to_score(tmp_path: Path) -> None:
    plain = open_family(load_suite(write_text_suite(tmp_path / "s", "llama")), "cpu")
    with pytest.raises(InputError, match="no answers to score against"):
        evaluate(plain)
    with pytest.raises(InputError, match="no targets"):
        measure_drift(plain, output=True)


def test_there_is_no_class_token(family: Family) -> None:
    with pytest.raises(InputError, match="has no class token"):
        measure_drift(family, tokens="class")


def test_prompts_lose_their_answers_and_are_padded_on_the_left() -> None:
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 1, 0], [8, 9, 10, 11, 1]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        "completion_mask": torch.tensor([[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]),
    }
    ids, mask = prompts(batch)
    assert ids.tolist() == [[0, 5, 6], [8, 9, 10]]
    assert mask.tolist() == [[0, 1, 1], [1, 1, 1]]


def test_a_text_without_an_answer_is_a_prompt_whatever_its_batch_holds() -> None:
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 1, 0], [8, 9, 10, 11, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 0]]),
        "completion_mask": torch.tensor([[0, 0, 1, 1, 0], [1, 1, 1, 1, 0]]),
    }
    ids, mask = prompts(batch)
    assert ids.tolist() == [[0, 0, 5, 6], [8, 9, 10, 11]]
    assert mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert prompt_batch(batch)["attention_mask"].tolist() == [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0]]


def test_texts_of_a_length_share_a_batch() -> None:
    kept = torch.tensor([[1, 1, 0, 0, 0], [1] * 5, [1, 1, 1, 0, 0], [1] * 5, [1, 0, 0, 0, 0]])
    ids = torch.arange(3, 28).reshape(5, 5) * kept
    drawn = Samples("t", "test", {"input_ids": ids, "attention_mask": kept}, None, (8, 3, 5, 7, 1), None, None)
    batches, places = batches_by_length(drawn, 2, torch.device("cpu"))
    assert [batch["input_ids"].shape for batch in batches] == [(2, 5), (2, 3), (1, 1)]
    rows = [row[row > 0].tolist() for batch in batches for row in batch["input_ids"]]
    assert [rows[place] for place in places] == [row[row > 0].tolist() for row in ids]


def test_spearman_counts_what_is_no_number_as_zero() -> None:
    assert spearman(["1", "x", "3"], ["1.0", "0.5", "2.0"]) == 1.0
    assert spearman(["3", "2", "1"], ["1.0", "2.0", "3.0"]) == -1.0
    assert spearman(["a", "b"], ["1.0", "2.0"]) == 0.0
    assert spearman(["nan", "inf", "1"], ["1", "2", "3"]) == pytest.approx(0.866025403784)
    with pytest.raises(InputError, match="needs numbers as right answers"):
        spearman(["1", "2"], ["yes", "no"])
    with pytest.raises(InputError, match="needs finite numbers"):
        spearman(["1", "2"], ["1", "nan"])
    with pytest.raises(InputError, match="that differ"):
        spearman(["1", "2"], ["1", "1"])


def test_completion_only_leaves_the_prompt_out(tmp_path: Path) -> None:
    from featcal import calibrate
    from featcal.calibration.calibrate import config_for

    family = open_family(load_suite(text_suite(tmp_path / "s", "llama")), "cpu")
    drawn = family.samples(TASKS[0], "calibration", None, 0)
    stage = family.adapter.stages[0]
    expert = family.expert_pass(drawn, 64)
    call = stage.first_call(expert.weights.read(stage.outer), expert.batches[0], None)
    config = config_for(family, lam=0.05, completion_only=True)
    weights = stage.token_weights("tokens", call, expert.batches[0], config)
    assert weights is not None
    answer = expert.batches[0]["completion_mask"]
    assert weights[:, :-1].equal(answer[:, 1:].double())  # what predicts the answer: the prompt's last token first
    assert float(weights.sum()) == 2 * len(drawn)  # the answer and the end of the text
    name = family.adapter.blocks()[0].name + ".mlp.up_proj.weight"
    whole = calibrate(family, config_for(family, lam=0.05)).weights.read([name])[name]
    answers = calibrate(family, config).weights.read([name])[name]
    assert not torch.allclose(whole, answers)


def test_how_much_a_token_counts_does_not_depend_on_its_batch(tmp_path: Path) -> None:
    """A text without a prompt counts as a whole, beside texts that have one too."""
    family = open_family(load_suite(write_text_suite(tmp_path / "tokens", "llama")), device="cpu")
    (stage,), config = family.adapter.stages, clip_config(completion_only=True)
    attended = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
    answer = torch.tensor([[0, 0, 1, 1, 0], [1, 1, 1, 0, 0]])

    def weights(rows: slice) -> list[list[float]]:
        batch = {"attention_mask": attended[rows], "completion_mask": answer[rows]}
        found = stage.token_weights("tokens", Call((torch.zeros(1),), {}), batch, config)
        assert found is not None
        return found.tolist()

    expected = [[0, 1, 1, 0, 0], [1, 1, 1, 0, 0]]
    assert weights(slice(0, 2)) == expected
    assert [weights(slice(i, i + 1))[0] for i in range(2)] == expected

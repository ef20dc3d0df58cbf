"""Zero-shot evaluation against the library's own full forward."""

from __future__ import annotations

import pytest
import torch
from suite_edits import Edit
from tiny_clip import CLASSES, TASKS

from featcal.family.opening import Family, open_family
from featcal.session.api import evaluate
from featcal.suite.schema import load_suite
from featcal.system.errors import InputError


def test_base_scores_like_the_whole_clip_model(tiny: Family) -> None:
    from transformers import AutoTokenizer, CLIPModel

    folder = tiny.base_folder
    model, tokenizer = CLIPModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer([f"a photo of a {name}." for name in CLASSES], padding=True, return_tensors="pt")
    ours = evaluate(tiny, "base")
    for task in TASKS:
        drawn = tiny.samples(task, "test", None, 42)
        with torch.no_grad():
            logits = model(**tokens, pixel_values=drawn.inputs["pixel_values"]).logits_per_image
        assert ours.tasks[task].predictions.equal(logits.argmax(1))
        assert ours.tasks[task].value == pytest.approx(float((logits.argmax(1) == drawn.labels).float().mean()))


def test_templates_are_averaged_after_normalisation(tiny: Family) -> None:
    from featcal.evaluation.scoring_heads import zero_shot_heads

    names, templates = ["cat", "dog"], ["a photo of a {}.", "a {}"]
    one = zero_shot_heads(tiny.adapter, tiny.origin, {"a": (names, templates[:1]), "b": (names, templates[1:])})
    both = zero_shot_heads(tiny.adapter, tiny.origin, {"t": (names, templates)})["t"]
    expected = torch.nn.functional.normalize((one["a"].prompts + one["b"].prompts) / 2, dim=-1)
    torch.testing.assert_close(both.prompts, expected)
    torch.testing.assert_close(both.prompts.norm(dim=-1), torch.ones(2))


def test_expert_is_scored_on_its_own_task(tiny: Family) -> None:
    scores = evaluate(tiny, "expert")
    for task in TASKS:
        own = evaluate(tiny, tiny.experts[task]).tasks[task]
        assert scores.tasks[task].predictions.equal(own.predictions)


def test_document(tiny: Family) -> None:
    document = evaluate(tiny, "merged", samples=6).to_json()
    assert (document["suite"], document["model"], document["split"]) == ("tiny", "merged", "test")
    entry = document["tasks"]["pets"]
    assert (entry["metric"], entry["n"]) == ("accuracy", 6)
    assert document["average"] == pytest.approx(sum(t["value"] for t in document["tasks"].values()) / len(TASKS))


def test_no_labels(edit_suite: Edit) -> None:
    suite = load_suite(edit_suite(lambda c: c["tasks"]["pets"]["test"].pop("labels")))
    with pytest.raises(InputError, match="task 'pets', test samples: no labels"):
        evaluate(suite, device="cpu")


def test_no_class_names(edit_suite: Edit) -> None:
    suite = load_suite(edit_suite(lambda c: c["tasks"]["pets"].pop("classes")))
    with pytest.raises(InputError, match="task 'pets': no class names"):
        evaluate(suite, device="cpu")


def test_base_without_text_tower(edit_suite: Edit) -> None:
    family = open_family(load_suite(edit_suite(lambda c: c.update(base="experts/pets"))), device="cpu")
    with pytest.raises(InputError, match="no text tower"):
        evaluate(family)


def test_parts_of_a_split_give_the_score_of_the_whole(tiny: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = evaluate(tiny)
    monkeypatch.setattr("featcal.family.opening.PART", 5)
    parts = list(tiny.parts("pets", "test", 11, 3))
    assert [len(part) for part in parts] == [5, 5, 1]
    assert [i for part in parts for i in part.indices] == list(tiny.samples("pets", "test", 11, 3).indices)
    split = evaluate(tiny)
    for task, score in whole.tasks.items():
        assert split.tasks[task].predictions.equal(score.predictions)  # type: ignore[union-attr,arg-type]
        assert split.tasks[task].value == score.value

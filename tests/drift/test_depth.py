"""Decisions after every block: against the library's own states and heads, and against the drift document's end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_clip import BLOCKS, CLASSES, in_float64
from tiny_text import library, text_suite
from torch import Tensor

from featcal.drift.depth import DepthDecisions
from featcal.family.opening import Family, open_family
from featcal.session.session import Session
from featcal.suite.schema import load_suite
from featcal.suite.views import DriftOptions, EvaluationSamples
from featcal.system.errors import InputError

ON = EvaluationSamples(12, "validation", 0)


def test_clip_is_read_by_its_norm_projection_and_prompts(tiny64: Family) -> None:
    from transformers import CLIPModel

    session = Session(tiny64)
    (task, *_) = tiny64.experts
    found = {name: session.measure.depth(name, task, ON) for name in ("expert", "merged")}
    prompts = session.measure.judges("merged", ON)[task][1].prompts.double()  # type: ignore[attr-defined]
    pixels = session.samples(ON)[task].inputs["pixel_values"].double()
    for name, weights in (("expert", tiny64.experts[task]), ("merged", tiny64.merged)):
        whole = CLIPModel.from_pretrained(tiny64.base_folder).double().eval()
        whole.load_state_dict(weights.read(tiny64.adapter.tower), strict=False)
        with torch.no_grad():
            states = whole.vision_model(pixel_values=pixels, output_hidden_states=True).hidden_states[1:]
            ends = [whole.visual_projection(whole.vision_model.post_layernorm(state[:, 0])) for state in states]
            scores = [whole.logit_scale.exp() * torch.nn.functional.normalize(end, dim=1) @ prompts.mT for end in ends]
        assert found[name].layers == tuple(f"block {i}" for i in range(BLOCKS))
        ranked = torch.stack(scores).softmax(2).topk(min(3, len(CLASSES)), dim=2)
        torch.testing.assert_close(found[name].chances, ranked.values, rtol=1e-7, atol=1e-12)
        assert found[name].answers[:, :, 0].equal(ranked.indices[:, :, 0])
        if name == "expert":
            final = ranked.indices[-1, :, 0]
        agreed = (ranked.indices[:, :, 0] == final).double().mean(1)
        torch.testing.assert_close(found[name].agreement, agreed, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_language_models_are_read_by_their_norm_and_vocabulary(kind: str, tmp_path: Path) -> None:
    """And the curve ends at the agreement of the drift document."""
    family = in_float64(open_family(load_suite(text_suite(tmp_path / "s", kind)), "cpu"))
    session, on = Session(family), EvaluationSamples(4, "test", 0)
    ledger = session.measure.drift("merged", DriftOptions(4, "test", 0, output=True)).to_json()
    for task in family.experts:
        depth = session.measure.depth("merged", task, on)
        assert depth.to_json()[-1]["agreement"] == ledger["tasks"][task]["output"]["agreement"]
        drawn, model = session.samples(on)[task].inputs, library(family, family.merged).double()
        for sample, place in enumerate(_answers(drawn)):
            alone = {name: one[sample : sample + 1] for name, one in drawn.items() if name != "completion_mask"}
            with torch.no_grad():
                output = model(**alone, output_hidden_states=True)
            seq2seq = kind == "t5"
            states = output.decoder_hidden_states if seq2seq else output.hidden_states
            norm = model.decoder.final_layer_norm if seq2seq else model.model.norm
            # The library's list has the embeddings first, and the last block's state already normed.
            scale = model.config.d_model**-0.5 if seq2seq and model.config.scale_decoder_outputs else 1.0
            ends = [*(norm(state) for state in states[1:-1]), states[-1]]
            chances = torch.stack([model.lm_head(scale * end)[0, place].softmax(0) for end in ends]).detach()
            torch.testing.assert_close(depth.chances[:, sample, 0], chances.amax(1), rtol=1e-8, atol=1e-12)
            assert depth.answers[:, sample, 0].equal(chances.argmax(1))


def _answers(inputs: dict[str, Tensor]) -> list[int]:
    """The position whose state decides the first token of every answer."""
    if "completion_mask" not in inputs:
        return [0] * len(inputs["input_ids"])
    return [int(row.nonzero()[0]) - 1 for row in inputs["completion_mask"]]


def test_the_curve_ends_at_the_agreement_of_the_document(tiny: Family) -> None:
    session = Session(tiny)
    for model in ("merged", "base", "calibrated:lam=0.1,samples=6"):
        tasks = session.measure.drift(model, DriftOptions(12, "validation", 0, output=True)).to_json()["tasks"]
        for task in tasks:
            rows = session.measure.depth(model, task, ON).to_json()
            assert rows[-1]["agreement"] == tasks[task]["output"]["agreement"]
            assert rows[-1]["turned"] == 1


def test_a_decision_turns_where_it_stays() -> None:
    """Three samples over four blocks: settled from the start, turned at the last block, gone and come back."""
    first = torch.tensor([[1, 0, 2], [1, 0, 0], [1, 0, 2], [1, 2, 2]])
    names = {0: "cat", 1: "dog", 2: "fish"}
    own = DepthDecisions(("a", "b", "c", "d"), torch.tensor([[1, 0, 2]] * 4)[:, :, None], torch.ones(4, 3, 1), names)
    depth = DepthDecisions(("a", "b", "c", "d"), first[:, :, None], torch.ones(4, 3, 1), names, own)
    assert depth.turning_points.tolist() == [0, 3, 2]
    rows = depth.to_json()
    assert [row["turned"] for row in rows] == pytest.approx([1 / 3, 1 / 3, 2 / 3, 1])
    assert [row["agreement"] for row in rows] == pytest.approx([1, 2 / 3, 1, 2 / 3])
    assert {row["expert_agreement"] for row in rows} == {1}
    course = depth.course(1)
    assert [row["answer"] for row in course] == ["cat"] * 7 + ["fish"]
    assert [row["of"] for row in course] == ["expert"] * 4 + ["model"] * 4
    with pytest.raises(InputError, match="sample 3 is out of range: 3 samples are measured, numbered 0 to 2"):
        depth.course(3)


def test_a_task_that_is_not_there_is_an_error(tiny: Family) -> None:
    with pytest.raises(InputError, match="task 'cars': the suite has"):
        Session(tiny).measure.depth("merged", "cars", ON)

"""Drift token by token: the layer's drift of every sample out of its tokens, and the tokens against the library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import Run, document
from tiny_clip import in_float64
from tiny_encoders import VARIANTS, tiny_encoder
from tiny_text import WORDS, library, text_suite
from tiny_vision_language import ROWS, write_pictured
from torch import Tensor

from featcal.calibration.calibrate import expert_passes
from featcal.drift.streams import cross
from featcal.drift.tokens import TokenDrift, _name_patches
from featcal.family.opening import Family, open_family
from featcal.figures.token_charts import patch_grid
from featcal.models.adapter import walking
from featcal.session import open_suite
from featcal.session.session import Session, open_session
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.schema import load_suite
from featcal.suite.views import DriftOptions, EvaluationSamples
from featcal.system.errors import InputError
from featcal.testing.trial import write_trial

PICTURES = EvaluationSamples(12, "validation", 0)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples come in several batches; those of texts are cut at different lengths."""
    monkeypatch.setattr(open_suite, "BATCH_SIZE", 4)


@pytest.fixture(scope="module", params=["t5", "llama"])
def texts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Session:
    """A language model in float64, with sentences of several lengths."""
    file = text_suite(tmp_path_factory.mktemp(request.param) / "s", request.param)
    return Session(in_float64(open_family(load_suite(file), "cpu")))


def require_identity(session: Session, on: EvaluationSamples, models: tuple[str, ...] = ("merged", "base")) -> None:
    """The root of the sum of squares over tokens is the drift of the ledger and of `features`, sample by sample."""
    options = DriftOptions(on.samples, on.split, on.seed)
    for model in models:
        ledger, features = session.measure.drift(model, options), session.measure.features(model, on)
        for task in session.tasks:
            found = session.measure.tokens(model, task, on)
            for one, layer, again in zip(
                found.layers, ledger.tasks[task].layers, features.tasks[task].layers, strict=True
            ):
                assert one.layer == layer.layer
                drift, norm = (torch.stack([t.norm() for t in by_sample]) for by_sample in (one.drift, one.expert_norm))
                torch.testing.assert_close(drift, layer.drift, rtol=1e-9, atol=1e-12)
                torch.testing.assert_close(drift, again.drift, rtol=1e-9, atol=1e-12)
                torch.testing.assert_close(norm, layer.expert_norm, rtol=1e-9, atol=1e-12)
                lengths = [(len(a), len(b)) for a, b in zip(one.tokens, one.drift, strict=True)]
                assert all(a == b for a, b in lengths)


def test_tokens_of_pictures_are_the_layers_drift(tiny64: Family) -> None:
    """And the class token is what `tokens="class"` measures."""
    session = Session(tiny64)
    require_identity(session, PICTURES)
    alone = session.measure.drift("merged", DriftOptions(12, "validation", 0, tokens="class"))
    for task, own in alone.tasks.items():
        for one, layer in zip(session.measure.tokens("merged", task, PICTURES).layers, own.layers, strict=True):
            first = torch.stack([drift[0] for drift in one.drift])
            torch.testing.assert_close(first, layer.drift, rtol=1e-9, atol=1e-12)
            parts = [token.part for token in one.tokens[-1]]
            expected = ["final feature"] if one.layer == "head" else ["class token", *["picture"] * (len(parts) - 1)]
            assert parts == expected


def test_tokens_of_texts_are_the_layers_drift(texts: Session) -> None:
    require_identity(texts, EvaluationSamples(6, "test", 0))


def test_tokens_of_texts_are_those_of_the_library(texts: Session) -> None:
    """Every sentence alone in the library, cut at its length: what padding is left out, and which token is which."""
    on, task = EvaluationSamples(6, "test", 0), texts.tasks[0]
    found = texts.measure.tokens("merged", task, on)
    family, inputs = texts.family, texts.samples(on)[task].inputs
    expert, merged = (library(family, one).double() for one in (family.experts[task], family.merged))
    seq2seq = "labels" in inputs
    lengths = inputs["attention_mask"].sum(1).tolist()
    assert len({*lengths}) > 1
    for sample, length in enumerate(lengths):
        ids = inputs["input_ids"][sample : sample + 1, :length]
        words = [WORDS[i] for i in ids[0].tolist()]
        given = {"input_ids": ids}
        if seq2seq:
            labels = inputs["labels"][sample]
            given["labels"] = labels[labels >= 0][None]
        with torch.no_grad():
            outputs = [model(**given, output_hidden_states=True, use_cache=False) for model in (expert, merged)]
        named = [(token.part, token.position, token.word) for token in found.layers[1].tokens[sample]]
        assert named == [("encoder" if seq2seq else "text", place, word) for place, word in enumerate(words)]
        if not seq2seq:
            require_same(found, "block 1", sample, [one.hidden_states[2] for one in outputs])
            continue
        require_same(found, "encoder block 0", sample, [one.encoder_hidden_states[1] for one in outputs])
        # Decoder tokens first, then the encoder's normed output, which the library's list ends with.
        states = [torch.cat([one.decoder_hidden_states[1], one.encoder_hidden_states[-1]], 1) for one in outputs]
        require_same(found, "decoder block 0", sample, states)
        read = ["<pad>", *(WORDS[i] for i in given["labels"][0, :-1].tolist())]
        said = [(token.part, token.word) for token in found.find("decoder block 0").tokens[sample]]
        assert said == [("decoder", word) for word in read] + [("encoder", word) for word in words]


def require_same(found: TokenDrift, layer: str, sample: int, states: list[Tensor]) -> None:
    apart = (states[1] - states[0])[0].norm(dim=1).detach()
    torch.testing.assert_close(found.find(layer).drift[sample], apart, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_pictures_of_several_sizes_have_no_padding(tmp_path: Path) -> None:
    trial = write_pictured(ROWS["qwen2_5_vl"], tmp_path / "s")
    session, on = Session(in_float64(trial.family)), EvaluationSamples(None, "calibration", 0)
    require_identity(session, on, ("merged",))
    task = session.tasks[0]
    counts = session.samples(on)[task].inputs["image_grid_thw"].prod(1).tolist()
    found = session.measure.tokens("merged", task, on)
    assert len({*counts}) > 1
    assert [len(drift) for drift in found.layers[1].drift] == counts
    (merger,) = [one for one in found.layers if one.layer.startswith("vision")][-1:]
    assert [len(drift) for drift in merger.drift] == [count // 4 for count in counts]  # four patches become one
    assert {token.part for token in found.layers[-2].tokens[0]} == {"text"}


def test_a_patch_without_a_state_is_no_padding_while_others_follow(tiny: Family) -> None:
    with walking(tiny.adapter):
        crossing = next(cross(tiny.run(), tiny.merged, expert_passes(tiny, CalibrationConfig(samples=2))))
    kept, named = _name_patches(crossing, torch.tensor([[1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]]))
    assert kept.tolist() == [[True, True, True, False], [True, True, False, False]]
    assert [[token.position for token in tokens] for tokens in named] == [[0, 0, 1], [0, 0]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vit", "dinov2", "siglip_vision_model", "bert"])
def test_tokens_of_other_encoders(kind: str, tmp_path: Path) -> None:
    """Patches are a grid of the picture, after a class token where there is one; words are those of the text."""
    facts = VARIANTS[kind][0]
    session = Session(in_float64(write_trial(tiny_encoder(facts), facts, tmp_path / "s").family))
    on, task = EvaluationSamples(None, "calibration", 0), session.tasks[0]
    require_identity(session, on, ("merged",))
    inputs, found = session.samples(on)[task].inputs, session.measure.tokens("merged", task, on).layers[1]
    parts = [[token.part for token in tokens] for tokens in found.tokens]
    if kind == "bert":
        assert [len(own) for own in parts] == inputs["attention_mask"].sum(1).tolist()
        assert {*parts[0]} == {"text"}
    else:
        assert (parts[0][0] == "class token") == (kind != "siglip_vision_model")
        assert patch_grid(parts[0].count("picture"), *inputs["pixel_values"].shape[2:])


def test_rows_of_a_sample(tiny64: Family) -> None:
    session = Session(tiny64)
    found = session.measure.tokens("merged", "pets", PICTURES)
    rows = found.rows(3, "block 1")
    assert sum(row["share"] for row in rows) == pytest.approx(1, abs=1e-12)
    assert [row["relative_drift"] for row in rows] == pytest.approx([r["drift"] / r["expert_norm"] for r in rows])
    assert rows == [row for row in found.rows(3) if row["layer"] == "block 1"]
    with pytest.raises(InputError, match="sample 12 is out of range: 12 samples are measured, numbered 0 to 11"):
        found.rows(12)
    with pytest.raises(InputError, match=r"no layer 'blok 1'; the model has embeddings, .* Did you mean 'block 1'\?"):
        found.rows(0, "blok 1")
    with pytest.raises(InputError, match="task 'cars': the suite has"):
        session.measure.tokens("merged", "cars", PICTURES)


def test_the_experts_own_drift_is_nothing(tiny64: Family) -> None:
    session = Session(tiny64)
    task = session.tasks[0]
    for one in session.measure.tokens(f"expert:{task}", task, PICTURES).layers:
        assert not torch.stack(one.drift).any()
    assert {row["share"] for row in session.measure.tokens(f"expert:{task}", task, PICTURES).rows(0)} == {None}


@pytest.mark.parametrize("suite", ["tiny", pytest.param("clip-mini", marks=pytest.mark.slow)])
def test_the_command_prints_the_arrays(run: Run, suite: str, tiny_suite_file: Path) -> None:
    named = str(tiny_suite_file) if suite == "tiny" else suite
    options = ("--tokens", "each", "--sample", 2, "--layer", "block 1", "--eval-samples", 3, "--json")
    printed = document(run("drift", named, *options))
    session, on = open_session(named, device="cpu"), EvaluationSamples(3)
    for task, entry in printed["tasks"].items():
        one = session.measure.tokens("merged", task, on).find("block 1")
        assert [row["drift"] for row in entry["tokens"]] == one.drift[2].tolist()
        assert [row["expert_norm"] for row in entry["tokens"]] == one.expert_norm[2].tolist()
        assert [(row["part"], row["position"], row["token"]) for row in entry["tokens"]] == [*one.tokens[2]]

"""Language models without a row of facts: blocks, norm and head are found by running the library's own class.

What is computed is held against the library and against a second calibration in float64 that uses hooks alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lanes import rows

from featcal import CalibrationConfig, InputError, calibrate, measure_drift
from featcal.calibration.calibrate import config_for
from featcal.models.families.found_decoder import find_decoder
from featcal.models.families.registry import architecture_for, supported_types
from featcal.preflight.check import check_suite
from featcal.studies.selection.candidates import plan_candidates
from featcal.testing.checks import CHECKS
from featcal.testing.trial import TASKS, Trial, write_trial

COMMON = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 1,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("GPTNeoXForCausalLM", {}),
    "bloom": ("BloomForCausalLM", {"tie_word_embeddings": True}),
    "starcoder2": ("Starcoder2ForCausalLM", {"sliding_window": 5, "use_bias": False}),
    "stablelm": ("StableLmForCausalLM", {}),
    "helium": ("HeliumForCausalLM", {"head_dim": 4}),
    "mpt": ("MptForCausalLM", {"d_model": 16, "num_hidden_layers": 6, "max_seq_len": 64}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}),
}
"""MPT has more blocks than a state has dimensions, each of which it returns in a tuple."""
QUICK = ("gpt_neox",)


def tiny(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    named, own = KINDS[kind]
    model_class = getattr(transformers, named)
    return model_class(model_class.config_class(**{**COMMON, **own, **options}))


def stated(model: Any) -> dict[str, Any]:
    """Content of the `config.json` that the library writes."""
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trial]:
    def write(kind: str) -> Trial:
        model = tiny(kind)
        facts = find_decoder(stated(model))
        assert facts is not None
        return write_trial(model, facts, tmp_path_factory.mktemp(kind))

    return cache(write)


@pytest.fixture(autouse=True)
def without_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has tests of its own, and takes longer than all else here."""
    monkeypatch.setattr("featcal.calibration.calibrate._generation", lambda *_: {})


@pytest.mark.parametrize("kind", rows(KINDS, quick=QUICK, slow={*KINDS} - {*QUICK}))
def test_states_scores_and_calibrated_tensors_are_those_of_the_library(
    trials: Callable[[str], Trial], kind: str
) -> None:
    trial = trials(kind)
    assert kind not in supported_types()
    for name in ("replay", "paper", "repair"):
        assert CHECKS[name](trial), name
    ledger = measure_drift(trial.exact, split="test")
    for task in TASKS:
        assert ledger.tasks[task].identity_residual < 1e-9
        assert [layer.layer for layer in ledger.tasks[task].layers] == trial.family.adapter.layers()


def test_options_are_limited_and_check_says_so(trials: Callable[[str], Trial]) -> None:
    trial = trials("gpt_neox")
    limits = (
        "no row of facts describes 'gpt_neox': its blocks were found by running GPTNeoXForCausalLM; replay checked, "
        "options limited to the recipe 'paper', without sublayers"
    )
    assert f"base: {limits}" in check_suite(trial.family.suite).notes
    for recipe in ("refined", "informed"):
        with pytest.raises(InputError, match=f"recipe '{recipe}': {limits}"):
            calibrate(trial.family, CalibrationConfig(recipe=recipe))
    with pytest.raises(InputError, match="no row of facts names attention and MLP inside it; leave sublayers out"):
        measure_drift(trial.family, sublayers=True, split="test")
    adapter = trial.family.adapter
    # Files of the first versions repeat masks, which the library drops.
    assert adapter.canonical("gpt_neox.layers.0.attention.masked_bias") is None
    assert adapter.canonical("layers.0.attention.dense.bias") == "gpt_neox.layers.0.attention.dense.bias"
    long = {"input_ids": torch.zeros(1, 65, dtype=torch.long)}
    assert "texts of 65 tokens, the model has 64 positions" in str(adapter.misfit(long))


def test_a_choice_tries_the_one_recipe_that_there_is(trials: Callable[[str], Trial]) -> None:
    family = trials("gpt_neox").family
    plan = plan_candidates(family, config_for(family, samples=8))
    assert [one.config and (one.config.recipe, one.config.decisions) for one in plan] == [("paper", 0.0), None]


class Shared(transformers.GPTNeoXForCausalLM):
    """Blocks that share weights, as ALBERT's do."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gpt_neox.layers[1] = self.gpt_neox.layers[0]


class Twice(transformers.GPTNeoXForCausalLM):
    """A forward that scores another thing than the head gives."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        found.logits = 2 * found.logits
        return found


def test_what_cannot_be_run_without_a_row_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(config: dict[str, Any]) -> str:
        with pytest.raises(InputError) as caught:
            architecture_for(config, "base")
        return str(caught.value)

    config = stated(tiny("gpt_neox"))
    for changed, said in (
        (Shared, "the blocks 'gpt_neox.layers' share weights"),
        (Twice, "its scores are not those of '"),
    ):
        monkeypatch.setattr(transformers, "GPTNeoXForCausalLM", changed)
        front = "base: architecture 'gpt_neox' is not supported: no row of facts describes it, and "
        assert refusal(config).startswith(f"{front}it is not read without one: {said}")
    small = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "rotary_dim": 2, "n_positions": 64}
    gptj = transformers.GPTJConfig(**small).to_dict() | {"architectures": ["GPTJForCausalLM"]}
    assert "its head 'lm_head' is more than a linear map without a bias" in refusal(gptj)
    for kind, named, options, said in (
        ("opt", "OPTForCausalLM", {"ffn_dim": 24, "word_embed_proj_dim": 16}, "is not given [batch, tokens, width]"),
        ("falcon", "FalconForCausalLM", {}, "mlp.dense_4h_to_h' has an output that is changed in place"),
    ):
        other = {**COMMON, **options, "model_type": kind, "architectures": [named]}
        assert f"{said}; featcal reads" in refusal(other), kind
    olmo = transformers.OlmoConfig(**COMMON).to_dict() | {"architectures": ["OlmoForCausalLM"]}
    assert "after its blocks it runs nothing, expected one norm" in refusal(olmo)
    # Of these nothing says that they are language models.
    assert "'albert' is not supported; featcal reads" in refusal(transformers.AlbertConfig().to_dict())
    assert "'gpt_neox' is not supported; featcal reads" in refusal({**config, "architectures": ["GPTNeoXModel"]})


def test_drift_is_refused_where_the_library_does_not_run_in_float64(tmp_path: Path) -> None:
    """XGLM's attention fills with float64's lowest number in float32; the rest works."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "d_model": 16, "ffn_dim": 24, "num_layers": 2, "attention_heads": 4}
    model = transformers.XGLMForCausalLM(transformers.XGLMConfig(**sizes, eos_token_id=1, pad_token_id=0))
    facts = find_decoder(stated(model))
    assert facts is not None
    trial = write_trial(model, facts, tmp_path)
    assert [*calibrate(trial.family, trial.config()).record["tasks"]] == [*TASKS]
    with pytest.raises(InputError, match=r"layers\.0: drift is computed a second time, in torch\.float64"):
        measure_drift(trial.family, "merged", samples=4)

"""An option that a file does not state means what its class takes for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_encoders import ROWS, tiny_encoder

from featcal.family.opening import open_family
from featcal.models.families.forward_options import forward_options
from featcal.system.errors import InputError
from featcal.testing.trial import write_trial

OLD_DEFAULTS = [
    ("BertConfig", "position_embedding_type", "absolute", "relative_key"),
    ("RobertaConfig", "position_embedding_type", "absolute", "relative_key_query"),
    ("ViTConfig", "is_decoder", False, True),
    ("Phi3Config", "attention_bias", False, True),
    ("Qwen2Config", "head_dim", 128, 64),  # hidden_size 4096 by 32 heads
    ("LlamaConfig", "use_sliding_window", False, True),
]
"""Options, what transformers 4 writes for a default that version 5 does not state, and another value."""


@pytest.mark.parametrize(("config", "option", "default", "other"), OLD_DEFAULTS)
def test_an_option_that_is_absent_is_its_default(config: str, option: str, default: Any, other: Any) -> None:
    def read(**stated: Any) -> Any:
        return forward_options(getattr(transformers, config)(**stated), [option])[option]

    assert read() == read(**{option: default}) == default
    assert read(**{option: other}) == other


def test_of_two_names_of_the_activation_that_counts_which_the_class_reads() -> None:
    names = ["hidden_act", "hidden_activation"]
    assert forward_options(transformers.Gemma2Config(hidden_act="relu"), names) == {
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    assert forward_options(transformers.LlamaConfig(), names) == {"hidden_act": "silu", "hidden_activation": None}


def test_experts_that_an_older_version_wrote_go_with_a_base_that_states_nothing(tmp_path: Path) -> None:
    trial = write_trial(tiny_encoder(ROWS["roberta"]), ROWS["roberta"], tmp_path, torch.float32)
    suite = trial.family.suite
    config = suite.root / next(iter(suite.tasks.values())).expert / "config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps(content | {"position_embedding_type": "absolute"}))
    open_family(suite, "cpu")
    config.write_text(json.dumps(content | {"position_embedding_type": "relative_key"}))
    with pytest.raises(InputError, match=r"position_embedding_type is 'relative_key' in .*, the base has 'absolute'"):
        open_family(suite, "cpu")

"""What keeps a model from being of the base's architecture, in the words of what was probably meant."""

from __future__ import annotations

import re

import pytest
import torch

from featcal.family.differences import list_differences
from featcal.formats.conversions import UNTIE
from featcal.formats.weights import InMemory
from featcal.models.adapter import Adapter
from featcal.models.families.registry import adapter_for

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 20}
CONFIG = {**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def adapter() -> Adapter:
    """A language model whose head has the shape of its embedding."""
    return adapter_for(CONFIG, [], torch.device("cpu"), "base")


@pytest.mark.parametrize("prefix", ["model", "module", "net.model"])
def test_a_prefix_of_all_tensors_is_one_finding(adapter: Adapter, prefix: str) -> None:
    """Lightning's `model.` must not make the head an embedding that was renamed."""
    tensors = {f"{prefix}.{name}": torch.zeros(shape) for name, shape in adapter.shapes().items()}
    (problem,) = list_differences(adapter, InMemory("expert 'x'", tensors), CONFIG)
    assert f"all {len(tensors)} tensors look renamed, '{prefix}' added: " in problem


def test_a_prefix_that_all_tensors_lack_is_one_finding(adapter: Adapter) -> None:
    tensors = {re.sub(r"^model\.", "", name): torch.zeros(shape) for name, shape in adapter.shapes().items()}
    (problem,) = list_differences(adapter, InMemory("expert 'x'", tensors), CONFIG)
    assert f"all {len(tensors) - 1} tensors look renamed, 'model' left out: " in problem


def test_an_expert_that_ties_its_head_is_told_how_to_untie_it(adapter: Adapter) -> None:
    tensors = {name: torch.zeros(shape) for name, shape in adapter.shapes().items() if name != "lm_head.weight"}
    own = InMemory("expert 'x'", tensors)
    (problem,) = list_differences(adapter, own, {"tie_word_embeddings": True})
    assert problem.startswith(
        "expert 'x': its head is tied to its embedding, but the base has a separate 'lm_head.weight'"
    )
    assert problem.endswith(UNTIE)
    # Where its file says nothing, the class decides, and Llama's does not tie.
    for config in ({"tie_word_embeddings": False}, {}):
        (problem,) = list_differences(adapter, own, config)
        assert problem == "expert 'x': missing tensors: 'lm_head.weight'"

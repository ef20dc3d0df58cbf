"""The tables of docs/architectures/every-class.md are what its script writes, and what featcal does."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import transformers

from featcal import InputError
from featcal.models.families.registry import architecture_for, supported_types

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "architectures" / "every-class.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_tables_are_those_of_the_script() -> None:
    version = re.search(r"^transformers (\S+):", PAGE, re.MULTILINE)
    assert version is not None
    if version[1] != transformers.__version__:
        pytest.skip(f"the page is of transformers {version[1]}, installed is {transformers.__version__}")
    assert runpy.run_path(str(DOCS / "architectures.py"))["filled"](PAGE) == PAGE


def test_what_is_accepted_is_what_featcal_knows() -> None:
    accepted = set(re.findall(r"\| `(\S+)` \| \*\*accepted\*\*", PAGE))
    assert accepted == set(supported_types()) - {"open_clip", "timm"}  # no class of transformers


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "falcon"}, "architecture 'falcon' is not supported; featcal reads .*llama, mistral, qwen2"),
        (
            {"model_type": "granitemoe", "num_local_experts": 8},
            "'granitemoe' is not supported: a mixture of experts that no row of facts describes "
            r"\('num_local_experts' in its config.json\); featcal reads .*mixtral, qwen3_moe",
        ),
        ({"model_type": "qwen2_moe", "num_experts": 60}, r"a mixture of experts .* \('num_experts' in its config"),
        ({"model_type": "gemma3", "vision_config": {"a": 1}}, "'gemma3' is not supported: a model of pictures"),
        (
            {"model_type": "new", "layer_types": ["linear_attention"]},
            r"'new' .*: a model with layers of linear attention \(layer 0: 'linear_attention'\)",
        ),
        (
            {"model_type": "qwen3_5_text", "layer_types": [*3 * ["linear_attention"], "full_attention"] * 2},
            r"a model with layers of linear attention \(layers 0, 1, 2 and 3 more: 'linear_attention'\); featcal reads",
        ),
        ({"model_type": "mamba", "state_size": 16}, r"a model with state-space layers \('state_size' in its config"),
        ({"model_type": "recurrent_gemma", "lru_width": 9}, r"a model with recurrent layers \('lru_width' in its"),
    ],
)
def test_what_is_refused_is_refused_by_name(config: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=f"base: .*{says}"):
        architecture_for(config, "base")

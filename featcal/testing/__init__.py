"""Test in one call whether the facts of an architecture are true, and whether a method keeps what it promises.

`check_adapter(model, facts)` writes a base, two experts near it and a merged model, all with the shapes of a tiny
`model` of the library with random weights, and compares featcal's results with the library's own forward, and with a
second computation of the whole calibration in float64 that uses only hooks (`reference`).

`check_method(name)` merges tensors in memory, or fits a tiny suite, and checks what must be true of every method.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from featcal.baselines.common.baseline import Baseline
from featcal.mergers.common.merger import Merger
from featcal.models.families.encoder_facts import ENCODERS
from featcal.models.families.registry import register_meanwhile
from featcal.suite.methods import method
from featcal.testing.checks import CHECKS
from featcal.testing.methods import BASELINE_CHECKS, MERGER_CHECKS, BaselineTrial, MergerTrial
from featcal.testing.trial import Facts, write_trial


def check_adapter(model: Any, facts: Facts) -> Mapping[str, Mapping[str, float]]:
    """Apply every check of `CHECKS` to the facts, which are known to this process meanwhile.

    Args:
        model: an instance of the library's class with a tiny configuration: few blocks, so that every kind of block is
            there, widths of 16 to 64, a window of fewer than 8 tokens where blocks have one. Its shapes are used, with
            random weights. Its attention must use transformers' attention interface, or plain products and a softmax:
            torch's fused kernel has no forward-mode derivative, which attribution needs.

    Returns:
        The measured values, by check and by name: each is a deviation, except "drift".

    Raises:
        AssertionError: a check fails; the message states the values.
        InputError: the facts do not describe the model.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from featcal import DecoderFacts
    >>> from featcal.testing import check_adapter
    >>> sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    >>> facts = DecoderFacts(model_type="llama", config="LlamaConfig", model="LlamaForCausalLM")
    >>> found = check_adapter(model, facts)
    >>> found["replay"]["scores"] < 1e-5
    True
    >>> found["repair"]["drift"] < 1
    True
    """
    with register_meanwhile(facts), TemporaryDirectory(prefix="featcal-check-") as folder:
        trial = write_trial(model, facts, Path(folder))
        return {name: check(trial) for name, check in CHECKS.items()}


def check_method(name: str, model: Any = None, facts: Facts | None = None) -> tuple[str, ...]:
    """Apply every check of `testing.methods` to a registered method.

    Args:
        model, facts: as for `check_adapter`: the model on which a method other than a merger is tried; by default a
            tiny BERT with a classifier per task, for which every kind of method is defined.

    Returns:
        The names of the checks, all of which passed.

    Raises:
        AssertionError: the first check that fails; the message states the values.
        InputError: there is no such method, or it is not defined for the model.

    >>> from featcal.testing import check_method
    >>> check_method("task-arithmetic")[:3]
    ('check_merger_name', 'check_identity', 'check_order')
    """
    kind = method(name)
    if issubclass(kind, Merger):
        for check in MERGER_CHECKS:
            check(MergerTrial(kind))
        return tuple(check.__name__ for check in MERGER_CHECKS)
    assert issubclass(kind, Baseline)
    with TemporaryDirectory(prefix="featcal-check-") as folder:
        trial = BaselineTrial(kind, write_trial(model or _tiny_bert(), facts or _BERT, Path(folder)))
        for own in BASELINE_CHECKS:
            own(trial)
    return tuple(check.__name__ for check in BASELINE_CHECKS)


_BERT = next(facts for facts in ENCODERS if facts.model_type == "bert")


def _tiny_bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 32, "max_position_embeddings": 16}
    return BertForSequenceClassification(BertConfig(num_hidden_layers=2, num_attention_heads=4, num_labels=3, **sizes))

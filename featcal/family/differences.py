"""List missing, extra and misshapen tensors of a model against an architecture, with a likely cause."""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from featcal.formats.conversions import SAVE_ANEW, UNTIE
from featcal.formats.weights import TensorInfo, Weights
from featcal.models.adapter import Adapter
from featcal.system.formatting import some

_QUANTISED = ("qweight", "qzeros", "scales", "g_idx", "weight_scale", "SCB", "absmax", "quant_map", "quant_state")
"""Parts of names that quantisers (GPTQ, AWQ, bitsandbytes, compressed-tensors) give their tensors."""
_ALIKE = 0.7
"""Similarity (difflib) from which on a single tensor counts as a renamed one."""
_KINDS = {
    "Classification": ("a classifier", "its head is that of one task, and the models of a suite share theirs"),
    "QuestionAnswering": ("a model that marks answers", "its head is that of one task"),
    "EncoderModel": ("a bare encoder", "its decoder and its head are missing"),
    "Model": ("a bare model", "its head is missing"),
}
"""Ending of a name in `architectures` → kind of model, and why it does not fit; the first matching one counts."""
_UNQUANTISED = "give the checkpoint that it was quantised from"


def list_differences(adapter: Adapter, weights: Weights, config: Mapping[str, Any] | None = None) -> list[str]:
    """List all differences of `weights` from the adapter's architecture; empty if they fit.

    Args:
        config: content of the model's `config.json`, which says whether it is quantised.
    """
    expected = {name: shape for name, shape in adapter.shapes().items() if name in adapter.tower}
    found, label = weights.info, weights.label
    quantised = _quantisation_signs(found, expected, config or {})
    # Every tensor of a quantised model differs: one line says more than hundreds.
    if quantised:
        return [f"{label}: quantised weights ({quantised}); {_UNQUANTISED}"]
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected and not adapter.is_carried(name)]
    another = _another_kind(adapter, config or {}) if missing or extra else ""
    another = another or _explain_stacking({name: found[name] for name in extra}, missing)
    if another:
        return [f"{label}: {another}"]
    head = _tied_head(adapter, config or {}, missing)
    if head and adapter.aliases:  # T5, whose files decide
        return [
            f"{label}: it has no head beside its embedding, and the base's file holds '{head}'. If that repeats the "
            "base's embedding, as in pickles of old, save the base anew, which writes it once, and give ANEW as the "
            f"base:\n    {SAVE_ANEW}"
        ]
    missing = [name for name in missing if name != head]
    renamed, sentences = _renames({n: expected[n] for n in missing}, {n: found[n].shape for n in extra})
    problems = [f"{label}: {sentence}" for sentence in sentences]
    if head:
        problems.append(
            f"{label}: its head is tied to its embedding, but the base has a separate '{head}'; save it with a head "
            "of its "
            f"own:\n    {UNTIE}"
        )
    missing = [name for name in missing if name not in renamed.values()]
    extra = [name for name in extra if name not in renamed]
    # Another architecture altogether: its own tensors would all be listed as extra.
    if len(missing) == len(expected):
        return [*problems, f"{label}: none of the {len(expected)} tensors of a {adapter.family} tower is there"]
    if missing:
        problems.append(f"{label}: missing tensors: {some(missing)}")
    if extra:
        whose = f"a model of type {adapter.family}" if label == "base" else "the base's architecture"
        count = "one tensor" if len(extra) == 1 else f"{len(extra)} tensors"
        problems.append(f"{label}: {count} that {whose} does not have, and no stage would run: {some(extra)}")
    rows, sentence = _vocabulary(adapter, found, expected)
    if rows:
        problems.append(f"{label}: {sentence}")
    problems += [
        f"{label}: tensor '{name}' has shape {list(found[name].shape)}, expected {list(shape)} as in the base"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape and name not in rows
    ]
    problems += [
        f"{label}: tensor '{name}' holds {found[name].dtype}, weights are floating-point"
        for name in expected
        if name in found and not found[name].dtype.is_floating_point
    ]
    return problems


def _tied_head(adapter: Adapter, config: Mapping[str, Any], missing: Sequence[str]) -> str:
    """Return the name of the base's head if it is the only missing tensor, because the model ties its own; else ""."""
    head = adapter.vocabulary[-1] if len(adapter.vocabulary) == 2 else ""
    return head if head and [*missing] == [head] and adapter.ties_head(config) else ""


def _another_kind(adapter: Adapter, config: Mapping[str, Any]) -> str:
    """Describe the model's class by its configuration, if that class has other tensors than the adapter; else ""."""
    formats = {"clip": "hf", "open_clip": "open_clip"}
    if {config.get("model_type"), adapter.family} == set(formats):
        layout = formats[adapter.family]
        return f"laid out for another library than the base; 'featcal export MODEL --format {layout} --out DIR' helps"
    named = next(iter(config.get("architectures") or ()), None)
    kind = next((kind for end, kind in _KINDS.items() if str(named).endswith(end)), None)
    if named in adapter.classes or kind is None or not adapter.classes:
        return ""
    wanted = adapter.classes[0]
    usual = f"save the whole {wanted}" if kind[0] == "a bare model" else f"give the {wanted} it was made from"
    remedy = adapter.remakes.get(str(named), usual)
    return f"config.json calls it {named}: {kind[0]}, {kind[1]}; {remedy}"


def _explain_stacking(extra: Mapping[str, TensorInfo], missing: Sequence[str]) -> str:
    """Explain files with the experts of a mixture in one tensor per layer; "" for other files."""
    found = [
        name
        for name, info in extra.items()
        if len(info.shape) == 3 and any(one.startswith(f"{name.rpartition('.')[0]}.0.") for one in missing)
    ]
    if not found:
        return ""
    return (
        f"the experts of a layer are stacked in one tensor ({some(found, 2)}), as transformers 5 writes them with "
        "save_original_format=False, and version 4 does not read; give the files with every expert's maps apart"
    )


def _quantisation_signs(found: Mapping[str, TensorInfo], expected: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Describe the signs that a model is quantised; "" if there are none."""
    signs = []
    settings = config.get("quantization_config")
    if settings:
        method = settings.get("quant_method") if isinstance(settings, Mapping) else None
        signs.append(f"quantization_config in config.json{f', method {method}' if method else ''}")
    dtypes = [found[name].dtype for name in expected if name in found]
    narrow = Counter(str(dtype).removeprefix("torch.") for dtype in dtypes if dtype.itemsize == 1)
    signs += [f"{count} tensors in {dtype}" for dtype, count in narrow.items()]
    named = [name for name in found if name not in expected and any(p in name.split(".")[-1] for p in _QUANTISED)]
    if named:
        signs.append(f"tensors such as {some(named, 1)}")
    return "; ".join(signs)


def _vocabulary(
    adapter: Adapter, found: Mapping[str, TensorInfo], expected: Mapping[str, tuple[int, ...]]
) -> tuple[list[str], str]:
    """Return tensors that differ only in the number of their rows, one per token of the vocabulary, with a sentence
    about them."""
    both = [name for name in adapter.vocabulary if name in found and name in expected]
    names = [n for n in both if found[n].shape != expected[n] and found[n].shape[1:] == expected[n][1:]]
    if not names:
        return [], ""
    own, base = found[names[0]].shape[0], expected[names[0]][0]
    remedy = (
        f"'vocabulary: base' in the suite file leaves out the last {own - base} rows, from row {base} on"
        if own > base
        else f"it lacks the base's rows from {own} on; give a model with the base's vocabulary"
    )
    return names, f"vocabulary of {own} rows, the base has {base} ({some(names)}); {remedy}"


def _renames(
    missing: Mapping[str, tuple[int, ...]], extra: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, str], list[str]]:
    """Pair extra tensors with missing ones that look renamed; return {extra: missing} and sentences.

    An extra tensor is paired with the missing one of its shape that differs only by a prefix, else with the one that
    shares most of its name; pairs that differ in the same part are one finding. A single pair must have nearly the same
    name.
    """
    rules: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for name, shape in extra.items():
        candidates = [other for other, own in missing.items() if own == shape]
        if candidates:
            closest = max(candidates, key=lambda other: (_is_inside(name, other), _shared_parts(name, other)))
            rules[_differing_part(name, closest)][name] = closest
    pairs: dict[str, str] = {}
    sentences = []
    for (theirs, ours), renamed in rules.items():
        taken = set(pairs.values())
        renamed = {name: other for name, other in renamed.items() if other not in taken}
        first, other = next(iter(renamed.items()), ("", ""))
        alike = difflib.SequenceMatcher(None, first, other).ratio() >= _ALIKE
        if len(set(renamed.values())) < len(renamed) or not renamed or (len(renamed) == 1 and not alike):
            continue
        pairs |= renamed
        count = f"all {len(renamed)}" if len(renamed) == len(missing) == len(extra) else str(len(renamed))
        how = f"'{theirs}' in place of '{ours}'" if theirs and ours else f"'{theirs}' added" if theirs else ""
        how = how or f"'{ours}' left out"
        what = f"{count} tensors look renamed" if len(renamed) > 1 else "a tensor looks renamed"
        sentences.append(f"{what}, {how}: '{first}' for '{other}'; save the model again under the base's names")
    return pairs, sentences


def _is_inside(a: str, b: str) -> bool:
    """Say whether one of two dotted names is the end of the other."""
    return f".{a}".endswith(f".{b}") or f".{b}".endswith(f".{a}")


def _shared_parts(a: str, b: str) -> int:
    start, end = _common(a.split("."), b.split("."))
    return start + end


def _differing_part(a: str, b: str) -> tuple[str, str]:
    """Return the differing middle parts of two dotted names."""
    own, other = a.split("."), b.split(".")
    start, end = _common(own, other)
    return ".".join(own[start : len(own) - end]), ".".join(other[start : len(other) - end])


def _common(a: Sequence[str], b: Sequence[str]) -> tuple[int, int]:
    """Count the parts that two names share at their start, and of the rest at their end."""
    most = min(len(a), len(b))
    start = next((i for i in range(most) if a[i] != b[i]), most)
    end = next((i for i in range(most - start) if a[-1 - i] != b[-1 - i]), most - start)
    return start, end

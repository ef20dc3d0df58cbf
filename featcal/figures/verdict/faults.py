"""Describe faults of a merged model: in the files beside its weights, in the weights, and in its features. This module
does not import torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from featcal.figures.verdict.findings import Findings
from featcal.figures.verdict.sentences import CHECK, MERGE, NOTHING, OPTIONS, REPAIR, Sentence, Verdict, judge_numbers
from featcal.system.assignment import assign_columns
from featcal.system.formatting import join_words, some

if TYPE_CHECKING:
    from featcal.family.ingredients import Makeup
    from featcal.preflight.beside_weights import FileDifference

FILES = "files"
"""Next steps for sound weights, besides those of `sentences`."""
STEEP = 2.0
"""Distance of a merge from the base, in units of the plain sum of all task vectors, from which on its scale is wrong:
every expert has twice its trained weight."""
HARM = 1.1
"""Final drift, relative to the base's, from which on a merge is worse than none."""
HALF = 0.5
"""Share of the largest drift from which on a model counts as drifting."""
_ALIKE = 0.1
"""Difference of a coefficient from the recipe's, as a share of the largest, up to which both count as equal: storing in
half precision changes them by a few hundredths."""
_ROUNDED = 2.0
"""Share of the difference that no expert explains, relative to rounding, up to which it counts as rounding."""
SPHERICAL = ("slerp", "nuslerp", "karcher", "multislerp")
"""mergekit's names for methods that rotate directions and preserve lengths."""
STOCK, SPLICE = "model_stock", "passthrough"
"""mergekit's names for Model Stock, and for the method that copies whole layers."""
SINGLE = (
    "ties", "dare_linear", "dare_ties", "breadcrumbs", "breadcrumbs_ties", "della", "della_linear", "sce", "ram",
    "ramplus_tl", "nearswap", "arcee_fusion",
)  # fmt: skip
"""mergekit's names for methods that drop or change single values."""
_MOST = 6
"""Most experts and files that a sentence names."""


@dataclass(frozen=True)
class Commands:
    """Command lines for the next step of a verdict, each "" if it does not apply."""

    files: str = ""
    """Command that corrects the files beside the weights."""
    again: str = ""
    """Command that merges again by the recipe."""
    smaller: str = ""
    """Command that merges again at the paper's scale."""
    repair: str = ""
    """Command that calibrates the merge."""
    choose: str = ""
    """Command that searches for better options of a calibration."""


@dataclass(frozen=True)
class MergeFindings:
    """All known facts about a merged model.

    Args:
        name: its name in sentences.
        stated: task → coefficient by its recipe; None if the recipe has no plain numbers.
        is_exact: whether the recipe's method is a sum of task vectors.
        method: of the recipe; "" without one.
        notes: what the recipe says of the vocabulary that is not as it should be.
        features: None where they could not be measured.
        failure: why not.
        finals: task → norm of the final drift, relative to that of the expert's features.
        base_finals: the same of the base; empty where it is not known.
        drift: layer → relative drift, mean over tasks, in forward order.
        is_written: experts wrote what it is measured on, so that there is nothing to score.
        found_base: the base, where the recipe does not name it and the experts do.
        missed_base: the base that the experts name, where it cannot be had.
        is_uneven: whether the recipe gives layers or tensors values of their own.
    """

    name: str
    differences: Sequence[FileDifference]
    contents: Makeup
    commands: Commands
    stated: Mapping[str, float] | None = None
    is_exact: bool = False
    method: str = ""
    notes: Sequence[str] = ()
    features: Findings | None = None
    failure: str = ""
    finals: Mapping[str, float] = field(default_factory=dict)
    base_finals: Mapping[str, float] = field(default_factory=dict)
    drift: Mapping[str, float] = field(default_factory=dict)
    is_written: bool = False
    found_base: str | None = None
    missed_base: str = ""
    is_uneven: bool = False

    @property
    def wrong_files(self) -> list[FileDifference]:
        """Return the faulty files beside the weights."""
        return [one for one in self.differences if one.is_fault]

    @property
    def is_harmful(self) -> bool:
        """Say whether the merge's features are farther from the experts' than the base's are, or than zero features."""
        if not self.finals:
            return False
        own = statistics.fmean(self.finals.values())
        return own > 1 or self.is_worse_than_base

    @property
    def is_worse_than_base(self) -> bool:
        """Say whether the merge's features are farther from the experts' than the base's are, if that is known."""
        own, base = self.finals.values(), self.base_finals.values()
        return bool(base) and statistics.fmean(own) > HARM * statistics.fmean(base)

    @property
    def is_stock(self) -> bool:
        """Say whether the merge is nearly the base because of Model Stock's own rule, which leaves nothing of
        experts with orthogonal task vectors.
        """
        return self.method == STOCK and self.contents.is_as_stocked


def judge_merge(found: MergeFindings) -> Verdict:
    """Write in about ten sentences whether a merged model is broken, where, and what repairs it."""
    step = _choose_step(found, list(find_wrong_weights(found)))
    lines = judge_weights(found)
    if found.features is not None:
        sentences = {one.about: one for one in judge_numbers(found.features).sentences}
        later = ("next", "samples", "repair", "repaired drift", *(["kept"] * found.is_written))
        lines += [one for about, one in sentences.items() if about not in later]
        lines += [*_say_since(found), *_say_worst(found)]
        lines += [sentences[about] for about in ("repair", "repaired drift") if about in sentences]
        lines += [_say_next(found, step), sentences["samples"]]
    else:
        lines += [Sentence("drift", f"Its features cannot be measured: {found.failure}"), _say_next(found, step)]
    return Verdict(tuple(lines), step)


def judge_weights(found: MergeFindings) -> list[Sentence]:
    """Write whether a merged model is broken by its files and its weights, and the ingredients of the weights."""
    wrong = list(find_wrong_weights(found))
    known = [*_say_uneven(found), _say_contents(found, wrong), *_say_origin(found)]
    return [_say_state(found, wrong), *_say_files(found), *wrong, *known]


def find_wrong_weights(found: MergeFindings) -> Iterator[Sentence]:
    """Yield a sentence for every fault of the weights themselves."""
    contents = found.contents
    for layer in contents.zero_layers:
        yield Sentence("zeros", f"{layer} is all zeros: its weights were lost.", {"layer": layer})
    if contents.zero_tensors:
        text = f"{some(contents.zero_tensors)} hold nothing but zeros, and in the base they do not."
        yield Sentence("zeros", text, {"tensors": len(contents.zero_tensors)})
    is_stock = found.method == STOCK
    far = contents.far_from_stock if is_stock else contents.far_layers
    for layer, times in far.items() if not found.is_uneven else ():
        text = (
            f"{layer} lies {times:.0f} times as far from {contents.start} as the other layers"
            f"{f', each measured by its share in {STOCK}' if is_stock else ''}: it was not merged as they were."
        )
        yield Sentence("far", text, {"layer": layer, "times": times})
    yield from _find_wrong_amounts(found)


def _say_uneven(found: MergeFindings) -> Iterator[Sentence]:
    """Write which layers lie far from the base where the recipe gives them values of their own."""
    contents = found.contents
    for layer, times in contents.far_layers.items() if found.is_uneven else ():
        text = f"{layer} lies {times:.0f} times as far from {contents.start} as the other layers"
        text += "; its recipe gives layers values of their own."
        yield Sentence("uneven", text, {"layer": layer, "times": times})


def _find_wrong_amounts(found: MergeFindings) -> Iterator[Sentence]:
    """Yield sentences on wrong coefficients of experts in a merge."""
    own, stated, contents = found.contents.coefficients, found.stated, found.contents
    if found.is_stock:
        return
    if contents.is_base:
        whose = "the base's own" if contents.is_base_known else f"those of {contents.start}"
        yield Sentence("absent", f"Its weights are {whose}: nothing was merged.")
        return
    meant = [task for task, weight in (stated or {}).items() if abs(weight) <= _ALIKE * _largest(stated or {})]
    absent = [task for task in contents.find_absent(stated) if task not in meant]
    if found.method == SPLICE:
        absent = [task for task, layers in contents.layers_by_owner.items() if not layers]
    elif found.is_uneven:
        absent = [task for task in absent if not contents.is_in_a_layer(task)]
    for task in absent:
        text = f"Nothing of the expert '{task}' is in it ({own[task]:.2f} of its task vector)"
        if contents.rest > max(_ALIKE, _ROUNDED * contents.rounding):
            text += (
                f", and {100 * contents.rest:.0f} % of its way from {contents.start} comes from none of the experts: "
                "another model was merged in that place, or the expert's folder holds another one now"
            )
        yield Sentence("absent", f"{text}.", {"task": task, "coefficient": own[task]})
    swapped = {} if stated is None or absent else _find_swap(own, stated)
    if swapped:
        how = ", ".join(f"'{task}' has the {(stated or {})[other]:g} of '{other}'" for task, other in swapped.items())
        names = join_words([f"'{task}'" for task in swapped])
        text = f"Experts are exchanged, {names}: against the recipe, {how}."
        yield Sentence("swapped", text, {task: own[task] for task in swapped})
    times = _measure_times(own, stated) if stated is not None and found.is_exact and not (absent or swapped) else None
    if contents.scale > STEEP and contents.is_base_known:
        text = (
            f"Its scale is too large: the experts carry it {contents.scale:.1f} times as far from the base as the sum "
            "of their task vectors does"
        )
        if times is not None and times > 1 + _ALIKE:
            text += f", {times:.1f} times as far as its recipe says"
        yield Sentence("scale", f"{text}.", {"scale": contents.scale})
    elif times is not None and abs(times - 1) > _ALIKE and contents.is_base_known:
        text = f"It is not what its recipe says: the experts carry it {times:.2f} times as far from the base."
        yield Sentence("scale", text, {"scale": contents.scale, "times": times})


def _find_swap(own: Mapping[str, float], stated: Mapping[str, float]) -> dict[str, str]:
    """Return task → the task whose weight it has, for exchanged ones; {} if the order is the recipe's.

    Shares are compared, since methods that trim change all coefficients alike.
    """
    tasks = [task for task in stated if task in own]
    a, b = ([abs(one[task]) / (sum(abs(one[t]) for t in tasks) or 1.0) for task in tasks] for one in (own, stated))
    costs = [[abs(x - y) for y in b] for x in a]
    columns = assign_columns(costs)
    best, straight = (sum(costs[row][column] for row, column in enumerate(of)) for of in (columns, range(len(a))))
    # Clearly better, not by the noise of coefficients that are nearly alike.
    if straight < _ALIKE or best > straight / 3:
        return {}
    return {tasks[row]: tasks[column] for row, column in enumerate(columns) if b[row] != b[column]}


def _measure_times(own: Mapping[str, float], stated: Mapping[str, float]) -> float | None:
    """Return the factor between the recipe's coefficients and the measured ones; None if there is no clear one."""
    square = sum(weight**2 for weight in stated.values())
    return sum(own.get(task, 0.0) * weight for task, weight in stated.items()) / square if square > 0 else None


def _largest(weights: Mapping[str, float]) -> float:
    return max((abs(one) for one in weights.values()), default=0.0)


def _say_state(found: MergeFindings, wrong: Sequence[Sentence]) -> Sentence:
    """Write, as the first sentence, whether it is broken."""
    files = join_words([*dict.fromkeys(one.about for one in found.wrong_files)])
    if wrong:
        text = "is broken, in its weights"
    elif found.failure:
        text = "is broken: what it computes is not finite"
    elif found.is_harmful:
        nearer = "the base is" if found.is_worse_than_base else "no features at all would be"
        text = f"is as it was merged, and worse than no merge: {nearer} nearer to the experts"
    elif found.is_stock:
        text = "is as its method makes it, and that is nearly the base"
    elif files:
        text = "is sound in its weights"
    else:
        text = "is healthy: nothing is wrong with its weights or the files beside them"
    text = f"{found.name} {text}" + (f"; the files beside them are wrong: {files}." if files else ".")
    numbers = {"broken": bool(wrong or found.failure or found.is_harmful), "files": bool(found.wrong_files)}
    return Sentence("state", text, {**numbers})


def _say_files(found: MergeFindings) -> Iterator[Sentence]:
    """Write the findings about the files beside the weights, faults one by one."""
    for one in found.wrong_files:
        yield Sentence("files", one.sentence, {"about": one.about})
    known = [one.sentence for one in found.differences if not one.is_fault]
    known += [f"The recipe has {one}." for one in found.notes]
    if known:
        yield Sentence("files", f"To be known: {' '.join(known[:_MOST])}", {"notes": len(known)})
    elif not found.differences:
        whose = "the base's" if found.contents.is_base_known else f"those of {found.contents.start}"
        yield Sentence("files", f"Tokenizer, chat template and configuration are {whose}.", {"notes": 0})


def _say_contents(found: MergeFindings, wrong: Sequence[Sentence]) -> Sentence:
    """Write the ingredients of the weights."""
    own = found.contents.coefficients
    first = [*own.items()][:_MOST]
    parts = join_words([f"{weight:.2f} of '{task}'" for task, weight in first])
    parts += f" (and {len(own) - len(first)} more)" if len(own) > len(first) else ""
    start = found.contents.start
    whole = f"{'the base and ' if found.contents.is_base_known else ''}{parts}"
    text = f"By its weights it is {whole}" if own else f"None of the experts differs from {start}"
    if found.method == SPLICE and own:
        layers = join_words([f"{count} of '{task}'" for task, count in found.contents.layers_by_owner.items() if count])
        text = f"By its weights it is whole layers of its experts: {layers}"
    if found.stated is not None and found.is_exact and not wrong:
        text += ", as its recipe says"
    rest = found.contents.rest
    if own and rest >= 0.005:
        text += f"; {100 * rest:.0f} % of its way from {start} is no sum of theirs{_say_why(found)}"
    return Sentence("contents", f"{text}.", {**own, "unexplained": rest})


def _say_why(found: MergeFindings) -> str:
    """Write why some of the difference from the base is no sum of task vectors; "" if nothing tells."""
    contents = found.contents
    if contents.rest <= _ROUNDED * contents.rounding:
        dtype = f"{contents.computed}, in which it was merged" if contents.computed else "its dtype"
        return f", but rounding to {dtype}"
    if found.method == STOCK:
        return f", since {STOCK} has another share for every tensor"
    if found.method in SPHERICAL:
        return f", since {found.method} keeps lengths, which no sum does"
    if found.method in SINGLE:
        return f", which {found.method} does to single values"
    return ", since its recipe gives tensors values of their own" if found.is_uneven else ""


def _say_origin(found: MergeFindings) -> Iterator[Sentence]:
    """Write Model Stock's scale and rule, and the source of a base that the recipe does not name."""
    contents = found.contents
    if found.method == STOCK and contents.is_base_known:
        text = (
            f"{STOCK} goes {contents.stock:.2f} of the way from the base to the experts' mean, by the angle between "
            "their task vectors: at right angles it stays at the base"
        )
        if found.is_stock:
            text += "; merging again gives the same, and task_arithmetic, ties or linear would not"
        yield Sentence("stock", f"{text}.", {"share": contents.stock})
    if found.found_base is not None:
        text = f"Its base is '{found.found_base}': the recipe names none, and all its experts name this one."
        yield Sentence("origin", text, {"base": found.found_base})
    elif not contents.is_base_known:
        why = f"its experts name '{found.missed_base}', which is neither on this machine nor available from the Hub"
        why = why if found.missed_base else "no recipe names it, nor do all its experts name one"
        text = (
            f"Its base is not known: {why}. So differences are taken from {contents.start}, and a calibration's anchor "
            "is the merge itself (rho 1); --base REFERENCE adds task vectors, the base's own drift, an anchor beyond "
            "the merge and the recipe 'informed'."
        )
        yield Sentence("origin", text, {"start": contents.start})


def _say_since(found: MergeFindings) -> Iterator[Sentence]:
    """Write the layer from which on it drifts."""
    largest = max(found.drift.values(), default=0.0)
    layer = next((name for name, one in found.drift.items() if one >= HALF * largest > 0), None)
    if layer is not None:
        text = f"It drifts from {layer} on, where half of its largest drift is reached ({found.drift[layer]:.2f})."
        yield Sentence("since", text, {"layer": layer, "drift": found.drift[layer]})


def _say_worst(found: MergeFindings) -> Iterator[Sentence]:
    """Write which expert suffers most, and how far the base is from the experts."""
    if not any(found.finals.values()):
        return
    task = max(found.finals, key=found.finals.__getitem__)
    own, base = found.finals[task], found.base_finals.get(task)
    who = f"Worst task: '{task}'" if len(found.finals) > 1 else f"The expert is '{task}'"
    text = f"{who}; features differ from the expert's by {100 * own:.0f} % of their norm"
    text += "." if base is None else f", those of the base by {100 * base:.0f} %."
    yield Sentence("worst", text, {"task": task, "final": own, **({} if base is None else {"base": base})})


def _choose_step(found: MergeFindings, wrong: Sequence[Sentence]) -> str:
    if wrong or found.failure or found.is_stock:
        return MERGE
    if found.wrong_files:
        return FILES
    own = judge_numbers(found.features).next if found.features is not None else NOTHING
    return MERGE if own == NOTHING and found.is_harmful else own


def _say_next(found: MergeFindings, step: str) -> Sentence:
    commands, numbers = found.commands, {"next": step}
    # What the recipe itself asks for comes out again if it is run again.
    by_recipe = commands.again and not _is_as_the_recipe_says(found) and not found.is_stock
    command = {
        MERGE: commands.again if by_recipe else commands.smaller,
        FILES: commands.files,
        REPAIR: commands.repair,
        OPTIONS: commands.choose,
    }.get(step, "")
    healthy = step == REPAIR and not found.is_harmful
    # Weights that were lost are not found again by any scale.
    lost = {one.about for one in find_wrong_weights(found)} - {"scale"} and not found.is_harmful
    smaller = "" if by_recipe or lost else " with a smaller scale"
    text = {
        MERGE: "Next: merge by a method that does not go by the angle"
        if found.is_stock
        else f"Next: calibration cannot mend this; merge again{smaller}",
        FILES: "Next: copy the base's files"
        if command
        else "Next: put that right by hand, for no file of the base fits",
        REPAIR: f"Next: {'use it as it is, or ' if healthy else ''}calibrate it, which moves it closer to the experts",
        OPTIONS: "Next: use it as it is; the usual calibration gains nothing, other options may",
        CHECK: "Next: check the expert that scores less than the base on its own task",
        NOTHING: "Next: nothing needs repair",
    }[step]
    numbers |= {"command": command} if command else {}
    return Sentence("next", f"{text}: {command}" if command else f"{text}.", {**numbers})


def _is_as_the_recipe_says(found: MergeFindings) -> bool:
    """Say whether the weights match the recipe, apart from coefficients that the recipe itself sets badly."""
    kinds = {one.about for one in find_wrong_weights(found)}
    if kinds - {"scale"}:
        return False
    times = None if found.stated is None else _measure_times(found.contents.coefficients, found.stated)
    return times is None or abs(times - 1) <= _ALIKE

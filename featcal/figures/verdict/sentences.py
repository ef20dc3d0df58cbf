"""Turn the numbers of a verdict into at most ten sentences, each with its numbers. This module does not import
torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from featcal.evaluation.comparison import Comparison, Difference
from featcal.figures.verdict.findings import Findings, LayerFinding
from featcal.system.formatting import percent, points

REPAIR, NOTHING, OPTIONS, MERGE, CHECK = "repair", "nothing", "other options", "merge again", "check the experts"
"""Possible next steps."""
_ALIKE = 1.1
"""Ratio of mismatch and propagation up to which neither counts as the larger."""
_CONFIRMED = 1e-9
"""Norm of a drift, relative to the features, up to which it counts as rounding."""


Numbers = dict[str, float | str | bool]


@dataclass(frozen=True)
class Sentence:
    """One line of a verdict: its subject, its words, and its numbers (shares of 1, relative norms, names)."""

    about: str
    text: str
    numbers: Numbers = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """The lines of a verdict, and the next step."""

    sentences: tuple[Sentence, ...]
    next: str
    """One of `REPAIR` and its neighbours."""

    @property
    def lines(self) -> tuple[str, ...]:
        """Return only the words."""
        return tuple(one.text for one in self.sentences)

    def to_json(self) -> dict[str, Any]:
        """Return sentences with their numbers, and the next step."""
        return {"sentences": [asdict(one) for one in self.sentences], "next": self.next}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Verdict:
        """Read the output of `to_json`."""
        return cls(tuple(Sentence(**one) for one in document["sentences"]), document["next"])


def judge_numbers(found: Findings) -> Verdict:
    """Write the sentences for the measured numbers; values that are not measured have no sentence."""
    step = _choose_step(found)
    lines = [*_say_scores(found), *_say_layers(found), *_say_repair(found)]
    if found.whole:
        lines.append(Sentence("next", _say_next(found, step), {"next": step}))
        intervals = "; 95 % bootstrap intervals over these samples" if found.lost is not None else ""
        lines.append(Sentence("samples", f"Measured on {found.on}{intervals}."))
    return Verdict(tuple(lines), step)


def _say_scores(found: Findings) -> Iterator[Sentence]:
    """Write how much of the experts the merge keeps, the base's score, the worst task, and doubtful experts."""
    if found.no_scores:
        yield Sentence("kept", f"There are no scores, so what follows is of features alone: {found.no_scores}")
    if found.lost is None:
        return
    average = found.lost.average
    where = f"on average over {len(found.lost.tasks)} tasks" if len(found.lost.tasks) > 1 else "on its only task"
    scored = f"{percent(average.b)} % {where}, the experts {percent(average.a)} %"
    numbers, change = _numbers(average, "expert", "model"), _format_change(average)
    if average.is_within_noise:
        text = f"{found.model} keeps what its experts know: {found.metric} {scored} ({change}, within noise)."
    elif average.difference > 0:
        text = f"{found.model} is better than its experts: {found.metric} {scored} ({change})."
    else:
        kept = f"{100 * average.b / average.a:.0f} %" if average.a > 0 else "none"
        numbers |= {"kept": average.b / average.a} if average.a > 0 else {}
        text = f"{found.model} keeps {kept} of its experts' {found.metric}: {scored} ({change})."
    yield Sentence("kept", text, numbers)
    if found.gained is not None:
        yield _say_base(found.gained.average)
    if len(found.lost.tasks) > 1:
        yield _say_worst(found.lost)
    if doubtful := _find_doubtful(found):
        experts = " and ".join(
            f"the expert of {task} ({percent(one.b)} %, base {percent(one.a)} %"
            f"{', within noise' if one.is_within_noise else ''})"
            for task, one in doubtful.items()
        )
        text = f"Check the file of {experts}: on its own task an expert should be better than the base model."
        yield Sentence("experts", text, {task: one.b for task, one in doubtful.items()})


def _say_base(gained: Difference) -> Sentence:
    base = f"The base model scores {percent(gained.a)} %"
    if gained.is_within_noise:
        verb = "loses" if gained.difference < 0 else "gains"
        size = percent(abs(gained.difference))
        span = f"{points(gained.low)} to {points(gained.high)}"
        text = f"Merging {verb} {size} points against the base ({percent(gained.a)} %), within noise ({span})."
    elif gained.difference > 0:
        text = f"{base}, so merging has gained something ({_format_change(gained)})."
    else:
        text = f"{base}, so merging has done harm ({_format_change(gained)}), as it does where its scale is too large."
    return Sentence("base", text, _numbers(gained, "base", "model"))


def _say_worst(lost: Comparison) -> Sentence:
    task, one = min(lost.tasks.items(), key=lambda item: item[1].difference)
    if one.difference >= 0:
        text = "No task scores less than its expert."
    elif one.is_within_noise:
        text = f"No task loses more than noise; '{task}' loses most ({_format_change(one)})."
    else:
        text = f"Worst task: '{task}', {percent(one.b)} %, its expert {percent(one.a)} % ({_format_change(one)})."
    return Sentence("worst", text, _numbers(one, "expert", "model") | {"task": task})


def _say_layers(found: Findings) -> Iterator[Sentence]:
    """Write the distance of the final features, the layer that caused most of it, and whether its drift is
    inherited."""
    if found.final is None:
        return
    if found.final <= _CONFIRMED:
        yield Sentence("drift", "The final features are those of the experts: nothing drifts.", {"final": found.final})
        return
    off = f"Final features differ from the experts' by {100 * found.final:.0f} % of the expert feature's norm"
    off += " (no features at all would be nearer)" if found.final > 1 else ""
    yield Sentence("drift", f"{off}.", {"final": found.final})
    ranked = sorted(found.layers, key=lambda one: -one.share)
    if not ranked:
        return
    first, then = ranked[0], ranked[1:2]
    causes = "cause" if first.layer.endswith("embeddings") else "causes"
    text = f"{_begin(first.layer)} {causes} the largest part of it, {100 * first.share:.0f} %"
    text += f", then {then[0].layer} with {100 * then[0].share:.0f} %" if then else ""
    numbers: Numbers = {"layer": first.layer, "share": first.share}
    numbers |= {"mismatch": first.mismatch, "propagation": first.propagation}
    yield Sentence("cause", f"{text}; {_say_inherited(first)}.", numbers)


def _say_inherited(one: LayerFinding) -> str:
    """Write how much of the drift after a layer comes from earlier ones."""
    own, inherited = f"{one.mismatch:.2f}", f"{one.propagation:.2f}"
    if one.propagation <= _CONFIRMED:
        return f"all the drift after {one.layer} ({own}) is its own mismatch, since nothing comes in"
    if one.mismatch > _ALIKE * one.propagation:
        return (
            f"most of the drift after {one.layer} is its own mismatch: {own}, against {inherited} from earlier layers"
        )
    if one.propagation > _ALIKE * one.mismatch:
        return (
            f"most of the drift after {one.layer} is inherited: {inherited} from earlier layers, {own} its own mismatch"
        )
    return f"the drift after {one.layer} is as much inherited ({inherited}) as its own mismatch ({own})"


def _begin(words: str) -> str:
    """Return words with a capital letter, for the start of a sentence."""
    return words[:1].upper() + words[1:]


def _say_repair(found: Findings) -> Iterator[Sentence]:
    """Write the gain of calibration in scores and in final drift."""
    if found.no_repair:
        yield Sentence("repair", f"The gain of calibration is not measured: {found.no_repair}")
    how = f"Calibrating with {found.repair_samples} samples per task" if found.repair_samples else "Calibrating"
    scores = f"the average {found.metric}"
    if found.repaired is not None:
        one = found.repaired.average
        numbers = _numbers(one, "model", "calibrated")
        if one.is_within_noise:
            text = f"{how} changes {scores} to {percent(one.b)} % ({_format_change(one)}), which is within noise."
        elif one.difference < 0:
            text = f"{how} does harm: it lowers {scores} to {percent(one.b)} % ({_format_change(one)})."
        else:
            text = f"{how} raises {scores} to {percent(one.b)} % ({_format_change(one)})"
            gap = 0.0 if found.lost is None else found.lost.average.a - one.a
            text += f", which closes {100 * one.difference / gap:.0f} % of the gap to the experts." if gap > 0 else "."
            numbers |= {"closed": one.difference / gap} if gap > 0 else {}
        yield Sentence("repair", text, numbers)
    if found.repaired_final is not None and found.final is not None:
        verb = "lowers" if found.repaired_final < found.final else "does not lower"
        who = how if found.repaired is None else "It"
        text = f"{who} {verb} the final drift: from {found.final:.2f} to {found.repaired_final:.2f}."
        yield Sentence("repaired drift", text, {"final": found.final, "calibrated": found.repaired_final})


def _choose_step(found: Findings) -> str:
    if any(map(_is_worse, _find_doubtful(found).values())):
        return CHECK
    if not found.repairable:
        return NOTHING
    if found.lost is None:
        return _choose_by_drift(found)
    if found.lost.average.is_within_noise or found.lost.average.difference > 0:
        return NOTHING
    harmful = found.gained is not None and _is_worse(found.gained.average)
    if found.repaired is None:
        return REPAIR
    after = found.repaired.average
    if harmful and found.gained is not None and after.b < found.gained.average.a:
        return MERGE
    return OPTIONS if after.is_within_noise or after.difference < 0 else REPAIR


def _choose_by_drift(found: Findings) -> str:
    """Choose the next step without scores."""
    if found.final is None or found.final <= _CONFIRMED:
        return NOTHING
    return REPAIR if found.repaired_final is None or found.repaired_final < found.final else OPTIONS


def _say_next(found: Findings, step: str) -> str:
    if step == NOTHING and not found.repairable:
        return "Next: nothing; only a merge that is not calibrated yet is repaired."
    if step == NOTHING:
        worst = None if found.lost is None else min(found.lost.tasks.items(), key=lambda item: item[1].difference)
        if worst is not None and _is_worse(worst[1]):
            return f"Next: nothing needs repair on average; look at {worst[0]} before you hand the model on."
        return "Next: nothing needs repair."
    return {
        REPAIR: "Next: repair it; a calibration needs neither labels nor training.",
        OPTIONS: f"Next: try other options; with these, {_describe_effect(found)}.",
        MERGE: "Next: merge again with a smaller scale; even calibrated it is below the base model.",
        CHECK: f"Next: check the expert of {', '.join(_find_doubtful(found))}, before anything is repaired.",
    }[step]


def _find_doubtful(found: Findings) -> dict[str, Difference]:
    """Return the tasks whose own expert scores less than the base, with the difference from base to expert."""
    return {} if found.taught is None else {task: d for task, d in found.taught.tasks.items() if d.difference < 0}


def _describe_effect(found: Findings) -> str:
    """Describe what a calibration without a gain does."""
    if found.repaired is None:
        return "calibration does not lower the drift"
    return "calibration does harm" if _is_worse(found.repaired.average) else "the gain of calibration is within noise"


def _is_worse(one: Difference) -> bool:
    """Say whether the second model is worse beyond noise."""
    return one.difference < 0 and not one.is_within_noise


def _format_change(one: Difference) -> str:
    """Return a difference with its interval in words."""
    return f"{points(one.difference)} points, {points(one.low)} to {points(one.high)}"


def _numbers(one: Difference, a: str, b: str) -> Numbers:
    """Return both scores by their models, their difference and its interval."""
    found: Numbers = {a: one.a, b: one.b, "difference": one.difference, "low": one.low, "high": one.high}
    return found | {"within noise": one.is_within_noise}

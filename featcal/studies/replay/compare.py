"""Compare a record with that of its repeated run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from featcal.formats.contents import stored_tensor
from featcal.studies.replay.record import Recorded

BITLESS = ("threads",)
"""Facts of a machine that a replay sets as in the record."""


@dataclass(frozen=True)
class Different:
    """A tensor that differs."""

    tensor: str
    why: str
    relative: float | None = None
    """Largest difference over the largest recorded value, both absolute; None if values cannot be compared."""

    def to_json(self) -> dict[str, Any]:
        return {"tensor": self.tensor, "why": self.why, "relative": self.relative}


def inputs_that_differ(then: Recorded, now: Recorded) -> list[str]:
    """List the files of models with another hash, by model, and the calibrated model if it is not in files."""
    lines = []
    for model in {**then.inputs, **now.inputs}:
        lines += _compare_hashes(f"{model}: ", then.inputs.get(model, {}), now.inputs.get(model, {}))
    if then.of != now.of:
        lines.append(f"model '{then.model}': other tensors than were calibrated")
    return lines


def samples_that_differ(then: Recorded, now: Recorded) -> list[str]:
    """List the tasks with other samples, or with other inputs made from them."""
    lines = []
    for task in {**then.tasks, **now.tasks}:
        before, after = then.tasks.get(task), now.tasks.get(task)
        if before is None or after is None:
            lines.append(f"{task}: only {'in the record' if after is None else 'in the replay'}")
        elif before.indices != after.indices:
            lines.append(f"{task}: other samples were drawn")
        elif before.sha256 != after.sha256:
            lines.append(f"{task}: the same positions give other inputs")
    return lines


def surroundings_that_differ(then: Recorded, now: Recorded) -> dict[str, list[str]]:
    """List other facts that can change a number: parts of the suite file, preparation of samples, versions, the
    machine."""
    machines = (
        # Several processes sum in another order than one.
        {k: str(v) for k, v in one.machine.items() if k not in BITLESS} | {"processes": str(one.processes)}
        for one in (then, now)
    )
    return {
        "suite file": _compare_hashes("", then.suite_file.sha256, now.suite_file.sha256),
        "preparation": _compare_values(then.preparation, now.preparation),
        "versions": _compare_values(then.versions, now.versions),
        "machine": _compare_values(*machines),
    }


def tensors_that_differ(
    then: Mapping[str, str], now: Mapping[str, str], files: Sequence[Path], again: Sequence[Path]
) -> list[Different]:
    """Return every tensor with another digest, the largest relative difference first.

    Args:
        then, now: digests by stored name.
        files: with the tensors of `then`; none if there are only digests.
        again: with those of `now`.
    """
    found = [_one_sided("replay", name) for name in now.keys() - then.keys()]
    found += [_one_sided("record", name) for name in then.keys() - now.keys()]
    for name in then.keys() & now.keys():
        if then[name] == now[name]:
            continue
        if files:
            found.append(_difference(name, stored_tensor(files, name), stored_tensor(again, name)))
        else:
            found.append(Different(name, "another hash; the recorded values are not at hand"))
    return sorted(found, key=lambda one: (-1.0 if one.relative is None else -one.relative, one.tensor))


def _one_sided(where: str, name: str) -> Different:
    return Different(name, f"only in the {where}")


def _difference(name: str, then: Tensor, now: Tensor) -> Different:
    if then.shape != now.shape or then.dtype != now.dtype:
        kinds = (f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}" for one in (then, now))
        return Different(name, "{} then, {} now".format(*kinds))
    largest = float(then.double().abs().max())
    apart = float((then.double() - now.double()).abs().max())
    if not largest or not torch.isfinite(torch.tensor([largest, apart])).all():
        return Different(name, "values that cannot be set in relation")
    return Different(name, "other values", apart / largest)


def _compare_hashes(of: str, then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """List the names with different hashes, or on one side only."""
    lines = []
    for name in {**then, **now}:
        if name not in now or name not in then:
            lines.append(f"{of}{name} is only {'in the record' if name in then else 'here'}")
        elif then[name] != now[name]:
            lines.append(f"{of}{name} is another (sha256 {then[name][:12]}… then, {now[name][:12]}… now)")
    return lines


def _compare_values(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    names = {**then, **now}
    return [
        f"{name} {then.get(name, 'none')} then, {now.get(name, 'none')} now"
        for name in names
        if then.get(name) != now.get(name)
    ]

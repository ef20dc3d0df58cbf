"""Compute from shapes how much of a measurement fits into memory at once, within a limit or
the machine's free memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

import torch

from featcal.calibration.memory import STARTED
from featcal.formats.weights import Weights
from featcal.models.activations import ActivationStore
from featcal.models.adapter import Adapter, Batch
from featcal.models.context import Run
from featcal.models.lane import ExpertPass
from featcal.models.linear_maps import widths
from featcal.system.errors import InputError
from featcal.system.progress import SLACK, half_of_available_bytes, rss_bytes

_HEAD = 64
"""Assumed channels of an attention head, for the size of attention scores."""
_SHARES = 4
"""Division of the free bytes into four shares: one for token states, one for a forward pass, two for the states and
mismatches that batches store at the layers for the backward pass.
"""


@dataclass(frozen=True)
class SampleChunks:
    """The numbers of samples that fit into memory; None means no limit."""

    batch: int | None = None
    """Number of samples in one forward pass."""
    together: int | None = None
    """Number of samples that go through the layers together, forward and backward."""

    @classmethod
    def plan(cls, run: Run, experts: Mapping[str, ExpertPass], layers: int, attribution: bool) -> SampleChunks:
        """Plan the sizes that fit: without a limit all samples at once; with attribution,
        as many as half of the free memory holds.
        """
        limit = run.store.budget
        if limit is None and not attribution:
            return cls()
        free = (_SHARES - 1) * limit if limit is not None else half_of_available_bytes()
        batches = [batch for one in experts.values() for batch in one.batches]
        state, work = (max(size(run.adapter, batch) for batch in batches) for size in (_state_bytes, _work_bytes))
        # Attribution keeps expert's and model's states and the mismatch at every layer.
        carried = 3 * (layers + 1) * state if attribution else 0
        largest, samples = max(map(_count, batches)), sum(map(_count, batches))
        passing = 2 * work if attribution else work  # a derivative keeps what the forward pass computes
        if limit is None and samples * carried + largest * passing < free:
            return cls()
        third = free / (_SHARES - 1)
        batch = int(max(1, min(largest, third // passing)))
        together = int(max(batch, 2 * third // carried)) if carried else None
        return cls(batch, together)

    def parts(self, experts: Mapping[str, ExpertPass]) -> Iterator[dict[str, ExpertPass]]:
        """Yield the samples in parts that run one after the other, each of at most `together` samples."""
        if self.batch is None:
            yield dict(experts)
            return
        part: dict[str, ExpertPass] = {}
        room = left = self.together or inf
        for task, one in experts.items():
            for batch in _cut(one, self.batch):
                if part and _count(batch) > left:
                    yield part
                    part, left = {}, room
                sofar = part[task].batches if task in part else []
                part[task] = replace(one, batches=[*sofar, batch], kept=None)
                left -= _count(batch)
        yield part


def measuring_store(adapter: Adapter, model: Weights, limit: int) -> ActivationStore:
    """Return the store of a measurement's token states that keeps the whole process within `limit` bytes.

    Raises:
        InputError: the limit is below what one block of expert and model needs; the message says how much that is.
    """
    names = [block.names for block in adapter.blocks()] + [stage.outer for stage in adapter.stages]
    working = max(sum(map(_tensor_bytes(model), some)) for some in names)
    needed = rss_bytes() + STARTED + int(SLACK * working)
    free = (limit - needed) / SLACK
    if free <= 0:
        raise InputError(
            f"--max-memory: one block of expert and model needs about {needed / 2**30:.2f} GiB with what is loaded "
            f"already, the limit is {limit / 2**30:.2f} GiB; raise it"
        )
    return ActivationStore(int(free / _SHARES))


def _tensor_bytes(model: Weights) -> Callable[[str], int]:
    """Return the bytes of a tensor by its name: of the expert's and the model's, as stored,
    in float32 and in float64.
    """

    def size(name: str) -> int:
        info = model.info[name]
        return 2 * torch.Size(info.shape).numel() * (info.dtype.itemsize + 4 + 8)

    return size


def _count(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _cut(one: ExpertPass, size: int) -> Iterator[Batch]:
    """Yield batches of at most `size` samples."""
    batches = one.batches if one.kept is None else list(one.batches)
    while batches:
        # A pass that is walked once is emptied on the way, so that its inputs leave memory; clones, since a slice would
        # keep its whole batch.
        batch = batches.pop(0)
        for start in range(0, _count(batch), size):
            yield {name: tensor[start : start + size].clone() for name, tensor in batch.items()}


def _tokens(adapter: Adapter, batch: Batch) -> float:
    return adapter.tokens(batch) / _count(batch)


def _state_bytes(adapter: Adapter, batch: Batch) -> int:
    """Return the bytes of one sample between two blocks, in float32."""
    return int(4 * _tokens(adapter, batch) * _width(adapter))


def _work_bytes(adapter: Adapter, batch: Batch) -> int:
    """Return the bytes of one sample in the largest block, in float32: inputs and outputs of its linear maps, and
    attention scores."""
    tokens = _tokens(adapter, batch)
    features = max(block.features for block in adapter.blocks())
    scores = 4 * tokens * max(1, _width(adapter) // _HEAD)
    return int(4 * tokens * (features + scores))


def _width(adapter: Adapter) -> int:
    """Return the channels of a token state: the most common input width of linear maps."""
    found = Counter(widths(module)[0] for block in adapter.blocks() for module in block.linears.values())
    return found.most_common(1)[0][0]

"""Polishing: some steps of gradient descent that bring a model's final features closer to the experts'.

The loss is the squared difference of the final features to those of the task's expert, on the same unlabelled samples
that calibration sees: its mean over samples and entries, then over tasks. Every step is one of Adam on all samples, so
nothing is drawn and nothing depends on an order. Final features of text are those that decide the first token of the
answer, so of longer answers nothing but the first token is polished.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.baselines.options import Polish
from featcal.errors import NumericalError
from featcal.formats.weights import Overlay, Weights
from featcal.models.adapter import Batch, Call, walking
from featcal.models.features import expert_features
from featcal.models.lane import ExpertPass, through
from featcal.models.model import mapped
from featcal.models.run import Run


def polish(
    run: Run, experts: Mapping[str, ExpertPass], model: Weights, options: Polish
) -> tuple[Weights, dict[str, list[float]]]:
    """The model after some steps, and the loss before every step and at the end.

    All of the tower moves that the final features depend on; it is stored in the model's own dtypes. Memory holds the
    whole tower four times (weights, gradient and two moments) and all that one batch leaves for the gradient.

    Args:
        experts: one expert pass per task, with `kept`; their batches are the samples.

    Raises:
        NumericalError: the loss is not finite.
    """
    adapter, compute = run.adapter, run.compute
    stored = model.read(adapter.tower)
    targets = expert_features(run, experts)
    moved = {name: tensor.clone().requires_grad_() for name, tensor in compute.place(stored).items()}
    optimizer = torch.optim.Adam(moved.values(), lr=options.rate)
    losses: list[float] = []
    with walking(adapter), torch.enable_grad(), run.seconds(options.kind):
        for step in range(options.steps):
            run.progress(options.kind, step, options.steps)
            optimizer.zero_grad()
            losses.append(_loss(run, model, moved, experts, targets, backward=True))
            optimizer.step()
        with torch.no_grad():
            losses.append(_loss(run, model, moved, experts, targets, backward=False))
        run.progress(options.kind, options.steps, options.steps)
    found = {name: moved[name].detach().to(tensor) for name, tensor in stored.items() if moved[name].grad is not None}
    return Overlay(f"{model.label}, {options.kind}", model, found), {"loss": losses}


def _loss(
    run: Run,
    model: Weights,
    tensors: Mapping[str, Tensor],
    experts: Mapping[str, ExpertPass],
    targets: Mapping[str, Tensor],
    backward: bool,
) -> float:
    """The loss of a tower on all samples; `backward` adds its gradient to those of the tensors."""
    total = 0.0
    for task, one in experts.items():
        sizes = [len(next(iter(batch.values()))) for batch in one.batches]
        for batch, target in zip(one.batches, torch.split(targets[task], sizes), strict=True):
            features = mapped(model, task, _final(run, tensors, batch))
            part = (features - target).square().sum() / (targets[task].numel() * len(experts))
            if backward:
                torch.autograd.backward(part)
            total += float(part)
    if not torch.isfinite(torch.tensor(total)):
        raise NumericalError(f"polish: the loss is {total}; lower the rate")
    return total


def _final(run: Run, tensors: Mapping[str, Tensor], batch: Batch) -> Float[Tensor, "b k"]:
    """Final features of one batch, with what their gradient needs."""
    adapter, call = run.adapter, None
    for stage in adapter.stages:
        call = stage.first_call({name: tensors[name] for name in stage.outer}, batch, call)
        for block in stage.blocks:
            call = through(stage, block, block.local(tensors), call)
    assert isinstance(call, Call)
    return adapter.final({name: tensors[name] for name in adapter.closing} | dict(run.head), call, batch)

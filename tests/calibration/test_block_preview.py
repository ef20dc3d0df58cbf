"""One block solved anew with everything in front frozen: what is exact of it, what is not, and what it holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from clip_config import clip_config
from lanes import rows
from preview_errors import relative_error
from tiny_text import write_text_suite

from featcal.calibration.block_preview import Preview, build_preview
from featcal.calibration.config import resolve_options
from featcal.family.opening import Family, open_family
from featcal.session.cache import nbytes
from featcal.session.session import Session
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.schema import load_suite
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import InputError, NumericalError

CONFIG = clip_config(samples=12, batch_size=5)
OTHER = replace(CONFIG, lam=0.3, rho=1.4, alpha=0.8, biases=False)
FEW = EvaluationSamples(8)
LAYERS = ("block 0", "block 1", "block 2")
INFORMED = clip_config(recipe="informed", samples=12, batch_size=5)


@pytest.fixture(scope="module")
def own(tiny64: Family) -> Session:
    return Session(tiny64)


def layer_drift(session: Session, config: CalibrationConfig, layer: str) -> dict[str, float]:
    tasks = session.measure.features(config, FEW).tasks
    return {task: next(o.relative_drift for o in one.layers if o.layer == layer) for task, one in tasks.items()}


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        pytest.param(INFORMED, marks=pytest.mark.slow),
        pytest.param(replace(INFORMED, recipe="refined", mu=0.0), marks=pytest.mark.slow),
    ],
    ids=lambda config: config.recipe,
)
@pytest.mark.parametrize("layer", LAYERS)
def test_with_the_same_options_it_is_the_exact_run(own: Session, layer: str, config: CalibrationConfig) -> None:
    found = own.fit.preview(config, layer, FEW).solve(config)
    exact = own.fit.calibrate(config).weights
    assert relative_error(found, exact) < 1e-10
    for name, tensor in exact.read(found.tensors).items():
        torch.testing.assert_close(found.tensors[name], tensor, rtol=1e-6, atol=1e-8)
    assert found.drift == pytest.approx(layer_drift(own, config, layer), rel=1e-9)


def test_another_merge_is_previewed_as_it_is_calibrated(own: Session) -> None:
    """Its own tensors are the anchor, and what stands in front of the block."""
    model = own.resolve(CONFIG, "ties")
    found, exact = own.fit.preview(model, "block 1", FEW).solve(CONFIG), own.fit.calibrate(model).weights
    assert relative_error(found, exact) < 1e-10
    first, others = own.fit.preview(model, "block 0", FEW).solve(OTHER), own.fit.calibrate(own.resolve(OTHER, "ties"))
    assert relative_error(first, others.weights) < 0.5 * relative_error(found, own.fit.calibrate(CONFIG).weights)


def test_of_the_first_pieces_any_options_are_exact(own: Session) -> None:
    """Those after them are given what the pieces in front gave with the exact run's options."""
    start = replace(INFORMED, layernorms=False)
    config = replace(start, lam=0.02, rho=1.4, alpha=0.8, beta=0.3, mu=0.5, biases=False)
    found, exact = own.fit.preview(start, "block 0", FEW).solve(config), own.fit.calibrate(config).weights
    name = own.family.adapter.blocks()[0].name
    before = own.fit.calibrate(start).weights
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        tensors = exact.read([f"{name}.{part}.weight"])
        for tensor, whole in tensors.items():
            torch.testing.assert_close(found.tensors[tensor], whole, rtol=1e-6, atol=1e-7)
            assert not torch.allclose(found.tensors[tensor], before.read([tensor])[tensor], rtol=1e-3)
    assert relative_error(found, exact) > 1e-4
    assert relative_error(found, exact) < relative_error(found, before)


def test_of_the_first_block_any_options_are_exact(own: Session) -> None:
    for config in (OTHER, replace(CONFIG, alpha=0.0), replace(CONFIG, alpha=1.0, lam=1e-6)):
        found = own.fit.preview(CONFIG, "block 0", FEW).solve(config)
        assert relative_error(found, own.fit.calibrate(config).weights) < 1e-6
        assert found.drift == pytest.approx(layer_drift(own, config, "block 0"), rel=1e-6)
        assert relative_error(found, own.fit.calibrate(CONFIG).weights) > 1e-3


def test_of_later_blocks_it_is_not(own: Session) -> None:
    """It keeps what is in front; an exact run with that in front would find the very same."""
    found = own.fit.preview(CONFIG, "block 2", FEW).solve(OTHER)
    assert relative_error(found, own.fit.calibrate(OTHER).weights) > 1e-3
    frozen = replace(CONFIG, blocks=("block 0", "block 1"))
    family = replace(own.family, merged=own.fit.calibrate(frozen).weights)
    # the anchor is of what is merged there; the last block is as merged in both
    last = Session(family).fit.calibrate(replace(OTHER, blocks=("block 2",)))
    assert relative_error(found, last.weights) < 1e-9


def test_in_float32_it_differs_by_rounding(tiny: Family) -> None:
    session = Session(tiny)
    for layer in LAYERS:
        found = session.fit.preview(CONFIG, layer, FEW).solve(CONFIG)
        assert relative_error(found, session.fit.calibrate(CONFIG).weights) < 5e-5
        assert {tensor.dtype for tensor in found.tensors.values()} == {torch.float32}


def test_options_may_be_left_open(own: Session) -> None:
    asked = CalibrationConfig(samples=12, batch_size=5, blocks=("block 0, block 1",))
    exact = resolve_options(asked, own.family.adapter, own.tasks)
    assert exact.blocks == ("block 0", "block 1")
    run, passes = own.family.run(), own.calibration_passes(exact)
    preview = build_preview(run, asked, own.fit.calibrate(exact).weights, "block 1", passes, passes)
    assert preview.config == exact
    assert preview.solve(replace(asked, tasks=tuple(own.tasks))).config == exact
    assert relative_error(preview.solve(asked), own.fit.calibrate(exact).weights) < 1e-10
    with pytest.raises(InputError, match="no 'block 7'"):
        preview.solve(replace(asked, blocks=("block 7",)))


def test_parts_that_are_left_out_stay_as_merged(own: Session) -> None:
    config = replace(CONFIG, maps=("mlp",), tasks=("pets",), layernorms=False)
    found = own.fit.preview(config, "block 1", FEW).solve(replace(config, rho=1.2))
    merged = own.family.merged.read(found.tensors)
    changed = {name for name, tensor in merged.items() if not torch.equal(tensor, found.tensors[name])}
    assert changed
    assert all(".mlp." in name for name in changed)
    assert set(found.drift) == set(own.tasks)  # drift is measured on every task


@pytest.mark.parametrize(
    "config", [pytest.param(CONFIG, marks=pytest.mark.slow), INFORMED], ids=lambda config: config.recipe
)
@pytest.mark.parametrize(
    "layer", rows(["encoder block 1", "decoder block 1"], quick=("decoder block 1",), slow=("encoder block 1",))
)
def test_an_encoder_decoder_has_previews_too(layer: str, config: CalibrationConfig, tmp_path: Path) -> None:
    session = Session(open_family(load_suite(write_text_suite(tmp_path, "t5")), "cpu"))
    config = replace(config, lam=0.05, alpha=0.6, samples=6, rmsnorms=True)
    found = session.fit.preview(config, layer, FEW).solve(config)
    assert relative_error(found, session.fit.calibrate(config).weights) < 5e-5
    assert found.drift == pytest.approx(layer_drift(session, config, layer), rel=1e-4)


def test_what_it_cannot_tell_is_refused(own: Session) -> None:
    preview = own.fit.preview(CONFIG, "block 1", FEW)
    for other in (replace(CONFIG, samples=8), replace(CONFIG, layernorms=False), replace(CONFIG, seed=1)):
        with pytest.raises(InputError, match="differ from its exact run in lam, rho, alpha, biases alone"):
            preview.solve(other)
    with pytest.raises(InputError, match="differ from its exact run in lam, rho, alpha, beta, biases alone"):
        own.fit.preview(replace(INFORMED, mu=0.0), "block 1", FEW).solve(INFORMED)
    with pytest.raises(InputError, match=r"no block 'blok 1', only .* Did you mean 'block 1'"):
        own.fit.preview(CONFIG, "blok 1", FEW)
    with pytest.raises(InputError, match="block 1: these options do not calibrate this block"):
        own.fit.preview(replace(CONFIG, blocks=("block 0",)), "block 1", FEW)


def test_a_solution_that_its_dtype_does_not_hold_is_refused(tiny: Family) -> None:
    preview = Session(tiny).fit.preview(CONFIG, "block 1", FEW)
    with pytest.raises(
        NumericalError,
        match=r"layers\.1.*does not fit float32: its largest value is 3.*e.38, float32 ends at 3.40282e.38",
    ):
        preview.solve(replace(CONFIG, rho=1e39))


def test_one_is_kept_and_counted(tiny64: Family) -> None:
    session = Session(tiny64)
    first = session.fit.preview(CONFIG, "block 0", FEW)
    assert session.fit.has_preview(CONFIG, "block 0", FEW)
    assert session.fit.preview(CONFIG, "block 0", FEW) is first
    session.fit.preview(CONFIG, "block 1", FEW)
    assert not session.fit.has_preview(CONFIG, "block 0", FEW)
    assert session.fit.has_preview(CONFIG, "block 1", FEW)
    width = 16
    grams = 2 * (3 * width**2 + (2 * width) ** 2) * 8  # both alphas: maps of three inputs of one width, and fc2
    assert isinstance(first, Preview)
    assert nbytes(first) > grams
    first.solve(OTHER)
    assert relative_error(first.solve(CONFIG), session.fit.calibrate(CONFIG).weights) < 1e-10  # a solve uses nothing up

"""Singular value calibration against its definition, written once more, and its identities."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tiny_clip import TASKS
from torch import Tensor

from featcal import evaluate
from featcal.baselines.common.fit import fit
from featcal.baselines.svc import Svc, calibrate_matrix
from featcal.cli import featcal_command
from featcal.family.opening import Family
from featcal.server.orders import order
from featcal.session.model_names import weights_of
from featcal.session.model_ref import resolve_model
from featcal.session.session import Session
from featcal.suite.name_grammar import ModelName, model_name, reference_in
from featcal.system.errors import InputError


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
def test_every_singular_value_is_divided_by_its_mean_share(shape: tuple[int, int]) -> None:
    base, experts = random(0, *shape), [random(seed, *shape) for seed in (1, 2, 3)]
    merged = base + 0.3 * sum((one - base for one in experts), torch.zeros(shape))
    left, values, right = torch.linalg.svd(merged - base, full_matrices=False)
    expected = []
    for r, value in enumerate(values):
        answer = left[:, r] @ (merged - base)
        theirs = [left[:, r] @ (one - base) for one in experts]
        shares = [max(0.4, float(answer @ one / (one @ one))) for one in theirs]
        expected.append(float(value) * len(shares) / sum(shares))
    found = calibrate_matrix(base, merged, experts, alpha=0.4)
    torch.testing.assert_close(found, base + left @ torch.tensor(expected, dtype=torch.float64).diag() @ right)


def test_of_a_scaled_expert_it_is_the_expert(tiny64: Family) -> None:
    """All shares are the scale, as long as alpha is not above it; above, alpha is what is divided by."""
    task = TASKS[0]
    family = replace(tiny64, experts={task: tiny64.experts[task]})
    scaled = weights_of("task-arithmetic:scale=0.3", family)
    names = family.adapter.tower
    expert, base, before = (one.read(names) for one in (family.experts[task], family.base, scaled))
    matrices = {name for name in names if expert[name].ndim == 2}
    for alpha, gain in ((0.1, 1 / 0.3), (0.5, 2.0)):
        found = fit(family.with_merged(scaled, "scaled"), Svc(alpha)).weights.read(names)
        for name, tensor in found.items():
            wanted = base[name] + gain * (before[name] - base[name]) if name in matrices else before[name]
            torch.testing.assert_close(tensor, wanted, rtol=1e-9, atol=1e-12)
    assert 0 < len(matrices) < len(names)


def test_experts_without_an_answer_do_not_count() -> None:
    base, expert = random(0, 5, 4), random(1, 5, 4)
    scaled = base + 0.3 * (expert - base)
    torch.testing.assert_close(calibrate_matrix(base, scaled, [expert, base], alpha=0.1), expert)
    assert calibrate_matrix(base, base.clone(), [expert, base], alpha=0.1).equal(base)


def test_names_of_models_made_of_others(tiny: Family, tmp_path: Path) -> None:
    assert model_name("svc") == ModelName("svc", of="merged")
    assert model_name("svc:alpha=0.2@svc@ties:scale=1") == ModelName("svc", (("alpha", "0.2"),), of="svc@ties:scale=1")
    assert model_name("owner/model@revision").kind == "reference"
    assert [reference_in(one) for one in ("svc@svc@owner/model@main", "svc@base", "owner/model@main")] == [
        "owner/model@main",
        None,
        "owner/model@main",
    ]
    assert resolve_model("svc@merged", tiny).name == resolve_model("svc", tiny).name == "svc:alpha=0.1"
    own = resolve_model("svc@calibrated:samples=8", tiny).name
    assert own == "svc:alpha=0.1@calibrated:lam=0.05,rho=2,alpha=0.3,samples=8"
    assert resolve_model(own, tiny).name == own
    for name, message in {
        "svc@": "names no model after @",
        "svc:alpha=0": "alpha is 0; it is above 0 and finite",
        "svc:samples=8": "no option 'samples'; it takes alpha",
        "svc@anchor": "needs its rho",
        "svc@expert": "means every expert on its own task",
    }.items():
        with pytest.raises(InputError, match=message):
            evaluate(tiny, name)


def test_a_model_made_of_files_is_told_by_them(tiny: Family, tiny_suite_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    name = f"svc:alpha=0.1@{folder}"
    fit(tiny.with_merged(tiny.experts[TASKS[0]], "expert"), Svc()).save(folder)
    model = resolve_model(name, tiny)
    before, ordered = model.key, order("scores", str(tiny_suite_file), {"model": name})
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert resolve_model(name, tiny).key == model.key != before
    assert order("scores", str(tiny_suite_file), {"model": name}).key != ordered.key


def test_measured_and_written_like_any_model(tiny: Family, tiny_suite_file: Path, tmp_path: Path) -> None:
    session, name = Session(tiny), "svc:alpha=0.2@calibrated:samples=8"
    assert session.fit.weights(name) is session.fit.weights(session.resolve(name))
    by_hand = fit(session.fit.family_with("calibrated:samples=8"), Svc(0.2))
    names = tiny.adapter.tower
    for tensor, other in zip(
        session.fit.weights(name).read(names).values(), by_hand.weights.read(names).values(), strict=True
    ):
        assert tensor.equal(other)
    out = str(tmp_path / "out")
    done = CliRunner().invoke(
        featcal_command, ["merge", str(tiny_suite_file), "--method", name, "--out", out, "--json"]
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["model"] == session.resolve(name).name
    assert evaluate(tiny, out).average == evaluate(session, name).average

"""What a merge leaves out of experts, and where they come from: check, calibrate and merge say the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lora_files import RANK, WIDTH, write_adapter
from safetensors.torch import load_file, save_file
from suite_edits import Edit

from featcal.calibration.calibrate import calibrate_family, calibrate_to_folder
from featcal.export.merge import merge_to_folder
from featcal.family.ancestry import UNRELATED, Lineage, Lineages, judge_distances
from featcal.family.opening import open_family
from featcal.family.outside_tower import note_left_out
from featcal.preflight.check import check_suite
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.schema import load_suite
from featcal.system.errors import InputError

CONFIG = CalibrationConfig(samples=4)
CHANGED = ("logit_scale", "text_projection.weight", "visual_projection.weight")


def whole_expert(root: Path, dtype: torch.dtype = torch.float32) -> None:
    """Make the expert of 'pets' a whole CLIP that differs from the base in its tower and in `CHANGED`."""
    folder = root / "experts" / "pets"
    tensors = load_file(root / "base" / "model.safetensors") | load_file(folder / "model.safetensors")
    for name in CHANGED:
        tensors[name] = tensors[name] + 0.1
    save_file({n: t.to(dtype) for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((root / "base" / "config.json").read_text())


def test_storage_in_half_precision_is_no_change_of_other_tensors(own_suite_file: Path) -> None:
    whole_expert(own_suite_file.parent, torch.float16)
    (note,) = note_left_out(open_family(load_suite(own_suite_file), "cpu")).values()
    assert f"it changed 3 tensors outside the tower that is merged ({', '.join(map(repr, CHANGED))})" in note


@pytest.mark.parametrize("cut", ["exact", "base"])
def test_what_the_configuration_of_an_adapter_does_not_select_is_named(own_suite_file: Path, cut: str) -> None:
    root = own_suite_file.parent
    modules = [f"encoder.layers.{i}.self_attn.q_proj" for i in (0, 1)]
    shapes = {"lora_A": (RANK, WIDTH), "lora_B": (WIDTH, RANK)}
    update = {f"{m}.{part}.weight": torch.ones(shape) for m in modules for part, shape in shapes.items()}
    write_adapter(root / "adapter", update, target_modules=["q_proj"], layers_to_transform=[1])
    suite = load_suite(own_suite_file)
    tasks = suite.tasks | {"pets": suite.tasks["pets"].model_copy(update={"expert": "base+adapter"})}
    family = open_family(suite.model_copy(update={"tasks": tasks, "vocabulary": cut}), "cpu").resident()
    assert note_left_out(family)["pets"] == (
        "expert 'pets': its adapter_config.json does not select one module whose updates are in its file "
        f"('{modules[0]}'); they are left out, as peft does"
    )
    names = [f"vision_model.{module}.weight" for module in modules]
    found, base = family.experts["pets"].read(names), family.base.read(names)
    assert [float((found[name] - base[name]).mean()) for name in names] == pytest.approx([0, 3], abs=1e-5)


def test_a_number_stored_as_a_vector_is_no_change(own_suite_file: Path) -> None:
    root = own_suite_file.parent
    whole_expert(root)
    tensors, base = load_file(root / "experts/pets/model.safetensors"), load_file(root / "base/model.safetensors")
    tensors["logit_scale"] = base["logit_scale"].reshape(1)
    save_file(tensors, root / "experts/pets/model.safetensors", {"format": "pt"})
    (note,) = note_left_out(open_family(load_suite(own_suite_file), "cpu")).values()
    assert "it changed 2 tensors" in note
    assert "logit_scale" not in note


@pytest.mark.slow
def test_what_a_whole_expert_changed_beside_the_tower_is_named(own_suite_file: Path) -> None:
    whole_expert(own_suite_file.parent)
    suite, out = load_suite(own_suite_file), own_suite_file.parent / "out"
    named = ", ".join(f"'{name}'" for name in CHANGED)
    note = (
        f"expert 'pets': it changed 3 tensors outside the tower that is merged ({named}); they are left out, and the "
        "written model has the base's"
    )
    assert note_left_out(open_family(suite, "cpu")) == {"pets": note}
    found = check_suite(suite, probe=False)
    assert found.problems == ()
    assert note in found.notes
    assert merge_to_folder(suite, None, None, out / "merged")["notes"] == [note]
    assert calibrate_to_folder(suite, CONFIG, out / "calibrated")["notes"] == [note]
    calibrate_family(suite, CONFIG, device="cpu").save(out / "saved")
    calibrate_family(open_family(suite, "cpu").resident(), CONFIG).save(out / "from memory")
    for folder in ("merged", "calibrated", "saved", "from memory"):
        assert json.loads((out / folder / "featcal.json").read_text())["notes"] == [note]
        assert f"\n## Notes\n\n- {note}\n" in (out / folder / "README.md").read_text()
        written = load_file(out / folder / "model.safetensors")
        base = load_file(own_suite_file.parent / "base" / "model.safetensors")
        assert all(written[name].equal(base[name]) for name in CHANGED)


def test_what_an_adapter_changed_beside_the_tower_is_named(own_suite_file: Path, edit_suite: Edit) -> None:
    folder = own_suite_file.parent / "adapter"
    folder.mkdir()
    update: dict[str, torch.Tensor] = {}
    for tower in ("vision_model", "text_model"):
        for part in ("q_proj", "v_proj"):
            module = f"base_model.model.{tower}.encoder.layers.0.self_attn.{part}"
            update |= {f"{module}.lora_A.weight": torch.full((2, 16), 0.1)}
            update |= {f"{module}.lora_B.weight": torch.full((16, 2), 0.1 if part == "q_proj" else 0.0)}
    save_file(update, folder / "adapter_model.safetensors", {"format": "pt"})
    options = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(options))
    edit_suite(lambda content: content["tasks"]["pets"].update(expert="base+adapter"))
    found = note_left_out(open_family(load_suite(own_suite_file), "cpu"))
    assert list(found) == ["pets"]
    assert "it changed one tensor outside" in found["pets"]  # v_proj's update is 0
    assert "('text_model.encoder.layers.0.self_attn.q_proj.weight')" in found["pets"]


def test_a_merged_checkpoint_left_nothing_out_here(own_suite_file: Path, edit_suite: Edit) -> None:
    whole_expert(own_suite_file.parent)
    edit_suite(lambda content: content.update(merged="experts/pets"))
    suite = load_suite(own_suite_file)
    assert not any("outside the tower" in note for note in check_suite(suite, probe=False).notes)
    notes = calibrate_to_folder(suite, CONFIG, own_suite_file.parent / "out")["notes"]
    assert not any("outside the tower" in note for note in notes)


def strangers(root: Path, which: Callable[[str], bool]) -> None:
    """Replace the expert's matrices that `which` names by noise of their size."""
    file = root / "experts" / "pets" / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if which(name) and tensor.ndim > 1:
            tensors[name] = torch.randn(tensor.shape, generator=generator) * tensor.std()
    save_file(tensors, file, {"format": "pt"})


def test_one_strange_layer_is_a_note_everywhere(own_suite_file: Path) -> None:
    strangers(own_suite_file.parent, lambda name: ".layers.1." in name)
    suite, out = load_suite(own_suite_file), own_suite_file.parent / "out"
    found = check_suite(suite, probe=False)
    assert found.problems == ()
    (note,) = [note for note in found.notes if "lineage" in note]
    assert note.startswith("expert 'pets': different base lineage in block 1: distance to the base ")
    assert note.endswith("was it trained from this base?")
    assert merge_to_folder(suite, None, None, out / "merged")["notes"] == [note]
    assert calibrate_to_folder(suite, CONFIG, out / "calibrated")["notes"] == [note]


def test_a_stranger_in_every_layer_is_refused_everywhere(own_suite_file: Path) -> None:
    strangers(own_suite_file.parent, lambda name: True)
    suite, out = load_suite(own_suite_file), own_suite_file.parent / "out"
    (problem,) = check_suite(suite, probe=False).problems
    assert problem.startswith("expert 'pets': different base lineage in every layer")
    for run in (lambda: merge_to_folder(suite, None, None, out), lambda: calibrate_to_folder(suite, CONFIG, out)):
        with pytest.raises(InputError) as refused:
            run()
        assert list(refused.value.problems) == [problem]
    assert not out.exists()


def test_only_every_layer_together_is_a_problem() -> None:
    for cosines, problem in (((0.1, 0.1), True), ((0.1, UNRELATED), False)):
        problems, notes = judge_distances(Lineages(("a", "b"), {"expert 'x'": Lineage((1.0, 1.0), cosines)}, True))
        assert [bool(problems), bool(notes)] == [problem, not problem]

"""The symptoms of "My merge is broken": every row's fault is planted, and its command says what the row says."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import Run
from known_layouts import lm_mini_as_qwen, wrap_names
from own_merges import edit_json, edit_tensors, plant, write_parents
from safetensors.torch import load_file, save_file
from tiny_clip import write_suite

import featcal
from featcal.preflight import estimates
from featcal.system.resources import data_path

PAGE = Path(__file__).resolve().parents[2] / "docs/broken-merge.md"
FOLDER, SUITE = "my-merge", "found.yaml"
"""Names of a merge and of a suite file in the page's commands, each beside where they run."""


@dataclass(frozen=True)
class Row:
    """One row of the page's table: the fault after a symptom, and the command that names it."""

    words: tuple[str, ...]
    """In italics: what the command prints."""
    command: str


def read_rows() -> dict[str, Row]:
    """Return the rows of the table by what is seen."""
    text = PAGE.read_text(encoding="utf-8").partition("\n## Symptoms\n")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    rows = {}
    for seen, what, command in cells:
        (asked,) = re.findall("`([^`]+)`", command)
        rows[seen] = Row(tuple(re.findall(r"\*([^*]+)\*", what)), asked)
    return rows


ROWS = read_rows()


@dataclass(frozen=True)
class Place:
    """An empty folder to plant a fault in, with the base and the experts of its merge beside it."""

    home: Path
    monkeypatch: pytest.MonkeyPatch

    def put_merge(self, fault: str = "") -> Path:
        """Write a merge of tiny language models, with a fault of `own_merges`."""
        return plant(self.home.parent, fault).rename(self.home / FOLDER)

    def put_suite(self, name: str, change: Callable[[dict[str, Any]], object]) -> None:
        """Write an embedded suite with its models beside it, changed."""
        shutil.copytree(data_path(name), self.home, dirs_exist_ok=True)
        self.write(yaml.safe_load((self.home / "suite.yaml").read_text()), change)

    def put_pictures(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Write the tiny suite of pictures, changed."""
        file = write_suite(self.home / "tiny")
        for one in file.parent.iterdir():
            one.rename(self.home / one.name)
        self.write(yaml.safe_load((self.home / file.name).read_text()), change)

    def write(self, content: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> None:
        change(content)
        (self.home / SUITE).write_text(yaml.safe_dump(content))


def merge_with(fault: str) -> Callable[[Place], None]:
    return lambda place: void(place.put_merge(fault))


def merge_beside(change: Callable[[Path], object]) -> Callable[[Place], None]:
    """Plant what `change` does to a healthy merge's folder."""
    return lambda place: void(change(place.put_merge()))


def void(_: object) -> None:
    """Return nothing, of whatever was made."""


def poison(folder: Path) -> None:
    edit_tensors(folder, lambda name, one: one / one.gt(0) if ".layers.1.mlp.up" in name else one)


def move_layer(folder: Path) -> None:
    edit_tensors(folder, lambda name, one: one + torch.randn_like(one) if ".layers.1." in name else one)


def merge_by_stock(folder: Path) -> None:
    file = folder / "mergekit_config.yml"
    file.write_text(file.read_text().replace("task_arithmetic", "model_stock"))


def lose_chat_template(place: Place) -> None:
    template = place.home.parent / "base" / "chat_template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    place.put_merge()


def ask_one(task: str, content: dict[str, Any], merged: object) -> None:
    """Name another merge, and leave samples to one task alone: a canary asks no other."""
    content["merged"] = merged
    for name, one in content["tasks"].items():
        if name != task:
            del one["calibration"]


def push_too_far(place: Place) -> None:
    place.put_suite("lm-mini", lambda own: ask_one("rewrite", own, {"method": "task-arithmetic", "scale": 1.5}))


def damage_end_token(place: Place) -> None:
    place.put_suite("lm-mini", lambda own: ask_one("sentiment", own, FOLDER))
    shutil.copytree(place.home / "base", place.home / FOLDER)
    end = torch.ones(242, 1).index_fill(0, torch.tensor(1), 30.0)
    edit_tensors(place.home / FOLDER, lambda name, one: one * end if "embed" in name else one)


def calibrate_on_too_little(place: Place) -> None:
    def ask_little(own: dict[str, Any]) -> None:
        own["calibration"].update(samples=4, lam=1e-9)
        own["tasks"] = {task: own["tasks"][task] for task in ("entailment", "grammar")}

    place.put_suite("t5-mini", ask_little)


def swap_experts(place: Place) -> None:
    def swap(own: dict[str, Any]) -> None:
        first, second = (own["tasks"][one] for one in ("digits", "faces"))
        own["tasks"] = {"digits": first, "faces": second}
        first["expert"], second["expert"] = second["expert"], first["expert"]

    place.put_suite("clip-mini", swap)


def train_elsewhere(place: Place) -> None:
    place.put_pictures(void)
    file = place.home / "experts" / "pets" / "model.safetensors"
    torch.manual_seed(5)
    save_file({name: torch.randn_like(one) for name, one in load_file(file).items()}, file, {"format": "pt"})


def wrap_folder(place: Place) -> None:
    wrap_names(lm_mini_as_qwen(place.home / FOLDER))


def lose_shard(place: Place) -> None:
    folder = lm_mini_as_qwen(place.home / FOLDER)
    places = dict.fromkeys(load_file(folder / "model.safetensors"), "model-00001-of-00002.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    places["model.norm.weight"] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def leave_little_memory(place: Place) -> None:
    place.put_pictures(void)
    place.monkeypatch.setattr(estimates, "available_bytes", lambda: 2**20)


def move_to_another_machine(place: Place) -> None:
    """Write what a processor with other instructions gave: one value a little off."""
    place.put_pictures(void)
    suite = featcal.load_suite(place.home / SUITE)
    featcal.calibrate(suite, featcal.CalibrationConfig(samples=4)).save(place.home / "calibrated")
    record = json.loads((place.home / "calibrated" / "featcal.json").read_text())
    edit_json(place.home / "calibrated" / "featcal.json", machine={**record["machine"], "cpu_capability": "AVX9"})
    edit_tensors(
        place.home / "calibrated", lambda name, one: one * (1 + 1e-6) if ".layers.1.mlp.fc1.w" in name else one
    )


PLANTS: dict[str, Callable[[Place], None]] = {
    "One task is dead, the others are fine": merge_with("swapped"),
    "One task is too weak, another too strong": merge_with("exchanged"),
    "It answers as the base does": merge_with("nothing"),
    "The same, and `model_stock` merged it": lambda place: merge_by_stock(place.put_merge("nothing")),
    "Everything is bad, worse than the base": merge_with("scale"),
    "Nonsense, or one token for ever": merge_with("zeros"),
    "Nonsense, though every file looks right": merge_beside(move_layer),
    "`nan`, or `!!!!!!`": merge_beside(poison),
    "Good drift, bad answers": merge_with("tokenizer"),
    "Good on short texts, bad on long ones": merge_with("rope"),
    "Good at completing texts, bad in a chat": lose_chat_template,
    "It does not stop after its answer": merge_beside(lambda folder: edit_json(folder / "config.json", eos_token_id=9)),
    "It loops": push_too_far,
    "Its answers are empty": damage_end_token,
    "Calibrated is worse than merged": calibrate_on_too_little,
    "Two experts are bad at their own tasks": swap_experts,
    "No merge and no calibration helps": train_elsewhere,
    "It loads here and not there": wrap_folder,
    "It loads nowhere": lose_shard,
    "Out of memory": leave_little_memory,
    "Numbers differ between machines": move_to_another_machine,
}
"""By what is seen: plants what the row says it is."""
QUICK = ("Nonsense, or one token for ever",)


@pytest.fixture(scope="module")
def parents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("parents")
    write_parents(root)
    return root


@pytest.fixture
def place(parents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    root = shutil.copytree(parents, tmp_path / "models")
    (root / "here").mkdir()
    monkeypatch.chdir(root / "here")
    return Place(root / "here", monkeypatch)


def test_every_row_is_planted_and_every_fault_has_a_row() -> None:
    assert [*PLANTS] == [*ROWS]
    for row in ROWS.values():
        assert row.words
        assert row.command.startswith("featcal ")


@pytest.mark.parametrize("seen", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in PLANTS])
@pytest.mark.usefixtures("all_tokens")
def test_the_command_of_a_row_names_its_fault(run: Run, place: Place, seen: str) -> None:
    PLANTS[seen](place)
    row = ROWS[seen]
    _, *words = shlex.split(row.command)
    _, out, err = run(*words)
    said = " ".join((out + err).split())
    assert [one for one in row.words if one not in said] == [], said
    # No other fault that this command names is there as well.
    others = [one for one, other in ROWS.items() if other.command == row.command and one != seen]
    assert [one for one in others if all(words in said for words in ROWS[one].words)] == [], said

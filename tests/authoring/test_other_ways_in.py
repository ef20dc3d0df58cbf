"""What comes in by other ways than a suite's files: recipes of other tools, uploads, pickles, records, addresses,
drafts. Each is one value or one error that names it; none runs code."""

from __future__ import annotations

import copy
import json
import os
import pickle
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from app_pages import PAGES, opened
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lanes import rows
from malformed import ABSURD, ANY, WRONG, noise
from turns import NIGHTLY, has_its_turn

from app.selection import HOME, PageSelection, from_query
from featcal import cli
from featcal.authoring.from_form import import_file, read_draft
from featcal.authoring.recipes import import_recipe
from featcal.formats.state_file import state_dict
from featcal.studies.replay.record import read_record
from featcal.system.errors import InputError
from featcal.system.formatting import message
from featcal.system.resources import data_path

QUICK = settings(max_examples=200 if NIGHTLY else 25, suppress_health_check=[HealthCheck.function_scoped_fixture])
ODD = WRONG | ABSURD
MERGEKIT: dict[str, Any] = {
    "merge_method": "ties",
    "base_model": "org/base@v2",
    "models": [
        {"model": "org/base@v2"},
        {"model": "org/math", "parameters": {"weight": 0.5, "density": 0.3}},
        {"model": {"model": {"path": "org/code", "revision": "v1"}, "lora": "org/code-lora"}},
    ],
    "slices": None,
    "parameters": {"density": 0.5, "lambda": 1.3, "int8_mask": True},
    "dtype": "float32",
    "tokenizer_source": "base",
}
POOL: dict[str, Any] = {
    "_target_": "fusion_bench.modelpool.CLIPVisionModelPool",
    "models": {"_pretrained_": "org/base", "sun397": "org/sun397", "dtd": {"_target_": "x.y", "path": "org/dtd"}},
    "train_datasets": {"sun397": "org/sun397"},
    "test_datasets": {"sun397": {"path": "org/sun397", "split": "test"}},
    "processor": "org/base",
}
SUITE: dict[str, Any] = {
    "name": "s",
    "base": "org/base",
    "merged": {"method": "task-arithmetic", "scale": 0.3},
    "tasks": {"a": {"expert": "org/a", "calibration": {"imagefolder": "a"}, "classes": ["x", "y"]}},
}
TOLD = {"mergekit": MERGEKIT, "pool": POOL, "suite": SUITE}


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in nested mappings and lists."""
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in inner:
        yield (*path, key)
        yield from places(value, (*path, key))


def changed(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The content with another value at one place."""
    whole = copy.deepcopy(content)
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return whole


def refusal(read: Callable[[], object]) -> str | None:
    """What an `InputError` says; None where the thing was taken."""
    try:
        read()
    except InputError as error:
        return str(error)
    return None


def assert_names(said: str | None, *names: str) -> None:
    """Whatever was refused is named."""
    assert said is None or any(name in message(said) for name in names), said


def assert_clean(said: str, *names: str) -> None:
    """What a command said is bounded, steers no terminal and names what was refused."""
    assert len(said) < 4200
    assert not [one for one in said if ord(one) < 32 and one not in "\n\t"], said
    assert "Traceback" not in said
    assert_names(said, *names)


def take_over(file: Path) -> None:
    """As the page *Bring your own* does with what is uploaded: made a draft of, then read as one."""
    text: list[str] = []
    assert_names(refusal(lambda: text.append(import_file(file)[0])), "r.yaml", "recipe")
    if text:
        assert_names(refusal(lambda: read_draft(text[0], file.parent / "out.yaml")), "draft")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "path"),
    [
        pytest.param(kind, path, id=f"{kind}, {'.'.join(map(str, path))}")
        for kind, whole in TOLD.items()
        for path in places(whole)
    ],
)
def test_odd_values_in_what_is_taken_over(tmp_path: Path, kind: str, path: tuple[Any, ...]) -> None:
    file = tmp_path / "r.yaml"
    for name, value in ODD.items():
        if has_its_turn(f"{kind} {path} {name}"):
            file.write_text(yaml.safe_dump(changed(TOLD[kind], path, value)))
            assert_names(refusal(lambda: import_recipe(file)), "r.yaml", "recipe")
            take_over(file)


@QUICK
@given(
    st.sampled_from(sorted(TOLD)).flatmap(
        lambda kind: st.tuples(
            st.just(kind), st.sampled_from(list(places(TOLD[kind]))), st.sampled_from(list(ODD.values()))
        )
    ),
    st.sampled_from(list(ODD.values())),
    st.data(),
)
def test_two_odd_values(
    tmp_path_factory: pytest.TempPathFactory, first: tuple[str, tuple[Any, ...], Any], other: Any, data: st.DataObject
) -> None:
    kind, path, value = first
    content = changed(TOLD[kind], path, value)
    content = changed(content, data.draw(st.sampled_from(list(places(content)))), other)
    file = tmp_path_factory.mktemp("two") / "r.yaml"
    file.write_text(yaml.safe_dump(content))
    take_over(file)


@pytest.mark.parametrize("kind", sorted(TOLD))
def test_damaged_recipes_through_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    for name, damage in ANY.items():
        file = tmp_path / name / "r.yaml"
        file.parent.mkdir()
        file.write_text(yaml.safe_dump(TOLD[kind]))
        damage(file)
        code, said = run(monkeypatch, capsys, "suite", "import", str(file), "--out", str(file.with_name("out.yaml")))
        assert code in (1, 2), (name, said)
        assert_clean(said, "r.yaml")
        assert not file.with_name("out.yaml").exists(), name


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *command: str) -> tuple[int, str]:
    """Exit status and stderr of a command, run in this process."""
    monkeypatch.setattr(sys, "argv", ["featcal", *command])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0), capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- records

RECORD = json.loads((data_path().parent / "docs/records/clip-mini-n16.json").read_text())
SHORT_RECORD = RECORD | {"tensors": dict(list(RECORD["tensors"].items())[:2]), "relative_drift": {}}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SHORT_RECORD))
def test_odd_values_in_a_record(tmp_path: Path, name: str) -> None:
    file = tmp_path / "featcal.json"
    for path in [path for path in places(SHORT_RECORD) if path[0] == name and path[-1] in {0, *map(str, path)}]:
        for odd, value in ODD.items():
            if has_its_turn(f"{path} {odd}"):
                file.write_text(json.dumps(changed(SHORT_RECORD, path, value)))
                assert_names(refusal(lambda: read_record(file).options()), "featcal.json", "record")


@pytest.mark.parametrize("name", [*sorted(ANY), *(f"noise {seed}" for seed in range(12))])
def test_a_damaged_record_through_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    file = tmp_path / "featcal.json"
    file.write_text(json.dumps({one: value for one, value in RECORD.items() if one != "inputs"}))  # never runs
    (ANY[name] if name in ANY else noise(int(name.split()[1])))(file)
    code, said = run(monkeypatch, capsys, "replay", str(file))
    assert code in (1, 2), said
    assert_clean(said, "featcal.json")


# ---------------------------------------------------------------------------------------------------- pickles


class Runs:
    """Writes a file when it is loaded by pickle."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return Path.touch, (self.place,)


def tensors() -> dict[str, Any]:
    return {"visual.proj": torch.ones(2, 2), "logit_scale": torch.ones(())}


def _again(file: Path, change: Callable[[str, bytes], bytes | None]) -> None:
    """The archive with other members."""
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            new = change(name, content)
            if new is not None:
                archive.writestr(name, new)


def _in_pickle(content: bytes) -> Callable[[Path], None]:
    return lambda file: _again(file, lambda name, old: content if name.endswith("data.pkl") else old)


PICKLES: dict[str, Callable[[Path], object]] = {
    **ANY,
    **{f"noise {seed}": noise(seed) for seed in range(24)},
    "code": lambda file: torch.save({"w": Runs(file.parent / "ran")}, file),
    "code beside tensors": lambda file: torch.save(tensors() | {"w": Runs(file.parent / "ran")}, file),
    "a bare pickle": lambda file: file.write_bytes(pickle.dumps(Runs(file.parent / "ran"))),
    "a module": lambda file: torch.save(torch.nn.Linear(2, 2), file),
    "a list": lambda file: torch.save([torch.ones(2)], file),
    "a number": lambda file: torch.save(7, file),
    "nothing": lambda file: torch.save({}, file),
    "numbers as names": lambda file: torch.save({1: torch.ones(2)}, file),
    "no names at all": lambda file: torch.save({None: torch.ones(2), (1, 2): torch.ones(2)}, file),
    "texts as values": lambda file: torch.save({"visual.proj": "x"}, file),
    "a wrapper in a wrapper": lambda file: torch.save({"state_dict": {"model": {"model": 1}}}, file),
    "an empty wrapper": lambda file: torch.save({"state_dict": {}}, file),
    "tensors nowhere": lambda file: torch.save({"visual.proj": torch.ones(2, device="meta")}, file),
    "holes": lambda file: torch.save({"visual.proj": torch.ones(3).to_sparse()}, file),
    "an archive of something else": lambda file: zipfile.ZipFile(file, "w").writestr("a", "b"),
    "no values": lambda file: _again(file, lambda name, old: None if "/data/" in name else old),
    "short values": lambda file: _again(file, lambda name, old: old[:3] if "/data/" in name else old),
    "deep": _in_pickle(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."),
    "an unknown instruction": _in_pickle(b"\x80\x02\xff."),
    "a long that is none": _in_pickle(b"\x80\x02L" + b"9" * 5000 + b"L\n."),
    "an endless stack": _in_pickle(b"\x80\x02" + b"(" * 1_000_000 + b"."),
    "no end": _in_pickle(b"\x80\x02}"),
    "a number too large": _in_pickle(b"\x80\x02\x8b\xff\xff\xff\x7f."),
}


@pytest.mark.parametrize("name", rows(sorted(PICKLES), quick=PICKLES.keys() - {"an endless stack"}, slow=PICKLES))
@pytest.mark.filterwarnings("ignore")
def test_a_state_dict_is_read_or_refused_and_runs_nothing(tmp_path: Path, name: str) -> None:
    file = tmp_path / "m.pt"
    torch.save(tensors(), file)
    PICKLES[name](file)
    said = refusal(lambda: state_dict(file, "model"))
    assert_names(said, "m.pt")
    assert not (tmp_path / "ran").exists()
    assert said is not None or name.startswith("noise")


def test_tensors_that_share_values_are_whole(tmp_path: Path) -> None:
    one, none = torch.arange(6.0), torch.ones(0, 3)
    shared = {"a": one, "b": one.view(2, 3).mT, "c": one[2:4], "none": none, "half": one.bfloat16()}
    torch.save(shared, tmp_path / "m.pt")
    read = state_dict(tmp_path / "m.pt", "model")
    assert read.keys() == shared.keys()
    assert all(torch.equal(read[name], shared[name]) for name in shared)


# ---------------------------------------------------------------------------------------------------- addresses

TEXTS = st.text(max_size=30) | st.sampled_from(
    [str(value) for value in ODD.values() if isinstance(value, str | int | float)]
    + ["٣", "1_0", "1e999", "-0", "0x10", "nan", "True", "true ", ",", "1,,2", "9" * 5000, "\x00", "%00", "\ud800"]
)


@settings(QUICK, max_examples=600 if NIGHTLY else 75)
@given(st.dictionaries(st.sampled_from(sorted(PageSelection.__dataclass_fields__)) | st.text(max_size=6), TEXTS))
def test_any_address_is_a_selection(query: dict[str, str]) -> None:
    chosen, problems = from_query(query)
    assert isinstance(chosen, PageSelection)
    assert len(problems) <= len(query)
    assert all(len(one) < 250 for one in problems)
    again, none = from_query(chosen.to_query())
    assert (again, none) == (chosen, [])


ADDRESSES: dict[str, dict[str, str]] = {
    "numbers out of range": {"n": "999999999", "lam": "-1", "rho": "1e300", "alpha": "7", "samples": "2147483646"},
    "no numbers": {"n": "many", "lam": "nan", "rho": "inf", "seed": "1e3", "samples": "-4"},
    "models that are none": {"a": "nobody", "b": "calibrated:lam=x", "run": "../../x", "against": "\x1b[31m"},
    "a model of too much": {"a": "calibrated@" * 400 + "merged", "b": "anchor:rho=1e308"},
    "places that are none": {"task": "<script>", "layer": "block 999", "blocks": "block 7,block 7", "maps": "x" * 9000},
    "picked nowhere": {"picked": "2147483647", "picked_of": "test'; --", "task": "pets"},
    "files as models": {"a": "./../../etc", "b": "/dev/zero", "against": "/proc/self/mem"},
    "a map that is none": {"map": "tsne", "colour": "red", "frame": "-1", "distance": "far", "every": "true"},
    "sweeps": {"sweep_lam": "1,2,x", "sweep_rho": "," * 3000, "sweep_alpha": "nan"},
}


WHERE = {f"{name}, {page}": (name, page) for name in ADDRESSES for page in PAGES}
MEANT = {
    "numbers out of range": "calibrate",
    "no numbers": "drift",
    "models that are none": "runs",
    "a model of too much": "cosines",
    "places that are none": "drift",
    "picked nowhere": "accuracy",
    "files as models": "models",
    "a map that is none": "features",
    "sweeps": "runs",
}
"""The page that reads most of an odd address: CI opens every address there, and so every page at one of them."""


@pytest.mark.usefixtures("instant_maps")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "where", rows(WHERE, quick=["no numbers, drift"], slow=[f"{name}, {page}" for name, page in MEANT.items()])
)
def test_a_page_at_an_odd_address(tiny_suite_file: Path, where: str) -> None:
    name, page = WHERE[where]
    app = opened(tiny_suite_file, page, **ADDRESSES[name])
    assert not app.exception, [one.value for one in app.exception]
    for kind in ("error", "warning"):
        assert all(len(one.value) < 4200 for one in app.get(kind))


@pytest.mark.parametrize(
    "suite", ["", "x" * 9000, "\x00", "../../../etc/passwd", "/dev/zero", "~nobody/x", "a\nb", "."]
)
@pytest.mark.usefixtures("instant_maps")
@pytest.mark.filterwarnings("ignore")
def test_an_odd_suite_in_an_address(suite: str) -> None:
    app = opened(suite)
    assert not app.exception
    assert [one for one in app.error if len(one.value) < 1000] or suite == ""
    assert HOME.suite
    assert os.getcwd()

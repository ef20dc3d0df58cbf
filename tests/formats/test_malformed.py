"""No file gives a traceback, takes memory or time out of proportion, runs code or leaves anything behind.

Every case of `malformed.CASES` is a calibration of a sound tiny suite in which one file was damaged. Commands run in
this process, as `featcal.cli.main` runs them; those that could take the machine's memory run in a process that may
grow by 2 GiB of addresses from where a sound run left it.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from clean_process import in_clean_process
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from malformed import CASES, HOMES, Case, use_source, write_home
from turns import NIGHTLY, SHARE, has_its_turn, is_drawn

from featcal import cli
from featcal.formats.checkpoint import read_header
from featcal.samples.table import read_jsonl
from featcal.suite.schema import load_suite, suite_from_dict
from featcal.system.errors import InputError
from featcal.system.json_files import read_json
from featcal.system.yaml_files import parse_yaml

SECONDS, GROWTH = 5.0, 2 << 30
ROLES = {
    "base": "base",
    "experts": "expert 'pets'",
    "adapter": "expert 'left'",
    "folder": "task 'pets', calibration",
    "arrays.npz": "task 'pets', calibration",
    "rows.parquet": "task 'pets', calibration",
    "rows.jsonl": "task 'left', calibration",
    "samples.safetensors": "task 'pets'",
}
"""What messages call the things that files belong to, where they do not name the file."""


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Folders of sound suites, never changed."""
    return {home: write_home(tmp_path_factory.mktemp(home) / "s", home).parent for home in HOMES}


def damaged(case: Case, homes: Mapping[str, Path], root: Path) -> Path:
    """A copy of the case's suite, with its damage."""
    shutil.copytree(homes[case.home], root)
    use_source(root / "suite.yaml", case.kind)
    case.damage(root / case.file)
    return root / "suite.yaml"


def command(suite: Path) -> list[str]:
    return [
        "featcal",
        "calibrate",
        str(suite),
        "--out",
        str(suite.parent / "OUT"),
        "--device",
        "cpu",
        "--samples",
        "12",
    ]


def faults(case: Case, code: int, said: str, before: set[Path], root: Path) -> list[str]:
    """What is wrong with how a command ended."""
    if code == 0:
        return [] if case.harmless else ["accepted"]
    noise = case.name.startswith("noise")  # samples that can be read, and overflow in some block
    names = (case.file.rsplit("/", 1)[-1], ROLES.get(case.file.split("/")[0]), case.says, case.says.rsplit(".", 1)[-1])
    found = {
        f"exit status {code}": code not in (1, 2),
        "a traceback": "Traceback" in said,
        "nothing named": not any(name and name in said for name in names) and case.kind != "suite value" and not noise,
        "no message": not said.strip(),
        "too long": len(said) > 4200,
        "control characters": re.search("[\x00-\x08\x0b-\x1f\x7f]", said) is not None,
        "something was written": bool(set(root.rglob("*")) - before),
    }
    return [fault for fault, is_so in found.items() if is_so]


def attempt(case: Case, homes: Mapping[str, Path], root: Path, read: Callable[[], str]) -> list[str]:
    """Run a case in this process; `read` gives what was said on stderr."""
    suite = damaged(case, homes, root)
    before = set(root.rglob("*"))
    sys.argv = command(suite)
    started = time.process_time()
    try:
        cli.main()
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    took = time.process_time() - started
    said = read()
    found = faults(case, code, said, before, root)
    found += [f"{took:.1f} s"] if took > SECONDS and code else []
    return [f"{fault}: {said[:300]}" for fault in found]


def title(case: Case) -> str:
    return f"{case.kind}, {case.home}/{case.file}, {case.name}"


SAFE = [case for case in CASES if not case.dangerous]
FILES = {f"{case.home}/{case.file}": (case.home, case.file) for case in SAFE}
"""Every file that is damaged, by home; one parameter each, whose damages are all tried before it fails."""
FIRST = {(case.kind, case.home, case.file): case for case in reversed(SAFE)}
"""The quick ones: of every kind and file the first."""


def test_there_are_enough_cases() -> None:
    counts = Counter(case.kind for case in CASES)
    assert len(CASES) >= 600
    assert len(counts) >= 12
    assert len({(case.kind, case.home, case.file, case.name) for case in CASES}) == len(CASES)


def test_every_case_has_its_turn() -> None:
    turns = [{title(case) for case in SAFE if is_drawn(title(case), str(state))} for state in range(60)]
    assert all(0.5 < SHARE * len(one) / len(SAFE) < 2 for one in turns)
    assert len(set[str]().union(*turns)) > 0.99 * len(SAFE)


@pytest.fixture
def require(
    homes: Mapping[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Iterable[Case]], None]:
    """Try cases in this process, every one of them, and tell all that is wrong at once."""
    monkeypatch.setattr(sys, "argv", [])

    def try_all(cases: Iterable[Case]) -> None:
        wrong = {}
        for number, case in enumerate(cases):
            root = tmp_path / str(number)
            try:
                found = attempt(case, homes, root, lambda: capsys.readouterr().err)
            except Exception:  # the others are tried nevertheless
                found = [traceback.format_exc()]
            if found:
                wrong[title(case)] = found
            shutil.rmtree(root)
        assert not wrong, json.dumps(wrong, indent=1)

    return try_all


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", FILES)
def test_one_message_and_nothing_written(place: str, require: Callable[[Iterable[Case]], None]) -> None:
    require(case for case in FIRST.values() if (case.home, case.file) == FILES[place])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", [pytest.param(place, marks=[pytest.mark.nightly] * NIGHTLY) for place in FILES])
def test_one_message_whatever_the_damage(place: str, require: Callable[[Iterable[Case]], None]) -> None:
    """Of the cases whose turn it is on this commit; of all in a nightly run."""
    require(case for case in SAFE if (case.home, case.file) == FILES[place] and has_its_turn(title(case)))


def _addresses() -> int:
    """Bytes of address space that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def run_dangerous(folder: Path) -> dict[str, list[str]]:
    """In a process of its own: a sound run, a limit on what may come on top of it, and every dangerous case; what was
    wrong, by case."""
    import contextlib
    import io

    warnings.simplefilter("ignore")
    results: dict[str, list[str]] = {}
    homes = {home: write_home(folder / home, home).parent for home in HOMES}
    for number, case in enumerate([Case("sound", "", "text", "suite.yaml", lambda _: None, True), *_dangerous()]):
        if number:
            resource.setrlimit(resource.RLIMIT_AS, (_addresses() + GROWTH, resource.RLIM_INFINITY))
        print(title(case), flush=True)  # for whoever wants to know which one ended the process
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            found = attempt(case, homes, folder / f"case {number}", said.getvalue)
        results[title(case)] = found
        shutil.rmtree(folder / f"case {number}")
    return results


def _dangerous() -> list[Case]:
    return [case for case in CASES if case.dangerous]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux for the size of a process")
def test_no_memory_out_of_proportion(tmp_path: Path) -> None:
    results = in_clean_process(run_dangerous, tmp_path)
    assert {case: found for case, found in results.items() if found} == {}
    assert len(results) == 1 + len(_dangerous())


# ------------------------------------------------------------------------------------------- property-based

QUICK = settings(max_examples=150 if NIGHTLY else 40, suppress_health_check=[HealthCheck.function_scoped_fixture])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
SIGNS = "abc 01:-{}[]&*!<|>'\"#%@`,?\n\t.\0\x1b"
KEYS = st.sampled_from(["name", "base", "merged", "tasks", "calibration", "vocabulary", "description", "use", "expert"])


def said_by(read: Callable[[], object], fine: str = "f.yaml: ") -> str:
    """What an InputError says, or `fine` if there is none."""
    try:
        read()
    except InputError as error:
        return str(error)
    return fine


@QUICK
@given(st.dictionaries(KEYS, VALUES, max_size=6))
def test_any_mapping_is_a_suite_or_one_error(content: dict[str, Any]) -> None:
    assert said_by(lambda: suite_from_dict(content, Path(), "f.yaml")).startswith("f.yaml: ")


@QUICK
@given(
    st.text(alphabet=st.sampled_from([*"abc 01:-{}[]&*!<|>'\"#%@`,?\n\t.\0\x1b"]), max_size=80) | st.text(max_size=60)
)
def test_any_text_is_yaml_or_one_error(text: str) -> None:
    assert said_by(lambda: parse_yaml(text, "f.yaml")).startswith("f.yaml: ")


READERS: dict[str, Callable[[Path], object]] = {
    "c.json": read_json,
    "s.yaml": load_suite,
    "r.jsonl": read_jsonl,
    "m.safetensors": lambda file: read_header(file, "model"),
}


@QUICK
@given(st.sampled_from(sorted(READERS)), st.binary(max_size=200))
def test_any_bytes_are_read_or_one_error_names_the_file(
    tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes
) -> None:
    file = tmp_path_factory.mktemp("any") / name
    file.write_bytes(content)
    assert str(file) in said_by(lambda: READERS[name](file), f"{file}: ")

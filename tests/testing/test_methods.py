"""Every method keeps what all promise; a method of one's own, in one file, is known wherever methods are."""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import Run, document
from lanes import rows
from tiny_decoders import tiny_decoder

from featcal import InputError, Merger, merger, open_session, option, register_method
from featcal.models.families.decoder_facts import FACTS
from featcal.studies.method_lists import everything
from featcal.studies.requirements import needs
from featcal.suite import methods
from featcal.suite.methods import baseline_names, is_method, merger_names, method, method_names
from featcal.suite.name_grammar import grammar, model_name
from featcal.suite.recipe import MergeRecipe
from featcal.testing import check_method

DOCS = Path(__file__).parents[2] / "docs"
DEAR = ("ties", "dare-ties", "wudi")
"""Mergers whose checks take more than a second."""
(EXAMPLE,) = re.findall(r"```python\n([^`]*def halfway.*?)```", (DOCS / "methods.md").read_text("utf-8"), re.DOTALL)
OWN = f'''
"""A merger, as the page of methods has it, and a baseline of one's own."""

{EXAMPLE}

from dataclasses import dataclass
from typing import ClassVar

from featcal.baselines.common.baseline import Sampled
from featcal.formats.weights import Overlay


@featcal.register_method("shrunk", "the merged model times a number that samples decide", needs=("samples",))
@dataclass(frozen=True)
class Shrunk(Sampled):
    by: float = featcal.option(0.01, "how much a sample takes away", least=0, below=0.1)
    on_another: ClassVar[bool] = True

    def make(self, given):
        rows = [inputs for one in given.experts.values() for batch in one.batches for inputs in batch.values()]
        size = float(sum((i + 1) * value.double().mean() for i, value in enumerate(rows)))
        own = given.family.merged.read(given.run.adapter.tower)
        small = {{name: tensor * (1 - self.by * abs(size) / (1 + abs(size))) for name, tensor in own.items()}}
        return Overlay("shrunk", given.family.merged, small), {{"size": size}}
'''


@pytest.fixture
def own_methods(tmp_path: Path) -> Iterator[None]:
    """Both methods of the file, registered as long as the test runs."""
    file = tmp_path / "own_methods.py"
    file.write_text(OWN)
    spec = importlib.util.spec_from_file_location("own_methods", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["own_methods"] = module
    spec.loader.exec_module(module)
    yield
    del sys.modules["own_methods"]


@pytest.mark.parametrize(
    "name",
    rows(
        method_names(),
        quick={*merger_names(), "svc", "regmean"} - {*DEAR},
        slow={*baseline_names(), *DEAR} - {"svc", "regmean"},
    ),
)
def test_every_method_keeps_what_all_promise(name: str) -> None:
    assert len(check_method(name)) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["regmean", "regmean++", "lot", "esm", "coefficients", "svc", "polished"])
def test_methods_of_weights_keep_it_on_a_decoder(name: str) -> None:
    facts = next(facts for facts in FACTS if facts.model_type == "llama")
    assert len(check_method(name, tiny_decoder(facts), facts)) >= 4


@pytest.mark.usefixtures("own_methods")
def test_methods_of_ones_own_are_named_and_listed() -> None:
    for name in ("halfway", "shrunk"):
        assert name in grammar()
        assert name in everything(2.0)
    assert "halfway" in merger_names()
    assert "shrunk" in baseline_names()
    assert model_name("shrunk:samples=4@halfway").of == "halfway"
    assert needs("shrunk@halfway:way=1", "pixels") == ("samples",)
    assert needs("halfway", "pixels") == ()
    tables = runpy.run_path(str(DOCS / "methods.py"))["tables"]()
    assert "| `halfway` | part of the way" in tables["mergers"]
    assert "`way` 0.5, in [0, 1]: share of the way" in tables["mergers"]
    assert "[arXiv 2203.05482]" in tables["mergers"]
    assert "| `shrunk` |" in tables["behind"]


@pytest.mark.usefixtures("own_methods")
def test_a_merger_of_ones_own_is_measured_written_and_read_strictly(
    run: Run, tiny_suite_file: Path, tmp_path: Path
) -> None:
    session = open_session(tiny_suite_file, "cpu")
    tower = session.family.adapter.tower[:3]
    half, whole, base = (session.fit.weights(name).read(tower) for name in ("halfway", "simple-averaging", "base"))
    for name in tower:
        torch.testing.assert_close(half[name], (whole[name] + base[name]) / 2, rtol=0, atol=1e-6)
    written = document(run("merge", tiny_suite_file, "--method", "halfway:way=1", "--out", tmp_path / "m", "--json"))
    assert (written["method"], written["way"]) == ("halfway", 1.0)
    again = session.fit.weights(str(tmp_path / "m")).read(tower)
    assert all(torch.allclose(again[name], whole[name], atol=1e-6) for name in tower)
    drift = document(run("drift", tiny_suite_file, "--model", "halfway:way=0.25", "--eval-samples", 2, "--json"))
    assert "halfway:way=0.25" in str(drift["model"])
    for asked, said in {"wy=1": "Did you mean 'way'?", "way=2": "halfway: way is 2; it lies in [0, 1]"}.items():
        code, _, err = run("merge", tiny_suite_file, "--method", f"halfway:{asked}", "--out", tmp_path / "n")
        assert code == 1
        assert said in err


@pytest.mark.slow
@pytest.mark.usefixtures("own_methods")
def test_methods_of_ones_own_keep_what_all_promise_and_are_compared(
    run: Run, tiny_suite_file: Path, tmp_path: Path
) -> None:
    for name in ("halfway", "shrunk"):
        assert len(check_method(name)) >= 4
    fitted = ["merge", tiny_suite_file, "--method", "shrunk:samples=2@halfway", "--out", tmp_path / "s", "--json"]
    assert document(run(*fitted))["options"]["by"] == 0.01
    models = ("--model", "halfway", "--model", "shrunk:samples=2")
    listed = ["compare", tiny_suite_file, *models, "--seeds", "42", "--json"]
    compared = document(run(*listed, "--samples", 2))
    assert {row["method"] for row in compared["rows"]} >= {"halfway", "shrunk:samples=2"}


@pytest.mark.usefixtures("own_methods")
def test_a_suite_file_is_merged_by_a_method_of_ones_own(edit_suite: Any) -> None:
    file = edit_suite(lambda content: content.update(merged={"method": "halfway", "way": 0.25}))
    family = open_session(file, "cpu").family
    assert family.merged.label == "merged model (halfway)"
    assert MergeRecipe.model_validate({"method": "halfway", "way": 0.25}).model_dump(exclude_none=True) == {
        "method": "halfway",
        "way": 0.25,
    }


@dataclass(frozen=True)
class Rogue(Merger):
    way: float = option(0.5, "share of the way", least=0, most=1)
    idle: float = option(0.5, "of nothing", least=0, most=1)

    def merge(self, given: Any) -> Any:
        return given.base + self.way * next(iter(given.vectors()))


def test_a_check_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    register_method("rogue", "the first expert alone")(Rogue)
    with pytest.raises(AssertionError, match="experts in another order: 'a' is another"):
        check_method("rogue")
    monkeypatch.setattr(Rogue, "symmetric", False)
    with pytest.raises(AssertionError, match="option 'idle' changes nothing"):
        check_method("rogue")


@pytest.mark.parametrize("name", ["Ties", "my method", "all", "merged", "ties", "svc", "9"])
def test_names_that_no_method_can_have(name: str) -> None:
    with pytest.raises(InputError, match=r"cannot be the name|is a method .* already"):
        register_method(name, "another")(Rogue)


def test_what_no_method_is_made_of() -> None:
    def bare(given: Any, *, way: float = 0.5) -> Any:
        return given.base

    class Bare(Merger):
        way: float = option(0.5, "share of the way")

    for kind, said in (
        (Bare, r"method 'bare': Bare is not a dataclass; write @dataclass\(frozen=True\) above it"),
        (dict, "method 'bare': <class 'dict'> is not a Merger or Baseline; derive a class"),
        (methods.Method, "Method'> is not a Merger or Baseline"),
        (len, "method 'bare': <built-in function len> is not"),
    ):
        register: Any = register_method("bare", "nothing")
        with pytest.raises(InputError, match=said):
            register(kind)
    with pytest.raises(InputError, match=r"method 'bare': write way=option\(0.5, HELP\), not way=0.5"):
        merger("bare", "nothing")(bare)
    assert not is_method("bare")
    with pytest.raises(InputError, match="ties: density is 'a'; give a number"):
        method("ties")(density="a")


BROUGHT = OWN.replace('"halfway"', '"brought"').replace('"shrunk"', '"brought-too"')


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that brings a method which works, one that does not, one of another name and one that featcal has."""
    (tmp_path / "bringing.py").write_text(BROUGHT)
    places = {
        "brought": "bringing:halfway",
        "torn": "bringing_none:X",
        "else": "bringing:halfway",
        "iso-c": "bringing:X",
    }
    points = EntryPoints(EntryPoint(name, place, methods.GROUP) for name, place in places.items())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(methods, "entry_points", lambda group: points.select(group=group))
    methods._entry_points.cache_clear()
    yield
    methods._entry_points.cache_clear()
    sys.modules.pop("bringing", None)


@pytest.mark.usefixtures("package")
def test_an_installed_package_brings_methods() -> None:
    assert "brought" in grammar()
    assert is_method("brought")
    assert "bringing" not in sys.modules  # names are known without the code
    assert MergeRecipe.model_validate({"method": "brought", "way": 0.25}).options().name == "brought:way=0.25"
    assert method("brought").__module__ == "bringing"
    # The function stays one: options that are left out have their defaults.
    given = SimpleNamespace(base=torch.tensor([1.0]), vectors=lambda: [torch.tensor([4.0])], tasks=["one"])
    assert (sys.modules["bringing"].halfway(given), sys.modules["bringing"].halfway(given, way=1)) == (3.0, 5.0)
    for name, said in {
        "torn": r"method 'torn' of the package bringing_none:X cannot be imported \(ModuleNotFoundError",
        "else": "bringing:halfway registers no method 'else'",
        "iso-c": "more than one method is called 'iso-c': remove the package with bringing:X",
    }.items():
        with pytest.raises(InputError, match=said):
            method(name)


def test_names_and_suites_of_checkpoints_need_no_torch(tmp_path: Path) -> None:
    suite = tmp_path / "suite.yaml"
    suite.write_text("{name: s, base: b, merged: m, tasks: {t: {expert: e, calibration: {imagefolder: x}}}}")
    code = (
        "import sys, featcal; from featcal.suite.name_grammar import grammar, model_name\n"
        f"assert 'tsv-m' in grammar() and model_name('ties:scale=1').kind == 'ties'\n"
        f"featcal.load_suite({str(suite)!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_tables_of_the_page_are_those_of_the_script() -> None:
    page = (DOCS / "methods.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(DOCS / "methods.py"))["filled"](page) == page

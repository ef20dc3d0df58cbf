"""What featcal leaves behind in the process that calls it: nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from clean_process import in_clean_process
from host_settings import look

REPOSITORY = Path(__file__).parents[2]


def python(*arguments: object, **options: object) -> str:
    """What a Python process prints; fails with its errors if it fails."""
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def wrong(tiny_suite_file: Path) -> dict[str, str | None]:
    """What went wrong in a host process, by what it looked at; None where it could not look."""
    if not hasattr(os, "fork"):
        pytest.skip("every combination needs a fork")
    return in_clean_process(look, tiny_suite_file)


@pytest.mark.slow
def test_whatever_precision_the_host_has_set_models_run_and_it_comes_back(wrong: dict[str, str | None]) -> None:
    """Torch's older and newer settings in every combination; mixing them makes torch's own readers raise."""
    assert wrong["precision"] == ""


@pytest.mark.slow
def test_a_library_call_leaves_the_memory_allocator_alone(wrong: dict[str, str | None]) -> None:
    if wrong["allocator"] is None:
        pytest.skip("a C library without mallinfo2")
    assert wrong["allocator"] == ""


def test_the_wheel_takes_one_name() -> None:
    """`app` and `pages` travel inside `featcal`: another project's `app` stays what `import app` finds."""
    wheel = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["packages"] == ["featcal"]
    assert all(place.startswith("featcal/_bundle/") for place in wheel["force-include"].values())
    assert (REPOSITORY / "featcal" / "py.typed").is_file()


@pytest.mark.slow
def test_an_installed_featcal_and_another_app_do_not_see_each_other(tmp_path: Path) -> None:
    import shutil

    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        pytest.skip("uv builds the wheel")
    built = subprocess.run([uv, "build", "--wheel", "--out-dir", tmp_path, REPOSITORY], capture_output=True, text=True)
    if built.returncode and "hatchling" in built.stderr:
        pytest.skip("the build backend is not to be had offline")
    assert built.returncode == 0, built.stderr
    site = tmp_path / "site"
    install = [uv, "pip", "install", "--quiet", "--no-deps", "--offline", "--target", site, *tmp_path.glob("*.whl")]
    subprocess.run(install, check=True, capture_output=True)
    assert {path.name for path in site.iterdir() if not path.name.endswith((".dist-info", ".lock"))} <= {
        "featcal",
        "bin",
    }
    theirs = tmp_path / "theirs" / "app"
    theirs.mkdir(parents=True)
    (theirs / "__init__.py").write_text("OWNER = 'another project'")
    paths = f"import sys; sys.path[:0] = [{str(site)!r}, {str(theirs.parent)!r}]\n"
    python("-c", f"{paths}import featcal, featcal.cli, app; assert app.OWNER == 'another project'", cwd=tmp_path)
    started = (
        "from importlib import import_module\n"
        "from featcal.server import launch; from featcal.system import resources\n"
        "root = resources.bundle_root()\n"
        f"assert str(root).startswith({str(site)!r}), root\n"
        "assert {'clip-mini', 't5-mini', 'lm-mini'} <= resources.embedded_suites().keys()\n"
        "from streamlit.web import cli\n"
        "cli.main = lambda *_, **__: 0\n"
        "launch._warm_up = lambda app: None\n"
        "launch.start_app(root / 'app' / 'main.py', 8501)\n"
        "for name in launch.FIRST_NEEDED: import_module(name)\n"
        "import app; assert not hasattr(app, 'OWNER') and app.__file__.startswith(str(root))\n"
    )
    python("-c", paths + started, cwd=tmp_path)


@pytest.mark.slow
def test_a_server_that_ends_tells_of_no_leaks() -> None:
    """What the app takes from the garbage collector for good goes back to it before libraries look at what is left."""
    code = (
        "import sys; from pathlib import Path; from streamlit.web import cli; from featcal.server import launch;"
        "cli.main = lambda *a, **k: launch.wait_until_warm();"
        "sys.exit(launch.start_app(Path(sys.argv[1]), 8501))"
    )
    command = [sys.executable, "-c", code, REPOSITORY / "app" / "main.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert "leak" not in done.stderr

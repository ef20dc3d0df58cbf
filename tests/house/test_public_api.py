"""What `import featcal` promises."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import featcal

ROOT = Path(__file__).resolve().parents[2]


def test_every_public_name_arrives_and_is_documented() -> None:
    assert {"Suite", "calibrate", "load_suite", "merge", "measure_drift"} <= set(featcal.__all__)
    assert set(featcal.__all__) <= set(dir(featcal))
    for name in featcal.__all__:
        thing = getattr(featcal, name)
        assert thing is getattr(import_module(featcal._HOMES[name]), name)
        assert inspect.getdoc(thing), name


def test_importing_loads_nothing_heavy() -> None:
    """No torch, no numpy, nothing of featcal's own, and in less than 0.1 s of the processor."""
    code = (
        "import json, sys, time\nstart = time.process_time()\nimport featcal\nspent = time.process_time() - start\n"
        "print(json.dumps([spent, [name for name in sys.modules if name.startswith('featcal.') or '.' not in name]]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    spent, modules = json.loads(done.stdout)
    assert not {"torch", "numpy", "pydantic", "transformers"} & set(modules)
    assert [name for name in modules if name.startswith("featcal.")] == []
    assert spent < 0.1


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'calibrat'"):
        featcal.calibrat  # noqa: B018


def test_version_is_the_packages() -> None:
    from importlib.metadata import version

    assert featcal.__version__ == version("featcal")

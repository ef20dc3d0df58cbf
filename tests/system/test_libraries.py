"""What is imported to stay is not looked through for garbage."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from featcal.system.libraries import collect_later


def test_the_collector_waits_for_imports_and_leaves_them_alone() -> None:
    before = gc.get_freeze_count()
    try:
        with collect_later():
            assert not gc.isenabled()
            kept = [[number] for number in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(kept)
        with pytest.raises(RuntimeError, match="on the way"), collect_later():
            raise RuntimeError("on the way")
        assert gc.isenabled()
    finally:
        gc.unfreeze()


@pytest.mark.slow
def test_a_command_has_its_libraries_frozen() -> None:
    code = (
        "import gc, sys; from featcal import cli\nsys.argv = ['featcal', 'drift', 'lm-mini', '--eval-samples', '2']\n"
        "try: cli.main()\nexcept SystemExit as end: assert not end.code\n"
        "assert gc.isenabled() and gc.get_freeze_count() > 100_000, gc.get_freeze_count()"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

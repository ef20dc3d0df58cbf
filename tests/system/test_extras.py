"""What is said of a package that is not there: one sentence with the command that installs it."""

from __future__ import annotations

import sys

import pytest

from featcal.system.extras import EXTRAS, MissingPackage, is_installed, require_packages


@pytest.mark.parametrize(("package", "extra"), EXTRAS.items())
def test_a_missing_package_is_named_with_its_extra(package: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert not is_installed(package)
    with pytest.raises(MissingPackage) as caught:
        require_packages("json", package, label="this")
    assert str(caught.value) == (f'this: {package} is not installed; install it with: pip install "featcal[{extra}]"')


def test_looking_for_a_package_does_not_import_it() -> None:
    name = "wave"
    sys.modules.pop(name, None)
    assert is_installed(name)
    require_packages(name)
    assert name not in sys.modules
    assert not is_installed("no_such_package")

"""What `import featcal` promises."""

from __future__ import annotations

import inspect

import pytest

import featcal


def test_every_public_name_arrives_and_is_documented() -> None:
    assert set(featcal.__all__) == set(featcal._HOME)
    for name in featcal.__all__:
        thing = getattr(featcal, name)
        assert inspect.getdoc(thing), name


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'calibrat'"):
        featcal.calibrat  # noqa: B018


def test_version_is_the_packages() -> None:
    from importlib.metadata import version

    assert featcal.__version__ == version("featcal")

"""Open suites for the app, and choose the starting options of a calibration."""

from __future__ import annotations

from contextlib import suppress
from weakref import WeakKeyDictionary

from app.first_page import HOME_SUITE, SAMPLES
from app.selection import OPTIONS
from featcal.calibration.calibrate import config_for
from featcal.calibration.config import idle_options, usable_recipes
from featcal.family.opening import open_family
from featcal.preflight.estimates import LIBRARIES
from featcal.server import lengths
from featcal.session.session import Session, open_session
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.schema import Suite
from featcal.system.errors import FeatcalError


def open_resident(suite: Suite | str) -> Session:
    """Open the session of a suite (an embedded name, a path, or a loaded suite) with every tensor in memory."""
    session = open_session(suite, resident=True)
    _prepared.clear()
    return session


def suite_bytes(suite: Suite) -> int:
    """Estimate the memory of a suite besides the libraries: every model as `open_resident` holds it, and a calibration
    with the suite's own options; from headers and the first samples.

    Raises:
        FeatcalError: the suite cannot be used.
    """
    session = Session(open_family(suite))
    return lengths.calibration_bytes(session, defaults(session), resident=True) - LIBRARIES


def prepare(reference: str = HOME_SUITE) -> None:
    """Open a suite in advance for the next `open_resident`, so that the first visitor does not wait; errors appear
    then."""
    with suppress(FeatcalError):
        _prepared.append(open_resident(reference))


_prepared: list[Session] = []
"""Sessions that `prepare` opened, held until the suite is opened."""


def defaults(session: Session, recipe: str | None = None, samples: int | None = None) -> CalibrationConfig:
    """Return the starting options of a calibration of a suite, by recipe and samples; the samples are as many as a
    slider can compute quickly."""
    known = _defaults.setdefault(session, {})
    if (recipe, samples) not in known:
        number = samples or session.family.suite.calibration.explicit_options().get("samples", SAMPLES)
        known[recipe, samples] = config_for(session.family, recipe=recipe, samples=number)
    return known[recipe, samples]


def recipes(session: Session) -> tuple[str, ...]:
    """Return the recipes that can be chosen for a suite."""
    return usable_recipes(session.family.adapter, session.family.is_base_known)


_defaults: WeakKeyDictionary[Session, dict[tuple[str | None, int | None], CalibrationConfig]] = WeakKeyDictionary()
"""Starting options by recipe and samples: a page asks for them some sixty times."""


def switches(session: Session) -> tuple[str, ...]:
    """Return the options of a calibration that are on or off and have an effect for the suite's architecture."""
    idle = idle_options(session.family.adapter)
    return tuple(name for name, one in OPTIONS.items() if one.kind is bool and name not in idle)

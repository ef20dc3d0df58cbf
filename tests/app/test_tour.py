"""The guided first visit: five steps that set the selection, none for who came by a link, gone when left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from app_pages import button, go, healthy, opened, shown_model
from streamlit.testing.v1 import AppTest

from app import selection, state, tour
from featcal.system.resources import bundle_root

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("instant_maps"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def newcomer(tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch) -> AppTest:
    """The app as it opens without a link, on the tiny suite."""
    home = replace(selection.HOME, suite=str(tiny_suite_file))
    monkeypatch.setattr(state, "from_query", lambda query: (home, []))
    return AppTest.from_file(str(bundle_root() / "app" / "main.py"), default_timeout=60).run()


def said(app: AppTest) -> list[str]:
    return [one.value for one in app.markdown if "First visit" in one.value]


def test_five_steps_lead_through_the_pages(newcomer: AppTest) -> None:
    for number, step in enumerate(tour.STEPS, 1):
        assert healthy(newcomer)
        assert [f"{number} of 5" in one and step.text in one for one in said(newcomer)] == [True]
        if number >= 3:
            assert shown_model(newcomer) == "λ 0.05 · ρ 2 · α 0.3 · n 64"
        if number < 5:
            button(newcomer, "Next").click().run()
    assert not [one for one in newcomer.button if one.label == "Next"]
    button(newcomer, "Done").click().run()
    assert not said(newcomer)
    newcomer = go(newcomer, "drift")
    assert not said(newcomer)
    # It takes no layer along: afterwards Drift still opens on the one that the verdict blames.
    assert newcomer.session_state["selection"].layer is None


def test_it_can_be_left_at_once(newcomer: AppTest) -> None:
    button(newcomer, "Skip").click().run()
    assert not said(newcomer)
    assert not said(go(newcomer, "drift"))


def test_its_words_are_of_the_suite_that_it_began_on(newcomer: AppTest) -> None:
    newcomer.session_state["selection"] = replace(newcomer.session_state["selection"], suite="t5-mini")
    assert not said(newcomer.run())


def test_who_comes_by_a_link_is_spared_it(tiny_suite_file: Path) -> None:
    assert not said(opened(tiny_suite_file, "verdict"))

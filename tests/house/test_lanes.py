"""How rows of tables are shared among the lanes of the tests."""

from __future__ import annotations

import lanes
import pytest
import turns

ROWS = [f"row {number}" for number in range(40)]


def marks(state: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the mark of every row on a commit; the first row is quick, the last one nightly."""
    monkeypatch.setattr(turns, "commit", lambda: state)
    found = lanes.rows(ROWS, quick=ROWS[:1], slow=ROWS[1:-1])
    return {one.values[0]: next((mark.name for mark in one.marks), "quick") for one in found}


def test_every_slow_row_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "NIGHTLY", False)
    commits = [marks(str(state), monkeypatch) for state in range(40)]
    assert {one[ROWS[0]] for one in commits} == {"quick"}
    assert {one[ROWS[-1]] for one in commits} == {"nightly"}
    drawn = [[row for row in ROWS if one[row] == "slow"] for one in commits]
    assert {row for rows in drawn for row in rows} == {*ROWS[1:-1]}
    assert sum(map(len, drawn)) / len(drawn) == pytest.approx(38 / lanes.SHARE, rel=0.15)


def test_a_night_has_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "NIGHTLY", True)
    assert {*marks("any", monkeypatch).values()} == {"quick", "slow", "nightly"}
    assert [row for row, mark in marks("any", monkeypatch).items() if mark == "slow"] == ROWS[1:-1]


def test_rows_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="no rows: row 99"):
        lanes.rows(ROWS, quick=["row 99"])

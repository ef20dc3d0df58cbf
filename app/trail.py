"""Remember what a visitor has tried: options to go back and forth on, and the models they gave. No streamlit here."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from featcal.suite.calibration_options import CalibrationConfig

MOST_STEPS = 100
RECENT = 5
"""Models that are offered to go back to, the last ones; the reference and the best beside them."""


@dataclass
class Trail:
    """The options of one merge in the order in which they were chosen, and where on it the visitor stands."""

    _steps: list[CalibrationConfig] = field(default_factory=list)
    _at: int = -1
    _scores: dict[tuple[Hashable, CalibrationConfig], str] = field(default_factory=dict)

    def visit(self, config: CalibrationConfig) -> None:
        """Go on with other options; what was undone before is forgotten then."""
        if not self._steps or self._steps[self._at] != config:
            self._steps = [*self._steps[: self._at + 1], config][-MOST_STEPS:]
            self._at = len(self._steps) - 1

    def find_step(self, by: int) -> CalibrationConfig | None:
        """Return the options so many steps from here, back below 0; None where there are none."""
        place = self._at + by
        return self._steps[place] if 0 <= place < len(self._steps) else None

    def move(self, by: int) -> None:
        """Stand so many steps from here; nothing where that is off the trail."""
        if self.find_step(by) is not None:
            self._at += by

    def note(self, on: Hashable, config: CalibrationConfig, score: str) -> None:
        """Remember what a model reached on some samples; one that is known keeps its place."""
        self._scores[on, config] = score

    def recent(self, on: Hashable, reference: CalibrationConfig) -> dict[CalibrationConfig, str]:
        """Return the last `RECENT` models on these samples, the newest last, with what they reached; before them the
        reference and the best, where they are older.

        Args:
            reference: the options that others are held against, the defaults.
        """
        here = {config: score for (where, config), score in self._scores.items() if where == on}
        pinned = {one for one in (reference, self.best(on)) if one in here}
        last = [*here][-RECENT:]
        return {config: here[config] for config in here if config in pinned or config in last}

    def best(self, on: Hashable) -> CalibrationConfig | None:
        """Return the first of the options that reached most on these samples; None where none was tried."""
        here = {config: float(score) for (where, config), score in self._scores.items() if where == on}
        return max(here, key=here.__getitem__, default=None)

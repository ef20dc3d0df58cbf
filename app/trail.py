"""Remember a visitor's trials: options for undo and redo, and the results of the models. This module does not use
streamlit."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from featcal.suite.calibration_options import CalibrationConfig

MOST_STEPS = 100
RECENT = 5
"""Number of recent models offered, besides the reference and the best."""


@dataclass
class Trail:
    """The options of one merge in the order in which they were chosen, and the visitor's position among them."""

    _steps: list[CalibrationConfig] = field(default_factory=list)
    _at: int = -1
    _scores: dict[tuple[Hashable, CalibrationConfig], str] = field(default_factory=dict)

    def visit(self, config: CalibrationConfig) -> None:
        """Add other options at the current position; undone ones are forgotten."""
        if not self._steps or self._steps[self._at] != config:
            self._steps = [*self._steps[: self._at + 1], config][-MOST_STEPS:]
            self._at = len(self._steps) - 1

    def find_step(self, by: int) -> CalibrationConfig | None:
        """Return the options so many steps away, backwards if negative; None if there are none."""
        place = self._at + by
        return self._steps[place] if 0 <= place < len(self._steps) else None

    def move(self, by: int) -> None:
        """Move by so many steps; do nothing if that is beyond the ends."""
        if self.find_step(by) is not None:
            self._at += by

    def note(self, on: Hashable, config: CalibrationConfig, score: str) -> None:
        """Remember the result of a model on some samples; a known one keeps its place."""
        self._scores[on, config] = score

    def recent(self, on: Hashable, reference: CalibrationConfig) -> dict[CalibrationConfig, str]:
        """Return the last `RECENT` models on these samples with their results, newest last; before them the reference
        and the best, if they are older.

        Args:
            reference: the options for comparison, the defaults.
        """
        here = {config: score for (where, config), score in self._scores.items() if where == on}
        pinned = {one for one in (reference, self.best(on)) if one in here}
        last = [*here][-RECENT:]
        return {config: here[config] for config in here if config in pinned or config in last}

    def best(self, on: Hashable) -> CalibrationConfig | None:
        """Return the first of the options with the best result on these samples; None if there are none."""
        here = {config: float(score) for (where, config), score in self._scores.items() if where == on}
        return max(here, key=here.__getitem__, default=None)

"""Return the command and the Python code that give the numbers of a chart.

All charts and tables come from a few measurements. `ChartSource` identifies the measurement, its samples and its
models; the command prints a JSON document, and `Kind.where` is the place of the numbers in it.
"""

from featcal.figures.commands.lines import command_lines, python_lines
from featcal.figures.commands.measurement import KINDS, ChartSource

__all__ = ["KINDS", "ChartSource", "command_lines", "python_lines"]

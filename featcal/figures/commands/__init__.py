"""Say which command and which lines of Python give the numbers of a chart.

Charts and tables are made of a few measurements. Which one, on which samples and of which models is one small value,
`ChartSource`; the command prints a JSON document with the numbers in it, `Kind.where` says at which place.
"""

from featcal.figures.commands.lines import command_lines, python_lines
from featcal.figures.commands.measurement import KINDS, ChartSource

__all__ = ["KINDS", "ChartSource", "command_lines", "python_lines"]

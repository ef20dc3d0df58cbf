"""`python -m featcal`."""

from featcal.cli import main

main()

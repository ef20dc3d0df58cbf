"""`featcal` whose pages give every calibration to a job, however little it takes: `python app_of_jobs.py app`."""

from featcal.cli import main
from featcal.jobs import lengths

if __name__ == "__main__":
    lengths.LONG = lengths.START = 0.0
    main()

"""`featcal` whose pages give every calibration to a job, however little it takes, and measure some samples slowly:
`python app_of_jobs.py app`."""

SLOW = 32
"""Samples per task whose first measurement has time to be stopped."""

if __name__ == "__main__":
    from featcal.cli import main
    from featcal.server import launch

    launch.FIRST_NEEDED = (*launch.FIRST_NEEDED, "app_of_jobs")  # when torch is there: the server is to come up before
    main()
elif __name__ == "app_of_jobs":  # as that program imports it; what collects tests gives it another name
    import time
    from typing import Any

    from featcal.server import lengths
    from featcal.session.measurements import Measurements
    from featcal.suite.views import DriftOptions

    lengths.LONG = lengths.LONG_IF_SMALL = 0.0
    seconds, drift = [6.0], Measurements.drift

    def drift_slowly(self: Measurements, model: Any, options: DriftOptions, *others: Any) -> Any:
        """Measure as ever, after some idle seconds the first time."""
        if options.samples == SLOW and seconds:
            time.sleep(seconds.pop())
        return drift(self, model, options, *others)

    Measurements.drift = drift_slowly

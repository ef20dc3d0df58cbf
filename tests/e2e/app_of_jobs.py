"""`featcal` whose pages give every calibration to a job, however little it takes: `python app_of_jobs.py app`."""

if __name__ == "__main__":
    from featcal.cli import main
    from featcal.server import launch

    launch.FIRST_NEEDED = (*launch.FIRST_NEEDED, "app_of_jobs")  # when torch is there: the server is to come up before
    main()
elif __name__ == "app_of_jobs":  # as that program imports it; what collects tests gives it another name
    from featcal.server import lengths

    lengths.LONG = lengths.LONG_IF_SMALL = 0.0

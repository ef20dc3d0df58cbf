"""The ways featcal says no. All end a command with one clear message and exit status 1."""


class FeatcalError(Exception):
    """Base of every error that featcal raises on purpose; the message says what, where and what to do."""


class InputError(FeatcalError):
    """What was handed in is wrong: a suite file, a checkpoint, samples, an option or an output folder.

    `problems` lists what is wrong one by one; the message has all of them.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        several = "\n".join([f"{len(problems)} problems:", *(f"  {problem}" for problem in problems)])
        super().__init__(problems[0] if len(problems) == 1 else several)


class NoScores(InputError):
    """A suite whose models cannot be scored, for want of labels, answers, class names or what makes a head of them.
    What needs no scores can be had of it."""


class NumericalError(FeatcalError):
    """A computation did not give finite, trustworthy numbers; nothing is substituted for them."""

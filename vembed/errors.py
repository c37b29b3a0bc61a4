"""How a run ends other than well: a user's mistake, a run that cannot go on, a run that was asked to stop."""


class UserError(Exception):
    """A mistake in the config, the data or the environment: the values involved and the way out. Exit code 2."""


class RunError(Exception):
    """A run that cannot go on (out of memory, numbers that are none, a full disk), with what to change. Exit code 1."""


class Stopped(Exception):  # noqa: N818 - not an error: the run was asked to stop, and has saved
    """A run that a signal or its time limit stopped after a checkpoint was saved. Exit code 128 + signal."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """What the process exits with."""
        return 128 + self.signum if self.signum else 0

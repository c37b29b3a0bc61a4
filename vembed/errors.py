"""Exceptions that end a run: user errors, run errors and requested stops."""


class UserError(Exception):
    """An error in the config, the data or the environment. The message gives the values and what to do. Exit code 2."""


class RunError(Exception):
    """A run that cannot continue (out of memory, non-finite values, full disk), with advice. Exit code 1."""


class Stopped(Exception):  # noqa: N818 - not an error: the run was asked to stop, and has saved
    """A stop by a signal or the time limit, after a checkpoint was saved. Exit code 128 + signal, or 0."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """Exit code of the process."""
        return 128 + self.signum if self.signum else 0

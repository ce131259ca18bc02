"""What can stop a run, each with the exit code that the command line returns for it."""


class SaccadeError(Exception):
    """A problem that a user can fix: the message says what, where, and what would work."""

    exit_code = 1
    request: str | None = None  # key of the only request that an engine could not serve


class ConfigError(SaccadeError, ValueError):
    """The configuration cannot run."""

    exit_code = 2


class DataError(SaccadeError, ValueError):
    """The data cannot be read, or too much of it is bad."""

    exit_code = 2


class SelfTestError(SaccadeError):
    """A reward gives the wrong score to answers that are known."""

    exit_code = 2


class EnvironmentProblem(SaccadeError):
    """A package, a device or a model folder is missing or does not fit, or a place to write."""

    exit_code = 3


class RankLost(EnvironmentProblem):
    """One of the processes that share a run has ended or hangs; so have all."""


class MicroBatchTooLarge(EnvironmentProblem):
    """One of several GPUs has no room for a micro-batch; smaller ones may fit."""


class RewardError(SaccadeError):
    """Too many rewards failed."""

    exit_code = 4


class TrainingError(SaccadeError):
    """The run is non-finite or stalled; or the log-probs of who only answers are not finite."""

    exit_code = 5


class Interrupted(SaccadeError):
    """SIGTERM or Ctrl-C, after a clean save."""

    exit_code = 130

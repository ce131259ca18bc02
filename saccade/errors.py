"""The exceptions that stop a run, each with the exit code of the command line."""


class SaccadeError(Exception):
    """A problem that a user can fix: the message says what, where, and what would work."""

    exit_code = 1
    request: str | None = None  # key of the request that an engine could not serve, if it was only one


class ConfigError(SaccadeError, ValueError):
    """The configuration cannot run."""

    exit_code = 2


class DataError(SaccadeError, ValueError):
    """The data cannot be read, or too much of it is bad."""

    exit_code = 2


class SelfTestError(SaccadeError):
    """A reward scores known answers wrongly."""

    exit_code = 2


class EnvironmentProblem(SaccadeError):
    """A package, a device, a model folder or a place to write to is missing or unsuitable."""

    exit_code = 3


class RankLost(EnvironmentProblem):
    """A rank of a run on several GPUs died or hangs, and the other ranks were stopped."""


class MicroBatchTooLarge(EnvironmentProblem):
    """A micro-batch does not fit on one of several GPUs; a smaller one may."""


class RewardError(SaccadeError):
    """Too many rewards failed."""

    exit_code = 4


class TrainingError(SaccadeError):
    """Training is non-finite or stalled, or an engine without a trainer returned non-finite log-probs."""

    exit_code = 5


class Interrupted(SaccadeError):
    """The run was stopped by a signal (SIGTERM, Ctrl-C, SIGHUP), after a checkpoint was saved."""

    exit_code = 130

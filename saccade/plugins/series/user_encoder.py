"""An encoder of time series that a user wrote, `file.py:function`: loaded, called, tried once.

What goes wrong in their code is a ConfigError with the file, the line and what was raised.

    module = load("own.py:make", channels=8, hidden=1536)
    try_out("own.py:make", module, values, [module.tokens(8, 2500), 1536])
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saccade.errors import ConfigError, SaccadeError
from saccade.user_code import own_module

CLOSE = 1e-4  # of the largest number: two forwards may differ by rounding


def load(encoder: str, *, channels: int, hidden: int) -> nn.Module:
    path, _, name = encoder.rpartition(":")
    if not (path.endswith(".py") and Path(path).is_file()):
        raise ConfigError(
            f"model.series.encoder={encoder}: the file {path} does not exist (looked in {Path.cwd()}), or is no .py"
        )
    with blamed(encoder, "loading the file"):
        file = own_module(path)
    make = getattr(file, name, None)
    if not callable(make):
        known = [n for n, f in vars(file).items() if inspect.isfunction(f)]
        raise ConfigError(
            f"model.series.encoder={encoder}: no function {name!r} in {path}; there is {', '.join(known) or 'none'}"
        )
    with blamed(encoder, f"{name}({channels}, {hidden})", make):
        made = make(channels, hidden)
    if not isinstance(made, nn.Module) or not callable(getattr(made, "tokens", None)):
        raise ConfigError(
            f"model.series.encoder={encoder}: gives {type(made).__name__}; it needs a "
            "torch.nn.Module with forward(values) and tokens(channels, samples)"
        )
    if next(made.parameters(), None) is None:
        raise ConfigError(
            f"model.series.encoder={encoder}: the module has no parameters, so nothing could learn "
            "to read a series; give it at least a torch.nn.Linear to the size of the model"
        )
    return made


@contextmanager
def blamed(encoder: str, doing: str, function: Any = None) -> Iterator[None]:
    """What the user's file raises inside says where; `function` is named where it was not entered,
    as by a wrong number of arguments.
    """
    try:
        yield
    except (SaccadeError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        path = Path(encoder.rpartition(":")[0]).resolve()
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path]
        if isinstance(error, SyntaxError):
            lines.append(error.lineno)
        if not lines and inspect.isroutine(function):
            lines.append(inspect.unwrap(function).__code__.co_firstlineno)
        where = f" (line {lines[-1]} of {path.name})" if lines else ""
        raise ConfigError(
            f"model.series.encoder={encoder}: {doing} raises {type(error).__name__}: {error}{where}"
        ) from error


def count_tokens(encoder: str, module: Any, channels: int, samples: int) -> int:
    with blamed(encoder, f"tokens({channels}, {samples})", module.tokens):
        return int(module.tokens(channels, samples))


def forward(encoder: str, module: nn.Module, values: Tensor, shape: Sequence[int]) -> Tensor:
    """One series, as many tokens as were promised."""
    with blamed(encoder, f"forward of {list(values.shape)}", module.forward):
        made = module(values)
    found = list(made.shape) if isinstance(made, Tensor) else f"a {type(made).__name__}"
    if found != list(shape):
        raise ConfigError(
            f"model.series.encoder={encoder}: forward gave {found}, and by its tokens() it is {list(shape)}"
        )
    return made


def try_out(encoder: str, module: nn.Module, values: Tensor, shape: Sequence[int]) -> None:
    """Before anything is trained: one series of the data, twice, as training computes it."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        first, second = (forward(encoder, module.train(), values, shape) for _ in range(2))
    if not first.isfinite().all():
        raise ConfigError(
            f"model.series.encoder={encoder}: forward gives numbers that are not finite, of a "
            f"series {list(values.shape)} that is"
        )
    if (first - second).abs().max() > CLOSE * max(1e-6, float(first.abs().max())):
        raise ConfigError(
            f"model.series.encoder={encoder}: two forwards of the same series differ; remove "
            "dropout and noise, and leave its input as it is"
        )

"""The user's encoder of time series, `file.py:function`: loads it, calls it, and tests it once.

Exceptions in the user's code become a ConfigError with the file, the line and the exception.

    module = load("own.py:make", channels=8, hidden=1536)
    counter("own.py:make", channels=8, hidden=1536)(media)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from saccade.errors import ConfigError, SaccadeError
from saccade.media.image_files import ImageError
from saccade.media.pixel_cache import DECODED
from saccade.types import Media
from saccade.user_code import raised_at, user_symbol

CLOSE = 1e-4  # tolerance for rounding, relative to the largest output: two forwards must agree


def load(encoder: str, *, channels: int, hidden: int) -> nn.Module:
    make = user_symbol(encoder, f"model.series.encoder={encoder}")
    with blamed(encoder, f"{encoder.rpartition(':')[2]}({channels}, {hidden})"):
        made = make(channels, hidden)
    if not isinstance(made, nn.Module) or not callable(getattr(made, "tokens", None)):
        needs = "it needs a torch.nn.Module with forward(values) and tokens(channels, samples)"
        raise _refusal(encoder, f"gives {type(made).__name__}; {needs}")
    if next(made.parameters(), None) is None:
        raise _refusal(encoder, "the module has no parameters that could learn to read a series; give it a Linear")
    return made


def _refusal(encoder: str, why: str) -> ConfigError:
    return ConfigError(f"model.series.encoder={encoder}: {why}")


@contextmanager
def blamed(encoder: str, doing: str) -> Iterator[None]:
    """Context manager that turns exceptions of the user's file into a ConfigError with their location."""
    try:
        yield
    except (SaccadeError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise _refusal(encoder, f"{doing} raises {raised_at(error, encoder.rpartition(':')[0])}") from error


def counter(encoder: str, *, channels: int, hidden: int) -> Callable[[Media], int]:
    """A function that returns the number of tokens of a series; the first series also tests the module."""
    module: Any = load(encoder, channels=channels, hidden=hidden)
    untried = True

    def count(media: Media) -> int:
        nonlocal untried
        with blamed(encoder, f"tokens({channels}, {media.width})"):
            tokens = int(module.tokens(channels, media.width))
        if tokens < 1:
            what = f"{media.width} samples are {tokens} tokens of {encoder}"
            raise ImageError(f"{media.path or 'series'}: {what}; give more samples")
        if untried:
            values = torch.tensor(DECODED.get(media))  # a copy: the module may write to it
            _try_out(encoder, module, values, [tokens, hidden])
            untried = False
        return tokens

    return count


def forward(encoder: str, module: nn.Module, values: Tensor, shape: Sequence[int]) -> Tensor:
    """Encode one series; raises if the output has another shape than `shape`, [tokens, hidden]."""
    with blamed(encoder, f"forward of {list(values.shape)}"):
        made = module(values)
    found = list(made.shape) if isinstance(made, Tensor) else f"a {type(made).__name__}"
    if found != list(shape):
        raise _refusal(encoder, f"forward gave {found}, and by its tokens() it is {list(shape)}")
    return made


def _try_out(encoder: str, module: nn.Module, values: Tensor, shape: Sequence[int]) -> None:
    """Check, before training, that two forwards of a series in training mode are finite and agree."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        first, second = (forward(encoder, module.train(), values, shape) for _ in range(2))
    if not first.isfinite().all():
        raise _refusal(encoder, f"forward gives numbers that are not finite, of a series {list(values.shape)} that is")
    if (first - second).abs().max() > CLOSE * max(1e-6, float(first.abs().max())):
        helps = "remove dropout and noise, and leave its input as it is"
        raise _refusal(encoder, f"two forwards of the same series differ; {helps}")

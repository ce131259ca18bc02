"""An encoder of time series for a model of any family. It is off unless a config names one or a model
folder holds one.

It is a separate tower, `series`. In a prompt a series is a run of one placeholder id, whose
embeddings are replaced by the encoder's output; position ids count its tokens like text. The id
exists in the model, but no text maps to it: an embedding row past the tokenizer's vocabulary (most
models have some), else an unused special token. So the vocabulary and its ids do not change, and the
id is banned from sampling. The weights are in a separate file in the model's folder, with the
settings in its header; code that does not know this file loads the model as before.

The user's module, `file.py:function`, is returned by `function(channels, hidden)` and has

    forward(values [channels, samples]) -> [tokens, hidden]
    tokens(channels, samples) -> int                            # number of tokens that forward returns

It runs in float32, one series at a time, and must compute the same in training and in evaluation.

    family = plugged(load_family(folder), SeriesConfig(encoder="patches"))
    model = load_model(family, dtype=dtype, device=device)      # model.series: the encoder
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import gcd, log
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from saccade.config import SeriesConfig
from saccade.errors import ConfigError
from saccade.media.images import ImageError
from saccade.media.pixel_cache import DECODED
from saccade.models.families import Family
from saccade.models.files import SERIES_FILE, require_same
from saccade.plugins.families.hearing import apart, joined
from saccade.plugins.series import user_encoder
from saccade.system.contents import File, on_host, tensor_file
from saccade.types import Media, MediaSpan

KIND = "series"  # kind of media; also the name of the tower, and of its module in the model
BUILT_IN = "patches"
SPARE = re.compile("reserved|unused|extra|place.?holder", re.IGNORECASE)
FARTHEST = 10.0  # normalised values are clamped to ± this
GRID = (0, 0, 0)  # of a media span: there are no image patches


# -- the family ------------------------------------------------------------------------------------


def plugged(family: Family, given: SeriesConfig) -> Family:
    """The family with an encoder, if the config names one or the family's folder holds one."""
    settings = _settings(Path(family.path), given)
    if settings is None:
        return family
    token = _token(family, settings)
    banned = family.banned.copy()
    banned[token] = True
    count = _counter(family, settings)

    def measure(media: Media) -> tuple[tuple[int, int, int], int]:
        if media.height != settings.channels:
            hint = "; is it transposed, [samples, leads]?" if media.width == settings.channels else ""
            what = f"{media.height} leads, model.series.channels is {settings.channels}"
            raise ImageError(f"{media.path or 'series'}: {what}{hint}")
        return GRID, count(media)

    def host_media(spans: Sequence[MediaSpan]) -> Mapping[str, Any]:
        values = DECODED.get_all([span.media for span in spans])
        whole = torch.from_numpy(np.concatenate(values, axis=1))
        return {"values": whole, "samples": [v.shape[1] for v in values], "tokens": [span.length for span in spans]}

    own: Any = family.chat

    def ids_of(media: Media) -> np.ndarray:
        return np.full(count(media), token) if media.kind == KIND else own.ids_of(media)

    def expand(text: str, media: Sequence[Media]) -> str:
        return own.expand(text, [one for one in media if one.kind != KIND])

    def embed(model: Any, ids: Tensor, places: Tensor, features: Tensor) -> dict[str, Any]:
        """Embeddings of media positions. family.embed keeps the word embedding of ids that it does not know."""
        options = family.embed(model, ids, places, features)  # type: ignore[misc]
        rows = options["inputs_embeds"].squeeze(0)
        first = features[:, : rows.shape[1]].to(rows.dtype)
        found = torch.where((ids[places] == token)[:, None], first, rows[places])
        return options | {"inputs_embeds": rows.index_copy(0, places, found)[None]}

    tower = {
        "measure": measure,
        "cache": lambda media: DECODED,
        "media": host_media,
        "features": lambda model, media: model.series(**media),
    }
    return replace(
        family,
        series=settings,
        spec=replace(family.spec, towers={KIND: (f"{KIND}.",), **family.spec.towers}),
        chat=replace(
            own,
            placeholders={**own.placeholders, KIND: token},
            expand=own.expand and expand,
            ids_of=own.ids_of and ids_of,
        ),
        embed=family.embed and embed,
        banned=banned,
        positions=lambda ids, media: family.positions(ids, tuple(apart(media, KIND)[0])),
        **joined({name: getattr(family, name) for name in tower}, KIND, tower),
    )


def _counter(family: Family, settings: SeriesConfig) -> Callable[[Media], int]:
    """A function that returns the number of tokens of a series."""
    if settings.encoder == BUILT_IN:
        return lambda media: -(-media.width // settings.patch)
    from transformers import AutoConfig

    hidden = int(AutoConfig.from_pretrained(family.path).get_text_config().hidden_size)
    return user_encoder.counter(str(settings.encoder), channels=settings.channels, hidden=hidden)


def _settings(folder: Path, given: SeriesConfig) -> SeriesConfig | None:
    """Settings of the encoder in the folder, which must agree with the config; else those of the config, or None."""
    path = folder / SERIES_FILE
    if not path.is_file():
        return None if given.encoder is None else given
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        stored = SeriesConfig(**json.loads((file.metadata() or {}).get(KIND, "{}")))
    for name in sorted(given.model_fields_set):
        mine, theirs = getattr(given, name), getattr(stored, name)
        own = name == "encoder" and BUILT_IN not in (mine, theirs)  # a user's file may have moved
        if mine is not None and mine != theirs and not own:
            hint = "remove the option, or begin with a model.path without an encoder"
            raise ConfigError(f"model.series.{name}={mine}: the encoder in {folder} has {theirs}; {hint}")
    if stored.encoder == BUILT_IN:
        return stored
    if given.encoder is None:  # user code runs only if the config names it, not because a model folder does
        hint = f"say where it is, such as model.series.encoder={stored.encoder}"
        raise ConfigError(f"model.series.encoder: {folder} holds the weights of a user's module; {hint}")
    return stored.model_copy(update={"encoder": given.encoder})


def fingerprint(settings: SeriesConfig) -> bytes:
    """Bytes that identify everything that the number of tokens depends on: settings and the user's file."""
    file = Path(str(settings.encoder).rpartition(":")[0])
    return settings.model_dump_json().encode() + (file.read_bytes() if file.is_file() else b"")


def _token(family: Family, settings: SeriesConfig) -> int:
    chat, last = family.chat, family.vocabulary - 1
    vocabulary = chat.tokenizer.get_vocab()
    taken = {*chat.placeholders.values(), *chat.eos_ids}
    free = [t for t in chat.reserved if vocabulary[t] not in taken and t not in chat.template]
    if settings.token is None and last > max(vocabulary.values()):
        return last
    fitting: Iterable[str] = filter(SPARE.search, free) if settings.token is None else {settings.token} & set(free)
    if (name := next(iter(fitting), None)) is None:
        why = f"{settings.token} cannot" if settings.token else "no id is spare: no special token can"
        other = free[0] if free else "TOKEN, a special one that you add to the tokenizer"
        what = f"{why} stand for a series in {family.path}"
        raise ConfigError(f"model.series.token: {what}; try model.series.token={other}")
    return vocabulary[name]


# -- the module ------------------------------------------------------------------------------------


class Patches(nn.Module):
    """One token per patch of P samples of all leads: linear, position embedding, transformer, linear."""

    def __init__(self, settings: SeriesConfig, *, hidden: int, spread: float) -> None:
        """`spread`: standard deviation of the initial output, about that of the model's embeddings."""
        super().__init__()
        width, self.patch = settings.width, settings.patch
        self.first = nn.Linear(settings.channels * settings.patch, width)
        # With relu or gelu, torch would use another code path (with other rounding) when there are no gradients.
        options: dict[str, Any] = {"activation": functional.silu, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, gcd(width, 4), 4 * width, dropout=0.0, **options)
            for _ in range(settings.layers)
        )
        self.norm, self.last = nn.LayerNorm(width), nn.Linear(width, hidden)
        nn.init.normal_(self.last.weight, std=spread / width**0.5)
        nn.init.zeros_(self.last.bias)

    def forward(self, values: Tensor) -> Tensor:
        """[C, T] of one series, or [N, C, T] of several → [tokens, hidden] or [N, tokens, hidden]."""
        padded = functional.pad(normalised(values), (0, -values.shape[-1] % self.patch))
        cut = padded.unflatten(-1, (-1, self.patch)).transpose(-3, -2).flatten(-2)  # […, C·P]
        hidden = self.first(cut)
        hidden = hidden + places(hidden)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.last(self.norm(hidden))


def normalised(values: Tensor) -> Tensor:
    """[…, C, T] → each lead minus its median, divided by its interquartile range / 1.349, or if that is 0
    (a constant lead with rare spikes) by its standard deviation.
    """
    quarters = torch.arange(1, 4, device=values.device, dtype=values.dtype) / 4
    low, middle, high = values.quantile(quarters, dim=-1, keepdim=True)
    usual, deviation = (high - low) / 1.349, values.std(dim=-1, keepdim=True, correction=0)
    usual = torch.where(usual > 0, usual, deviation)
    usual = torch.where(usual > 0, usual, torch.ones_like(usual))
    return ((values - middle) / usual).clamp(-FARTHEST, FARTHEST)


def places(like: Tensor) -> Tensor:
    """Sinusoidal position embeddings [tokens, width], for any number of tokens."""
    tokens, width = like.shape[-2:]
    steps = torch.exp(torch.arange(width // 2, device=like.device) * (-2 * log(1e4) / width))
    angles = torch.arange(tokens, device=like.device)[:, None] * steps
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(like.dtype)


class Encoder(nn.Module):
    """Runs the inner module, ours or the user's, on all series of a forward; checks the number of tokens."""

    def __init__(self, settings: SeriesConfig, text_config: Any) -> None:
        super().__init__()
        self.settings, self.hidden = settings, int(text_config.hidden_size)
        spread = float(getattr(text_config, "initializer_range", 0.02))
        if settings.encoder == BUILT_IN:
            self.inner: nn.Module = Patches(settings, hidden=self.hidden, spread=spread)
        else:
            self.inner = user_encoder.load(str(settings.encoder), channels=settings.channels, hidden=self.hidden)

    def forward(self, values: Tensor, samples: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """values [C, samples of all] → [tokens of all, hidden]."""
        values = values.to(next(self.parameters()).dtype)
        cut = values.split(list(samples), dim=1)
        if isinstance(self.inner, Patches) and len(set(samples)) == 1:
            return self.inner(torch.stack(cut)).flatten(0, 1)
        if isinstance(self.inner, Patches):
            return torch.cat([self.inner(one) for one in cut])
        run = partial(user_encoder.forward, str(self.settings.encoder), self.inner)
        return torch.cat([run(one, [count, self.hidden]) for one, count in zip(cut, tokens, strict=True)])


def attach(model: Any, family: Family, *, seed: int) -> None:
    """Attach the encoder of the family's folder, or a randomly initialised one. It is float32 even with a
    bf16 model: it is small, and small differences between samples matter.
    """
    assert family.series is not None
    like, text_config = next(model.parameters()), model.config.get_text_config()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = Encoder(family.series, text_config)
    path = Path(family.path) / SERIES_FILE
    if path.is_file():
        from safetensors.torch import load_file

        stored, hint = load_file(path), f"the encoder is {family.series.encoder}"
        require_same(str(path), encoder.state_dict().items(), stored.items(), hint)
        encoder.load_state_dict(stored)
    wide = torch.promote_types(like.dtype, torch.float32)
    model.series = encoder.to(like.device, wide).train()


@contextmanager
def without_series(model: Any) -> Iterator[Encoder | None]:
    """Context manager that detaches the encoder from the model and yields it (None if there is none)."""
    encoder = getattr(model, KIND, None)
    if not isinstance(encoder, Encoder):
        yield None
        return
    del model.series
    try:
        yield encoder
    finally:
        model.series = encoder


def file(encoder: Encoder, *, copy: bool = False) -> File:
    tensors = {name: on_host(t, copy=copy) for name, t in encoder.state_dict().items()}
    settings = {KIND: encoder.settings.model_dump_json()}  # a single entry: the order of several is not fixed
    return SERIES_FILE, tensor_file(tensors, settings)

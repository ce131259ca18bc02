"""What `saccade estimate` plans with: a model without its weights, and forests as large as those
that a config will train on.

    model = empty_model(config, family)
    skeleton = build_skeleton(config.model.lora, family, model, element=2, train="full")
    step = make_step(config, algorithm, family, prompts)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from saccade import flops, shapes
from saccade.algorithms.algorithm import Algorithm
from saccade.config import ADAPTED, Config, LoraConfig
from saccade.data.overlong import SHRINK_STEP
from saccade.data.sources import parse_address
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.flops import Training
from saccade.footprint import patches
from saccade.forest.packing import pack
from saccade.models import lora
from saccade.models.families import Family
from saccade.models.load import freeze
from saccade.models.series import Encoder
from saccade.recipes import questions
from saccade.shapes import Shape
from saccade.types import (
    Batch,
    Group,
    Media,
    MediaSpan,
    Message,
    Rendered,
    Sample,
    Source,
    Trajectory,
)

ROWS = 64  # of the data that are looked at
GOLDEN = 0.6180339887  # multiples of it, without their whole part, spread evenly
MICRO_BATCHES = 4  # of which the rest of a step is a multiple
MEMBERS = 128  # of a group, and more only to fill these; the rest are a multiple, too


# -- the model -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """Numbers of a model that trains."""

    shape: Shape
    training: Training
    weights: float  # bytes
    trained: int
    largest: int  # trained tensor
    head_tied: bool
    head_trained: bool


def described(config: Config, family: Family) -> tuple[Any, Shape | None]:
    """The folder's config, and its shape if its memory can be told from that: what a tower that
    hears keeps is not known.
    """
    from transformers import AutoConfig

    settings = AutoConfig.from_pretrained(
        family.path, trust_remote_code=config.model.trust_remote_code
    )
    shape = shapes.shape_of(settings)
    return settings, None if shape is not None and shape.audio is not None else shape


def empty_model(config: Config, family: Family) -> Any:
    """From the folder's config alone: modules without memory for their weights."""
    import torch
    import transformers

    settings, shape = described(config, family)
    if shape is None:
        raise EnvironmentProblem(
            f"{family.path}: the memory of a {family.name} is not known, so nothing can be "
            f"estimated; known are {', '.join(shapes.KNOWN)} and vision models over them, but "
            "none that hears"
        )
    with torch.device("meta"):
        model = getattr(transformers, family.spec.auto_class).from_config(settings)
        if family.series is not None:
            model.series = Encoder(family.series, settings.get_text_config())
    return model


def build_skeleton(
    settings: LoraConfig, family: Family, model: Any, element: int, train: str
) -> Skeleton:
    """Of an empty model that trains as `train` says."""
    shape = shapes.shape_of(model.config)
    assert shape is not None, "models of unknown shapes are refused"
    model.requires_grad_(True)
    weights = sum(parameter.numel() for parameter in model.parameters())
    trained = _trained(model, family, settings, train)
    packed = _linear(model, family) if train == "qlora" else 0
    weights += sum(trained.values()) if train in ADAPTED else 0
    head = model.get_output_embeddings().weight
    return Skeleton(
        shape=shape,
        training=flops.training_of(trained, flops.matrices_of(model), family.tower_of),
        weights=element * (weights - packed) + flops.NF4 * packed,
        trained=sum(trained.values()),
        largest=max(trained.values()),
        head_tied=head is model.get_input_embeddings().weight,
        head_trained=head.requires_grad and train not in ADAPTED,
    )


def _linear(model: Any, family: Family) -> int:
    """Weights that `lora.four_bit` packs: experts are no linear layers."""
    import torch

    layers = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    inside = [n for n in layers if n != lora.HEAD and family.tower_of(n) == "llm"]
    return sum(layers[name].weight.numel() for name in inside)


def _trained(model: Any, family: Family, settings: LoraConfig, train: str) -> dict[str, int]:
    """Parameters that learn: name → how many numbers."""
    if train not in ADAPTED:
        freeze(model, family, train)
        return {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    found = {}
    for name in lora.target_names(model, family, settings):
        layer = model.get_submodule(name)
        found[f"{name}.lora_A"] = layer.in_features * settings.rank
        found[f"{name}.lora_B"] = layer.out_features * settings.rank
    return found


def full_rank(model: Any, family: Family, settings: LoraConfig) -> int:
    """Of the largest matrix that gets an adapter: what exceeds it adds nothing."""
    layers = map(model.get_submodule, lora.target_names(model, family, settings))
    return max(min(layer.in_features, layer.out_features) for layer in layers)


# -- a step ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Step:
    """The groups of a step and their forests, or a share of them that stands for all."""

    groups: list[Group]
    batches: list[Batch]
    times: float  # how often the groups fit into a step
    fold: float  # how often the members of one stand for those that it has

    @property
    def repeats(self) -> float:
        """How often members and forests fit into a step."""
        return self.times * self.fold

    @property
    def longest(self) -> int:
        return max(len(group.trajectories[0].ids) for group in self.groups)

    @property
    def mean_length(self) -> float:
        return fmean(len(group.trajectories[0].ids) for group in self.groups)

    @property
    def mean_prompt(self) -> float:
        return fmean(group.trajectories[0].prompt_length for group in self.groups)

    @property
    def mean_patches(self) -> float:
        return fmean(patches(group.trajectories[0].media) for group in self.groups)


def typical_prompts(
    config: Config, family: Family, *, prompt_tokens: int | None, image: tuple[int, int] | None
) -> tuple[list[Rendered], str]:
    """As long as said, else those of the first rows of the data, else as long as allowed."""
    source = "as said" if prompt_tokens is not None else "data.max_prompt_tokens"
    tokens = prompt_tokens or config.data.max_prompt_tokens
    if prompt_tokens is None and config.data.train and not missing_data(config):
        few = [s.model_copy(update={"max_samples": ROWS}) for s in config.data.train]
        rows = prompts_of(questions.load_prompts(config, few, family).samples, family)
        if image is None:
            return rows
        text = fmean(len(p) - sum(span.length for span in p.media) for p in rows[0])
        tokens = max(1, round(text)) + _picture(image, config, family).length
        source = f"the text is that of {len(rows[0])} rows of data.train"
    if prompt_tokens is None and image is None and family.spec.image_token:
        image = _largest_picture(config, family)
    spans = (_picture(image, config, family),) if image else ()
    if spans and tokens <= spans[0].length:
        source = f"the picture alone takes {spans[0].length}"
        tokens = spans[0].length + 1
    if tokens >= family.max_positions:
        raise ConfigError(
            f"a prompt of {tokens} tokens leaves no position for a response: {family.path} has "
            f"{family.max_positions}; try --prompt-tokens {family.max_positions // 2}"
        )
    shown = f", a picture of {image[0]}x{image[1]}" if image else ""
    nothing = np.zeros(tokens, np.int64)
    prompt = Rendered(ids=nothing, sources=nothing.astype(np.int8), media=spans)
    return [prompt], f"{tokens} tokens{shown} ({source})"


def prompts_of(samples: Sequence[Sample], family: Family) -> tuple[list[Rendered], str]:
    """Of the first rows of the data, and how long they are."""
    if not samples:
        raise ConfigError("data.train: no usable row; give --prompt-tokens N instead")
    prompts = [family.render(sample.messages) for sample in samples[:ROWS]]
    mean, longest = fmean(map(len, prompts)), max(map(len, prompts))
    about = f"{mean:.0f} tokens (mean of {len(prompts)} rows of data.train, the longest {longest})"
    return _spread(prompts), about


def _spread(prompts: list[Rendered]) -> list[Rendered]:
    """The longest first, since it may be in any step; then short and long ones in turn, so that as
    many of them as a step takes stand for all, however the rows are ordered.
    """
    ordered = sorted(prompts, key=len)
    longest, count = ordered.pop(), len(ordered)
    places = sorted(range(count), key=lambda place: place * GOLDEN % 1)
    return [longest, *(ordered[place] for place in places)]


def missing_data(config: Config) -> list[str]:
    paths = [parse_address(source.path).path for source in config.data.train]
    return [str(path) for path in paths if not Path(path).exists()]


def _largest_picture(config: Config, family: Family) -> tuple[int, int] | None:
    """A square that leaves a prompt room for a word, found as `data.overlong=shrink` finds it."""
    data = config.data
    budget = data.max_pixels
    while _picture((side := isqrt(budget), side), config, family).length >= data.max_prompt_tokens:
        if budget <= data.min_pixels:
            return None
        budget = max(data.min_pixels, int(budget * SHRINK_STEP))
    return side, side


def _picture(size: tuple[int, int], config: Config, family: Family) -> MediaSpan:
    media = Media(
        hash="planned",
        width=size[0],
        height=size[1],
        path="planned",
        min_pixels=config.data.min_pixels,
        max_pixels=config.data.max_pixels,
    )
    grid, length = family.measure(media)
    return MediaSpan(media=media, start=0, length=length, grid=grid)


def make_step(
    config: Config, algorithm: Algorithm, family: Family, prompts: Sequence[Rendered]
) -> Step:
    """Responses have their full length and differ from the first token on."""
    train, new = config.train, config.rollout.max_tokens
    members = min(
        algorithm.samples_per_prompt, max(MEMBERS, -(-MICRO_BATCHES * train.micro_tokens // new))
    )
    groups: list[Group] = []
    tokens = 0
    while len(groups) < train.prompts_per_step and tokens < MICRO_BATCHES * train.micro_tokens:
        prompt = prompts[len(groups) % len(prompts)]
        groups.append(_group(prompt, len(groups), members, config, algorithm.estimator.greedy))
        tokens += len(prompt) + members * new
    return Step(
        groups=groups,
        batches=pack(groups, positions=family.positions, micro_tokens=train.micro_tokens),
        times=train.prompts_per_step / len(groups),
        fold=algorithm.samples_per_prompt / members,
    )


def _group(prompt: Rendered, index: int, members: int, config: Config, greedy: bool) -> Group:
    new = config.rollout.max_tokens
    sources = np.concatenate([prompt.sources, np.full(new, Source.POLICY, np.int8)])
    name = f"{index}"
    asked = np.full(len(prompt), index)  # another prompt in each group: each is computed
    trajectories = tuple(
        Trajectory(
            sample_id=name,
            repeat=repeat,
            ids=np.concatenate([asked, np.full(new, repeat + 1)]),
            sources=sources,
            logprobs=np.zeros(len(sources), np.float32),
            versions=np.zeros(len(sources), np.int32),
            media=prompt.media,
        )
        for repeat in range(members)
    )
    sample = Sample(id=name, messages=(Message(role="user", parts=("",)),))
    baseline = trajectories[0] if greedy else None  # as long as the others
    return Group(sample=sample, uid=name, trajectories=trajectories, greedy=baseline)

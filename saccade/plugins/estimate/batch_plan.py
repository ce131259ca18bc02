"""The inputs of an estimate: a step with prompts and forests as long as those that the config will
train, the model without its weights (on the meta device), and its size during training.

    size = size_of(empty_model(family), family, config.model.lora, element=2, train="full")
    step = make_step(config.train, config.rollout.max_tokens, algorithm, prompts)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import isqrt
from statistics import fmean
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.config import ADAPTED, Config, DataConfig, LoraConfig, TrainConfig
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.forest.batch import Batch
from saccade.forest.packing import pack
from saccade.models import lora
from saccade.models.families import Family
from saccade.models.load import freeze
from saccade.plugins.estimate.flops import NF4, Meter, training_of
from saccade.plugins.estimate.shapes import Shape, shape_of
from saccade.plugins.media.sounds import RATE
from saccade.plugins.overlong.shorten import SHRINK_STEP
from saccade.plugins.ranks.layouts import share_held
from saccade.plugins.series.series_tower import Encoder
from saccade.system.devices import CONTEXT_GIB, Device
from saccade.trainer.checkpointing import MARGIN
from saccade.types import Group, Media, MediaSpan, Message, Rendered, Sample, Source, Trajectory

ROWS = 64  # rows of the data that are read
SOUND_SECONDS = (30, 15, 8, 4, 2, 1)
GOLDEN = 0.6180339887  # the fractional parts of its multiples are evenly spread
MICRO_BATCHES = 4  # that are constructed; the rest of a step is extrapolated
SHAPES: WeakKeyDictionary[Any, Shape] = WeakKeyDictionary()  # of empty models, whatever of them is trained

Prompts = tuple[list[Rendered], str]  # and a description of their lengths
Size = tuple[int, int]  # width and height of an image


# -- the model --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelSize(Meter):
    weights: float  # bytes
    towers: float  # share of the weights outside of the language model
    trained: int  # weights
    largest: int  # weights of the largest trained tensor
    head_tied: bool
    head_trained: bool


def empty_model(family: Family, *, trust_remote_code: bool = False) -> Any:
    """The model of a folder's config, built on the meta device: without memory for weights."""
    import torch
    import transformers

    remote, kind = {"trust_remote_code": trust_remote_code}, getattr(transformers, family.spec.auto_class)
    settings = transformers.AutoConfig.from_pretrained(family.path, **remote)
    try:
        with torch.device("meta"):
            if hasattr(kind, "from_config"):
                model = kind.from_config(settings, **remote)
            else:  # not one of the auto classes
                model = kind(getattr(settings, family.spec.section, settings))
            if family.series is not None:
                model.series = Encoder(family.series, settings.get_text_config())
        family.spec.prepare(model)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        if family.name not in (settings.model_type, "generic"):
            given = f"model.family={family.name}, but the folder holds a model of type {settings.model_type!r}"
            raise EnvironmentProblem(f"{family.path}: {given} ({why}); leave model.family out") from error
        raise EnvironmentProblem(f"{family.path}: it cannot be built without its weights ({why})") from error
    return model


def size_of(model: Any, family: Family, settings: LoraConfig, *, element: int, train: str) -> ModelSize:
    """The size of an empty model that is trained with model.train=`train`. `element`: bytes per weight."""
    from torch.nn import Linear

    tower_of = cache(family.tower_of)
    if model not in SHAPES:
        SHAPES[model] = shape_of(model, tower_of)
    model.requires_grad_(True)
    weights, packed = sum(parameter.numel() for parameter in model.parameters()), 0
    towers = sum(p.numel() for name, p in model.named_parameters() if tower_of(name) != "llm") / weights
    if train in ADAPTED:
        adapted = [(name, model.get_submodule(name)) for name in lora.target_names(model, family, settings)]
        trained = {f"{name}.lora_A": layer.in_features * settings.rank for name, layer in adapted}
        trained |= {f"{name}.lora_B": layer.out_features * settings.rank for name, layer in adapted}
        weights += sum(trained.values())
    else:
        freeze(model, family, train)
        trained = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    head = model.get_output_embeddings().weight
    if train == "qlora":  # `lora.four_bit_options` packs linear layers only, and experts are none
        linear = (m for name, m in model.named_modules() if isinstance(m, Linear) and tower_of(name) == "llm")
        packed = sum(layer.weight.numel() for layer in linear if layer.weight is not head)
    return ModelSize(
        shape=SHAPES[model],
        training=training_of(model, trained, tower_of),
        weights=element * (weights - packed) + NF4 * packed,
        towers=towers,
        trained=sum(trained.values()),
        largest=max(trained.values()),
        head_tied=head is model.get_input_embeddings().weight,
        head_trained=head.requires_grad and train not in ADAPTED,
    )


# -- the plan ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Step:
    """The groups and forests of a step, or a sample of them; only those of one set of GPUs that compute forests
    together.
    """

    groups: list[Group]
    batches: list[Batch]
    times: float  # factor from this sample to the whole step

    @property
    def members(self) -> list[Trajectory]:
        """The first trajectory of each group."""
        return [group.trajectories[0] for group in self.groups]

    @property
    def mean_length(self) -> float:
        return fmean(len(member.ids) for member in self.members)

    @property
    def pictures(self) -> bool:
        return any(batch.media for batch in self.batches)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All inputs of the estimate of memory and seconds of a GPU."""

    config: Config  # train.prompts_per_step is that of one GPU
    algorithm: Algorithm
    device: Device
    layout: str  # whole, sharded or hybrid
    step: Step
    policy: ModelSize
    whole: ModelSize  # without adapters, for reference and critic
    element: int  # bytes per weight
    generates: bool  # in training or validation
    samples: bool  # has a rollout in every step; else it learns from rows
    teacher: int  # number of weights of the teacher

    @property
    def learners(self) -> list[ModelSize]:
        """The policy, and a critic if there is one."""
        return [self.policy, *([replace(self.whole, head=False)] if self.algorithm.needs_critic else [])]

    def divides(self, learner: ModelSize) -> bool:
        """Whether the learner's weights are sharded over the GPUs; 4-bit weights never are."""
        return self.share("weights") < 1 and not (learner is self.policy and self.config.model.train == "qlora")

    def share(self, kind: str) -> float:
        """The share of weights, gradient sums or optimizer state that one GPU holds of a sharded model."""
        whole = 1.0 if kind == "sums" and self.config.model.train in ADAPTED else self.whole.towers
        return share_held(self.layout, kind, gpus=self.config.run.gpus, whole=whole)

    @property
    def together(self) -> int:
        """Number of GPUs that compute a forest together."""
        return self.config.train.sequence_parallel if self.config.run.gpus > 1 else 1

    @property
    def paged(self) -> bool:
        """Whether the engine's KV cache has small pages; else a page holds a whole sequence."""
        return self.device.is_gpu and self.element == 2

    @property
    def limit(self) -> float:
        """GiB that can be planned with, on the first GPU; with several, it also holds the controller's process."""
        processes = 1 + (self.config.run.gpus > 1)
        return self.device.memory * (1 - MARGIN) - CONTEXT_GIB * processes * self.device.is_gpu

    @property
    def sequences(self) -> int:
        """Sequences in an engine at a time, if its KV cache is large enough."""
        members = self.algorithm.samples_per_prompt + self.algorithm.estimator.greedy
        rollout, gpus = self.config.rollout, self.config.run.gpus
        steps = 1 + rollout.ahead * (rollout.replicas > 0)  # else later steps only fill gaps
        begun = self.config.train.prompts_per_step * min(steps, self.config.run.max_steps or steps)
        return min(rollout.max_sequences, round(begun * members * gpus / (rollout.replicas or gpus)))


# -- prompts ---------------------------------------------------------------------------------------


def typical_prompts(
    data: DataConfig, family: Family, rows: Sequence[Sample] | None, *, prompt_tokens: int | None, image: Size | None
) -> Prompts:
    """Prompts of `prompt_tokens` if given, else those of the rows, else of the greatest length that is allowed."""
    tokens, source, heard = prompt_tokens or data.max_prompt_tokens, "data.max_prompt_tokens", tuple[MediaSpan, ...]()
    if prompt_tokens is not None:
        source = "as said"
    elif rows is not None:
        found = prompts_of(rows, family)
        if image is None:
            return found
        text = fmean(len(p) - sum(span.length for span in p.media) for p in found[0])
        tokens = max(1, round(text)) + _picture(image, data, family).length
        source = f"the text is that of {len(found[0])} rows of data.train"
    elif image is None and family.spec.image_token:
        image = _largest_picture(data, family)
    elif "audio" in family.spec.media_tokens:
        heard = _longest_sound(data, family)
    spans = (_picture(image, data, family),) if image else heard
    if spans and tokens <= spans[0].length:
        source = f"the image alone takes {spans[0].length}"
        tokens = spans[0].length + 1
    if tokens >= (most := family.max_positions):
        has = f"{family.path} has {most}; try --prompt-tokens {most // 2}"
        raise ConfigError(f"a prompt of {tokens} tokens leaves no position for a response: {has}")
    shown = f", an image of {image[0]}x{image[1]}" if image else ""
    shown += "".join(f", a sound of {span.media.width / RATE:g} s" for span in heard)
    nothing = np.zeros(tokens, np.int64)
    prompt = Rendered(ids=nothing, sources=nothing.astype(np.int8), media=spans)
    return [prompt], f"{tokens} tokens{shown} ({source})"


def prompts_of(samples: Sequence[Sample], family: Family) -> Prompts:
    """The prompts of the first rows. The longest comes first, since it may be in any step; the others
    mix short and long ones, so that the first prompts of the list are representative whatever the
    order of the rows.
    """
    if not samples:
        raise ConfigError("data.train: no usable row; give --prompt-tokens N instead")
    ordered = sorted((family.render(sample.messages) for sample in samples[:ROWS]), key=len)
    mean, longest = fmean(map(len, ordered)), ordered.pop()
    about = f"{mean:.0f} tokens (mean of {len(ordered) + 1} rows of data.train, the longest {len(longest)})"
    places = sorted(range(len(ordered)), key=lambda place: place * GOLDEN % 1)
    return [longest, *(ordered[place] for place in places)], about


def _largest_picture(data: DataConfig, family: Family) -> Size | None:
    """The largest square image that leaves room for text in a prompt; shrunk as with `data.overlong=shrink`."""
    budget = data.max_pixels
    while _picture((side := isqrt(budget), side), data, family).length >= data.max_prompt_tokens:
        if budget <= data.min_pixels:
            return None
        budget = max(data.min_pixels, int(budget * SHRINK_STEP))
    return side, side


def _longest_sound(data: DataConfig, family: Family) -> tuple[MediaSpan, ...]:
    """A sound of 30 seconds, or a shorter one that leaves room for text in a prompt."""
    for seconds in SOUND_SECONDS:
        media = Media(kind="audio", hash="planned", width=seconds * RATE, height=1, path="planned")
        grid, length = family.measure(media)
        if length < data.max_prompt_tokens:
            return (MediaSpan(media=media, start=0, length=length, grid=grid),)
    return ()


def _picture(size: Size, data: DataConfig, family: Family) -> MediaSpan:
    media = Media(hash="planned", width=size[0], height=size[1], path="planned")
    media = replace(media, min_pixels=data.min_pixels, max_pixels=data.max_pixels)
    grid, length = family.measure(media)
    return MediaSpan(media=media, start=0, length=length, grid=grid)


# -- a step ----------------------------------------------------------------------------------------


def make_step(train: TrainConfig, max_tokens: int, algorithm: Algorithm, prompts: Sequence[Rendered]) -> Step:
    """Construct groups and forests of one optimizer step after the other, as `split_updates` divides groups among
    them. Responses have the maximum length and differ from the first token on.
    """
    enough = MICRO_BATCHES * train.micro_tokens
    members, tokens = algorithm.samples_per_prompt, 0
    groups, batches = list[Group](), list[Batch]()
    for share in np.array_split(np.arange(train.prompts_per_step), algorithm.updates_per_step):
        begun, most = len(groups), tokens + enough
        for _ in share:
            if tokens >= most:
                break
            prompt = prompts[len(groups) % len(prompts)]
            groups.append(_group(prompt, len(groups), members, max_tokens, algorithm.estimator.greedy))
            tokens += len(prompt) + members * max_tokens
        batches += pack(groups[begun:], micro_tokens=train.micro_tokens)
        if tokens >= enough:
            break
    return Step(groups=groups, batches=batches, times=train.prompts_per_step / len(groups))


def _group(prompt: Rendered, index: int, members: int, new: int, greedy: bool) -> Group:
    sources = np.concatenate([prompt.sources, np.full(new, Source.POLICY, np.int8)])
    asked = np.full(len(prompt), index)  # a different prompt in each group, so that none is shared
    media = tuple(replace(span, media=replace(span.media, hash=f"{index}/{span.media.hash}")) for span in prompt.media)
    trajectories = tuple(
        Trajectory(
            sample_id=f"{index}",
            repeat=repeat,
            ids=np.concatenate([asked, np.full(new, repeat + 1)]),
            sources=sources,
            logprobs=np.zeros(len(sources), np.float32),
            versions=np.zeros(len(sources), np.int32),
            media=media,
        )
        for repeat in range(members)
    )
    sample = Sample(id=f"{index}", messages=(Message(role="user", parts=("",)),))
    baseline = trajectories[0] if greedy else None  # stands for a greedy response of the same length
    return Group(sample=sample, uid=sample.id, trajectories=trajectories, greedy=baseline)

"""What recipes are made of, built from a config: model, data, prompts, rewards, sampling.

Each function makes one part; the recipes decide which they need and in what order.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from saccade.algorithms.algorithm import Algorithm
from saccade.backends import Reference
from saccade.backends.learned import LearnedReward
from saccade.backends.local import LocalBackend
from saccade.backends.reference import AdapterReference
from saccade.config import ADAPTED, Config, DataConfig, DataSource
from saccade.data import datasets, prompts, suites
from saccade.data.chats import RowError
from saccade.data.comparisons import chosen_first
from saccade.devices import limit_memory
from saccade.environments import Environment, stop_strings, texts_hash
from saccade.errors import ConfigError, DataError
from saccade.models import lora, tiny
from saccade.models.families import Family, load_family
from saccade.models.files import SERIES_FILE, require_whole
from saccade.models.heads import attach_score, start_score
from saccade.models.load import freeze, load_model, pick_device, pick_dtype
from saccade.models.rating import SECTION, flaw
from saccade.models.series import plugged
from saccade.recipes.lengths import remembered
from saccade.rewards.formats import FORMATS
from saccade.rewards.learned import model_terms
from saccade.rewards.scorer import Scorer
from saccade.rewards.self_test import require, self_test
from saccade.rollout import hosting
from saccade.rollout.episode import Limits
from saccade.types import Batch, Sample, Sampling


@dataclass(frozen=True, kw_only=True)
class Policy:
    family: Family
    model: torch.nn.Module
    device: torch.device


def quiet_libraries() -> None:
    """Progress bars and warnings of libraries would tear the display apart."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.captureWarnings(True)


def start_folder(config: Config) -> str:
    """The model folder that the config names."""
    return model_folder(config, config.model.path)


def model_folder(config: Config, path: str) -> str:
    """A tiny model is built beside the runs first."""
    if not path.startswith("tiny:"):
        return path
    kind = path.removeprefix("tiny:")
    folder = Path(config.run.out) / ".tiny" / f"{kind}-{config.run.seed}"
    if not (folder / "model.safetensors").is_file():
        tiny.build(kind, folder, seed=config.run.seed)
    return str(folder)


def family_of(config: Config, folder: str) -> Family:
    require_whole(Path(folder))
    template = config.prompt.chat_template
    family = load_family(
        folder,
        name=config.model.family,
        chat_template=Path(template).read_text(encoding="utf-8") if template else None,
        trust_remote_code=config.model.trust_remote_code,
    )
    return plugged(family, config.model.series)


def device_of(config: Config) -> torch.device:
    """Where this process computes, held to the memory that it may take there."""
    device = pick_device(config.run.device)
    if config.run.memory and device.type == "cuda":
        limit_memory(device, config.run.memory)
    return device


def load_policy(
    config: Config, family: Family, *, folder: str | None = None, train: str | None = None
) -> Policy:
    """Weights from `folder` (a checkpoint) or from the family's own; `train` instead of
    `model.train`. Adapters always lie over the family's own: a checkpoint has them merged in.
    """
    train = train or config.model.train
    adapted = train in ADAPTED
    device = device_of(config)
    dtype = pick_dtype(config.model.dtype, device)
    model = load_model(
        replace(family, path=folder) if folder and not adapted else family,
        dtype=dtype,
        device=device,
        trust_remote_code=config.model.trust_remote_code,
        options=lora.four_bit(family, dtype, device) if train == "qlora" else None,
        seed=config.run.seed,
    )
    if hasattr(model.config, SECTION):  # whoever trains it as one writes its own
        delattr(model.config, SECTION)
    if adapted:
        stored = Path(folder) / lora.FOLDER if folder else None
        lora.add(model, family, config.model.lora, seed=config.run.seed, stored=stored)
        torch.manual_seed(config.run.seed)  # of dropout; a resumed run then restores its own state
    else:
        freeze(model, family, train)
    return Policy(family=family, model=model, device=device)


def load_reference(
    config: Config, family: Family, algorithm: Algorithm | None, policy: LocalBackend
) -> Reference:
    """The model that the policy started from: another copy, or the policy without its adapters."""
    if config.model.train not in ADAPTED:
        return LocalBackend(load_policy(config, family).model, family)
    if algorithm is not None and algorithm.kl.update == "ema":
        raise ConfigError(
            "algorithm.kl.update=ema: a blend of weights is no adapter; with "
            f"model.train={config.model.train} use algorithm.kl.update=copy, or none"
        )
    return AdapterReference(policy)


def load_critic(
    config: Config,
    family: Family,
    algorithm: Algorithm,
    *,
    checkpointing: bool | Literal["auto"],
    say: Callable[[str], None],
) -> LocalBackend:
    """A model of the policy's family with a head for values, and an optimizer of its own. It has no
    adapters: where the policy has them, all of the critic is trained.
    """
    train = "full" if config.model.train in ADAPTED else None
    policy = load_policy(config, family, folder=algorithm.critic.path, train=train)
    attach_score(policy.model, seed=config.run.seed)
    path = algorithm.critic.path
    if path is not None and not start_score(policy.model, Path(path)):
        say(
            f"algorithm.critic.path={path}: its score is no linear function of the last states; "
            "the critic takes its weights and draws a head of its own"
        )
    return LocalBackend(policy.model, family, config.train, checkpointing=checkpointing)


def load_teacher(config: Config, family: Family) -> LocalBackend | None:
    """A model that reads the same tokens and only scores."""
    path = config.sft.teacher
    if path is None:
        return None
    folder = model_folder(config, path)
    theirs = load_family(folder, trust_remote_code=config.model.trust_remote_code)
    if family.series is not None and (Path(folder) / SERIES_FILE).is_file():
        theirs = plugged(theirs, family.series)
    vocabularies = [each.chat.tokenizer.get_vocab() for each in (family, theirs)]
    alike = theirs.spec.bind is family.spec.bind and theirs.series == family.series
    if not alike or vocabularies[0] != vocabularies[1]:
        raise ConfigError(
            f"sft.teacher={path}: a {theirs.name} with other tokens than the {family.name} that "
            "learns; give a model of the same family and tokenizer, and with an encoder of time "
            "series if that has one"
        )
    return LocalBackend(load_policy(config, theirs, train="full").model, theirs)


def use_checkpointing(config: Config) -> bool | Literal["auto"]:
    wanted = config.model.checkpointing
    return "auto" if wanted == "auto" else wanted == "on"


# -- data ------------------------------------------------------------------------------------------


def instruction_of(config: Config) -> str:
    """How to answer, then which tools there are."""
    own = config.prompt.instruction
    answering = prompts.instruction_for(config.prompt.format) if own is None else own
    return " ".join(filter(None, [answering, hosting.explanation(config.env)]))


def asker(config: Config) -> Callable[[Sample], Sample]:
    """A row as the model is asked it. A demonstration at its end is no part of the question: of an
    episode all turns, of a chat the last reply.
    """
    instruction, episodes = instruction_of(config), config.env.name != "single_turn"

    def ask(sample: Sample) -> Sample:
        messages, roles = sample.messages, [message.role for message in sample.messages]
        if roles[-1] == "assistant" and (episodes or "tool" in roles):
            messages = messages[: roles.index("assistant") or 1]
        while len(messages) > 1 and messages[-1].role == "assistant":
            messages = messages[:-1]
        asked = replace(sample, messages=messages)
        return prompts.apply(
            asked, config.prompt, instruction=instruction, choices_seed=config.run.seed
        )

    return ask


def load_prompts(
    config: Config,
    sources: Sequence[DataSource],
    family: Family,
    change: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> datasets.Dataset:
    """Questions, ready to be rendered; rows over the prompt limit follow `data.overlong`."""
    ask = asker(config)
    with remembered(config, family, "prompt", ask, family.render) as length:
        return worded(datasets.load(sources, config.data, length=length, change=change), ask)


def load_dialogues(
    config: Config, sources: Sequence[DataSource], family: Family
) -> datasets.Dataset:
    """Conversations to learn from, the question worded as in RL; of candidates the best one."""
    instruction, tag = instruction_of(config), config.sft.reward_tag

    def word(sample: Sample) -> Sample:
        if sample.desirable is False and tag is None:
            raise RowError("labelled as bad; sft learns from such rows with sft.reward_tag")
        for candidate in chosen_first(sample).candidates[:1]:
            if any(message.media for message in candidate):
                raise RowError("candidates are media; data.compare=verdict teaches to judge them")
            sample = replace(sample, messages=(*sample.messages, *candidate), candidates=())
        roles = [message.role for message in sample.messages]
        if "assistant" not in roles or roles[0] == "assistant":
            raise RowError("no assistant turn that answers something; sft reads conversations")
        sample = prompts.apply(sample, config.prompt, instruction=instruction)
        return sample if tag is None else _tagged(sample, tag, reward_of(sample))

    limits: DataConfig = config.data.model_copy(update={"max_prompt_tokens": config.sft.max_tokens})
    with remembered(config, family, "dialogue", word, family.render_dialogue) as length:
        data = datasets.load(sources, limits, length=length, limit="sft.max_tokens")
    return worded(data, word)


def load_documents(
    config: Config, sources: Sequence[DataSource], family: Family
) -> datasets.Dataset:
    """Plain texts to learn from, as they are; their length counts characters."""

    def length(sample: Sample) -> int:
        if sample.media:
            raise RowError("a document with an image; conversations show images (sft.mode=chat)")
        return sum(len(message.text) for message in sample.messages)

    data = config.data
    changes = {"keys": {"prompt": "text", **data.keys}, "max_prompt_tokens": sys.maxsize}
    changes["format"] = "messages" if data.format == "auto" else data.format
    limits = data.model_copy(update=changes)
    return datasets.load(sources, limits, length=length, limit="sft.max_tokens")


def reward_of(sample: Sample) -> float:
    """What the row says of its answer."""
    value = sample.desirable
    for column in ("reward", "label"):
        value = sample.extra.get(column) if value is None else value
    if not isinstance(value, bool | int | float):
        raise RowError("no number in the column reward or label, which sft.reward_tag shows")
    return float(value)


def _tagged(sample: Sample, tag: str, reward: float) -> Sample:
    """The reward after the question, which is the last one that is answered."""
    messages = list(sample.messages)
    last = max(index for index, message in enumerate(messages) if message.role == "user")
    text = tag.format(reward=reward)
    messages[last] = replace(messages[last], parts=(*messages[last].parts, text))
    return replace(sample, messages=tuple(messages))


def asking_for_the_best(
    config: Config, data: datasets.Dataset, sets: dict[str, datasets.Dataset]
) -> dict[str, datasets.Dataset]:
    """Where answers were learned with their reward, questions name the highest one."""
    tag = config.sft.reward_tag
    if tag is None or not sets:
        return sets
    best = max(reward_of(sample) for sample in data.samples)
    return {name: worded(part, lambda s: _tagged(s, tag, best)) for name, part in sets.items()}


def worded(dataset: datasets.Dataset, change: Callable[[Sample], Sample]) -> datasets.Dataset:
    return replace(dataset, samples=tuple(change(sample) for sample in dataset.samples))


def write_quarantine(path: Path, data: datasets.Dataset) -> None:
    """Every row that is not trained on, with the reason; no file when there is none."""
    rows = [asdict(row) for row in (*data.quarantined, *data.overlong, *data.left_out)]
    if rows:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        path.write_text(text, encoding="utf-8")


def validation_sets(config: Config, family: Family) -> dict[str, datasets.Dataset]:
    sets: dict[str, datasets.Dataset] = {}
    for source in config.data.val:
        dataset = not_empty(load_prompts(config, [source], family), f"data.val: {source.path}")
        name = source.name or dataset.parts[0].name
        sets[name if name not in sets else f"{name}-{len(sets)}"] = dataset
    return sets


def not_empty(dataset: datasets.Dataset, where: str) -> datasets.Dataset:
    if not dataset.samples:
        raise DataError(f"{where} has no usable row:\n{dataset.summary}")
    return dataset


def suite_sets(config: Config, family: Family) -> dict[str, datasets.Dataset]:
    """The sets of `eval.suites`, whatever the config says about columns of its own rows."""
    plain: dict[str, Any] = {"format": "auto", "keys": {}}
    config = config.model_copy(update={"data": config.data.model_copy(update=plain)})
    sets = {}
    for name in config.eval.suites:
        source, change = suites.suite_source(name, config.eval), suites.SUITES[name].row
        loaded = load_prompts(config, [source], family, change)
        sets[name] = not_empty(loaded, f"eval.suites: {source.path}")
    return sets


# -- rewards and sampling --------------------------------------------------------------------------


def make_scorer(config: Config, algorithm: Algorithm | None = None) -> Scorer | None:
    reward = config.reward
    if not reward.given:
        return None
    penalty = algorithm.overlong if algorithm is not None else None
    scorer = Scorer(
        reward,
        prompt_format=config.prompt.format,
        max_tokens=config.rollout.max_tokens,
        overlong=(penalty.buffer, penalty.factor, penalty.max_tokens) if penalty else None,
        load_model=partial(load_learned, config),
    )
    idle = {"judge": scorer.judge is None, "remote": not scorer.elsewhere}
    for name, unused in idle.items():
        given = getattr(reward, name).model_fields_set
        if algorithm is not None and unused and given:
            scorer.close()
            who = "judge or hybrid" if name == "judge" else name
            raise ConfigError(
                f"reward.{name}.{min(given)}: has no effect without a term that asks; "
                f"add {who} to reward.terms, or remove it"
            )
    return scorer


def require_reward_models(config: Config) -> None:
    """Refuse folders that are none, before a run has one of its own."""
    for args in model_terms(config.reward):
        if not args["path"].startswith("tiny:") and (wrong := flaw(Path(args["path"]))):
            raise ConfigError(f"reward.terms: {wrong}")


def load_learned(config: Config, path: str) -> LearnedReward:
    """A reward model of a term; in this process, beside the policy."""
    device = device_of(config)
    return LearnedReward.load(
        model_folder(config, path),
        device=device,
        dtype=pick_dtype(config.model.dtype, device),
        micro_tokens=config.train.micro_tokens,
        offload=config.reward.offload,
        trust_remote_code=config.model.trust_remote_code,
        untrained=path.startswith("tiny:"),
    )


def test_rewards(config: Config, scorer: Scorer | None, samples: Sequence[Sample]) -> None:
    """Before step 1: does every data source have a recipe, and does it know right from wrong?"""
    if scorer is None:
        return
    scorer.check_sources(sample.data_source for sample in samples)
    scorer.check_media(samples)
    if config.reward.self_test != "off":
        result = self_test(scorer, samples, format=config.prompt.format)
        require(result, config.reward.self_test)
    scorer.metrics()  # those of the test belong to no step


def warn_of_unused(
    scorer: Scorer | None, sets: Iterable[datasets.Dataset], say: Callable[[str], Any]
) -> None:
    """Rewards of sources that none of the sets has: most likely the name is misspelt."""
    sources = (sample.data_source for dataset in sets for sample in dataset.samples)
    if scorer is not None and (warning := scorer.unused(sources)):
        say(warning)


def check_algorithm(
    algorithm: Algorithm,
    scorer: Scorer | None,
    samples: Sequence[Sample],
    say: Callable[[str], Any],
) -> None:
    """What an algorithm wants to know of rewards and rows must be there before step 1."""
    if algorithm.overlong.buffer and scorer is None:
        raise ConfigError(
            "algorithm.overlong: its penalty is a term of the reward, and the environment alone "
            "gives the reward; set reward.terms, or algorithm.overlong.buffer=0"
        )
    if algorithm.estimator.components:
        if scorer is None:
            raise ConfigError(
                f"algorithm.advantage={algorithm.advantage} compares the terms of the reward, and "
                "the environment gives one number; set reward.terms, or algorithm.advantage=grpo"
            )
        for source in sorted({sample.data_source for sample in samples}):
            scorer.component_weights(source)
    if algorithm.estimator.domains and all(
        sample.extra.get("domain") is None for sample in samples
    ):
        say("no row has a `domain`: all of them are one, and only difficulty weighs")


def rollout_sampling(config: Config, algorithm: Algorithm | None = None) -> Sampling:
    """With an algorithm: as it wants its first token drawn."""
    rollout, fire = config.rollout, algorithm.fire if algorithm else None
    return Sampling(
        first=(fire.temperature, fire.top_k) if fire and fire.temperature else None,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=rollout.max_tokens,
        stop=(*rollout.stop, *stop_strings(config.env)),
        ignore_eos=rollout.ignore_eos,
        support=rollout.top_p < 1 or rollout.top_k > 0,
    )


def validation_sampling(config: Config) -> Sampling:
    val = config.val
    temperature = val.temperature if val.temperature is not None else float(val.n > 1)
    return Sampling(
        temperature=temperature,
        top_p=val.top_p,
        max_tokens=val.max_tokens or config.rollout.max_tokens,
        stop=(*config.rollout.stop, *stop_strings(config.env)),
    )


def limits_of(config: Config, *, evaluation: bool = False) -> Limits:
    env = config.env
    counted: dict[str, Any] = env.limits(evaluation=evaluation)
    turns = frozenset(config.val.turns if evaluation else ())
    if turns:
        counted["max_turns"] = max(turns)
    marks = turns - {counted["max_turns"]}
    return Limits(timeout=env.timeout, step_timeout=env.step_timeout, marks=marks, **counted)


def environments_of(config: Config, family: Family) -> Callable[[], Environment]:
    """What makes the environment of an episode."""
    return hosting.environments(
        config.env,
        order=FORMATS.get(config.prompt.format, FORMATS["none"]).order,
        think_prefilled=family.chat.think_prefilled,
        role="tool" if family.chat.knows_tools else "user",
        unit=family.unit,
    )


def manifest(family: Family, data: datasets.Dataset | None, config: Config) -> dict[str, Any]:
    """What a resumed run must find unchanged."""
    template = hashlib.sha256(family.chat.template.encode()).hexdigest()
    return {
        "data": data.hash if data is not None else None,
        "template": template,
        "prompt_texts": prompts.texts_hash(),
        "environment_texts": texts_hash(),
        "pixels": [config.data.min_pixels, config.data.max_pixels],
        "family": family.name,
    }


def save_batches(path: Path, batches: Sequence[Batch]) -> Path:
    """Ids, log-probs, advantages and image hashes of an update that could not be made."""
    path.parent.mkdir(exist_ok=True)
    arrays: dict[str, Any] = {}
    for index, batch in enumerate(batches):
        for field in fields(batch):
            value = getattr(batch, field.name)
            if isinstance(value, np.ndarray):
                arrays[f"{index}/{field.name}"] = value
        arrays[f"{index}/keys"] = np.array([f"{id}/{repeat}" for id, repeat in batch.keys])
        arrays[f"{index}/media"] = np.array([span.media.hash for span in batch.media])
    np.savez(path, **arrays)
    return path

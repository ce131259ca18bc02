"""What a config alone can say against a run: options that contradict each other or do nothing.

Runs in milliseconds, before data or weights are touched, and lists every problem at once, each with
the field, the reason and a value that works. Types and limits of single values are the schema's
business; what needs a tokenizer, a row or a tensor is checked by whoever holds it.

    >>> check(load(None, ["model.path=tiny:qwen2_5_vl"]), "sft")
    Traceback (most recent call last):
    saccade.errors.ConfigError: data.train: no training data; try data.train=train.jsonl
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from saccade import checks_offline as offline
from saccade import environments
from saccade.config import ADAPTED, Config, Section
from saccade.data import suites
from saccade.data.sources import parse_address
from saccade.errors import ConfigError
from saccade.models.files import SERIES_FILE, described, names_experts
from saccade.schema import HttpConfig

Rule = Callable[[Config], Iterator[str]]

# The fewest tokens of an answer where every tag is one token: with less, no response can be right.
SHORTEST_ANSWER = {
    "think_answer": 5,
    "think_boxed": 4,
    "boxed": 2,
    "answer_line": 2,
    "hash": 2,
}
TOWERS = ("vision", "projector", "llm", "audio", "series")

SUPERVISED = {
    "algorithm": "only `saccade rl` reads it",
    "eval": "only `saccade eval` reads it",
    "prompt.permute_choices": "rows name the letters that they were written with",
    "data.demonstrations": "only `saccade rl` reads it",
    "train.ptx_coef": "only `saccade rl` reads it",
    "train.samples_per_prompt": "nothing is sampled",
    "train.updates_per_step": "a step is one update",
    "train.epochs_per_batch": "a step is one update",
}
SFT = {"sft": "only `saccade sft` reads it"}
DPO = {"dpo": "only `saccade dpo` reads it"}
RATING = {"reward_model": "only `saccade reward-model` reads it"}

# Options and sections that a training command does not read. `generate` makes rows for sft and dpo,
# so one file may hold both. Eval and generate take the file of a
# training run as it is, so there nothing is refused.
WITHOUT_EFFECT = {
    "rl": {
        **SFT,
        **DPO,
        **RATING,
        "generate": "only `saccade generate` reads it",
        "eval": "only `saccade eval` reads it",
        "rollout.http": "an endpoint only evaluates",
    },
    "sft": SUPERVISED | DPO | RATING,
    "dpo": SUPERVISED | SFT | RATING,
    "reward-model": SUPERVISED | SFT | DPO | {"reward": "nothing is sampled"},
}


def check(config: Config, command: str) -> None:
    """Raise one ConfigError with everything that keeps the config from running as COMMAND."""
    problems = [problem for rule in RULES[command] for problem in rule(config)]
    problems += _without_effect(config, command)
    if problems:
        raise ConfigError("\n".join(problems))


def chosen(section: Section, prefix: str = "") -> Iterator[str]:
    """Dotted names of the options that were set, as opposed to left at their defaults."""
    for name in type(section).model_fields:
        if name in section.model_fields_set:
            value = getattr(section, name)
            if isinstance(value, Section):
                yield from chosen(value, f"{prefix}{name}.")
            else:
                yield prefix + name


def _without_effect(config: Config, command: str) -> Iterator[str]:
    for name in chosen(config):
        for key, reason in WITHOUT_EFFECT.get(command, {}).items():
            if name == key or name.startswith(f"{key}."):
                yield f"{name}: has no effect in `saccade {command}` ({reason}); remove it"


def _model(config: Config) -> Iterator[str]:
    path, train = config.model.path, config.model.train
    if not path:
        yield (
            "model.path: no model; give a Hugging Face model folder, or model.path=tiny:qwen2_5_vl"
        )
    else:
        yield from offline.folder("model.path", path)
    frozen = train.removeprefix("freeze:")
    if train not in ("full", *ADAPTED) and (frozen == train or not frozen.strip(", ")):
        yield (
            f"model.train: {train!r} is none of full, lora, qlora and freeze:PATTERNS; "
            "try freeze:vision"
        )


def _answering_model(config: Config) -> Iterator[str]:
    """Where nothing is trained an endpoint may answer, and no folder is needed."""
    if config.rollout.engine == "http":
        yield from _endpoint(config)
    else:
        yield from _model(config)


def _endpoint(config: Config) -> Iterator[str]:
    http = config.rollout.http
    if not http.url:
        yield (
            "rollout.http.url: rollout.engine=http needs the address of an endpoint; "
            "try rollout.http.url=http://127.0.0.1:8000/v1"
        )
    yield from _address("rollout.http", http)
    if config.prompt.chat_template:
        yield "prompt.chat_template: an endpoint applies its own template; remove it"
    if config.rollout.replicas:
        yield "rollout.replicas: an endpoint is one already; try rollout.replicas=0"


def _address(section: str, http: HttpConfig) -> Iterator[str]:
    address = urlsplit(http.url)
    if http.url and (address.scheme not in ("http", "https") or not address.hostname):
        yield (
            f"{section}.url: {http.url} is no address of an endpoint; "
            f"try {section}.url=http://127.0.0.1:8000/v1"
        )
    if address.username or address.password or address.query:
        yield (
            f"{section}.url: an address with a password or a query would be logged; put the "
            f"key into an environment variable and its name into {section}.key"
        )
    if http.key and not re.fullmatch(r"[A-Za-z_]\w*", http.key):
        yield (
            f"{section}.key: takes the name of an environment variable, not the key itself; "
            f"try {section}.key=OPENAI_API_KEY"
        )


def _judge(config: Config) -> Iterator[str]:
    judge = config.reward.judge
    yield from _address("reward.judge", judge)
    if judge.api == "completions" and judge.send_images:
        yield ("reward.judge.send_images: completions take text only; try reward.judge.api=chat")
    if judge.template is not None and not Path(judge.template).is_file():
        yield f"reward.judge.template: {judge.template} does not exist; give a Jinja file"


def _own_weights(config: Config) -> Iterator[str]:
    if config.rollout.engine == "http":
        yield (
            "rollout.engine: http asks a model that is not trained here and gives no log-probs; "
            "it serves eval, generate and chat: try rollout.engine=embedded"
        )


def _engine_options(config: Config) -> Iterator[str]:
    rollout = config.rollout
    for name in ("tensor_parallel", "memory_share", "engine_args"):
        if rollout.engine == "embedded" and name in rollout.model_fields_set:
            yield (
                f"rollout.{name}: has no effect with rollout.engine=embedded; remove it, or try "
                "rollout.engine=vllm"
            )
    shared = rollout.engine == "embedded" and not rollout.replicas
    if shared and "parity_max" in rollout.model_fields_set:
        yield (
            "rollout.parity_max: the embedded engine samples from the trainer's own weights, there "
            "is nothing to compare; remove it"
        )


def _lora(config: Config) -> Iterator[str]:
    model = config.model
    for name in chosen(model.lora) if model.train not in ADAPTED else ():
        yield (
            f"model.lora.{name}: has no effect with model.train={model.train}; try model.train=lora"
        )
    if model.lora.vision and model.lora.targets != "all-linear":
        yield (
            f"model.lora.vision: has no effect with model.lora.targets={model.lora.targets}; "
            "name the vision tower there, or try model.lora.targets=all-linear"
        )


def _series(config: Config) -> Iterator[str]:
    model, rollout = config.model, config.rollout
    held = bool(model.path) and (Path(model.path) / SERIES_FILE).is_file()
    encoder = model.series.encoder
    if encoder is None and not held:
        for name in chosen(model.series):
            yield (
                f"model.series.{name}: has no effect without an encoder; "
                "try model.series.encoder=patches"
            )
        return
    file, _, function = (encoder or "").rpartition(":")
    if file.endswith(".py") and function and not Path(file).is_file():
        yield f"model.series.encoder: {file} does not exist (looked in {Path.cwd()})"
    elif encoder not in (None, "patches") and not (file.endswith(".py") and function):
        yield (
            f"model.series.encoder: {encoder} is neither patches nor FILE.py:FUNCTION; "
            "try model.series.encoder=patches"
        )
    if rollout.engine != "embedded" or rollout.replicas:
        name = "replicas" if rollout.engine == "embedded" else "engine"
        yield (
            f"rollout.{name}: {getattr(rollout, name)} has no encoder for time series; "
            "try rollout.engine=embedded rollout.replicas=0"
        )
    if (model.train in ADAPTED or "series" in _frozen(model.train)) and not held:
        yield (
            f"model.train: {model.train} would leave the encoder of time series as it was drawn; "
            "train it first with model.train=freeze:llm, or try model.train=full"
        )


def _lora_dropout(config: Config) -> Iterator[str]:
    if config.model.lora.dropout:
        yield (
            "model.lora.dropout: with it the policy that learns is not the one that answered; "
            "try model.lora.dropout=0"
        )


def _train_data(config: Config) -> Iterator[str]:
    if not config.data.train:
        yield "data.train: no training data; try data.train=train.jsonl"
    weighted = [source for source in config.data.train if source.weight is not None]
    if weighted and len(weighted) < len(config.data.train):
        yield "data.train: some sets have a weight and some have none; give one to all, or to none"
    if "mixing" in config.data.model_fields_set and not weighted:
        yield "data.mixing: has no effect without weights; set data.train[].weight or remove it"


def _val_data(config: Config) -> Iterator[str]:
    if not config.data.val and not config.eval.suites:
        yield "data.val: nothing to evaluate; try data.val=test.jsonl"
    yield from suites.problems(config.eval)


def _some_data(config: Config) -> Iterator[str]:
    if not config.data.train and not config.data.val:
        yield "data.train: no data; try data.train=train.jsonl"


def _data_files(config: Config) -> Iterator[str]:
    return _missing_files(config, "train", "val", "demonstrations")


def _val_files(config: Config) -> Iterator[str]:
    return _missing_files(config, "val")


def _missing_files(config: Config, *names: str) -> Iterator[str]:
    data = config.data
    for name in names:
        for source in getattr(data, name):
            path = parse_address(source.path).path
            if not data.allow_network and not Path(path).exists():
                yield (
                    f"data.{name}: {path} does not exist; give a file or folder on this disk, or "
                    "a hub id with data.allow_network=true"
                )


def _pixels(config: Config) -> Iterator[str]:
    low, high = config.data.min_pixels, config.data.max_pixels
    if low > high:
        yield (
            f"data.min_pixels: {low} is above data.max_pixels={high}; "
            f"try data.min_pixels={min(3136, high)}"
        )


def _prompt_files(config: Config) -> Iterator[str]:
    for name in ("template", "chat_template"):
        path = getattr(config.prompt, name)
        if path is not None and not Path(path).is_file():
            yield f"prompt.{name}: file {path} does not exist; give a Jinja file, or remove it"


def _sampling(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.support == "refuse":
        for name, truncates, off in (
            ("top_p", rollout.top_p < 1, 1),
            ("top_k", rollout.top_k > 0, -1),
        ):
            if truncates:
                yield (
                    f"rollout.{name}: truncated sampling biases every ratio unless the kept ids "
                    f"are replayed; set rollout.support=replay or rollout.{name}={off}"
                )
    if rollout.top_k == 0:
        yield "rollout.top_k: 0 keeps no token; try rollout.top_k=-1 to keep all"


def _response_length(config: Config) -> Iterator[str]:
    style, limits = config.prompt.format, {"rollout.max_tokens": config.rollout.max_tokens}
    if config.val.max_tokens is not None:
        limits["val.max_tokens"] = config.val.max_tokens
    shortest = SHORTEST_ANSWER.get(style, 1)
    for name, limit in limits.items():
        if limit < shortest:
            yield (
                f"{name}: {limit} tokens cannot hold an answer in the format {style!r} "
                f"(at least {shortest}); try {name}=256"
            )
    total = config.env.max_total_tokens
    if total <= config.rollout.max_tokens:
        yield (
            f"env.max_total_tokens: {total} leaves no room for a prompt beside "
            f"rollout.max_tokens={config.rollout.max_tokens}; "
            f"try env.max_total_tokens={config.rollout.max_tokens + config.data.max_prompt_tokens}"
        )


def _batch(config: Config) -> Iterator[str]:
    updates, prompts = config.train.updates_per_step, config.train.prompts_per_step
    if updates is not None and updates > prompts:
        yield (
            f"train.updates_per_step: {updates} updates need as many prompts, and a step has "
            f"{prompts}; try train.updates_per_step={prompts}"
        )


def _optimizer(config: Config) -> Iterator[str]:
    train, steps = config.train, config.run.max_steps
    if train.schedule == "constant" and "min_lr" in train.model_fields_set:
        yield "train.min_lr: has no effect with train.schedule=constant; try train.schedule=linear"
    if train.ema and config.model.train in ADAPTED:
        yield f"train.ema: averages whole weights; with model.train={config.model.train} use 0"
    if steps is not None and train.warmup >= max(1, steps):
        yield (
            f"train.warmup: {train.warmup:g} steps in a run of {steps} never reach the full "
            f"learning rate; try train.warmup={steps // 10}"
        )
    found = described(Path(config.model.path)) if train.aux_coef else {}
    if found and not names_experts(found):
        yield (
            f"train.aux_coef: {config.model.path} is a {found.get('model_type')} and has no "
            "experts to balance; try train.aux_coef=0"
        )
    for beta in train.betas:
        if not 0 <= beta < 1:
            yield f"train.betas: {beta} is outside [0, 1); try train.betas=[0.9,0.95]"
    for name, factor in train.lr_scale.items():
        if name not in TOWERS:
            yield f"train.lr_scale: unknown tower {name!r}; known are {', '.join(TOWERS)}"
        elif factor < 0:
            yield f"train.lr_scale: {name} has the factor {factor:g}; try 0.1"
        elif name in _resting(config):
            yield (
                f"train.lr_scale.{name}: has no effect with model.train={config.model.train}, "
                "which leaves that tower as it is; remove it"
            )


def _frozen(train: str) -> list[str]:
    kind, _, listed = train.partition(":")
    return [pattern.strip() for pattern in listed.split(",")] if kind == "freeze" else []


def _resting(config: Config) -> list[str]:
    """Towers of which nothing is trained, as far as their names say."""
    model = config.model
    if model.train not in ADAPTED:
        return _frozen(model.train)
    chosen = ("vision", "projector", "audio") if model.lora.targets == "all-linear" else ()
    return ["series", *(name for name in chosen if name == "audio" or not model.lora.vision)]


def _reward(config: Config) -> Iterator[str]:
    reward = config.reward
    if not reward.given and not environments.gives_rewards(config.env):
        yield "reward.terms: nothing scores a response; try reward.terms=[math]"
    if reward.clip is not None and reward.clip[0] >= reward.clip[1]:
        low, high = reward.clip
        yield f"reward.clip: {low} is not below {high}; try reward.clip=[-1,1]"


def _environment(config: Config) -> Iterator[str]:
    turns = config.env.turns
    yield from environments.problems(config.env)
    if config.env.name == "single_turn" and turns > 1:
        yield f"env.max_turns: {turns} has no effect with env.name=single_turn; try env.max_turns=1"


def _validation(config: Config) -> Iterator[str]:
    val = config.val
    if val.n > 1 and val.temperature == 0:
        yield (
            f"val.n: {val.n} greedy responses are all the same; try val.temperature=1 or val.n=1"
        )
    yield from environments.sweep_problems(config.env, val.turns)


def _selection(config: Config) -> Iterator[str]:
    if config.generate.select != "all":
        yield from _reward(config)


def _resume(config: Config) -> Iterator[str]:
    resume = config.run.resume
    if resume not in ("none", "auto", "best") and not Path(resume).is_dir():
        yield f"run.resume: {resume} is not a checkpoint folder; try run.resume=auto"


def _critic(config: Config) -> Iterator[str]:
    path = config.algorithm.critic.path
    if path is not None and not (Path(path) / "config.json").is_file():
        yield (
            f"algorithm.critic.path: {path} has no config.json; give a Hugging Face model folder, "
            "or leave it empty to start from the policy"
        )


def _critic_warmup(config: Config) -> Iterator[str]:
    alone, steps = config.algorithm.critic.warmup_steps or 0, config.run.max_steps
    if steps is not None and alone >= steps:
        yield (
            f"algorithm.critic.warmup_steps: in all {steps} steps of the run only the critic would "
            f"learn; try algorithm.critic.warmup_steps={steps // 10}"
        )


LOOKING = (_pixels, _prompt_files, _judge)
READING = (_data_files, *LOOKING)
TRAINING = (
    _model,
    _own_weights,
    _engine_options,
    _lora,
    _series,
    _train_data,
    *READING,
    _optimizer,
    _validation,
    _resume,
)
RULES: dict[str, tuple[Rule, ...]] = {
    "rl": (
        *TRAINING,
        _critic,
        _critic_warmup,
        offline.demonstrations,
        _lora_dropout,
        _sampling,
        _response_length,
        _batch,
        _reward,
        _environment,
    ),
    "sft": (*TRAINING, offline.imitation),
    "dpo": (*TRAINING, offline.preferences),
    "reward-model": (*TRAINING, offline.rating),
    "eval": (
        _answering_model,
        _series,
        _val_data,
        _val_files,
        *LOOKING,
        _response_length,
        _validation,
        _environment,
    ),
    "generate": (
        _answering_model,
        _series,
        _some_data,
        *READING,
        _response_length,
        _environment,
        _selection,
        offline.selection,
    ),
    "chat": (_answering_model, _series, _pixels, _prompt_files),
    "estimate": (  # those of rl that need neither rows nor rewards
        _model,
        _own_weights,
        _engine_options,
        _lora,
        _series,
        _pixels,
        _optimizer,
        _critic,
        _critic_warmup,
        _lora_dropout,
        _sampling,
        _response_length,
        _batch,
    ),
    "check-data": (_series, _some_data, *READING),
    "serve-reward": (_pixels, _judge, _reward),
}

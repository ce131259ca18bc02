"""Rules about models: folders, endpoints, engines, adapters, critics, teachers."""

import os
import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import urlsplit

from saccade.config import ADAPTED, Config
from saccade.config.schema import HttpConfig


def folder(field: str, path: str) -> Iterator[str]:
    if not path.startswith("tiny:") and not (Path(path) / "config.json").is_file():
        reason = "has no config.json" if Path(path).is_dir() else "is not a folder"
        saved = [p.parent for p in (Path(path) / "checkpoints").glob("step-*/config.json")]
        newest = max(saved, key=lambda p: p.stat().st_mtime, default=None)
        if (Path(path) / "adapter_config.json").is_file():  # the merged model is in the parent folder
            reason, newest = "is an adapter", Path(path).absolute().parent
        advice = "give a Hugging Face model folder that is on this disk"
        yield f"{field}: {path} {reason}; {f'try {field}={newest}' if newest else advice}"


def model(config: Config) -> Iterator[str]:
    path, train = config.model.path, config.model.train
    if not path:
        yield ("model.path: no model; give a Hugging Face model folder, or model.path=tiny:qwen2_5_vl")
    else:
        yield from folder("model.path", path)
    frozen = train.removeprefix("freeze:")
    if train not in ("full", *ADAPTED) and (frozen == train or not frozen.strip(", ")):
        meant = next(iter(get_close_matches(train.lower(), ("full", *ADAPTED), n=1)), "freeze:vision")
        yield f"model.train: expected full, lora, qlora or freeze:PATTERNS, got {train!r}; try {meant}"


def answering_model(config: Config) -> Iterator[str]:
    """Commands that do not train may use an endpoint, which needs no model folder."""
    http = config.rollout.http
    if config.rollout.engine != "http":
        yield from model(config)
        return
    if not http.url:
        yield "rollout.http.url: no address; try rollout.http.url=http://127.0.0.1:8000/v1"
    yield from _address("rollout.http", http)
    if config.prompt.chat_template:
        yield "prompt.chat_template: an endpoint applies its own template; remove it"
    if config.rollout.replicas:
        yield "rollout.replicas: an endpoint is one already; try rollout.replicas=0"


def _address(section: str, http: HttpConfig) -> Iterator[str]:
    address = urlsplit(http.url)
    if http.url and (address.scheme not in ("http", "https") or not address.hostname):
        yield (f"{section}.url: {http.url} is no address of an endpoint; try {section}.url=http://127.0.0.1:8000/v1")
    if address.username or address.password or address.query:
        yield f"{section}.url: a password or query would be logged; name a variable that holds it in {section}.key"
    if http.key and not re.fullmatch(r"[A-Za-z_]\w*", http.key):
        yield f"{section}.key: takes the name of a variable, not the key itself; try {section}.key=OPENAI_API_KEY"


def judge(config: Config) -> Iterator[str]:
    judge = config.reward.judge
    yield from _address("reward.judge", judge)
    if judge.api == "completions" and judge.send_images:
        yield ("reward.judge.send_images: completions take text only; try reward.judge.api=chat")
    if judge.template is not None and not Path(judge.template).is_file():
        yield f"reward.judge.template: {judge.template} does not exist; give a Jinja file"


def local_weights_needed(config: Config) -> Iterator[str]:
    if config.rollout.engine == "http":
        yield "rollout.engine: http answers in eval, generate and chat only; try rollout.engine=embedded"


def several_gpus(config: Config) -> Iterator[str]:
    """Problems of options that do not work on several GPUs."""
    if config.run.gpus > 1:
        if config.rollout.engine != "embedded" and not config.rollout.replicas:
            yield f"rollout.replicas: {config.rollout.engine} needs processes beside run.gpus; try rollout.replicas=1"
        if (config.run.min_gpus or 0) > config.run.gpus:
            yield f"run.min_gpus: more than run.gpus={config.run.gpus}; try run.min_gpus={config.run.gpus}"
        if config.run.restarts and config.run.launcher == "join" and "SACCADE_TOKEN" not in os.environ:
            yield "run.restarts: who starts `saccade rank` again needs SACCADE_TOKEN; set it, or try run.restarts=0"
        together = config.train.sequence_parallel
        if config.run.gpus % together:
            works = next(n for n in range(together, 0, -1) if config.run.gpus % n == 0)
            what = f"{together} does not divide run.gpus={config.run.gpus}"
            yield f"train.sequence_parallel: {what}; try train.sequence_parallel={works}"
        if together > 1 and config.train.aux_coef:
            yield "train.aux_coef: no GPU sees all tokens of a forest; try train.aux_coef=0"


def frozen(train: str) -> list[str]:
    kind, _, listed = train.partition(":")
    return [pattern.strip() for pattern in listed.split(",")] if kind == "freeze" else []


def lora_dropout(config: Config) -> Iterator[str]:
    if config.model.lora.dropout:
        yield "model.lora.dropout: the policy that learns is not the one that answered; try model.lora.dropout=0"


def critic(config: Config) -> Iterator[str]:
    critic, steps = config.algorithm.critic, config.run.max_steps
    if critic.path is not None:
        yield from folder("algorithm.critic.path", critic.path)
    if steps is not None and critic.warmup_steps >= steps:
        yield f"algorithm.critic.warmup_steps: the policy learns in none of the {steps} steps; try {steps // 10}"


def imitation(config: Config) -> Iterator[str]:
    sft = config.sft
    if sft.teacher is not None:
        yield from folder("sft.teacher", sft.teacher)
    if sft.reward_tag is not None and not _shows_reward(sft.reward_tag):
        yield f"sft.reward_tag: {sft.reward_tag!r} shows no reward; try '<reward {{reward:.1f}}>'"


def _shows_reward(tag: str) -> bool:
    try:
        return tag.format(reward=0.25) != tag.format(reward=100.0)
    except (LookupError, ValueError, AttributeError):
        return False

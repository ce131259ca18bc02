"""Rules about data and prompts."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from saccade.config import Config
from saccade.data.sources import parse_address
from saccade.registry import HOOKS


def train_data(config: Config) -> Iterator[str]:
    if not config.data.train:
        yield "data.train: no training data; try data.train=train.jsonl"
    weighted = [source for source in config.data.train if source.weight is not None]
    if weighted and len(weighted) < len(config.data.train):
        yield "data.train: some sets have a weight and some have none; give one to all, or to none"


def val_data(config: Config) -> Iterator[str]:
    if not config.data.val and not config.eval.suites:
        yield "data.val: nothing to evaluate; try data.val=test.jsonl"
    yield from HOOKS["suite_problems"](config.eval) if config.eval.suites else ()


def some_data(config: Config) -> Iterator[str]:
    if not config.data.train and not config.data.val:
        yield "data.train: no data; try data.train=train.jsonl"


def data_files(config: Config, names: Sequence[str] = ("train", "val", "demonstrations")) -> Iterator[str]:
    data = config.data
    alone = ", or data.val=[] to evaluate the suites alone" if [*names] == ["val"] and config.eval.suites else ""
    for name in names:
        for source in getattr(data, name):
            path = parse_address(source.path).path
            if not data.allow_network and not Path(path).exists():
                hub = "a hub id with data.allow_network=true"
                yield f"data.{name}: {path} does not exist; give a file, or {hub}{alone}"


def pixels(config: Config) -> Iterator[str]:
    low, high = config.data.min_pixels, config.data.max_pixels
    if low > high:
        yield (f"data.min_pixels: {low} is above data.max_pixels={high}; try data.min_pixels={min(3136, high)}")


def prompt_files(config: Config) -> Iterator[str]:
    for name in ("template", "chat_template"):
        path = getattr(config.prompt, name)
        if path is not None and not Path(path).is_file():
            yield f"prompt.{name}: file {path} does not exist; give a Jinja file, or remove it"


def demonstrations(config: Config) -> Iterator[str]:
    if config.train.sft_coef and not config.data.demonstrations:
        yield "data.demonstrations: train.sft_coef needs some; try data.demonstrations=shown.jsonl"

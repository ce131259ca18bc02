"""A first run.yaml for a model folder and a data file, every line with its reason.

Looks at the model's config and processor, at the first rows and the size of an image; opens no weights.

    write_config(Path("models/Qwen2.5-VL-3B-Instruct"), Path("train.jsonl"), Path("run.yaml"))
"""

import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from saccade.config import Config, DataConfig, DataSource, load
from saccade.config.schema.presets import unknown
from saccade.data.chats import RowError
from saccade.data.datasets import load as load_rows
from saccade.data.formats import Format, detect, read_row
from saccade.data.sources import open_source
from saccade.errors import ConfigError, DataError, SaccadeError
from saccade.models.files import model_json
from saccade.plugins.check_data.unused_media import unread_media
from saccade.plugins.families.tiny_kinds import ALL, build
from saccade.plugins.init.run_page import Guess, Page, run_page
from saccade.plugins.sokoban import sokoban
from saccade.system import devices
from saccade.system.devices import Device
from saccade.system.disk import require_new
from saccade.types import Media, Sample

LOOKED_AT = 200
MOST_SOURCES = 10  # most values of a column by which rewards may differ
DEFAULT = "default"  # in reward.by_source: all sources that it does not name
UNOPENED = Media(hash="", width=1, height=1, path="")
OPENED = 8  # rows whose images are opened to read their sizes
USUAL_IMAGE = Media(hash="", width=1024, height=768, path="")

NUMBER = r"\s*-?\d+(?:\.\d+)?\s*"
# Two letters: a single one is a variable, and letters behind a backslash are a LaTeX command.
WORD = r"(?<![\\A-Za-z])[^\W\d_]{2}|[\u3040-\u30ff\u4e00-\u9fff]"
LETTER = r"\(?[A-Z]\)?\.?"
MATHS = r"[\d\\=+^{}$<>*/|_]"
# The first kind that fits every gold: (reward, its arguments, pattern, what the golds look like).
KINDS = (
    ("count", "", r"[+-]?\d+", "every gold is an integer"),
    ("choice", "", LETTER, "every gold is a letter"),
    ("iou", "", rf"\[{NUMBER}(?:,{NUMBER}){{3}}\]", "golds are boxes, in pixels of the image"),
    ("exact", "", rf"(?s)(?!.*{MATHS}).*(?:{WORD}).*", "golds are words"),
    ("math", "", rf"(?s)(?!.*(?:{WORD})).*", "golds are numbers or formulas"),
    ("relaxed", "", r"[^\\=^{}<>*/|_]+", "numbers within 5 % (a chart's), words by their spelling"),
    ("math", "{gold_unparseable: string}", r"(?s).*", "numbers by value, words by their spelling"),
)
USUAL_PIXELS, TILED_PIXELS = 401_408, 802_816  # of an image; of one that is cut into tiles
LARGE, LEAST, MOST = (2048, 1536), 3136, 1 << 24  # an image, and budgets, to see whether they change what it costs


def write_config(model: Path, data: Path, out: Path, device: str | None = None, keys: Sequence[str] = ()) -> str:
    """Write `out`; refuses to replace a file. Returns how a step fits the GPUs of this machine, or one as named.
    `keys`: data.keys.ROLE=COLUMN.
    """
    from saccade.plugins.estimate.estimate_command import find_device  # with torch

    require_new(out, "--out")
    gpu = find_device(device, "auto")
    model_type = _type_of(model)
    if others := [option for option in keys if not option.startswith("data.keys.")]:
        raise ConfigError(f"{others[0]}: init takes data.keys.ROLE=COLUMN; set this in the file that it writes")
    format, named, samples = _first_rows(data, load(None, keys).data)
    rows, images = len(samples), sum(bool(sample.media) for sample in samples)
    shares = {0: "text only", rows: "each with an image"}
    column, rewards = letters_apart(samples) or ("", {"": guess_reward(samples)})
    page = Page(
        advice=advice(out),
        name=data.name.split(".")[0],
        model=str(model),
        model_type=model_type,
        data=str(data),
        format=format,
        about=shares.get(images, f"{images} of the first {rows} with an image"),
        keys={**named, "data_source": column} if column else named,
        budgets=pixel_budgets(str(model), _first_image(data, named)) if images else (),
        rewards=rewards,
        prompts=min(32, rows),
        played=rewards.get("", ("",))[0] == "sokoban" and not images,  # move by move
        gpus=1 if device else devices.count(),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(run_page(page), encoding="utf-8")
    config = load(out)
    if not gpu.is_gpu:
        return ""
    note, changes = fitting(config, gpu, more=device is not None)
    lines = [f"# {note}", *(change.replace("=", ": ", 1) for change in changes)]
    out.write_text(run_page(page) + "\n".join(lines) + "\n", encoding="utf-8")
    load(out)
    return note


def fitting(config: Config, gpu: Device, *, more: bool) -> tuple[str, list[str]]:
    """Returns a line about the GPUs and the options with which a step fits them. `more`: there may be more GPUs than
    `run.gpus`.
    """
    from saccade.plugins.estimate import estimate  # with torch
    from saccade.recipes.model_setup import quiet_libraries

    quiet_libraries()
    cards = f"one {gpu.name}" if config.run.gpus == 1 else f"each of {config.run.gpus} {gpu.name}"
    try:
        found = estimate(config, gpu)
    except SaccadeError as error:
        return f"No estimate for {cards}: {' '.join(str(error).split())}", []
    need = f"{max(found.memory.peaks.values()):.0f} GiB are needed of {found.memory.limit:.0f}"
    if found.memory.fits:
        return f"A step fits {cards}: {need}", []
    options = [option for option in found.advice if more or "run.gpus=" not in option]
    if not options:
        instead = found.advice[0] if found.advice else "a smaller model"
        return f"A step does not fit {cards}, whatever is changed: {need}; take {instead}", []
    first, *others = options
    instead = f", instead of which {' or '.join(others)} would do" if others else ""
    return f"A step fits {cards} with {first}{instead}: else {need}", first.split()


def pixel_budgets(model: str, image: Media) -> list[tuple[int, str]]:
    """A pixel budget, and what it does: nothing is returned where no budget changes what an image costs."""
    from saccade.models.families import load_family  # with transformers
    from saccade.recipes.model_setup import quiet_libraries

    quiet_libraries()
    with TemporaryDirectory() as folder:
        try:
            family = load_family(build(_type_of(Path(model)), folder) if model.startswith("tiny:") else model)
            large = replace(image, width=LARGE[0], height=LARGE[1])
            costs = {family.measure(replace(large, max_pixels=pixels))[1] for pixels in (LEAST, MOST)}
            whole = getattr(family.reader, "scales", family.spec.whole)
            pixels = USUAL_PIXELS if whole else TILED_PIXELS
            _, tokens = family.measure(replace(image, max_pixels=pixels))
        except SaccadeError:  # what is missing there, other commands say
            return [(USUAL_PIXELS, "larger images are scaled down; more shows finer detail")]
    where = "" if image is USUAL_IMAGE else ", as in the rows,"
    shown = f"an image of {image.width}x{image.height}{where} is {tokens:,} tokens"
    return [(pixels, f"{shown}; more shows finer detail")] if len(costs) > 1 else []


def _first_image(data: Path, keys: Mapping[str, str]) -> Media:
    """The first of some rows that can be opened, else one of a usual size."""
    config = DataConfig(keys=dict(keys), on_bad_row="quarantine", max_bad_fraction=1.0)
    with suppress(SaccadeError, StopIteration):
        samples = load_rows([DataSource(path=str(data), max_samples=OPENED)], config).samples
        return next(media for sample in samples for media in sample.media if media.kind == "image")
    return USUAL_IMAGE


def advice(out: Path) -> str:
    """The next commands for the file, shown in its first line and on the screen."""
    file = shlex.quote(str(out))
    return f"saccade check-data {file}, then saccade rl {file} --dry-run, then saccade rl {file}"


def _type_of(model: Path) -> str:
    kind = str(model).removeprefix("tiny:")
    if kind != str(model):
        if kind not in ALL:
            raise unknown("tiny model", kind, ALL)
        return kind
    if not (config := model_json(model)):
        raise ConfigError(f"{model} has no config.json; give a Hugging Face model folder, or tiny:qwen2_5_vl")
    return config.get("model_type", "unknown")


def _first_rows(data: Path, config: DataConfig) -> tuple[str, Mapping[str, str], list[Sample]]:
    """Returns the format of the rows, `data.keys` for media in columns of other names, and the samples."""
    rows = islice(open_source(DataSource(path=str(data))).rows, LOOKED_AT)
    readable = [row for row in rows if not isinstance(row, RowError)]
    if not readable:
        raise DataError(f"{data}: none of the first {LOOKED_AT} rows can be read")
    format = detect(sorted({name for row in readable for name in row}), config, data.name)
    keys = dict(config.keys)
    samples = _samples(readable, format, keys)
    if not samples:
        raise DataError(f"{data}: no row fits the format {format.name}; see `saccade check-data {data}`")
    if not any(sample.media for sample in samples) and (unread := unread_media(readable, format, keys)):
        column, role = unread
        keys[role] = column
        samples = _samples(readable, format, keys)
    return format.name, keys, samples


def _samples(rows: Iterable[Mapping[str, Any]], format: Format, keys: Mapping[str, str]) -> list[Sample]:
    config, samples = DataConfig(keys=dict(keys)), []
    for row in rows:
        with suppress(RowError):  # `saccade check-data` lists them with their reasons
            samples.append(read_row(row, format, config, open_image=lambda *_, **__: UNOPENED))
    return samples


def guess_reward(samples: Sequence[Sample]) -> Guess:
    """(verifier, its arguments, why) from the golds."""
    if all(_is_level(sample.extra.get("level")) for sample in samples):
        return "sokoban", "", "plays the moves on the column `level`"
    golds = [gold for sample in samples for gold in _golds(sample)]
    if not golds:
        called = "call its column `answer` (of Sokoban `level`), or set data.keys.answer in a config"
        others = "Demonstrations are for `saccade sft`, pairs for `saccade dpo` or `saccade reward-model`, labels for"
        others += " `saccade dpo … dpo.loss=kto`, steps for `saccade reward-model … reward_model.kind=process`"
        raise DataError(f"no row has an answer; {called}. {others}")
    if all(sample.choices for sample in samples):
        return "choice", "", "every row lists its choices"
    reward, args, because = next(
        (reward, args, because)
        for reward, args, pattern, because in KINDS
        if all(re.fullmatch(pattern, gold.strip()) for gold in golds)
        if reward != "iou" or all(sample.media for sample in samples)
        if reward != "relaxed" or any(re.fullmatch(r"\D*\d+\.\d+\D*", gold) for gold in golds)
    )
    if 1 < (letters := sum(map(_is_letter, golds))) < len(golds):
        advice = "give those rows another data_source, and it `choice` in reward.by_source"
        because += f"; {letters} of {len(golds)} are letters: {advice}"
    return reward, args, because


def letters_apart(samples: Sequence[Sample]) -> tuple[str, dict[str, Guess]] | None:
    """Returns the column that separates rows whose golds are letters of choices from others (empty: data_source), and
    the rewards: one for each of its values that has letters, and `default` for all others. None without such a column.
    """
    for column in ("", *(name for name, value in samples[0].extra.items() if isinstance(value, str))):
        sources: dict[str, list[Sample]] = defaultdict(list)
        for sample in samples:
            sources[str(sample.extra.get(column, DEFAULT)) if column else sample.data_source].append(sample)
        kinds = {name: {_is_letter(gold) for row in rows for gold in _golds(row)} for name, rows in sources.items()}
        letters = [source for source, kind in kinds.items() if kind == {True}]
        others = [row for source, rows in sources.items() if source not in letters for row in rows]
        apart = bool(letters and others) and all(len(kind) == 1 for kind in kinds.values())
        # Sources not seen here are more likely to be like the others, so these are the default.
        if apart and DEFAULT not in letters and len(sources) <= MOST_SOURCES:
            rewards = {source: guess_reward(sources[source]) for source in letters}
            return column, rewards | {DEFAULT: guess_reward(others)}
    return None


def _golds(sample: Sample) -> Sequence[str]:
    return [sample.answer] if isinstance(sample.answer, str) else sample.answer or []


def _is_letter(gold: str) -> bool:
    return re.fullmatch(LETTER, gold.strip()) is not None


def _is_level(value: Any) -> bool:
    """Whether the value is a level of Sokoban; in other data `level` is a difficulty."""
    try:
        return isinstance(value, str | list) and bool(sokoban.start(value))
    except ValueError:
        return False

"""A model that nobody has looked at is compared with transformers before it is used: prompts token by token, the mask
of every layer place by place, what the decoder is handed, last states and logits of packed rows number by number. What
does not agree is refused. A verdict is kept in the user's cache folder, by class, config, versions and our code.

Rows are short, so nothing is proved of what changes with length beyond a window: that is read from the config.

    for row in comparisons(model, family): print(row)
"""

import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp

import saccade
from saccade.errors import EnvironmentProblem
from saccade.forest import attention
from saccade.media.kinds import KINDS
from saccade.models.families import Family
from saccade.models.files import model_json
from saccade.models.load import hidden_states, media_inputs
from saccade.plugins.families import proof_rows
from saccade.plugins.families.door import door
from saccade.plugins.families.picture_processor import BESIDE
from saccade.plugins.families.proof_rows import Layer, ProofRow, noise
from saccade.plugins.ranks.by_rows import keep_rows
from saccade.plugins.ranks.machines import agreed
from saccade.trainer import model_state
from saccade.trainer.forward_inputs import inputs_of
from saccade.types import Media, Rendered, Source

GAPS = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}  # of the largest number
ROUNDINGS = 3  # of half precision, measured: two ways to compute round, and not of all rows alike
FILLER = 16_384  # tokens before a row: as many as a forward may have
LONGEST_ROW = 8_192  # of a row that is longer than a window
NOT_HANDED = "not handed over: its decoder counts them itself, and last states tell whether as here"


class Compared(NamedTuple):
    """One comparison: how far apart it was found, in what, and how far it may be."""

    what: str
    gap: float
    limit: float = 0
    of: str = "of the largest number"
    where: str = ""
    kind: str = ""  # of media, alone or beside a picture, that are refused if it does not agree; else the model is

    @property
    def agrees(self) -> bool:
        return self.gap <= self.limit

    @property
    def advice(self) -> str:
        """What can be done where it does not agree."""
        halves = GAPS[torch.float32] < self.limit and math.isfinite(self.gap)
        instead = "use another model" + ", or model.dtype=float32 if it is rounding" * halves
        kind, beside, _ = self.kind.partition(f" {BESIDE}")
        what = kind and f"rows that hold {KINDS[kind].article}{beside} are refused, others are not: leave them out, or "
        return what + instead

    def __str__(self) -> str:
        if self.gap == math.inf and self.where:
            return f"{self.what}: {self.where}"
        number = f"{self.gap:.0f}" if self.limit == 0 else f"{self.gap:.2g}"
        return f"{self.what}: {number} {self.of}, limit {self.limit:g}" + f"; {self.where}" * bool(self.where)


def prove(model: Any, family: Family) -> None:
    """Refuse a model that does not compute here what it computes in transformers, or videos and sounds that it does
    not see and hear so.
    """
    family.reader.keep_for(model.dtype)
    file = _verdict_file(model, family)
    proved = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.is_file() else []
    if _largest(model, not proved)[0]:
        proved = []  # ranks that hold a part each prove it together, or none does
    found, started = [], time.perf_counter()
    for row in [Compared(**each) for each in proved] or comparisons(model, family):
        found.append(row)
        if not row.agrees and row.kind:
            family.reader.refuse(row.kind, str(row))
        elif not row.agrees:
            what = f"{family.path}: a model of type {family.name!r} computes something else here than in transformers"
            raise EnvironmentProblem(f"{what}; {row}; {row.advice}")
    if proved:
        return
    kept = {"seconds": time.perf_counter() - started, "rows": [row._asdict() for row in found]}
    with suppress(OSError):  # it is proved again where nothing can be kept
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = file.with_suffix(f".{os.getpid()}")  # other processes may read it at this moment
        whole.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        whole.replace(file)


def comparisons(model: Any, family: Family, *, filler: int = FILLER) -> Iterator[Compared]:
    """Comparison after comparison; whoever reads them may stop at one that does not agree. What may be rounding, since
    transformers itself is as far from float32, is compared again in float32, all of it.
    """
    training, half = model.training, model.dtype in (torch.bfloat16, torch.float16)
    model.eval()
    try:
        for row in _comparisons(model, family, filler):
            if not (half and 0 < row.limit < row.gap < math.inf):
                yield row
                continue
            rows = proof_rows.probes(family)
            rounded = _by_transformers(model, rows)
            # Of several ranks, the others would wait in the middle of a pass for one that goes on.
            with suppress(*[torch.OutOfMemoryError] * (not _is_divided(model))), _in_float32(model, family):
                if row.gap <= ROUNDINGS * max(_largest(model, *map(_gap, rounded, _by_transformers(model, rows)))):
                    yield from _comparisons(model, family, filler)
                    return
            yield row
    except EnvironmentProblem:
        raise
    except Exception as error:
        why = f"could not be run here ({type(error).__name__}: {error})"
        raise EnvironmentProblem(f"{family.path}: a model of type {family.name!r} {why}; use another model") from error
    finally:
        model.train(training)


@torch.no_grad()
def _by_transformers(model: Any, rows: Sequence[ProofRow]) -> list[Tensor]:
    return [found for row in rows for found in proof_rows.theirs(model, row)[0]]


@contextmanager
def _in_float32(model: Any, family: Family) -> Iterator[None]:
    """Weights of half precision are the same numbers there, and afterwards again. Gathered ones stay gathered: those
    outside of layers are not gathered again.
    """
    half = model.dtype
    halves = [one for one in (*model.parameters(), *model.buffers()) if one.dtype == half]

    def cast_all(dtype: torch.dtype) -> None:
        for one in halves:
            divided = hasattr(one, "rows")
            if divided:
                one.rows = one.rows.to(dtype)
            if divided and not any(one.stride()):  # one number, expanded
                keep_rows([one])
            else:
                one.data = one.data.to(dtype)
        family.reader.keep_for(dtype)

    try:
        cast_all(torch.float32)
        yield
    finally:
        cast_all(half)
        torch.cuda.empty_cache()  # an engine in another process may need it


def _is_divided(model: Any) -> bool:
    return any(hasattr(weight, "rows") for weight in model.parameters())


def _largest(model: Any, *numbers: float) -> list[float]:
    """Of all ranks, if each holds a part of the model: they gather it together, so they have to decide alike."""
    return agreed(numbers, ReduceOp.MAX).tolist() if _is_divided(model) else [*numbers]


def _comparisons(model: Any, family: Family, filler: int) -> Iterator[Compared]:
    for row in _own_comparisons(model, family, filler):
        gap, limit = _largest(model, row.gap, row.limit)
        yield row._replace(gap=gap, limit=limit)


def _own_comparisons(model: Any, family: Family, filler: int) -> Iterator[Compared]:
    limit = GAPS[model.dtype]
    rows = proof_rows.probes(family) + _longer_than_windows(model, family)
    yield from _row_comparisons(model, family, rows, limit)
    with torch.no_grad():
        gap = _behind(model, family, filler)
    yield Compared(f"a row behind {filler} tokens of others", gap, limit)
    for kind in [kind for kind in family.spec.media_tokens if kind != "image"]:
        yield from sense_comparisons(model, family, kind, limit)


def sense_comparisons(model: Any, family: Family, kind: str, limit: float) -> Iterator[Compared]:
    """Comparisons for another kind of media than pictures, alone and beside one."""
    draw = np.random.default_rng(6)
    if kind == "video":
        films = (draw.integers(0, 256, size, dtype=np.uint8) for size in ((4, 50, 60, 3), (6, 70, 90, 3)))
        one, other = (KINDS[kind].open(film, fps=fps) for film, fps in zip(films, (2.0, 1.0), strict=True))
    else:
        one, other = (KINDS[kind].open(draw.normal(size=n).astype(np.float32) / 10) for n in (8_000, 20_000))
    asked: Mapping[str, Any] = {
        kind: [((one, "What is it?"), 2), ((other, "And this?"), 1)],
        f"{kind} {BESIDE}": [(("Is ", noise(60, 50, 0), " as ", other, "?"), 1)],
    }
    for name, prompts in asked.items():
        try:
            rows = [row for parts, answers in prompts for row in proof_rows.answered(family, parts, answers)]
            if left_out := [array for parts, _ in prompts for array in _left_out(family, parts)]:
                raise ValueError(f"its processor makes {', '.join(left_out)} of one of them alone")
            made = list(_row_comparisons(model, family, rows, limit))
            rows += proof_rows.answered(family, (noise(60, 50, 0),), 1)
            spans = {span.media.kind: span for row in rows for span in row.prompt.media}.values()  # one of each kind
            widths = {family.features(model, media_inputs(family, [span], model.device)).shape[1] for span in spans}
            made.append(Compared("width of features", len(widths) - 1, of="others than those of pictures"))
        except torch.AcceleratorError:
            raise  # whatever a GPU runs after that fails, too
        except Exception as error:  # also where transformers itself does not take it
            made = [Compared("cannot be run", math.inf, limit, where=f"{type(error).__name__}: {error}")]
        worst = next((row for row in made if not row.agrees), max(made, key=lambda row: row.gap))
        yield worst._replace(what=f"{name}: {worst.what}", kind=name)


def _row_comparisons(model: Any, family: Family, rows: Sequence[ProofRow], limit: float) -> Iterator[Compared]:
    yield max((_prompts(family, row) for row in rows), key=lambda found: found.gap)
    with torch.no_grad():
        wanted, seen = zip(*(proof_rows.theirs(model, row) for row in rows), strict=True)
        once = {row.prompt.ids.tobytes(): (row, told) for row, told in zip(rows, seen, strict=True)}.values()
        spans = [span for row, _ in once for span in row.prompt.media]
        lengths = [sum(span.length for span in row.prompt.media) for row, _ in once]
        features = family.features(model, media_inputs(family, spans, model.device)).split(lengths)
        shown = [(row, told, each) for (row, told), each in zip(once, features, strict=True)]
        masks = [found for each in shown for found in _masks(model, family, *each)]
        handed = _handed(model, family, [(row, each) for row, _, each in shown if row.prompt.media])
    for what in ("attention", "masks"):
        yield max((found for found in masks if found.what == what), key=lambda found: found.gap)
    yield Compared("pictures", handed[0], max(limit, 16 * torch.finfo(model.dtype).eps))
    yield Compared("positions", handed[1] or 0, of="tokens", where="" if handed[1] is not None else NOT_HANDED)
    with torch.no_grad():
        found = proof_rows.packed_rows(model, family, rows)
        model_state.set_training(model)
        trained = proof_rows.packed_rows(model, family, rows[:1])
        model.eval()
    for number, what in enumerate(("last states", "logits of answers")):
        yield Compared(what, max(_gap(a[number], b[number]) for a, b in zip(found, wanted, strict=True)), limit)
    yield Compared("training", _gap(trained[0][0], found[0][0]), limit)
    if alone := [n for n, row in enumerate(rows) if not row.prompt.media]:
        with torch.no_grad():
            texts = proof_rows.packed_rows(model, family, [rows[n] for n in alone])
        yield Compared("text alone", max(_gap(a[0], wanted[n][0]) for n, a in zip(alone, texts, strict=True)), limit)


def _gap(found: Tensor, wanted: Tensor) -> float:
    gap = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))
    return math.inf if math.isnan(gap) else gap  # which `max` might lose


def _left_out(family: Family, parts: Sequence[Any]) -> list[str]:
    """Arrays that are smaller than those of each medium alone: the model would look for features that are not there,
    and a GPU does not forgive that.
    """
    whole = {name: value.numel() for name, value in proof_rows.processed(family, parts).items()}
    alone = Counter[str]()
    for part in parts:
        if isinstance(part, Media):
            made = proof_rows.processed(family, (part,))
            shape = made["input_ids"].shape
            alone.update({name: value.numel() for name, value in made.items() if value.shape != shape})
    return [name for name, size in alone.items() if whole.get(name, 0) < size]


def _longer_than_windows(model: Any, family: Family) -> list[ProofRow]:
    """A row of text, where the config names a window that short rows do not reach."""
    text = model.config.get_text_config()
    named = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    lengths = [size + 40 for size in named if size and size + 40 <= min(LONGEST_ROW, family.max_positions)]
    if not lengths:
        return []
    ids = np.random.default_rng(5).choice(np.flatnonzero(~family.banned), max(lengths))
    prompt = Rendered(ids=ids[:-7], sources=np.full(len(ids) - 7, Source.PROMPT, np.int8))
    return [ProofRow(prompt, ids, {"input_ids": torch.from_numpy(prompt.ids)[None]})]


def _prompts(family: Family, row: ProofRow) -> Compared:
    ours, theirs = row.prompt.ids, row.inputs["input_ids"][0].numpy()
    least = min(len(ours), len(theirs))
    different = np.flatnonzero(ours[:least] != theirs[:least])
    count, first = len(different) + abs(len(ours) - len(theirs)), int(different[0]) if len(different) else least
    around = [family.chat.decode(ids[max(0, first - 4) : first + 4], special=True) for ids in (theirs, ours)]
    where = f"its processor writes {around[0]!r}, here it is {around[1]!r}" if count else ""
    return Compared("prompts", count, of="tokens", where=where)


def _masks(model: Any, family: Family, row: ProofRow, layers: Mapping[Any, Layer], shown: Tensor) -> Iterator[Compared]:
    """What each layer sees against what our plan would show it."""
    given = inputs_of(proof_rows.batch_of([row]), family, model.device, model.dtype, pixels=False)
    own: Any = given.plan
    told: dict[int, Any] = {}

    def note(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: Any) -> Tensor:
        told[layer] = window
        return own(layer, q, k, v, scale, window)

    spans = row.prompt.media
    plan = attention.ForwardPlan(note, lambda: own.recurrent_plan)
    hidden_states(model, family, given.ids, given.positions, spans, plan, places=given.places, features=shown)
    place, blocks = torch.arange(len(row.ids)), attention.blocks_at(family.blocks, row.ids, family.chat.placeholders)
    for layer, (mask, unknown, keys) in layers.items():
        where = f"in layer {layer}"
        yield Compared("attention", len(unknown), of="unknown arguments", where=", ".join(unknown))
        if keys != len(row.ids) or layer not in told:
            yield Compared("masks", keys, of="keys", where=f"{where} it looks at more than its own tokens")
            continue
        window = told[layer]
        wanted = place[:, None] >= place
        if blocks is not None and blocks.applies_to(window):
            numbers = torch.from_numpy(blocks.numbers)
            wanted |= (numbers[:, None] == numbers) & (numbers >= 0)
        if window is not None:
            wanted &= place >= attention.first_seen(place, window)[:, None]
        found = place[:, None] >= place if mask is None else mask[0, 0].cpu()
        found = found if found.dtype == torch.bool else found >= 0
        yield Compared("masks", int((found != wanted).sum()), of="pairs of tokens", where=where)
    if not layers:
        yield Compared("attention", 1, of="decoder", where="it computes its own")


def _handed(model: Any, family: Family, rows: Sequence[tuple[ProofRow, Tensor]]) -> tuple[float, int | None]:
    """How far apart what stands for pictures is at the decoder's door, before any layer blurs it, and how many
    positions differ there, if they are handed over; all may be further on by as much.
    """
    assert family.embed is not None
    gap, wrong = 0.0, None
    for row, mine in rows:
        places = np.concatenate([np.arange(span.start, span.end) for span in row.prompt.media])
        ids, where = (torch.from_numpy(each).to(model.device) for each in (row.ids, places))
        met = door(model, **proof_rows.whole_inputs(model, row))
        ours = family.embed(model, ids, where, mine)
        gap = max(gap, _gap(ours["inputs_embeds"].float(), met["inputs_embeds"].float()))
        found, wanted = family.positions(row.ids, row.prompt.media), met.get("position_ids")
        if wanted is not None:
            wanted = wanted.reshape(-1, wanted.shape[-1])[-len(found) :].cpu().numpy()
            wrong = max(wrong or 0, int(np.any(wanted - found != (wanted - found)[0, 0], axis=0).sum()))
    return gap, wrong


def _behind(model: Any, family: Family, filler: int) -> float:
    """How far a row behind as many others as a forward may have is from the row alone."""
    draw, free = np.random.default_rng(4), np.flatnonzero(~family.banned)
    row, length = draw.choice(free, 48), min(128, family.max_positions)
    others = [draw.choice(free, length) for _ in range(-(-filler // length))]

    def last(rows: Sequence[np.ndarray]) -> Tensor:
        starts = np.cumsum([0, *map(len, rows)])
        plan = attention.forest_plan(starts, np.full(len(rows), -1), model.device, model.dtype)
        places = np.tile(np.concatenate([np.arange(len(one)) for one in rows]), (family.axes, 1))
        ids, positions = (torch.from_numpy(each).to(model.device) for each in (np.concatenate(rows), places))
        return hidden_states(model, family, ids, positions, (), plan)[-len(row) :].float()

    return _gap(last([*others, row]), last([row]))


# -- verdicts --------------------------------------------------------------------------------------


def _verdict_file(model: Any, family: Family) -> Path:
    """Where the verdict on such a model is: by all that it depends on."""
    package = Path(saccade.__file__).parent
    code = [package / name for name in ("models", "forest", "trainer", "plugins/families", "plugins/linear")]
    sources = sorted(file for folder in code for file in folder.rglob("*.py"))
    described_by = ("config.json", "processor_config.json", "preprocessor_config.json")
    written = sorted(Path(family.path).glob("tokenizer*"))
    libraries = ("torch", "transformers", "tokenizers", "torchvision", "timm")
    known = {
        "class": type(model).__name__,
        "files": [model_json(Path(family.path), name) for name in described_by],
        "template": family.chat.template,
        "tokenizer": [hashlib.sha256(file.read_bytes()).hexdigest() for file in written],
        "where": [str(model.dtype), model.device.type, getattr(model, "is_loaded_in_4bit", False)],
        "versions": [version(name) for name in libraries if find_spec(name)],
        "code": hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest(),
    }
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()
    return cache / "saccade" / "proofs" / f"{family.name}-{digest[:16]}.json"

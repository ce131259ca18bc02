"""Rows that a proof compares, and what a model computes of them: by transformers, one by one, and here, packed.

(states, logits), layers = theirs(model, row)
packed_rows(model, family, rows)
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from saccade.forest import attention, interface
from saccade.forest.packing import pack
from saccade.media.images import open_media
from saccade.models.families import Family
from saccade.models.heads import language_head
from saccade.models.load import hidden_states
from saccade.plugins.families.door import cast
from saccade.trainer.forward_inputs import inputs_of
from saccade.types import Group, Media, Message, Rendered, Sample, Source, Trajectory

WATCHED = "saccade_probe"
# Sizes of a picture, up to the usual data.max_pixels: the first that is cut into several squares is looked at.
LARGER, MOST_TOKENS = ((140, 70), (400, 200), (700, 500), (1200, 800)), 4_096


class ProofRow(NamedTuple):
    prompt: Rendered
    ids: np.ndarray  # prompt and answer
    inputs: Mapping[str, Tensor]  # what the processor makes of the prompt


def noise(width: int, height: int, seed: int) -> Media:
    return open_media(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def probes(family: Family) -> list[ProofRow]:
    """Two answers of one prompt with two pictures, one of a prompt with another picture of a size that was there, which
    goes through the tower beside it, and one of text. One picture is small, one is cut into tiles by those who do that.
    """
    measured = [(size, *family.measure(Media(hash="", width=size[0], height=size[1], path=""))) for size in LARGER]
    tiled = next((size for size, grid, n in measured if sum(grid[::3]) > 1 and n < MOST_TOKENS), LARGER[0])
    small, wide, again = noise(60, 50, 0), noise(*tiled, 1), noise(60, 50, 2)
    asked: list[tuple[Any, ...]] = [("What is ", small, " beside ", wide, "?"), (again, "Why so?"), ("Just text.",)]
    made = []
    for parts, answers in zip(asked, (2, 1, 1), strict=True):
        try:
            made += answered(family, parts, answers)
        except ValueError:  # some processors cannot take pictures of different sizes together
            made += answered(family, tuple(wide if part is small else part for part in parts), answers)
    return made


def answered(family: Family, parts: Sequence[Any], answers: int) -> list[ProofRow]:
    draw, free = np.random.default_rng(3 + len(parts)), np.flatnonzero(~family.banned)
    inputs, prompt = processed(family, parts), family.render([Message(role="user", parts=tuple(parts))])
    return [ProofRow(prompt, np.concatenate([prompt.ids, draw.choice(free, 7)]), inputs) for _ in range(answers)]


def processed(family: Family, parts: Sequence[Any]) -> dict[str, Tensor]:
    """What the model's processor makes of a question."""
    chat, reader = family.chat, family.reader
    messages = [Message(role="user", parts=tuple(parts))]
    text = chat.text_of(messages, generation=True, expanded=False)
    shown = [reader.shown(part) for part in parts if isinstance(part, Media)]
    options = {} if chat.begin else {"add_special_tokens": False}
    try:
        return dict(reader.call(text, shown, **options))
    except (TypeError, ValueError):
        if shown:
            raise
        return dict(reader.processor.tokenizer([text], return_tensors="pt", **options))


class Layer(NamedTuple):
    """What attention is told in a layer."""

    mask: Tensor | None
    unknown: tuple[str, ...]  # arguments that we do not read
    keys: int


@contextmanager
def _watched(model: Any, seen: dict[Any, Layer]) -> Iterator[None]:
    """Attention of transformers with dense masks, which are noted."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    known = {*interface.READ, *interface.HARMLESS, "dropout", "logits_to_keep"}

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        unknown = (n for n, value in options.items() if value is not None and value is not False and n not in known)
        seen[getattr(module, "layer_idx", None)] = Layer(mask, tuple(unknown), k.shape[2])
        # On a GPU, others than plain products misread some masks of 65 tokens in full precision.
        with sdpa_kernel(SDPBackend.MATH) if q.is_cuda else nullcontext():
            return sdpa_attention_forward(module, q, k, v, mask, scaling=options.get("scaling"))

    AttentionInterface.register(WATCHED, attend)
    AttentionMaskInterface.register(WATCHED, lambda *a, **o: sdpa_mask(*a, **o | {"allow_is_causal_skip": False}))
    decoder = interface.decoder_of(model)
    before = decoder.config._attn_implementation
    ours = {module: vars(module).pop("forward") for module in decoder.modules() if "forward" in vars(module)}
    interface.attend_by(decoder, WATCHED)
    try:
        yield
    finally:
        interface.attend_by(decoder, before)
        for module, forward in ours.items():
            module.forward = forward


def theirs(model: Any, row: ProofRow) -> tuple[tuple[Tensor, Tensor], dict[Any, Layer]]:
    """Last states [row, E] and logits [answer, vocabulary] of one row by transformers, and what each layer is told."""
    seen: dict[Any, Layer] = {}
    states: list[Tensor] = []
    hook = interface.decoder_of(model).register_forward_hook(lambda *met: states.append(met[2].last_hidden_state[0]))
    try:
        with _watched(model, seen):
            logits = model(**whole_inputs(model, row), use_cache=False).logits[0]
    finally:
        hook.remove()
    return (states[0].float(), logits[len(row.prompt.ids) - 1 :].float()), seen


def whole_inputs(model: Any, row: ProofRow) -> dict[str, Any]:
    """The inputs of transformers' own forward over the prompt and the answer."""
    answer, shape = len(row.ids) - len(row.prompt.ids), row.inputs["input_ids"].shape
    inputs = dict(row.inputs)
    for name, value in row.inputs.items():
        if value.shape == shape:
            inputs[name] = torch.nn.functional.pad(value, (0, answer), value=int(name == "attention_mask"))
    return cast(inputs | {"input_ids": torch.from_numpy(row.ids)[None]}, model.device, model.dtype)


def packed_rows(model: Any, family: Family, rows: Sequence[ProofRow]) -> list[tuple[Tensor, Tensor]]:
    """The same, packed: rows with one prompt are a tree."""
    batch = batch_of(rows)
    given = inputs_of(batch, family, model.device, model.dtype, pixels=False)
    hidden = hidden_states(model, family, given.ids, given.positions, batch.media, given.plan, places=given.places)
    paths, starts, found = attention.paths(batch.parents), batch.node_starts, {}
    for (_, repeat), leaf in zip(batch.keys, batch.forest.leaves.tolist(), strict=True):
        places = np.concatenate([np.arange(starts[node], starts[node + 1]) for node in paths[leaf]])
        states = hidden[torch.from_numpy(places).to(model.device)]
        found[repeat] = states.float(), language_head(model)(states[len(rows[repeat].prompt.ids) - 1 :]).float()
    return [found[number] for number in range(len(rows))]


def batch_of(rows: Sequence[ProofRow]) -> Any:
    groups: dict[bytes, list[Trajectory]] = {}
    for number, row in enumerate(rows):
        length = len(row.ids)
        member = Trajectory(
            sample_id="probe",
            repeat=number,
            ids=row.ids,
            sources=np.where(np.arange(length) < len(row.prompt), Source.PROMPT, Source.POLICY).astype(np.int8),
            logprobs=np.zeros(length, np.float32),
            versions=np.zeros(length, np.int32),
            media=row.prompt.media,
        )
        groups.setdefault(row.prompt.ids.tobytes(), []).append(member)
    sample = Sample(id="probe", messages=())
    (batch,) = pack(
        [Group(sample=sample, trajectories=tuple(g)) for g in groups.values()], micro_tokens=1 << 30, ends=True
    )
    return batch

"""Decoding with CUDA graphs: one graph per batch size holds a whole step, from the embedding to the
sampled token and the state of the next step, and is replayed many times before the host reads tokens.

Rows are uploaded before a burst and advance on the device; a row that ends stays idle until the
host removes it. Weights are the trainer's and change in place, so graphs stay valid; if a tensor
has moved they are captured again. On a CPU (tests), and for a model that synchronises with the
device within a step and so cannot be captured, steps run without graphs.

    graphs.launch(ready, tokens, table, steps=16)
    ids, logprobs = graphs.read()

Legend: B rows, E hidden size.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from saccade.engines.embedded import sequences
from saccade.engines.embedded.kv_cache import PAGE, KVCache
from saccade.engines.embedded.sampling import Drawn, truncates
from saccade.forest.attention import ForwardPlan, Window
from saccade.forest.device_ops import to_device
from saccade.models.experts import capturable
from saccade.models.families import FAMILIES, Family
from saccade.models.heads import language_head
from saccade.models.load import hidden_states
from saccade.plugins.gpu import decode_state as fields
from saccade.plugins.gpu import kernels, sampling_kernels
from saccade.plugins.gpu.fused_decode import fused_forwards, swapped_forwards
from saccade.types import Sampling

log = logging.getLogger(__name__)

STEPS_PER_SYNC = 16  # steps of a burst, after which the host reads the sampled tokens
MAX_BURST = 64  # steps of a burst in which no row can end early
# Programs of one attention call, for the rows and for the prefix groups: enough to occupy every
# multiprocessor of a large GPU.
ROW_PROGRAMS, PREFIX_PROGRAMS = 256, 256
MOST_ROW_SPLITS, MOST_PREFIX_SPLITS = 32, 4
# (tokens of the longest row, least parts of a row): undivided, one program would read it while others wait.
LONG_ROWS = ((2048, 1), (16384, 8), (math.inf, MOST_ROW_SPLITS))
COLUMNS = 256  # pages of a sequence; for a longer one graphs are captured again
# Room for the ids that truncated sampling keeps in a burst. A row that overflows it continues in the next.
KEPT = 16 << 20


class Shape(NamedTuple):
    """Key of a captured graph."""

    rows: int
    cutting: bool  # with truncated sampling
    parts: int  # least parts of a row in attention


class Graphs:
    def __init__(self, model: nn.Module, family: Family, cache: KVCache, *, banned: Tensor | None) -> None:
        self.model, self.family, self.cache, self.banned = model, family, cache, banned
        self.device = cache.device
        self._fused = fused_forwards(model)
        self._captures = self.device.type == "cuda" and capturable(model)
        count = fields.bucket(cache.slots)
        self.eos = torch.tensor(sorted(family.chat.eos_ids), dtype=torch.int64, device=self.device)
        self.state = torch.zeros((fields.FIELDS, count), dtype=torch.int64, device=self.device)
        self.temperature_top_p = torch.ones((2, count), dtype=torch.float32, device=self.device)
        self.table = torch.zeros((count, 0), dtype=torch.int32, device=self.device)
        self.prefix_groups = torch.zeros((3, count // 2), dtype=torch.int64, device=self.device)
        text: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
        self._vocabulary = text.vocab_size
        attending = [x for x in cache.shape.layers if x.key_heads]
        self._key_heads = max((x.key_heads for x in attending), default=1)  # all layers may be recurrent
        most = [fields.members_of(x.heads // x.key_heads, x.key_size) for x in attending]
        self.members = min(most, default=fields.members_of(1))
        self.step_index = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.ids = torch.zeros((MAX_BURST, count), dtype=torch.int64, device=self.device)
        self.logprobs = torch.zeros((MAX_BURST, count), dtype=torch.float32, device=self.device)
        self._support: sampling_kernels.Support | None = None  # allocated for the first truncated sampling
        self._captured: dict[Shape, torch.cuda.CUDAGraph] = {}
        if self.device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()  # shared by all graphs
            self._aside = torch.cuda.Stream()  # the same for all graphs: libraries keep workspaces per stream
        self._addresses: tuple[int, ...] = ()
        self._launched = (0, 0)

    @staticmethod
    def steps(ready: Sequence[sequences.Sequence]) -> int:
        """Steps to run before the host reads: more if no row can end before its token limit."""
        limits = [s.remaining for s in ready]
        settings = {s.request.sampling for s in ready}
        open_ended = any(x.stop or not x.ignore_eos for x in settings)
        far = STEPS_PER_SYNC if open_ended else max(STEPS_PER_SYNC, min(limits))
        return min(far, MAX_BURST, max(limits))

    def launch(self, ready: Sequence[sequences.Sequence], tokens: np.ndarray, table: np.ndarray, steps: int) -> None:
        """Launch `steps` decode steps without waiting for them. `tokens` [B]: the last one of each
        sequence; `table` [B, pages].
        """
        settings = [s.request.sampling for s in ready]
        cutting, count = any(map(truncates, settings)), len(ready)
        padded = fields.bucket(count)
        self._widen(table.shape[1])
        lengths = np.array([s.cached for s in ready])
        prefix_groups, shared = fields.find_prefix_groups(table, lengths, page=PAGE, most=self.members)
        longest = (lengths - shared).max() + steps
        parts = next(parts for tokens, parts in LONG_ROWS if longest <= tokens)
        anyway = _row_splits(padded, self._key_heads)  # few rows are divided into this many in any case
        step = self._step_of(Shape(padded, cutting, parts if parts > anyway else 1))
        described = np.zeros((3, padded // 2), dtype=np.int64)
        described[:, : prefix_groups.shape[1]] = prefix_groups
        self.prefix_groups[:, : padded // 2].copy_(to_device(described, self.device))
        states = self.cache.rows[[s.slot for s in ready]]
        self.state[:, :padded].copy_(to_device(fields.rows_of(ready, tokens, shared, states, padded), self.device))
        self.table[:count, : table.shape[1]].copy_(to_device(table, self.device))
        temperature_top_p = np.array([[s.temperature for s in settings], [s.top_p for s in settings]], np.float32)
        self.temperature_top_p[:, :count].copy_(to_device(temperature_top_p, self.device))
        self.step_index.zero_()
        if cutting:
            self._room_for_support()[0].zero_()
        for _ in range(steps):
            step()
        self._launched = (steps, count)

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """ids (-1 where a row was idle) and log-probs of the last burst, [steps, B]."""
        steps, count = self._launched
        return (self.ids[:steps, :count].cpu().numpy(), self.logprobs[:steps, :count].cpu().numpy())

    def read_support(self) -> Callable[[int, int], np.ndarray]:
        """A function (step, row) → ids that truncated sampling kept there, in the last burst."""
        steps, count = self._launched
        cursor, kept, spans = self._room_for_support()
        first, length = spans[:steps, :, :count].cpu().numpy().transpose(1, 0, 2)
        ids = kept[: int(cursor)].cpu().numpy().astype(np.int64)
        return lambda step, row: ids[first[step, row] :][: length[step, row]].copy()

    def draw(self, logits: Tensor, lines: Tensor | None, sampling: Sampling, keys: Tensor, index: Tensor) -> Drawn:
        """Sample first tokens without truncation, from rows `lines` of the logits (None: in order)."""
        heat = torch.full((len(keys),), sampling.temperature, device=self.device)
        ids, logprobs = sampling_kernels.draw(
            logits, temperature=heat, keys=keys, index=index, banned=self.banned, rows=lines
        )
        return Drawn(ids=ids, logprobs=logprobs, kept=None)

    def check_weights(self) -> None:
        """Drop the graphs if the memory of a weight has moved."""
        if self._captured and self._addresses != _addresses(self.model):
            self._forget()

    def _widen(self, columns: int) -> None:
        if columns > self.table.shape[1]:
            wider = max(COLUMNS, 1 << (columns - 1).bit_length())
            self.table = self.table.new_zeros((self.table.shape[0], wider))
            self._forget()

    def _forget(self) -> None:
        self._captured.clear()
        if self.device.type == "cuda":  # a pool is freed with the last graph that was captured in it
            self._pool = torch.cuda.graph_pool_handle()

    def _room_for_support(self) -> sampling_kernels.Support:
        if self._support is None:
            self._support = (
                torch.zeros(1, dtype=torch.int64, device=self.device),
                torch.zeros(max(KEPT, self._vocabulary), dtype=torch.int32, device=self.device),
                torch.zeros((MAX_BURST, 2, self.ids.shape[1]), dtype=torch.int64, device=self.device),
            )
        return self._support

    def _step_of(self, shape: Shape) -> Callable[[], None]:
        if self._captures and shape not in self._captured:
            if not self._captured and self.family.name not in FAMILIES and self._waits(shape):
                self._captures = False
                log.info("generation runs without CUDA graphs: the model waits for the GPU inside of a step")
            else:
                self._captured[shape] = self._capture(shape)
        return self._captured[shape].replay if self._captures else lambda: self._step(shape)

    def _waits(self, shape: Shape) -> bool:
        """Whether a step of an unknown model synchronises with the device, which cannot be captured.
        The synchronisation in transformers' masking_utils.py does not count: it is not captured.
        """
        self._rest()
        self._step(shape)  # warm-up: compiles kernels, and libraries choose theirs
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self._step(shape)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        waits = [each.filename for each in warned if "called a synchronizing" in str(each.message)]
        return any(not file.endswith("masking_utils.py") for file in waits)

    def _rest(self) -> None:
        """Make every row idle and remove prefix groups, so that a step touches no page: the state of the
        last burst may have more rows than the next one, and refer to a pool that was freed.
        """
        self.state.zero_()
        self.state[fields.LENGTH] = -1
        self.prefix_groups.zero_()
        self.step_index.zero_()

    def _capture(self, shape: Shape) -> torch.cuda.CUDAGraph:
        self._rest()
        graph = torch.cuda.CUDAGraph()
        self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside):
            for _ in range(2):  # warm-up: compiles kernels, and libraries choose theirs
                self._step(shape)
        torch.cuda.current_stream().wait_stream(self._aside)
        # thread_local: other threads may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._aside, capture_error_mode="thread_local"):
            self._step(shape)
        self._addresses = _addresses(self.model)
        return graph

    def _attention(self, count: int, parts: int) -> ForwardPlan:
        """The plan for one new token per row, which is written to its page and attends to the whole row."""
        state = self.state[:, :count]
        groups = -(-count // self.members)
        rows: dict[str, Any] = {
            "bases": self.cache.bases,
            "table": self.table[:count],
            "lengths": state[fields.LENGTH],
            "shared": state[fields.SHARED],
            "prefix_groups": self.prefix_groups[:, : count // 2],
        }

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window) -> Tensor:
            heads = k.shape[1]
            splits = (
                _splits(PREFIX_PROGRAMS // (groups * heads), MOST_PREFIX_SPLITS),
                max(parts, _row_splits(count, heads)),
            )
            return kernels.decode_attention(
                q, k, v, layer=layer, page=PAGE, scale=scale, splits=splits, window=window, **rows
            )

        return ForwardPlan(attend, lambda: self.cache.states.steps(state[fields.ROW], state[fields.LENGTH]))

    def _step(self, shape: Shape) -> None:
        count, cutting, parts = shape
        state = self.state[:, :count]
        temperature, top_p = self.temperature_top_p[:, :count]
        positions = state[fields.POSITION].expand(self.family.axes, -1)
        with swapped_forwards(self._fused):
            plan = self._attention(count, parts)
            hidden = hidden_states(self.model, self.family, state[fields.TOKEN], positions, (), plan)
        logits = language_head(self.model)(hidden)
        floors, noise = None, {"keys": state[fields.KEY], "index": state[fields.INDEX]}
        rows: dict[str, Any] = {"state": state, "banned": self.banned}
        if cutting:
            floors = sampling_kernels.cut(logits, temperature=temperature, top_p=top_p, **rows)
        ids, logprobs = sampling_kernels.draw(
            logits, temperature=temperature, banned=self.banned, floors=floors, **noise
        )
        step_index, out = self.step_index, (self.ids, self.logprobs)
        if floors is not None:
            room = self._room_for_support()
            sampling_kernels.keep(logits, ids, floors=floors, step_index=step_index, out=room, **rows)
        sampling_kernels.advance(ids, logprobs, state=state, eos=self.eos, step_index=step_index, out=out)


def _addresses(model: nn.Module) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in model.parameters())


def _row_splits(rows: int, key_heads: int) -> int:
    return _splits(ROW_PROGRAMS // (rows * key_heads), MOST_ROW_SPLITS)


def _splits(wanted: int, most: int) -> int:
    """Parts to split a context into, a power of two, so that few long sequences also use the whole GPU."""
    return min(most, 1 << (max(1, wanted).bit_length() - 1))

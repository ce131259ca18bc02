"""What runs inside vLLM, next to its model: banned ids, first tokens, and weight updates.

vLLM imports this file by name (`logits_processors`, `worker_extension_cls`); nothing else does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from saccade.plugins.engines.vllm.vllm_weights import Place, place_of
from saccade.plugins.engines.weights import Mapped, checksum

# Methods whose parameters stay as they were loaded, so that they can be written in place.
PLAIN = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}


class First(LogitsProcessor):
    """Sample the first token of an episode with other settings."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, tuple[float, int, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self.rows, batch_update, _first)
        self.rows = {row: entry for row, entry in self.rows.items() if not entry[2]}

    def apply(self, logits: Tensor) -> Tensor:
        for row, (factor, top_k, _) in self.rows.items():
            if top_k > 0:
                least = logits[row].topk(top_k).values[-1]
                logits[row].masked_fill_(logits[row] < least, -torch.inf)
            logits[row] *= factor
        return logits


def _first(params: Any, prompt: Any, sampled: list[int]) -> tuple[float, int, list[int]] | None:
    wanted = (params.extra_args or {}).get("first")
    # A factor, because vLLM divides by the ordinary temperature later on.
    return wanted and (params.temperature / wanted[0], wanted[1], sampled)


class Loader:
    """Methods that vLLM adds to its workers, called by name."""

    model_runner: Any
    vllm_config: Any

    def saccade_ban(self, ids: list[int]) -> None:
        """Never sample these ids, and leave them out of log-probs: their logits are -inf before any
        sampler sees them. A logits processor could do the same, but vLLM would then wait for the ids
        of each step before it begins the next one.
        """
        model = self.model_runner.get_model()
        banned = torch.tensor(ids, dtype=torch.long, device=self.model_runner.device)
        compute = model.compute_logits

        def without(*arguments: Any, **options: Any) -> Tensor | None:
            logits = compute(*arguments, **options)  # None on a worker without the logits
            return None if logits is None else logits.index_fill_(-1, banned, -torch.inf)

        model.compute_logits = without

    def saccade_sees_both_ways(self) -> bool:
        """Whether attention can be bidirectional inside a picture. If it cannot, vLLM silently attends causally."""
        backends = [group.backend for groups in self.model_runner.attn_groups for group in groups]
        return all(getattr(backend, "supports_mm_prefix", bool)() for backend in backends)

    @torch.no_grad()
    def saccade_load(self, weights: Iterable[tuple[str, Tensor]] | tuple[str, ...]) -> tuple[set, set]:
        """Load weights. Returns the names of the parameters that were written, and of all parameters.
        `weights`: (name, tensor) pairs, or paths of pieces if they come from another process.
        """
        model = self.model_runner.get_model()
        names = {name for name, _ in model.named_parameters()}
        pairs = Mapped(weights).weights() if isinstance(weights, tuple | list) else weights
        with set_current_vllm_config(self.vllm_config):
            if _plain(model):
                torch.cuda.synchronize()  # the engine may compute on another stream, before and after
                loaded = set(model.load_weights(pairs))
                torch.cuda.synchronize()
                return loaded, names
            # Parameters were packed for the device: load as from a file, layer by layer.
            if not next(model.parameters()).is_cuda:
                _pack_experts_again(model)
            initialize_layerwise_reload(model)
            loaded = set(model.load_weights(pairs))
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            _pack_tied_head(model)
            return loaded, names

    def saccade_places(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, Place]:
        """Where vLLM stores the tensors of these names, for those that it stores unchanged."""
        parameters = dict(self.model_runner.get_model().named_parameters())
        return {name: place for name in shapes if (place := place_of(name, shapes, parameters))}

    def saccade_checksums(self, places: dict[str, Place]) -> dict[str, int]:
        parameters = dict(self.model_runner.get_model().named_parameters())
        return {name: checksum(parameters[p][first : first + rows]) for name, (p, first, rows) in places.items()}


def _pack_tied_head(model: nn.Module) -> None:
    """A head that is tied to the embedding is written with it, but has its own packed copy."""
    for head in model.modules():
        if isinstance(head, ParallelLMHead):
            head.quant_method.process_weights_after_loading(head)


def _pack_experts_again(model: nn.Module) -> None:
    """Drop the kernels of experts: on a CPU experts are packed when their kernel is made, not when they are loaded."""
    methods: list[Any] = [getattr(module, "quant_method", None) for module in model.modules()]
    for method in methods:
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _plain(model: nn.Module) -> bool:
    methods = {type(getattr(m, "quant_method", None)).__name__ for m in model.modules()}
    return next(model.parameters()).is_cuda and methods <= PLAIN | {"NoneType"}

"""Activation checkpointing for as few layers as the free memory allows.

The size of a layer's activations is measured, not derived from a config: in the first micro-batch all
layers recompute except the last of each kind, and the memory before and after that one is compared.
From then on as many of the last layers as fit keep their activations, because backward frees those
first. The rest of that micro-batch's peak memory is left free. Knows nothing of losses or optimizers.

    recompute = Recompute(model, "auto")
    recompute.choose(batch.tokens, media_tokens)
    ...                                                    # forward and backward
    recompute.after_backward()
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from saccade.system.devices import free_gpu_bytes, total_bytes

# Share of the device's memory that is left unused, for fragmentation and workspaces of libraries.
MARGIN = 0.04
MORE_AFTER_AN_ERROR = 0.03
LOOKS = 4  # micro-batches with media after which a tower that did not run is no longer measured


@dataclass(kw_only=True)
class _Kind:
    """Layers of one class with the same submodules, in the order in which they run."""

    layers: list[Any]
    tokens: int = 0  # of the measured micro-batch: all, or (`of_media`) those of media
    of_media: bool = False
    kept: int | None = None  # bytes of activations of one layer there, without its output; None: not measured

    def cost(self, tokens: int, media_tokens: int) -> float:
        assert self.kept is not None
        return self.kept * (media_tokens if self.of_media else tokens) / max(1, self.tokens)


class Recompute:
    def __init__(self, model: Any, wanted: bool | Literal["auto"]) -> None:
        from transformers.modeling_layers import GradientCheckpointingLayer

        self.device = next(model.parameters()).device
        self.planned = wanted == "auto" and self.device.type == "cuda"
        self.margin = MARGIN
        self.spare = 0.0  # bytes left free beside the activations that layers keep
        self.looks = LOOKS
        self.overhead = (0, 1, 1)  # peak bytes beyond kept activations; tokens, media tokens of that micro-batch
        if wanted is True or self.planned:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            # Only reentrant checkpointing needs inputs that require a gradient; with them a frozen
            # tower would run a useless backward.
            model.disable_input_require_grads()
        kinds: dict[tuple[Any, ...], _Kind] = {}
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                parts = tuple(name for name, _ in layer.named_children())  # tells attention from recurrent layers
                kinds.setdefault((type(layer), *parts), _Kind(layers=[])).layers.append(layer)
        self.kinds = list(kinds.values())
        self._hooks: list[Any] = []
        self._measured: tuple[int, int, int] | None = None  # bytes before, tokens, media tokens
        self._tokens = 0  # of the current micro-batch
        self._passed = [0, 0]  # tokens times layers: of all layers, and of those that recompute

    @property
    def keeping(self) -> int:
        """Number of layers that keep their activations."""
        return sum(not layer.gradient_checkpointing for k in self.kinds for layer in k.layers)

    def choose(self, tokens: int, media_tokens: int, *, cautious: bool = False) -> None:
        """Choose the layers that recompute in the next micro-batch. `cautious`: all of them."""
        self.spare, self._tokens = 0.0, tokens
        if not self.planned:
            return
        for layer in (layer for kind in self.kinds for layer in kind.layers):
            layer.gradient_checkpointing = True
        self._stop_measuring()
        if cautious:
            return
        unknown = self.looks > 0 and any(kind.kept is None for kind in self.kinds)
        if not self.overhead[0] or (unknown and media_tokens):  # layers of towers run only with media
            self.looks -= media_tokens > 0
            self._measure(tokens, media_tokens)
        else:
            self._keep_what_fits(tokens, media_tokens)

    def _keep_what_fits(self, tokens: int, media_tokens: int) -> None:
        spent, of_tokens, of_media_tokens = self.overhead
        grown = max(1.0, tokens / of_tokens, media_tokens / of_media_tokens)
        room = free_gpu_bytes(self.device) - self.margin * total_bytes(self.device) - spent * grown
        for kind in reversed(self.kinds):
            if kind.kept is None:
                continue
            fitting = int(max(0.0, room) // max(1.0, kind.cost(tokens, media_tokens)))
            keeping = kind.layers[max(0, len(kind.layers) - fitting) :]
            for layer in keeping:
                layer.gradient_checkpointing = False
            room -= len(keeping) * kind.cost(tokens, media_tokens)
        self.spare = max(0.0, room)

    # -- measuring --

    def _measure(self, tokens: int, media_tokens: int) -> None:
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

        def measure(kind: _Kind) -> None:
            began = 0

            def start(layer: nn.Module, inputs: Any) -> None:
                nonlocal began
                began = torch.cuda.memory_allocated(self.device)

            def end(layer: nn.Module, inputs: Any, output: Any) -> None:
                out = output if isinstance(output, Tensor) else output[0]
                kind.of_media = out[..., 0].numel() != tokens
                kind.tokens = media_tokens if kind.of_media else tokens
                now = torch.cuda.memory_allocated(self.device)
                kind.kept = max(0, now - began - out.nbytes)

            last = kind.layers[-1]
            last.gradient_checkpointing = False
            # The end hook must run first: another hook may free the weights of the layer.
            self._hooks += [last.register_forward_pre_hook(start), last.register_forward_hook(end, prepend=True)]

        for kind in self.kinds:
            if kind.kept is None:
                measure(kind)
        self._measured = (before, max(1, tokens), max(1, media_tokens))

    def after_backward(self) -> None:
        """Update the memory estimates; call it after the backward of a micro-batch."""
        layers = sum(len(kind.layers) for kind in self.kinds)
        self._passed[0] += self._tokens * layers
        self._passed[1] += self._tokens * (layers - self.keeping)
        if self._measured is None:
            return
        before, tokens, media_tokens = self._measured
        self._stop_measuring()
        peak = torch.cuda.max_memory_allocated(self.device) - before
        spent, of_tokens, of_media_tokens = self.overhead
        if peak > spent:
            self.overhead = (peak, tokens, media_tokens)
        elif media_tokens > of_media_tokens:  # more media tokens, but no higher peak
            self.overhead = (spent, of_tokens, media_tokens)

    def recomputed_share(self) -> float:
        """Share of the layer forwards since the last call that were recomputed, weighted by tokens."""
        (passed, again), self._passed = self._passed, [0, 0]
        return again / max(1, passed)

    def after_oom(self) -> bool:
        """Call it when out of memory. Returns whether there are layers that can recompute to save memory."""
        self.margin += MORE_AFTER_AN_ERROR
        self._stop_measuring()
        return self.planned and self.keeping > 0

    def _stop_measuring(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._measured = [], None

"""Which layers compute their activations again in backward: as few as the free memory allows.

What a layer keeps is measured, not computed from a config: in the first micro-batch every layer
recomputes but the last of each kind, and the memory before and after that one is compared. From
then on the layers at the end keep what they made for as long as it fits; they are the first that
backward frees. What else was needed at the peak of that micro-batch is left free. Knows nothing of
losses or optimizers.

    recompute = Recompute(model, "auto")
    recompute.choose(batch.tokens, media_tokens)
    ...                                                    # forward and backward
    recompute.learn()
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from saccade.system.devices import free_bytes, total_bytes

# Of the device's memory, never planned with: fragments between blocks, workspaces of libraries.
MARGIN = 0.04
MORE_AFTER_AN_ERROR = 0.03
LOOKS = 4  # micro-batches with media after which a tower that did not run is waited for no more


@dataclass(kw_only=True)
class _Kind:
    """Layers of one class and with the same parts, in the order in which they run."""

    layers: list[Any]
    tokens: int = 0  # of the micro-batch in which it was measured, all or those of media
    of_media: bool = False
    kept: int | None = None  # bytes that one layer kept there beyond its output

    def cost(self, tokens: int, media_tokens: int) -> float:
        assert self.kept is not None
        return self.kept * (media_tokens if self.of_media else tokens) / max(1, self.tokens)


class Recompute:
    def __init__(self, model: Any, wanted: bool | Literal["auto"]) -> None:
        from transformers.modeling_layers import GradientCheckpointingLayer

        self.device = next(model.parameters()).device
        self.planned = wanted == "auto" and self.device.type == "cuda"
        self.margin = MARGIN
        self.spare = 0.0  # bytes that are left when every layer has what it keeps
        self.looks = LOOKS
        self.overhead = (0, 1, 1)  # bytes beside what layers keep; its tokens, its media tokens
        if wanted is True or self.planned:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            # Only reentrant checkpointing wants inputs with a gradient; a frozen tower would get a
            # backward for nobody.
            model.disable_input_require_grads()
        kinds: dict[tuple[Any, ...], _Kind] = {}
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                parts = tuple(name for name, _ in layer.named_children())  # with attention, or with a state
                kinds.setdefault((type(layer), *parts), _Kind(layers=[])).layers.append(layer)
        self.kinds = list(kinds.values())
        self._hooks: list[Any] = []
        self._measured: tuple[int, int, int] | None = None  # bytes before, tokens, media tokens
        self._tokens = 0  # of the micro-batch under way
        self._passed = [0, 0]  # tokens through all layers, and through those that computed again

    @property
    def keeping(self) -> int:
        """Layers that keep what they made."""
        return sum(not layer.gradient_checkpointing for k in self.kinds for layer in k.layers)

    def choose(self, tokens: int, media_tokens: int, *, cautious: bool = False) -> None:
        """For the micro-batch that follows. `cautious`: every layer recomputes."""
        self.spare, self._tokens = 0.0, tokens
        if not self.planned:
            return
        for layer in (layer for kind in self.kinds for layer in kind.layers):
            layer.gradient_checkpointing = True
        self._stop_measuring()
        if cautious:
            return
        unknown = self.looks > 0 and any(kind.kept is None for kind in self.kinds)
        if not self.overhead[0] or (unknown and media_tokens):  # no media: their layers do not run
            self.looks -= media_tokens > 0
            self._measure(tokens, media_tokens)
        else:
            self._keep_what_fits(tokens, media_tokens)

    def _keep_what_fits(self, tokens: int, media_tokens: int) -> None:
        spent, of_tokens, of_media_tokens = self.overhead
        grown = max(1.0, tokens / of_tokens, media_tokens / of_media_tokens)
        room = free_bytes(self.device) - self.margin * total_bytes(self.device) - spent * grown
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
            # The end first of all: another hook may give back the weights of the layer.
            self._hooks += [last.register_forward_pre_hook(start), last.register_forward_hook(end, prepend=True)]

        for kind in self.kinds:
            if kind.kept is None:
                measure(kind)
        self._measured = (before, max(1, tokens), max(1, media_tokens))

    def learn(self) -> None:
        """Call it when the backward of the micro-batch is done."""
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
        elif media_tokens > of_media_tokens:  # so many need no more than that
            self.overhead = (spent, of_tokens, media_tokens)

    def repeated(self) -> float:
        """Share of the layers that computed again in all micro-batches since the last call."""
        (passed, again), self._passed = self._passed, [0, 0]
        return again / max(1, passed)

    def failed(self) -> bool:
        """Memory ran out. True when layers kept something that they can compute again instead."""
        self.margin += MORE_AFTER_AN_ERROR
        self._stop_measuring()
        return self.planned and self.keeping > 0

    def _stop_measuring(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._measured = [], None

"""Bytes that activations, logits and the cache need, from the shape of a model.

Counts the tensors that live at the moments where memory peaks. Written for a GPU in half precision
(fused norms, rotations and gated layers, one attention call over gathered keys); elsewhere it is
off by what those save.

    moments = update_moments(shape, batch, element=2, keeping=(0, 0), …)
    peak = max(sum(moment.values()) for moment in moments.values())
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from saccade.models.flops import FULL, Training, token_depths
from saccade.models.shapes import Shape, Stack
from saccade.types import Batch, MediaSpan

Moments = Mapping[str, dict[str, float]]  # of each: item → bytes

# Numbers per token that one layer keeps for its backward, its input included: two inputs of norms
# and two of matrices (hidden size), the query and the result of attention (all heads), gate and
# other half (width of the MLP). Adapters keep what enters the last matrix, too.
KEPT_HIDDEN, KEPT_HEADS, KEPT_WIDE, KEPT_WIDE_ADAPTED = 4, 2, 2, 3
# Numbers that an expert keeps, which is not fused: its token and its result (hidden size); both
# halves, the activated gate and the product. A frozen one keeps nothing that enters its matrices.
KEPT_EXPERT_HIDDEN, KEPT_EXPERT_WIDE = 2, 4
# Beside that in backward: gradients of both halves, their product and its gradient; of the stream.
BACKWARD_WIDE, BACKWARD_HIDDEN = 4, 4
# Without backward: both halves and their product; the stream and its norms.
FORWARD_WIDE, FORWARD_HIDDEN = 3, 3


def layer_bytes(stack: Stack, tokens: int, keys: int, *, element: int, adapted: bool = False) -> float:
    """What one layer keeps for its backward, among it `keys` gathered keys and their values."""
    wide = KEPT_WIDE_ADAPTED if adapted else KEPT_WIDE
    per_token = KEPT_HIDDEN * stack.hidden + KEPT_HEADS * stack.queries + wide * stack.wide
    per_token += (KEPT_EXPERT_HIDDEN - adapted) * stack.chosen * stack.hidden
    per_token += (KEPT_EXPERT_WIDE - adapted) * stack.chosen * stack.expert_wide
    if stack.experts and stack.wide:
        per_token += stack.hidden  # the result of the shared expert, which is weighted, too
    per_token += stack.head_norms * (stack.queries + stack.keys)
    per_token += stack.scales * stack.hidden  # what is scaled
    return float(element * (tokens * per_token + 2 * keys * stack.keys))


def input_bytes(stack: Stack, tokens: int, *, element: int) -> float:
    """What a layer keeps that computes everything else again."""
    return float(element * tokens * stack.hidden)


def gathered_keys(batch: Batch) -> int:
    """Keys of all nodes, each with those of its ancestors."""
    depths = token_depths(batch.node_starts, batch.parents)
    return int((depths[batch.node_starts[1:] - 1] + 1).sum())


def patches(media: Sequence[MediaSpan]) -> int:
    return sum(int(np.prod(span.grid)) for span in media)


def prefill_bytes(shape: Shape, tokens: int, patches: int, *, element: int) -> float:
    """Running prompts, their pictures first."""
    towers = [(shape.text, tokens)]
    if (vision := shape.senses.get("vision")) is not None:
        towers.append((vision.stack, patches))
    return max(
        float(element * n * (FORWARD_WIDE * _wide(stack) + FORWARD_HIDDEN * stack.hidden)) for stack, n in towers
    )


def update_moments(
    shape: Shape,
    batch: Batch,
    *,
    element: int,
    keeping: tuple[int, int],
    logits: float,
    head_gradient: float,
    head_tied: bool,
    training: Training = FULL,
) -> Moments:
    """What lives beside weights and gradient sums when backward enters the head, the decoder and
    the vision tower. `keeping`: layers of decoder and tower that do not recompute. The gradient of
    a head that is also the embedding waits for the end of backward.
    """
    adapted = training.mode("llm") == "adapter"
    one = layer_bytes(shape.text, batch.tokens, gathered_keys(batch), element=element, adapted=adapted)
    kept, layer = _tower(shape.text, batch.tokens, one, keeping[0], element)
    if training.mode("llm") == "full":  # matrices of experts outweigh a layer's activations
        layer += element * shape.text.expert_weights
    shown, block, seen = 0.0, 0.0, patches(batch.media)
    vision = shape.senses.get("vision")
    if vision is not None and seen and training.mode("vision") != "frozen":
        one = layer_bytes(vision.stack, seen, seen, element=element)
        shown, block = _tower(vision.stack, seen, one, keeping[1], element)
    both = {"decoder activations": kept, "vision activations": shown}
    waiting = {"gradient of the head": head_gradient * head_tied}
    return {
        "head": both | {"logits": logits, "gradient of the head": 2 * head_gradient},
        "decoder": both | {"a layer in backward": layer} | waiting,
        "vision": {"vision activations": shown, "a layer in backward": block} | waiting,
    }


def _tower(stack: Stack, tokens: int, one: float, keeping: int, element: int) -> tuple[float, float]:
    """What its layers keep, and what the one that backward is in needs beside that: all that `one`
    keeps, where that is computed again.
    """
    kept = keeping * one + (stack.layers - keeping) * input_bytes(stack, tokens, element=element)
    wide = BACKWARD_WIDE * _wide(stack) + BACKWARD_HIDDEN * stack.hidden
    return kept, element * tokens * wide + (0.0 if keeping else one)


def _wide(stack: Stack) -> float:
    """Numbers between the matrices of a layer, for one token."""
    return stack.wide + stack.chosen * (stack.expert_wide + stack.hidden)

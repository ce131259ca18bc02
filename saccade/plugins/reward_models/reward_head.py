"""The head of a reward model: one score per sequence and head. The model keeps its language head, frozen,
so that its folder can still be loaded as a language model.

    attach_reward(model, RewardHead(like=model, card=RewardCard(kind="scalar", heads=("taste",)), seed=0))
    scores = model.score(hidden, sequence, count)  # [sequences, heads]

Legend: R targets, E hidden size, S sequences, H heads, P attention heads of the pooling.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from saccade.errors import ConfigError, EnvironmentProblem
from saccade.models.heads import SavedHead, blocks_of, random_weight
from saccade.plugins.reward_models.reward_card import REWARD_FILE, RewardCard, read_card


class RewardHead(SavedHead):
    """Pools the hidden states of each sequence and computes one score per head."""

    def __init__(
        self, *, like: nn.Module, card: RewardCard, seed: int, first_log_scale: float = 0.0, stored: Path | None = None
    ) -> None:
        """`first_log_scale`: initial logarithm of the scale that some losses learn (0: it is not learned). `stored`:
        folder with a trained head to load; if that learned no scale, `first_log_scale` is used.
        """
        super().__init__(REWARD_FILE)
        self.card = card
        self.weight = random_weight(like, len(card.heads), seed)
        size = self.weight.shape[1]
        if size % card.pooling_heads:
            why = f"{card.pooling_heads} does not divide the hidden size {size} of this model"
            raise ConfigError(f"reward_model.pooling_heads: {why}; try reward_model.pooling_heads=1")
        # A zero query weighs all states equally; with pooling `mean` it stays zero.
        self.query = nn.Parameter(torch.zeros_like(self.weight[0]))
        self.log_scale = nn.Parameter(torch.full_like(self.weight[0, :1], first_log_scale))
        self.query.requires_grad_(card.pooling == "attention")
        self.log_scale.requires_grad_(first_log_scale != 0)
        if card.head == "mlp":
            self.inner = nn.Parameter(random_weight(like, size, seed + 1).data * size**0.5)
            self.gain = nn.Parameter(torch.ones_like(self.query))
        if stored is not None and not self.weight.is_meta:
            tensors = load_file(stored / REWARD_FILE)
            try:
                self.load_state_dict({name.removeprefix("score."): tensor for name, tensor in tensors.items()})
            except RuntimeError as error:
                raise EnvironmentProblem(f"{stored / REWARD_FILE} does not fit config.json: {error}") from None
            if not self.log_scale.item():
                self.log_scale.data.fill_(first_log_scale)

    def forward(self, hidden: Tensor, sequence: Tensor, count: int) -> Tensor:
        """hidden [R, E], sequence [R] (its index) → scores [S, H]. With pooling `last`, R = S."""
        pooled = hidden.to(self.weight.dtype)
        if self.card.pooling != "last":
            pooled = self._pooled(pooled, sequence, count)
        if self.card.head == "mlp":
            pooled = silu(rms_norm(pooled @ self.inner.T, self.gain.shape, self.gain, eps=1e-6))
        scores = pooled @ self.weight.T
        return scores.sigmoid() if self.card.bounded else scores

    def _pooled(self, hidden: Tensor, sequence: Tensor, count: int) -> Tensor:
        """[R, E] → [S, E]: attention pooling over each sequence, with one softmax per pooling head."""
        parts = hidden.unflatten(1, (self.card.pooling_heads, -1))
        query = self.query.view(parts.shape[1:])
        logits = torch.einsum("rpe,pe->rp", parts, query) / query.shape[1] ** 0.5
        highest = logits.detach().new_full((count, len(query)), -torch.inf)
        index = sequence[:, None].expand_as(logits)
        highest = highest.scatter_reduce(0, index, logits.detach(), "amax")
        weights = (logits - highest[sequence]).exp()
        total = weights.new_zeros(highest.shape).index_add(0, sequence, weights)
        weighted = (weights / total[sequence])[..., None] * parts
        return hidden.new_zeros(count, hidden.shape[1]).index_add(0, sequence, weighted.flatten(1))


def attach_reward(model: nn.Module, head: RewardHead) -> None:
    """Add the head as `model.score`. Layers above the probed one move into `head.above`, and an untied language head is
    frozen: neither is trained, both are saved, so that the folder stays complete.
    """
    model.score = head
    if head.card.probe_layer != -1:
        blocks, probe = blocks_of(model), head.card.probe_layer
        if not -len(blocks) <= probe < len(blocks):
            why = f"{probe} is none of the {len(blocks)} blocks of this model"
            raise ConfigError(f"reward_model.probe_layer: {why}; give {-len(blocks)} to {len(blocks) - 1}")
        read = probe % len(blocks) + 1
        head.above = list(blocks[read:])
        del blocks[read:]
    output, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight  # type: ignore
    if output is not embedding:
        output.requires_grad_(False)


@torch.no_grad()
def start_critic(model: nn.Module, folder: Path) -> bool:
    """Copy the weights of the reward model's first head into the critic's. Returns False and keeps the random head if
    the score is not linear in the last hidden states. Does nothing if `folder` holds no reward model.
    """
    card = read_card(folder)
    if card is None or not (folder / REWARD_FILE).is_file():
        return True
    if card.head != "linear" or card.bounded or card.probe_layer != -1:
        return False
    model.score.weight.copy_(load_file(folder / REWARD_FILE)["score.weight"][:1])  # type: ignore
    return True

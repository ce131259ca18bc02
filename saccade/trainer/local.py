"""One model in this process, on one device: no collectives, breakpoints work.

A forward runs on one forest; log-probs or values are read where targets are predicted. A policy, a
reference and a critic (`models/heads.py`) are each an instance. Knows nothing of rollouts, rewards
or files other than its own state.

    trainer = LocalTrainer(model, family, TrainConfig())
    trainer.train_step(batches, PolicyLoss(algorithm, Scoring(temperature=1.0)), lr=1e-6)
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from saccade.algorithms.objective import LossSums, to_metrics
from saccade.config import TrainConfig
from saccade.forest.batch import Batch
from saccade.forest.device_ops import to_device
from saccade.forest.logprobs import read_logprobs
from saccade.forest.packing import halves
from saccade.models import experts, lora
from saccade.models.families import Family
from saccade.models.files import require_same
from saccade.models.heads import SavedHead, language_head, read_scores, without_head
from saccade.models.load import banned_mask, hidden_states, media_inputs, negated_weight
from saccade.system.contents import File, host_copies, spare_bytes, tensor_file
from saccade.trainer import Loss, Scoring, Update, model_state
from saccade.trainer.checkpointing import Recompute
from saccade.trainer.forward_inputs import FeatureCache, InputPrefetcher, Inputs, inputs_of
from saccade.trainer.losses import routers_of, with_balance
from saccade.trainer.optimizer import Optimizer
from saccade.trainer.optimizer_files import load_optimizer, optimizer_file
from saccade.types import Metrics

log = logging.getLogger(__name__)

WEIGHTS, AVERAGE = "weights.safetensors", "average/"
RANDOM = "random.safetensors"
Found = TypeVar("Found")


class LocalTrainer:
    dp_size = 1  # number of data-parallel groups over which the forests of a step are dealt
    engine = None  # the recipe makes one over the same tensors
    retries_on_oom = True  # retry a micro-batch that ran out of memory; False if other processes would wait for it

    def __init__(
        self,
        model: nn.Module,
        family: Family,
        train: TrainConfig | None = None,
        *,
        checkpointing: bool | Literal["auto"] = False,
        optimizer: type[Optimizer] = Optimizer,
    ) -> None:
        """Without `train` the model only scores, like a reference. `checkpointing`: all layers recompute
        their activations in backward, or ("auto") as many as memory requires. `optimizer`: another class
        if several processes train the same weights.
        """
        self.model, self.family = model, family
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.banned = banned_mask(family, self.device)
        self.changes, self.oom_splits = 0, 0
        # A model that only scores sees each image once per step, so its features are not cached.
        self._seen, self._towers_frozen = FeatureCache(), False
        self._inputs = InputPrefetcher(
            lambda batch: inputs_of(batch, family, self.device, self.dtype, pixels=not self._towers_frozen)
        )
        self.optimizer: Optimizer | None = None
        self.averages: dict[str, Tensor] = {}  # of `blend`, fp32
        self.ema: tuple[LocalTrainer, float] | None = None  # (model, share) of the `blend` after every update
        if train is None:
            model.requires_grad_(False)
            return
        scales = dict(train.lr_scale)
        self.optimizer = optimizer(
            model.named_parameters(), train, lr_scale=lambda n: scales.get(family.tower_of(n), 1.0)
        )
        self.recompute = Recompute(model, checkpointing)
        if in_eval := model_state.modules_in_eval(model):
            why = "so that the policy that learns is the one that answers"
            log.info("%d dropouts and batch norms (%s, …) stay off in training, %s", len(in_eval), in_eval[0], why)
        self.routers, self.aux_coef = routers_of(model, train.aux_coef), train.aux_coef
        self._towers_frozen = not any(
            p.requires_grad for n, p in model.named_parameters() if family.tower_of(n) != "llm"
        )

    # -- scoring --

    @torch.no_grad()
    def map_batches(self, batches: Sequence[Batch], read: Callable[[Batch], Found]) -> list[Found]:
        """Apply `read` to every batch, in eval mode and without gradients."""
        self.model.eval()
        self.prefetch(batches)
        return [read(batch) for batch in batches]

    def logprobs(self, batches: Sequence[Batch], scoring: Scoring) -> list[tuple[np.ndarray, np.ndarray]]:
        """Log-probs and entropies of every target, per batch."""
        results = self.map_batches(batches, lambda batch: self.score(batch, scoring))
        return [(new.float().cpu().numpy(), entropy.cpu().numpy()) for new, entropy in results]

    def values(self, batches: Sequence[Batch]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Values per batch, of a model with a score head: at every target, and after the last sampled token
        of every sequence (0 if the batch was packed without `ends`).
        """

        def read(batch: Batch) -> Tensor:
            places = batch.predictors if batch.ends is None else np.concatenate([batch.predictors, batch.ends])
            return self.values_at(batch, places)

        found = [(b, len(b.predictors), v) for b, v in zip(batches, self.map_batches(batches, read), strict=True)]
        arrays = ((b, at, v.float().cpu().numpy()) for b, at, v in found)
        return [(v[:at], v[at:] if b.ends is not None else np.zeros(len(b.keys), v.dtype)) for b, at, v in arrays]

    def score(self, batch: Batch, scoring: Scoring, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the targets; in training, the logits are kept for backward if they fit
        into the spare memory.
        """
        logits = batch.target_count * self.family.vocabulary * self.dtype.itemsize
        fits = torch.is_grad_enabled() and logits <= self.recompute.spare
        return read_logprobs(
            self.hidden_at(batch, batch.predictors),
            language_head(self.model),
            to_device(batch.targets, self.device),
            temperature=scoring.temperature,
            banned=self.banned if scoring.ban else None,
            support=batch.support,
            entropy_gradient=entropy_gradient,
            keep_logits=fits,
        )

    def values_at(self, batch: Batch, places: np.ndarray) -> Tensor:
        assert hasattr(self.model, "score"), "values need a model with a score head"
        return read_scores(self.model.score, self.hidden_at(batch, places))  # type: ignore[arg-type]

    def at_targets(self, batch: Batch, compute: Callable[[Any], Sequence[Tensor]]) -> list[Tensor]:
        return [*compute(batch)]

    def hidden_at(self, batch: Batch, places: np.ndarray) -> Tensor:
        """Last hidden states [places, hidden size] at some tokens of the forest."""
        inputs = self._inputs.get(batch)
        given = inputs.ids, inputs.positions, batch.media, inputs.plan
        features = self._features(batch, inputs)
        hidden = hidden_states(self.model, self.family, *given, places=inputs.places, features=features)
        return hidden[to_device(places, self.device)]

    def _features(self, batch: Batch, inputs: Inputs) -> Tensor | None:
        """Features of the media, or None; those of frozen towers are computed once for all passes."""
        if not batch.media:
            return None
        if inputs.media is not None:
            return self.family.features(self.model, inputs.media)
        return self._seen.read(
            batch.media, lambda spans: self.family.features(self.model, media_inputs(self.family, spans, self.device))
        )

    def forget_features(self) -> None:
        """Drop the cached features of media. Call it after changing the weights of a tower, or to free memory."""
        self._seen.clear()

    def prefetch(self, batches: Sequence[Batch]) -> None:
        """Prepare the pixels of later batches in background threads while the first ones are computed."""
        self.family.prefetch([span.media for batch in batches for span in batch.media])

    def measure(self, batches: Sequence[Batch], loss: Loss) -> Metrics:
        """The metrics that a step on these batches would report, without taking it."""
        return self.metrics_of(self.map_batches(batches, lambda batch: loss.forward(self, batch)()[1]))

    def metrics_of(self, sums: Sequence[LossSums]) -> Metrics:
        """The metrics of the forests of this process."""
        assert self.optimizer is not None, "this trainer only scores"
        return to_metrics(sums, self.optimizer.total)

    # -- training --

    def train_step(self, batches: Sequence[Batch], loss: Loss, *, lr: float, moves: bool = True) -> Update:
        """One optimizer step on all batches together; their scales already hold the denominators
        of the step. Without `moves` everything is measured, but weights and optimizer do not change.

        Several processes may each hold some of the batches, or none. The metrics of all processes, merged,
        are those of the step.
        """
        metrics = self.metrics_of(self.sum_gradients(batches, loss))
        return self.take_step(loss.role, metrics, lr, moves=moves)

    def sum_gradients(self, batches: Sequence[Batch], loss: Loss) -> list[LossSums]:
        """The first half of a step: sum the gradients of all batches in the optimizer; return the sums of
        the loss for each.

        A batch that runs out of memory is retried with every layer recomputed, then as two halves,
        whose gradients add up to the same.
        """
        assert self.optimizer is not None, "this trainer only scores"
        model_state.set_training(self.model)
        if self.optimizer.world > 1 and model_state.draws(self.model):
            # Ranks draw different numbers, and a resumed run draws the same without stored state.
            torch.manual_seed(self.optimizer.updates() * self.optimizer.world + self.optimizer.rank)
        self.optimizer.begin()
        self.oom_splits = 0
        self.prefetch(batches)
        if self.routers:
            tokens = max(1, self.optimizer.total(Counter(all=sum(batch.tokens for batch in batches)))["all"])
        found: list[LossSums] = []
        # (batch, parameters whose gradient of it is already summed, whether every layer recomputes). The
        # last is True for an empty batch, so that memory is not measured with it.
        todo = deque((batch, frozenset[str](), batch.tokens == 0) for batch in batches)
        while todo:
            batch, added, cautious = todo.popleft()
            self.optimizer.start_micro_batch(added)
            self.recompute.choose(*self.token_counts(batch), cautious=cautious)
            value: Tensor | None = None
            try:
                with experts.recorded_logits(self.routers) as routed:
                    compute_loss = loss.forward(self, batch)
                    value, sums = compute_loss()
                if self.routers:
                    chosen, share = self.routers[0].top_k, batch.tokens / tokens
                    value, sums = with_balance(value, sums, routed, chosen, self.aux_coef, share, loss.role)
                if todo and self.device.type == "cuda":  # prepare inputs while the GPU runs the backward
                    self._inputs.begin(todo[0][0])
                if value.requires_grad:  # False if only a tower trains and the batch does not use it
                    value.backward()
            except torch.OutOfMemoryError:
                if not self.retries_on_oom:
                    raise
                value = None  # frees the graph that filled the memory
                routed.clear()
                added = self.optimizer.drop_micro_batch()
                again = self.recompute.after_oom() and not cautious
                parts = (batch,) if again else halves(batch, whole=loss.whole)
                if parts is None:
                    raise
            else:
                self.optimizer.end_micro_batch()
                self.recompute.after_backward()
                found.append(sums)
                continue
            torch.cuda.empty_cache()
            self.oom_splits += not again
            todo.extendleft((part, added, cautious or again) for part in reversed(parts))
        return found

    def token_counts(self, batch: Batch) -> tuple[int, int]:
        """Number of tokens that pass the language model in this process, and of media tokens that pass a tower."""
        return batch.tokens, sum(span.length for span in batch.media)

    def take_step(self, role: str, metrics: Metrics, lr: float, *, moves: bool = True) -> Update:
        """The second half of a step: update the weights, unless the loss (`role`/loss of the metrics) or a
        gradient is not finite, or `moves` is False.
        """
        assert self.optimizer is not None
        loss = metrics.means().get(f"{role}/loss", 0.0)
        finite = self.optimizer.reduce(finite=bool(np.isfinite(loss)))
        norm = self.optimizer.norm()
        finite = finite and bool(np.isfinite(norm.item()))
        vision = [n for n in self.optimizer.parameters if self.family.tower_of(n) == "vision"]
        facts = {f"{role}/grad_norm": norm.item()}
        if vision:
            facts[f"{role}/grad_norm_vision"] = self.optimizer.norm(vision).item()
        facts |= {f"{role}/lr": lr, "guard/nonfinite": not finite, f"{role}/update_skipped": not finite}
        each = 1 / self.optimizer.world  # all processes have the same facts: each adds 1 / world of the count
        for name, value in facts.items():
            metrics.add(name, value * each, each)
        metrics.add("mem/oom_splits", self.oom_splits, each)
        if finite and moves:
            self.changes += 1
            self.optimizer.step(lr, norm=norm)
            if self.ema is not None:
                average, share = self.ema
                average.blend(self.local_weights(), share)
        else:
            self.optimizer.clear()
        return Update(metrics=metrics, skipped=not finite)

    def recomputed_share(self) -> float:
        return self.recompute.recomputed_share()

    # -- weights and state --

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors as in a checkpoint, with adapters merged in."""
        yield from lora.merged(self.model)

    def local_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The part of the weights that this process holds, which may be written to."""
        return self.weights()

    @contextmanager
    def negated(self, tower: str) -> Iterator[str]:
        """Context manager for probes: negates one weight of a tower, yields its name, and restores it."""
        with negated_weight(self.model, self.family, tower) as name:
            self.forget_features()
            yield name
        self.forget_features()

    @torch.no_grad()
    def blend(self, source: Iterable[tuple[str, Tensor]], share: float) -> None:
        """Follow the `local_weights` of another model, as a reference does: mine = share * source +
        (1 - share) * mine, in fp32. A share of 1 is a copy.
        """
        assert self.optimizer is None, "a model that trains follows its optimizer"
        assert 0 < share <= 1, share
        model_state.blend_into(dict(self.local_weights()), dict(source), share, self.averages)
        self.forget_features()

    def weight_shapes(self) -> list[tuple[str, tuple[int, ...], int]]:
        """Name, shape and bytes of each weight."""
        return list(lora.merged_shapes(self.model))

    def spare_bytes(self) -> int:
        """Main memory that is reserved for the next copy of a checkpoint."""
        return spare_bytes()

    def saved_bytes(self) -> int:
        """The size of `model_files` and `state_files` together."""
        steps = self.optimizer.state() if self.optimizer is not None else {}
        with without_head(self.model):  # a model with a saved head is saved with blocks that it does not use
            weights = sum(size for _, _, size in self.weight_shapes())
        return weights + sum(t.nbytes for t in (*steps.values(), *self.averages.values()))

    def model_files(self, *, copy: bool = False) -> list[File]:
        """The files of a Hugging Face folder. `copy`, here and below: copy the tensors now, so that
        training may change them before they are written.
        """
        trained = {name for name, p in self.model.named_parameters() if p.requires_grad}
        assert self.optimizer is None or trained == self.optimizer.parameters.keys()
        return model_state.model_files(self.model, copy=copy)

    def weight_file(self, *, copy: bool = False) -> File:
        """Only the weights, for a model that cannot be loaded from a model folder."""
        averages = {f"{AVERAGE}{name}": average for name, average in self.averages.items()}
        return WEIGHTS, tensor_file(host_copies(dict(self.weights()) | averages, copy=copy))

    @torch.no_grad()
    def load_weights(self, folder: Path) -> None:
        from safetensors.torch import load_file

        stored = load_file(folder / WEIGHTS)
        averages = {name: stored.pop(name) for name in list(stored) if name.startswith(AVERAGE)}
        mine = dict(self.weights())
        require_same(str(folder / WEIGHTS), mine.items(), stored.items())
        for name, weight in mine.items():
            weight.copy_(stored[name])
        self.forget_features()
        self.averages = {name.removeprefix(AVERAGE): average.to(self.device) for name, average in averages.items()}

    def state_files(self, *, copy: bool = False) -> Iterator[File]:
        """The optimizer's state; for a critic or a moving reference also the weights, which only rank 0 writes."""
        if self._weights_are_state and (self.optimizer is None or self.optimizer.rank == 0):
            yield self.weight_file(copy=copy)
        if self.optimizer is not None:
            yield optimizer_file(self.optimizer, copy=copy)
            if self.optimizer.world == 1 and model_state.draws(self.model):
                yield RANDOM, tensor_file(model_state.random_state(self.device))

    def load_state(self, folder: Path) -> None:
        from safetensors.torch import load_file

        if self._weights_are_state:
            self.load_weights(folder)
        if self.optimizer is not None:
            load_optimizer(self.optimizer, folder)
            # Several processes store no random state.
            if self.optimizer.world == 1 and (folder / RANDOM).is_file() and model_state.draws(self.model):
                model_state.restore_random_state(load_file(folder / RANDOM), self.device)

    def close(self) -> None:
        """Does nothing: the memory is freed with the last reference."""

    @property
    def _weights_are_state(self) -> bool:
        """Whether no model folder holds the weights: those of a critic, or of a reference that moves."""
        score = getattr(self.model, "score", None)
        return self.optimizer is None or not isinstance(score, SavedHead | None)

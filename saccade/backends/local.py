"""One model in this process, on one device: no collectives, breakpoints work.

A forward runs on one forest; log-probs or values are read where targets are predicted. A policy, a
reference and a critic (`models/heads.py`) are each one of these. Knows nothing of rollouts, rewards
or files other than its own state.

    backend = LocalBackend(model, family, TrainConfig())
    backend.train_step(batches, algorithm, Scoring(temperature=1.0), lr=1e-6)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from saccade.algorithms.algorithm import Algorithm
from saccade.algorithms.objective import Columns, Stats, objective, to_metrics
from saccade.algorithms.value import ValueStats, value_metrics, value_objective
from saccade.backends import Scoring, Update
from saccade.backends.features import FeatureCache
from saccade.backends.inputs import Ahead, Inputs, inputs_of
from saccade.backends.memory import Recompute
from saccade.backends.optimizer import Optimizer
from saccade.config import TrainConfig
from saccade.errors import EnvironmentProblem
from saccade.forest import has_media, select
from saccade.logprobs import read_logprobs
from saccade.models import lora
from saccade.models.families import Family
from saccade.models.heads import read_scores
from saccade.models.load import banned_mask, hidden_states, media_inputs, negated
from saccade.transfer import to_device
from saccade.types import Batch, Metrics

S = TypeVar("S")
WEIGHTS, OPTIMIZER, AVERAGE = "weights.safetensors", "optimizer.safetensors", "average/"
RANDOM = "random.safetensors"


class LocalBackend:
    def __init__(
        self,
        model: nn.Module,
        family: Family,
        train: TrainConfig | None = None,
        *,
        checkpointing: bool | Literal["auto"] = False,
    ) -> None:
        """Without `train` the model only scores, as a reference does. `checkpointing`: every layer
        computes its activations again in backward, or as many as the memory asks for.
        """
        self.model, self.family = model, family
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.banned = banned_mask(family, self.device)
        self.oom_splits = 0
        self._seen, self._towers_stand = FeatureCache(), True
        self._inputs = Ahead(self._make_inputs)
        self.optimizer: Optimizer | None = None
        self.averages: dict[str, Tensor] = {}  # of `blend`, fp32
        if train is None:
            model.requires_grad_(False)
            return
        scales = dict(train.lr_scale)
        self.optimizer = Optimizer(
            model.named_parameters(), train, lr_scale=lambda n: scales.get(family.tower_of(n), 1.0)
        )
        self.recompute = Recompute(model, checkpointing)
        self._towers_stand = not any(
            p.requires_grad for n, p in model.named_parameters() if family.tower_of(n) != "llm"
        )

    # -- scoring --

    @torch.no_grad()
    def logprobs(
        self, batches: Sequence[Batch], scoring: Scoring
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        self.model.eval()
        self._prefetch(batches)
        results = [self._read(batch, scoring) for batch in batches]
        return [(new.float().cpu().numpy(), entropy.cpu().numpy()) for new, entropy in results]

    @torch.no_grad()
    def values(self, batches: Sequence[Batch]) -> list[tuple[np.ndarray, np.ndarray]]:
        self.model.eval()
        self._prefetch(batches)
        results = []
        for batch in batches:
            reads, ends = batch.reads, batch.ends
            places = reads if ends is None else np.concatenate([reads, ends])
            found = self._values(batch, places).float().cpu().numpy()
            after = np.zeros(len(batch.keys), np.float32) if ends is None else found[len(reads) :]
            results.append((found[: len(reads)], after))
        return results

    def _read(
        self, batch: Batch, scoring: Scoring, *, entropy_gradient: bool = False, spare: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the reads; their logits are kept where they fit into `spare`
        bytes.
        """
        logits = len(batch.reads) * self.family.vocabulary * self.dtype.itemsize
        return read_logprobs(
            self._hidden(batch, batch.reads),
            self.model.lm_head,  # type: ignore[arg-type]
            self._tensor(batch.targets),
            temperature=scoring.temperature,
            banned=self.banned if scoring.ban else None,
            support=batch.support,
            vocabulary=self.family.vocabulary,
            entropy_gradient=entropy_gradient,
            keep_logits=logits <= spare,
        )

    def _values(self, batch: Batch, places: np.ndarray) -> Tensor:
        assert hasattr(self.model, "score"), "values need a model with a score head"
        return read_scores(self.model.score, self._hidden(batch, places))  # type: ignore[arg-type]

    def _hidden(self, batch: Batch, places: np.ndarray) -> Tensor:
        """Last hidden states at some tokens of the forest."""
        inputs = self._inputs.get(batch)
        hidden = hidden_states(
            self.model,
            self.family,
            inputs.ids,
            inputs.positions,
            batch.media,
            inputs.plan,
            places=inputs.places,
            features=self._features(batch, inputs),
        )
        return hidden[self._tensor(places)]

    def _features(self, batch: Batch, inputs: Inputs) -> Tensor | None:
        """What stands for the media; of towers that stand still, computed once for all passes."""
        if not batch.media:
            return None
        if inputs.media is not None:
            return self.family.features(self.model, inputs.media)
        return self._seen.read(
            batch.media,
            lambda spans: self.family.features(
                self.model, media_inputs(self.family, spans, self.device)
            ),
        )

    def _make_inputs(self, batch: Batch) -> Inputs:
        pixels = not self._towers_stand
        return inputs_of(batch, self.family, self.device, self.dtype, pixels=pixels)

    def _prefetch(self, batches: Sequence[Batch]) -> None:
        """Threads make the pixels of later batches while the first ones are computed."""
        self.family.prefetch([span.media for batch in batches for span in batch.media])

    # -- training --

    def train_step(
        self, batches: Sequence[Batch], algorithm: Algorithm, scoring: Scoring, *, lr: float
    ) -> Update:
        stats = self.accumulate(batches, algorithm, scoring)
        return self._update("policy", to_metrics(algorithm, stats), lr)

    def accumulate(
        self, batches: Sequence[Batch], algorithm: Algorithm, scoring: Scoring
    ) -> list[Stats]:
        """The first half of a step: the gradients, summed in the optimizer."""

        def loss_of(batch: Batch) -> tuple[Tensor, Stats]:
            asked, spare = algorithm.entropy.coef != 0, self.recompute.spare
            new, entropy = self._read(batch, scoring, entropy_gradient=asked, spare=spare)
            return objective(algorithm, new, entropy, self._columns(batch, new.dtype))

        return self._accumulate(batches, loss_of)

    def train_values(self, batches: Sequence[Batch], *, clip: float, lr: float) -> Update:
        def loss_of(batch: Batch) -> tuple[Tensor, ValueStats]:
            new = self._values(batch, batch.reads)
            old, returns, scales = (
                self._column(column, new.dtype)
                for column in (batch.values, batch.returns, batch.scales)
            )
            assert old is not None and returns is not None and scales is not None
            return value_objective(new, old, returns, scales, clip=clip)

        return self._update("critic", value_metrics(self._accumulate(batches, loss_of)), lr)

    def _accumulate(
        self, batches: Sequence[Batch], loss_of: Callable[[Batch], tuple[Tensor, S]]
    ) -> list[S]:
        """The gradients of all batches, summed in the optimizer; what `loss_of` reports of each."""
        assert self.optimizer is not None, "this backend only scores"
        self.model.train()
        self.optimizer.begin()
        self.oom_splits = 0
        self._prefetch(batches)
        self._inputs.clear()
        following = dict(zip(map(id, batches), batches[1:], strict=False))

        def forward(batch: Batch) -> tuple[Tensor, S]:
            found = loss_of(batch)
            if self.device.type == "cuda" and id(batch) in following:  # while it is busy backwards
                self._inputs.begin(following.pop(id(batch)))
            return found

        return [stats for batch in batches for stats in self._micro_step(batch, forward)]

    def _micro_step(
        self,
        batch: Batch,
        loss_of: Callable[[Batch], tuple[Tensor, S]],
        added: frozenset[str] = frozenset(),
        *,
        cautious: bool = False,
    ) -> list[S]:
        """Forward and backward of one forest. Out of memory: once more with every layer recomputed,
        then as two halves, whose gradients add up to the same.
        """
        assert self.optimizer is not None
        self.optimizer.start_micro_batch(added)
        media_tokens = sum(span.length for span in batch.media)
        self.recompute.choose(batch.tokens, media_tokens, cautious=cautious)
        try:
            stats = _backward(loss_of, batch)
        except torch.OutOfMemoryError:
            added = self.optimizer.drop_micro_batch()
            planned = self.recompute.failed() and not cautious
            if len(batch.keys) < 2 and not planned:
                raise
        else:
            self.optimizer.end_micro_batch()
            self.recompute.learn()
            return [stats]
        torch.cuda.empty_cache()
        if planned:
            return self._micro_step(batch, loss_of, added, cautious=True)
        self.oom_splits += 1
        middle = len(batch.keys) // 2
        halves = (select(batch, range(middle)), select(batch, range(middle, len(batch.keys))))
        return [
            stats
            for half in halves
            for stats in self._micro_step(half, loss_of, added, cautious=cautious)
        ]

    def _update(self, role: str, metrics: Metrics, lr: float) -> Update:
        """Take the step, unless the loss or a gradient is not finite."""
        assert self.optimizer is not None
        norm = self.optimizer.norm()
        vision = [n for n in self.optimizer.parameters if self.family.tower_of(n) == "vision"]
        metrics.add(f"{role}/grad_norm", norm.item())
        if vision:
            metrics.add(f"{role}/grad_norm_vision", self.optimizer.norm(vision).item())
        metrics.add(f"{role}/lr", lr)
        metrics.add("mem/oom_splits", self.oom_splits)
        finite = bool(np.isfinite([norm.item(), metrics.means().get(f"{role}/loss", 0.0)]).all())
        if finite:
            self.optimizer.step(lr, norm=norm)
        else:
            self.optimizer.clear()
        metrics.add("guard/nonfinite", not finite)
        metrics.add(f"{role}/update_skipped", not finite)
        return Update(metrics=metrics, skipped=not finite)

    def _columns(self, batch: Batch, dtype: torch.dtype) -> Columns:
        advantages, scales = (self._column(c, dtype) for c in (batch.advantages, batch.scales))
        assert advantages is not None and scales is not None
        sees = self.family.spec.image_token is not None
        return Columns(
            advantages=advantages,
            scales=scales,
            sequence=self._tensor(batch.sequence),
            sequences=len(batch.keys),
            old=self._column(batch.old_logprobs, dtype),
            rollout=self._column(batch.rollout_logprobs, dtype),
            ref=self._column(batch.ref_logprobs, dtype),
            keep=self._column(batch.keep, dtype),
            weights=self._column(batch.weights, dtype),
            rewards=self._column(batch.rewards, dtype),
            selected=self._column(batch.selected, torch.bool),
            stale=self._column(batch.stale, torch.bool),
            images=self._tensor(has_media(batch)[batch.sequence]) if sees else None,
        )

    def _column(self, values: np.ndarray | None, dtype: torch.dtype) -> Tensor | None:
        return None if values is None else self._tensor(values).to(dtype)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.device)

    # -- weights and state --

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from lora.merged(self.model)

    @contextmanager
    def changed(self, tower: str) -> Iterator[str]:
        """Inside, one weight of a tower differs, for probes; afterwards all are as before."""
        with negated(self.model, self.family, tower) as name:
            self._seen.clear()
            yield name
        self._seen.clear()

    @torch.no_grad()
    def blend(self, source: Iterable[tuple[str, Tensor]], share: float) -> None:
        assert self.optimizer is None, "a model that trains follows its optimizer"
        assert 0 < share <= 1, share
        mine, theirs = dict(self.weights()), dict(source)
        _require_same("the weights to follow", mine, theirs)
        for name, weight in mine.items():
            target = theirs[name].detach().to(weight.device)
            if share == 1:
                weight.copy_(target)
                continue
            average = weight
            if torch.promote_types(weight.dtype, torch.float32) != weight.dtype:
                # Rounded to bf16 at every step, an average would stand still.
                average = self.averages.setdefault(name, weight.float())
            average.lerp_(target.to(average.dtype), share)
            weight.copy_(average)
        if share == 1:
            self.averages = {}
        self._seen.clear()

    def save_model(self, folder: Path) -> None:
        trained = {name for name, p in self.model.named_parameters() if p.requires_grad}
        assert self.optimizer is None or trained == self.optimizer.parameters.keys()
        if lora.is_adapted(self.model):
            lora.save(self.model, folder)
        else:
            self.model.save_pretrained(folder)  # type: ignore[operator]

    def saved_bytes(self) -> int:
        state = self.optimizer.state() if self.optimizer is not None else {}
        return sum(t.nbytes for t in (*(t for _, t in self.weights()), *state.values()))

    def save_weights(self, folder: Path) -> None:
        averages = {f"{AVERAGE}{name}": average for name, average in self.averages.items()}
        _save(folder / WEIGHTS, dict(self.weights()) | averages)

    @torch.no_grad()
    def load_weights(self, folder: Path) -> None:
        from safetensors.torch import load_file

        stored = load_file(folder / WEIGHTS)
        averages = {name: stored.pop(name) for name in list(stored) if name.startswith(AVERAGE)}
        mine = dict(self.weights())
        _require_same(str(folder / WEIGHTS), mine, stored)
        for name, weight in mine.items():
            weight.copy_(stored[name])
        self._seen.clear()
        self.averages = {
            name.removeprefix(AVERAGE): average.to(self.device)
            for name, average in averages.items()
        }

    def save_state(self, folder: Path) -> None:
        if self._weights_are_state:
            self.save_weights(folder)
        if self.optimizer is not None:
            _save(folder / OPTIMIZER, self.optimizer.state())
            if _draws(self.model):
                _save(folder / RANDOM, _random_state(self.device))

    def load_state(self, folder: Path) -> None:
        from safetensors.torch import load_file

        if self._weights_are_state:
            self.load_weights(folder)
        if self.optimizer is not None:
            self.optimizer.load(load_file(folder / OPTIMIZER))
            if _draws(self.model):
                _restore_random_state(load_file(folder / RANDOM), self.device)

    @property
    def _weights_are_state(self) -> bool:
        """No model folder holds those of a critic, nor of a reference that moves."""
        return self.optimizer is None or hasattr(self.model, "score")


def _backward(loss_of: Callable[[Batch], tuple[Tensor, S]], batch: Batch) -> S:
    """A function of its own: an error leaves it, and with it the graph that filled the memory."""
    loss, stats = loss_of(batch)
    loss.backward()
    return stats


def _draws(model: nn.Module) -> bool:
    """Whether a training step depends on torch's random numbers."""
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


def _random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"])


def _save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: t.detach().contiguous() for name, t in tensors.items()}, path)


def _require_same(what: str, mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Names and shapes, both ways: a tensor left out or stretched would train another model."""
    problems = {
        "missing": mine.keys() - theirs.keys(),
        "unexpected": theirs.keys() - mine.keys(),
        "of another shape": {
            n for n in mine.keys() & theirs.keys() if mine[n].shape != theirs[n].shape
        },
    }
    if any(problems.values()):
        listed = (f"{k}: {', '.join(sorted(names)[:3])}" for k, names in problems.items() if names)
        raise EnvironmentProblem(
            f"{what}: not those of this model ({'; '.join(listed)}); use the same model.path"
        )

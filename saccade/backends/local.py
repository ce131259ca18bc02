"""One model in this process, on one device: no collectives, breakpoints work.

A forward runs on one forest; log-probs are read where targets are predicted. Knows nothing of
rollouts, rewards or files other than its own state.

    backend = LocalBackend(model, family, TrainConfig())
    backend.train_step(batches, algorithm, Scoring(temperature=1.0), lr=1e-6)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from saccade.algorithms.algorithm import Algorithm
from saccade.algorithms.objective import Columns, Stats, objective, to_metrics
from saccade.attention import forest_plan
from saccade.backends import Scoring, Update
from saccade.backends.optimizer import Optimizer
from saccade.config import TrainConfig
from saccade.forest import select
from saccade.logprobs import read_logprobs
from saccade.models.families import Family
from saccade.models.load import banned_mask, hidden_states
from saccade.types import Batch


class LocalBackend:
    def __init__(
        self,
        model: nn.Module,
        family: Family,
        train: TrainConfig | None = None,
        *,
        checkpointing: bool = False,
    ) -> None:
        """Without `train` the model only scores, as a reference does."""
        self.model, self.family = model, family
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.banned = banned_mask(family, self.device)
        self.oom_splits = 0
        self.optimizer: Optimizer | None = None
        if train is None:
            model.requires_grad_(False)
            return
        scales = dict(train.lr_scale)
        self.optimizer = Optimizer(
            model.named_parameters(), train, lr_scale=lambda n: scales.get(family.tower_of(n), 1.0)
        )
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]

    # -- scoring --

    @torch.no_grad()
    def logprobs(
        self, batches: Sequence[Batch], scoring: Scoring
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        self.model.eval()
        results = []
        for batch in batches:
            new, entropy = self._read(batch, scoring)
            results.append((new.float().cpu().numpy(), entropy.float().cpu().numpy()))
        return results

    def _read(
        self, batch: Batch, scoring: Scoring, *, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        plan = forest_plan(batch.node_starts, batch.parents, self.device, self.dtype)
        hidden = hidden_states(
            self.model,
            self.family,
            self._tensor(batch.ids),
            self._tensor(batch.positions),
            batch.media,
            plan,
        )
        return read_logprobs(
            hidden[self._tensor(batch.reads)],
            self.model.lm_head,  # type: ignore[arg-type]
            self._tensor(batch.targets),
            temperature=scoring.temperature,
            banned=self.banned if scoring.ban else None,
            support=batch.support,
            vocabulary=self.family.vocabulary,
            entropy_gradient=entropy_gradient,
        )

    # -- training --

    def train_step(
        self, batches: Sequence[Batch], algorithm: Algorithm, scoring: Scoring, *, lr: float
    ) -> Update:
        assert self.optimizer is not None, "this backend only scores"
        self.model.train()
        self.optimizer.clear()
        self.oom_splits = 0
        stats = [s for batch in batches for s in self._micro_step(batch, algorithm, scoring)]
        norm = self.optimizer.norm()
        vision = [n for n in self.optimizer.parameters if self.family.tower_of(n) == "vision"]
        vision_norm = self.optimizer.norm(vision)
        metrics = to_metrics(algorithm, stats)
        metrics.add("policy/grad_norm", norm.item())
        if vision:
            metrics.add("policy/grad_norm_vision", vision_norm.item())
        metrics.add("policy/lr", lr)
        metrics.add("mem/oom_splits", self.oom_splits)
        finite = bool(np.isfinite([norm.item(), metrics.means().get("policy/loss", 0.0)]).all())
        if finite:
            self.optimizer.step(lr, norm=norm)
        else:
            self.optimizer.clear()
        metrics.add("guard/nonfinite", not finite)
        metrics.add("policy/update_skipped", not finite)
        return Update(metrics=metrics, skipped=not finite)

    def _micro_step(self, batch: Batch, algorithm: Algorithm, scoring: Scoring) -> list[Stats]:
        """Forward and backward of one forest. Out of memory: two halves of it, whose gradients add
        up to the same.
        """
        assert self.optimizer is not None
        try:
            stats = self._forward_backward(batch, algorithm, scoring)
        except torch.OutOfMemoryError:
            self.optimizer.drop_micro_batch()
            if len(batch.keys) < 2:
                raise
        else:
            self.optimizer.fold()
            return [stats]
        torch.cuda.empty_cache()
        self.oom_splits += 1
        middle = len(batch.keys) // 2
        halves = (select(batch, range(middle)), select(batch, range(middle, len(batch.keys))))
        return [s for half in halves for s in self._micro_step(half, algorithm, scoring)]

    def _forward_backward(self, batch: Batch, algorithm: Algorithm, scoring: Scoring) -> Stats:
        new, entropy = self._read(batch, scoring, entropy_gradient=algorithm.entropy_coef > 0)
        loss, stats = objective(algorithm, new, entropy, self._columns(batch, new.dtype))
        loss.backward()
        return stats

    def _columns(self, batch: Batch, dtype: torch.dtype) -> Columns:
        def column(values: np.ndarray | None) -> Tensor | None:
            return None if values is None else self._tensor(values).to(dtype)

        assert batch.advantages is not None and batch.scales is not None
        return Columns(
            advantages=self._tensor(batch.advantages).to(dtype),
            scales=self._tensor(batch.scales).to(dtype),
            sequence=self._tensor(batch.sequence),
            sequences=len(batch.keys),
            old=column(batch.old_logprobs),
            rollout=column(batch.rollout_logprobs),
            ref=column(batch.ref_logprobs),
            keep=column(batch.keep),
            weights=column(batch.weights),
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    # -- weights and state --

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()

    def save_model(self, folder: Path) -> None:
        self.model.save_pretrained(folder)  # type: ignore[operator]

    def save_state(self, folder: Path) -> None:
        from safetensors.torch import save_file

        assert self.optimizer is not None
        state = {name: t.contiguous() for name, t in self.optimizer.state().items()}
        save_file(state, folder / "optimizer.safetensors")

    def load_state(self, folder: Path) -> None:
        from safetensors.torch import load_file

        assert self.optimizer is not None
        self.optimizer.load(load_file(folder / "optimizer.safetensors"))

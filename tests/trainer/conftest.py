"""What comparisons with transformers' own forward need."""

from collections.abc import Callable

import pytest
import torch


@pytest.fixture
def keep_float64(monkeypatch) -> Callable[[], None]:
    """transformers casts norms and rotary embeddings to fp32; not in float64, once this was called after loading."""
    narrow, to = torch.Tensor.float, torch.Tensor.to

    def wide(x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        return x if x.dtype == torch.float64 and args == (torch.float32,) else to(x, *args, **kwargs)

    def patch() -> None:
        monkeypatch.setattr(torch.Tensor, "to", wide)
        monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else narrow(x))

    return patch


@pytest.fixture
def measured(monkeypatch):
    """Metrics and gradients of a step, caught where the optimizer would use them."""

    def step(backend, batches, loss):
        seen: dict[str, torch.Tensor] = {}
        with monkeypatch.context() as patch:
            patch.setattr(backend.optimizer, "step", lambda lr, norm: seen.update(backend.optimizer.gradients))
            update = backend.train_step(batches, loss, lr=0.0)
        assert not update.skipped
        return update.metrics.means(), seen

    return step


@pytest.fixture
def padded():
    """Members as padded rows for transformers' own forward."""

    def rows(family, members, dtype):
        ids = torch.zeros(len(members), max(len(t.ids) for t in members), dtype=torch.long)
        mask, kinds = torch.zeros_like(ids), torch.zeros_like(ids)
        for row, t in enumerate(members):
            ids[row, : len(t.ids)], mask[row, : len(t.ids)] = torch.from_numpy(t.ids), 1
            for span in t.media:
                kinds[row, span.start : span.end] = 1
        vision = family.vision([span for t in members for span in t.media], torch.device("cpu"), dtype)
        if vision and family.axes > 1:
            vision = {**vision, "mm_token_type_ids": kinds}
        return {"input_ids": ids, "attention_mask": mask, "use_cache": False, **vision}

    return rows

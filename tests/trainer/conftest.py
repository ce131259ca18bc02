"""What comparisons in float64 need."""

from collections.abc import Callable

import pytest
import torch


@pytest.fixture
def keep_float64(monkeypatch) -> Callable[[], None]:
    """transformers casts norms and rotary embeddings to fp32: in float64 leave them wide. To be
    called after models are loaded.
    """
    narrow, to = torch.Tensor.float, torch.Tensor.to

    def wide(x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        return x if x.dtype == torch.float64 and args == (torch.float32,) else to(x, *args, **kwargs)

    def patch() -> None:
        monkeypatch.setattr(torch.Tensor, "to", wide)
        monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else narrow(x))

    return patch

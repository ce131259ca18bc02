"""Options of generation: engines, sampling, environments."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator, model_validator

from saccade.config.schema.section import Section, When, mapping, option

OTHER_ENGINE = When("rollout.engine != 'embedded'", "rollout.engine=vllm")
OTHER_WEIGHTS = When(
    "rollout.engine != 'embedded' or rollout.replicas", "rollout.engine=vllm", "an engine with separate weights"
)


class HttpConfig(Section):
    url: str = option("", "Address of an OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1.")
    api: Literal["chat", "completions"] = option("chat", "How the endpoint is asked.")
    model: str = option("", "Name of the model there; empty: the only one that it lists.")
    key: str = option("", "Environment variable that holds the key; empty: none is sent.")
    concurrency: int = option(16, "Requests under way at once.", ge=1)
    per_minute: int = option(0, "Most requests in a minute; 0: as many as go.", ge=0)
    retries: int = option(5, "Further attempts after an error that may pass.", ge=0)
    timeout: float = option(120.0, "Seconds before an attempt is given up.", gt=0)
    cache: str | None = option(None, "Folder of answers for reuse; empty: beside the results; off: none.", path=True)
    price: tuple[float, float] | None = option(None, "Cost of a million prompt and a million response tokens.")


class RolloutConfig(Section):
    engine: Literal["embedded", "vllm", "sglang", "http"] = option(
        "embedded", "What generates: embedded uses the trainer's weights; http only evaluates."
    )
    replicas: int = option(0, "Separate engine processes behind one queue; 0: one engine in this process.", ge=0)
    ahead: int = option(
        0, "Steps that rollouts may run ahead of training; above 0 their tokens are weighed.", ge=0, commands=("rl",)
    )
    at_update: Literal["interrupt", "keep_keys", "drain"] = option(
        "interrupt",
        "When weights change, unfinished sequences: compute keys again, keep old ones, or end first (training waits).",
        when=(When("rollout.ahead", "rollout.ahead=1"), When("rollout.replicas", "rollout.replicas=1")),
        commands=("rl",),
    )
    record: str | None = option(
        None,
        "write: store all that the engine says; or the folder of a run that did, to train on its rollouts again.",
        path=True,
        commands=("rl",),
    )
    tensor_parallel: int = option(1, "GPUs of one engine (vllm, sglang).", ge=1, when=OTHER_ENGINE)
    memory_share: float = option(0.6, "Share of the GPU's memory for vllm or sglang.", gt=0, le=1, when=OTHER_ENGINE)
    engine_args: dict[str, Any] = option({}, "Further arguments of vllm or sglang, or http fields.", when=OTHER_ENGINE)
    parity_max: float | None = option(
        None, "Largest mean gap of log-probs; empty: 0.05 in bfloat16, 1e-4 in float32.", gt=0, when=OTHER_WEIGHTS
    )
    http: HttpConfig = mapping(HttpConfig, "The endpoint of engine=http.", commands=("eval", "generate", "chat"))
    temperature: float = option(1.0, "Sampling temperature; the trainer scores at the same one.", gt=0)
    top_p: float = option(1.0, "Nucleus sampling; below 1 the kept ids are replayed in training.", gt=0, le=1)
    top_k: int = option(-1, "Keep only the k likeliest tokens; -1 keeps all. Replayed in training.", ge=-1)
    truncated_sampling: Literal["refuse", "replay"] = option("refuse", "top_p, top_k in training: refuse or replay.")
    max_tokens: int = option(2048, "Longest response (of one turn).", ge=1)
    stop: tuple[str, ...] = option((), "Strings that end a response; they stay in it.")
    ignore_eos: bool = option(False, "Go on past the end-of-turn token (for benchmarks).")
    max_sequences: int = option(512, "Sequences decoded at once by one engine.", ge=1)


LIMITS = {  # limits of one episode → smallest allowed value
    "max_turns": 1,
    "max_images": 0,
    "max_turn_tokens": 1,
    "max_total_tokens": 1,
    "min_turn_tokens": 1,
    "max_tool_errors": 0,
}


class EnvConfig(Section):
    name: str = option("single_turn", "single_turn, crop, calculator, tools, sokoban_step or file.py:Class.", path=True)
    args: dict[str, Any] = option({}, "Arguments of your environment's class.")
    tools: tuple[str, ...] = option((), "Your functions, file.py:name, beside built-in tools.", path=True)
    call: Literal["grounding", "tool_call", "action"] | None = option(
        None, "<grounding>, <tool_call> with a name, or moves in the answer tag; empty: the environment's."
    )
    parallel_calls: int = option(1, "Calls of one turn that are answered; above 1 only with tool_call.", ge=1)
    instruction: str | None = option(None, "Replaces the text that explains the tools; an empty string adds none.")
    coordinates: Literal["relative", "milli", "absolute"] = option(
        "relative", "Boxes of crops: fractions of their source, thousandths, or pixels as the model sees it."
    )
    min_crop_px: int = option(4, "Crops with a shorter side are refused.", ge=1)
    min_pixels: int = option(40_000, "Images that a tool shows: those below are scaled up.", ge=1)
    max_pixels: int = option(2_000_000, "Images that a tool shows: those above are scaled down.", ge=1)
    invalid_call_penalty: float = option(0.0, "Taken off the reward for every call that failed.", ge=0)
    max_turns: int = option(1, "Assistant turns of one episode; 6 unless set with tools.", ge=1)
    max_images: int = option(64, "Images of one episode, prompt included; 12 unless set with tools.", ge=0)
    max_turn_tokens: int | None = option(None, "Longest turn; empty: that of rollout (val in evaluation).", ge=1)
    max_total_tokens: int = option(32_768, "Prompt, policy and observation tokens of one episode.", ge=1)
    min_turn_tokens: int = option(2000, "Left for the next turn; unless set at most max_total_tokens / 16.", ge=1)
    max_tool_errors: int | None = option(None, "Failed calls before an episode ends; empty: any number.", ge=0)
    timeout: float = option(600.0, "Seconds that the environment of one episode may take in all.", gt=0)
    step_timeout: float = option(60.0, "Seconds for one step of your environment; then its process is ended.", gt=0)
    processes: int = option(128, "Environments of yours that live at once, each in a process; others wait.", ge=1)
    eval: dict[str, int] = option(
        {}, "Those that differ in evaluation: max_turns (12 with tools), max_images, max_turn_tokens, max_total_tokens."
    )

    @field_validator("eval")
    @classmethod
    def _known(cls, limits: dict[str, int]) -> dict[str, int]:
        for name, value in limits.items():
            if name not in LIMITS:
                raise ValueError(f"{name} is no limit; expected one of {', '.join(LIMITS)}")
            if value < LIMITS[name]:
                raise ValueError(f"{name} should be at least {LIMITS[name]}")
        return limits

    @model_validator(mode="after")
    def _derived(self) -> EnvConfig:
        """Fill in limits that depend on others, unless they are given."""
        self.__dict__.update({k: v for k, v in self._usual().items() if k not in self.model_fields_set})
        return self

    def _usual(self, turns: int = 6, total: int | None = None) -> dict[str, int]:
        single, room = self.name == "single_turn", max(1, (total or self.max_total_tokens) // 16)
        counted = {"max_turns": 1, "max_images": 64} if single else {"max_turns": turns, "max_images": 12}
        return counted | {"min_turn_tokens": min(2000, room)}

    def limits(self, *, evaluation: bool = False) -> dict[str, int | None]:
        """All limits of an episode, by name."""
        values = {name: getattr(self, name) for name in LIMITS}
        if evaluation:
            usual = self._usual(12, self.eval.get("max_total_tokens"))
            values |= {name: n for name, n in usual.items() if name not in self.model_fields_set} | self.eval
        return values

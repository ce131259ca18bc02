"""Every option once: its type, its default, one line that says what it does.

Single values are checked here; what options mean together is `checks.py`, how they are written and
read is `config.py`.

    >>> dict(options())["train.lr"].description
    'Peak learning rate; empty: 1e-6 (rl), 5e-6 (sft).'
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

WORDS = (tuple[str, ...], tuple[str, ...] | None)  # types of lists of words


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, coerce_numbers_to_str=True
    )

    @model_validator(mode="before")
    @classmethod
    def _one_word_is_a_list_of_one(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kinds = {name: field.annotation for name, field in cls.model_fields.items()}
        words = {k: v for k, v in values.items() if isinstance(v, str) and kinds.get(k) in WORDS}
        return values | {key: (word,) for key, word in words.items()}


def option(default: Any, description: str, **limits: Any) -> Any:
    return Field(default, description=description, **limits)


def section(kind: type[Section], description: str) -> Any:
    return Field(default_factory=kind, description=description)


def _entries(value: Any, main: str) -> Any:
    """A list of records; one entry stands for a list of one, a text for its main field."""
    if value is None:
        return []
    rows = value if isinstance(value, list | tuple) else [value]
    return [{main: row} if isinstance(row, str) else row for row in rows]


class RunConfig(Section):
    name: str = option("run", "Name of the run; its folder is OUT/NAME.")
    out: str = option("runs", "Folder that holds the run folders.")
    seed: int = option(42, "Seed of data order, sampling noise, order of choices and tiny models.")
    resume: str = option(
        "none", "none | auto (latest checkpoint, or start) | best | path of a checkpoint."
    )
    max_steps: int | None = option(
        None, "Stop after this many steps; empty: when the epochs are over.", ge=1
    )
    max_hours: float | None = option(
        None, "Stop cleanly, with a checkpoint, after this many hours.", gt=0
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "Where the model lives; auto takes a GPU when there is one."
    )
    memory: float | None = option(
        None, "GiB of the GPU that this process may take; empty: all that is free.", gt=0
    )
    trace: bool = option(
        False, "Write a profiler trace of the third step (or the last, if there are fewer)."
    )


ADAPTED = ("lora", "qlora")  # values of model.train that leave the weights alone


class LoraConfig(Section):
    rank: int = option(64, "Rank of the adapters.", ge=1)
    alpha: int = option(16, "Adapters are scaled by alpha / rank.", ge=1)
    dropout: float = option(0.0, "Dropout before the adapters; sft and dpo only.", ge=0, lt=1)
    targets: str = option(
        "all-linear",
        "Linear layers with an adapter: all-linear (those of the language model), or PATTERNS as "
        "in model.train. Never the head.",
    )
    exclude: str = option("", "PATTERNS of layers among them that get none.")
    vision: bool = option(False, "all-linear means vision tower and projector, too.")


class ModelConfig(Section):
    path: str = option("", "Hugging Face model folder, or tiny:FAMILY for a model built in place.")
    family: str | None = option(
        None, "Force a family; empty: detected from model_type in config.json."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "Compute type; auto: bfloat16 on GPU, float32 on CPU."
    )
    train: str = option(
        "full",
        "full | lora | qlora (over 4-bit weights) | freeze:PATTERNS, comma-separated: vision, "
        "projector, llm, a prefix or re:REGEX.",
    )
    lora: LoraConfig = section(LoraConfig, "Adapters, with train=lora or qlora.")
    checkpointing: Literal["auto", "on", "off"] = option(
        "auto",
        "Recompute activations in backward; auto: in as few layers as a GPU's memory allows.",
    )
    trust_remote_code: bool = option(False, "Run Python code shipped inside the model folder.")


class DataSource(Section):
    path: str = option(..., "File, folder or hub id: PATH[:CONFIG][@SPLIT][#DATA_DIR].")
    name: str | None = option(None, "Name of the set in metrics; empty: the file stem.")
    weight: float | None = option(
        None, "Share in the mixture; empty everywhere: concatenation.", gt=0
    )
    data_source: str | None = option(
        None, "Overrides the data_source of every row (chooses reward.by_source)."
    )
    split: str | None = option(None, "Split of a data set that has several.")
    max_samples: int | None = option(None, "Use only the first rows.", ge=1)
    image_dir: str | None = option(
        None, "Folder that relative media paths start from; empty: the file's own folder."
    )
    mapping: str | None = option(
        None, "Mapping of this set's preference rows; empty: data.mapping; none: as they are."
    )


class DataConfig(Section):
    train: tuple[DataSource, ...] = option((), "Training sets; a plain path also works.")
    val: tuple[DataSource, ...] = option((), "Validation sets, each reported under its name.")
    demonstrations: tuple[DataSource, ...] = option(
        (), "Conversations that rl also learns from, by train.ptx_coef."
    )
    keys: dict[str, str] = option(
        {},
        "Column names by role: prompt, answer, images, videos, audios, id, data_source, choices, "
        "system, chosen, rejected, output, label.",
    )
    format: str = option(
        "auto",
        "Record format: auto | messages | r1v | easyr1 | minio3 | lightrft | qa | sharegpt | "
        "pairs | sides | labels | steps.",
    )
    mapping: str | None = option(
        None,
        "How preference rows of other people are read: hpdv3, imagerewarddb and others that are "
        "shipped, or FILE.yaml[:NAME].",
    )
    compare: Literal["apart", "verdict"] = option(
        "apart",
        "Rows with two candidates: apart keeps them (dpo, reward models), verdict shows both in "
        "one prompt that asks for the better one (sft, rl, eval).",
    )
    side_seed: int = option(
        0, "Draws for each compared pair which candidate is shown first; stored in the record."
    )
    placeholder: Literal["strict", "prepend"] = option(
        "prepend",
        "Media but no <image> in the text: prepend puts them first, strict refuses the row.",
    )
    min_pixels: int = option(3136, "Images below are scaled up.", ge=1)
    max_pixels: int = option(1_003_520, "Images above are scaled down.", ge=1)
    max_images: int = option(
        64, "Most images and other media in one prompt; rows with more are bad rows.", ge=0
    )
    fps: float = option(2.0, "Frames per second that are taken from a video.", gt=0)
    min_frames: int = option(4, "Fewest frames of a video, where it has as many.", ge=2)
    max_frames: int = option(768, "Most frames of a video; their number is always even.", ge=2)
    max_frame_pixels: int = option(602_112, "Frames of videos above are scaled down.", ge=1)
    long_audio: Literal["truncate", "reject"] = option(
        "truncate", "Sound of more than 30 seconds: keep the first 30, or a bad row."
    )
    max_prompt_tokens: int = option(4096, "Longest prompt, media tokens included.", ge=1)
    overlong: Literal["drop", "shrink", "drop_turns", "truncate_text", "error"] = option(
        "drop", "What happens to a longer prompt. No policy ever cuts inside a media span."
    )
    max_megapixels: float = option(200, "Larger images are refused from their header.", gt=0)
    aspect: Literal["pad", "reject"] = option(
        "pad", "What happens to an image with an aspect ratio above 200."
    )
    on_bad_row: Literal["quarantine", "error"] = option(
        "quarantine", "Set bad rows aside with a reason, or stop."
    )
    max_bad_fraction: float = option(0.01, "Stop when more rows than this are bad.", ge=0, le=1)
    order: str = option("shuffle", "shuffle | sequential | length | column:NAME.")
    mixing: Literal["all_exhausted", "first_exhausted"] = option(
        "all_exhausted", "When a weighted mixture ends."
    )
    max_samples: int | None = option(None, "Use only the first rows of the whole mixture.", ge=1)
    allow_network: bool = option(False, "Fetch http(s) images and hub data sets.")
    allow_outside: bool = option(False, "Allow relative image paths that leave their folder.")

    @field_validator("train", "val", "demonstrations", mode="before")
    @classmethod
    def _paths(cls, value: Any) -> Any:
        return _entries(value, "path")


class PromptConfig(Section):
    format: str = option(
        "think_answer",
        "How the model answers: think_answer | think_boxed | boxed | answer_line | hash | letter | "
        "grounding | boxes_json | direct | none.",
    )
    instruction: str | None = option(
        None, "Replaces the format's instruction; an empty string adds none."
    )
    position: Literal["before", "after"] = option(
        "after", "Where the instruction stands in the first user message."
    )
    system: str | None = option(None, "System message: text, or a file that holds it.")
    template: str | None = option(
        None, "Jinja file around the question; variables: content, choices, row, instruction."
    )
    chat_template: str | None = option(
        None, "Jinja file that replaces the model's chat template everywhere."
    )
    permute_choices: bool = option(
        False,
        "Show options in an order drawn per row; the gold letter follows. A question that lists "
        "its options itself keeps their order.",
    )


class HttpConfig(Section):
    url: str = option(
        "", "Address of an OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1."
    )
    api: Literal["chat", "completions", "anthropic"] = option(
        "chat", "How the endpoint is spoken to."
    )
    model: str = option("", "Name of the model there; empty: the only one that it lists.")
    key: str = option("", "Environment variable that holds the key; empty: none is sent.")
    concurrency: int = option(16, "Requests under way at once.", ge=1)
    per_minute: int = option(0, "Most requests in a minute; 0: as many as go.", ge=0)
    retries: int = option(5, "Further attempts after an error that may pass.", ge=0)
    timeout: float = option(120.0, "Seconds before an attempt is given up.", gt=0)
    cache: str | None = option(
        None,
        "Folder of answers that are not asked for again; empty: beside the results; off: none.",
    )
    price: tuple[float, float] | None = option(
        None, "Cost of a million prompt and of a million response tokens, to be summed up."
    )


class RolloutConfig(Section):
    engine: Literal["embedded", "vllm", "sglang", "http"] = option(
        "embedded",
        "What generates: embedded uses the trainer's own weights; http only evaluates.",
    )
    replicas: int = option(
        0, "Engine processes of their own behind one queue; 0: one engine in this process.", ge=0
    )
    tensor_parallel: int = option(1, "GPUs of one engine (vllm, sglang).", ge=1)
    memory_share: float = option(
        0.6, "Share of the GPU's memory that vllm or sglang may hold.", gt=0, le=1
    )
    engine_args: dict[str, Any] = option(
        {}, "Further arguments for vllm or sglang, or fields of an http request, as they are."
    )
    parity_max: float | None = option(
        None,
        "Largest mean gap of log-probs between engine and trainer at the start; empty: 0.05 in "
        "bfloat16, 1e-4 in float32.",
        gt=0,
    )
    http: HttpConfig = section(HttpConfig, "The endpoint of engine=http.")
    temperature: float = option(
        1.0, "Sampling temperature; the trainer scores at the same one.", gt=0
    )
    top_p: float = option(
        1.0, "Nucleus sampling; below 1 the kept ids are replayed in training.", gt=0, le=1
    )
    top_k: int = option(
        -1, "Keep only the k likeliest tokens; -1 keeps all. Replayed in training.", ge=-1
    )
    support: Literal["refuse", "replay"] = option(
        "refuse", "Truncated sampling in training: refuse it, or replay kept ids."
    )
    max_tokens: int = option(2048, "Longest response (of one turn).", ge=1)
    stop: tuple[str, ...] = option((), "Strings that end a response; they stay in it.")
    ignore_eos: bool = option(False, "Go on past the end-of-turn token (for benchmarks).")
    max_sequences: int = option(512, "Sequences decoded at once by one engine.", ge=1)


class EnvLimits(Section):
    max_turns: int | None = option(
        None, "Assistant turns in evaluation; empty: 12, or as in training where that is set.", ge=1
    )
    max_images: int | None = option(
        None, "Images of one episode in evaluation; empty: as in training.", ge=0
    )
    max_turn_tokens: int | None = option(
        None, "Longest turn in evaluation; empty: as in training.", ge=1
    )
    max_total_tokens: int | None = option(
        None, "Tokens of one episode in evaluation; empty: as in training.", ge=1
    )
    reserve: int | None = option(
        None, "Tokens kept for the next turn in evaluation; empty: as in training.", ge=1
    )
    max_tool_errors: int | None = option(
        None, "Failed calls before an episode ends, in evaluation; empty: as in training.", ge=0
    )


class EnvConfig(Section):
    name: str = option(
        "single_turn",
        "What the policy talks to: single_turn | crop | calculator | tools | sokoban_step | "
        "file.py:Class with reset, step and close.",
    )
    args: dict[str, Any] = option({}, "Arguments of your own environment's class.")
    tools: tuple[str, ...] = option(
        (),
        "Functions of your own, file.py:name, that the policy may call beside built-in tools.",
    )
    call: Literal["grounding", "tool_call", "action"] | None = option(
        None,
        "How a call is written: <grounding>, <tool_call> with a name, or moves in the answer tag; "
        "empty: as the environment likes it.",
    )
    parallel_calls: int = option(
        1, "Calls of one turn that are answered; above 1 only with tool_call.", ge=1
    )
    instruction: str | None = option(
        None, "Replaces the text that explains the tools; an empty string adds none."
    )
    coordinates: Literal["relative", "milli", "absolute"] = option(
        "relative",
        "Boxes of crops: fractions of their source, thousandths, or pixels as the model sees it.",
    )
    min_crop_px: int = option(4, "Crops with a shorter side are refused.", ge=1)
    min_pixels: int = option(40_000, "Pictures that a tool shows: those below are scaled up.", ge=1)
    max_pixels: int = option(2_000_000, "Pictures that a tool shows: above, scaled down.", ge=1)
    invalid_call_penalty: float = option(
        0.0, "Taken off the reward for every call that failed.", ge=0
    )
    max_turns: int | None = option(
        None, "Assistant turns of one episode; empty: 1 with single_turn, else 6.", ge=1
    )
    max_images: int | None = option(
        None,
        "Images of one episode, prompt included; empty: 64 with single_turn, else 12.",
        ge=0,
    )
    max_turn_tokens: int | None = option(
        None, "Longest turn; empty: rollout.max_tokens, in evaluation val.max_tokens.", ge=1
    )
    max_total_tokens: int = option(
        32_768, "Prompt, policy and observation tokens of one episode.", ge=1
    )
    reserve: int | None = option(
        None,
        "An observation must leave this many tokens for the next turn; empty: 2000, at most a "
        "sixteenth of max_total_tokens.",
        ge=1,
    )
    max_tool_errors: int | None = option(
        None, "Failed calls before an episode ends; empty: any number.", ge=0
    )
    timeout: float = option(
        600.0, "Seconds that the environment of one episode may take in all.", gt=0
    )
    step_timeout: float = option(
        60.0, "Seconds for one step of your own environment; then its process is ended.", gt=0
    )
    processes: int = option(
        128, "Environments of your own that live at once, each in a process; others wait.", ge=1
    )
    eval: EnvLimits = section(EnvLimits, "Other limits for validation and eval.")

    @property
    def turns(self) -> int:
        """Assistant turns of one training episode."""
        return self.max_turns or (1 if self.name == "single_turn" else 6)

    def limits(self, *, evaluation: bool = False) -> dict[str, int | None]:
        """Every limit of an episode that is counted, resolved."""
        single = self.name == "single_turn"
        values = {name: getattr(self, name) for name in EnvLimits.model_fields}
        values["max_turns"] = self.turns
        if self.max_images is None:
            values["max_images"] = 64 if single else 12
        if evaluation:
            values |= {} if single or self.max_turns else {"max_turns": 12}
            values |= {n: v for n, v in self.eval.model_dump().items() if v is not None}
        values["reserve"] = values["reserve"] or min(2000, max(1, values["max_total_tokens"] // 16))
        return values


class RewardTerm(Section):
    verifier: str = option(
        ...,
        "Built-in verifier (math, choice, count, judge, remote, model, format:think_answer …) or "
        "file.py:name.",
    )
    name: str | None = option(None, "Name in metrics; empty: the verifier's.")
    weight: float = option(1.0, "Factor in the sum.")
    args: dict[str, Any] = option({}, "Arguments of the verifier.")
    shaping: bool | None = option(
        None, "Added after the combination; empty: the verifier's own default."
    )


class JudgeConfig(HttpConfig):
    concurrency: int = option(64, "Answers judged at once.", ge=1)
    retries: int = option(
        4, "Further attempts after an error that may pass, or a reply without a verdict.", ge=0
    )
    deadline: float = option(
        600.0, "Seconds that an answer waits while the judge gives no sign of life.", gt=0
    )
    max_tokens: int = option(1024, "Longest reply of the judge.", ge=1)
    scale: int = option(1, "Best score that the judge can give; rewards are score / scale.", ge=1)
    template: str | None = option(
        None,
        "Jinja file that replaces our question; variables: question, references, prediction, "
        "scale.",
    )
    send_images: bool = option(False, "Show the judge the pictures of the question, too.")
    on_failure: Literal["error", "abstain", "rule", "drop_group"] = option(
        "error",
        "An answer without a verdict: an error, an abstention, what the rule of a hybrid said, or "
        "an error that costs its whole group.",
    )
    fields: dict[str, Any] = option(
        {}, "Further fields of a request, as they are; null removes one of ours."
    )


class RemoteConfig(Section):
    url: tuple[str, ...] = option(
        (),
        "Address of a reward service, such as http://127.0.0.1:8400/get_reward; several share the "
        "work.",
    )
    token: str = option("", "Environment variable that holds the token; empty: none is sent.")
    batch: int = option(64, "Most samples in one request.", ge=1)
    concurrency: int = option(8, "Requests under way at once.", ge=1)
    retries: int = option(4, "Further attempts after an error that may pass.", ge=0)
    timeout: float = option(180.0, "Seconds before an attempt is given up.", gt=0)
    deadline: float = option(
        600.0, "Seconds for a request in all, also while a busy service asks to wait.", gt=0
    )
    send_images: bool = option(False, "Send the pictures of the question, too.")
    template: Literal["chatml", "llama3", "deepseek", "base", "plain"] = option(
        "chatml", "How prompt and response are joined in `query`, which old services read."
    )
    on_failure: Literal["error", "abstain"] = option(
        "error", "What a sample is that the service did not score."
    )


class ServeConfig(Section):
    queue: int = option(
        4096, "Samples that wait or are scored; who sends more is told when to come back.", ge=1
    )
    max_body_mb: int = option(256, "Largest request.", ge=1)
    response_after: str = option(
        "",
        "Text before the response in a `query` whose client sends no `responses`; empty: the marks "
        "of known chat templates.",
    )
    unscored: float | None = option(
        None,
        "What an old client gets for a sample without a score; empty: null, at which it stops.",
    )
    log: str | None = option(None, "JSONL file that gets a line for every sample.")


class RewardConfig(Section):
    terms: tuple[RewardTerm, ...] = option((), "What is scored; a plain verifier name also works.")
    preset: str | None = option(
        None,
        "Named list of terms: lmmr1_math | lmmr1_sokoban | r1v | easyr1_r1v | easyr1_math | "
        "lightrft | geo3k | gsm8k | medical_safe | hybrid_mc | minio3.",
    )
    combine: str = option(
        "weighted_sum",
        "weighted_sum | product | min | gate(TERM): the sum where that term is positive.",
    )
    outcome: str | None = option(
        None, "Term that counts as accuracy; empty: the first that is no format or shaping term."
    )
    by_source: dict[str, Any] = option(
        {}, "Terms or preset name per data_source, 'default' for the rest."
    )
    normalise: Literal["off", "std", "mean_std"] = option(
        "off", "Divide by the running deviation of all rewards so far; mean_std: minus their mean."
    )
    clip: tuple[float, float] | None = option(
        None, "Limits of the shaped reward, before group statistics; empty: the preset's."
    )
    renormalise: bool = option(
        False, "An abstaining term is dropped and the other weights rescaled."
    )
    judge: JudgeConfig = section(JudgeConfig, "The endpoint of judge and hybrid terms.")
    remote: RemoteConfig = section(
        RemoteConfig, "The service of remote terms; a term's args override it."
    )
    serve: ServeConfig = section(ServeConfig, "What `saccade serve-reward` takes.")
    offload: bool = option(
        True, "Models of `model` terms wait in main memory while others use the GPU."
    )
    workers: int = option(2, "Killable processes for verifiers that may hang or are yours.", ge=1)
    deadline: float = option(
        10.0, "Seconds for one sample; then the worker is killed and the sample is an error.", gt=0
    )
    max_error_rate: float = option(
        0.05, "Stop with exit code 4 when more of a step fails to score.", ge=0, le=1
    )
    self_test: Literal["strict", "warn", "off"] = option(
        "strict",
        "Before step 1: gold must score the maximum, empty and foreign answers the minimum.",
    )

    @field_validator("terms", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        return _entries(value, "verifier")


class KLConfig(Section):
    coef: float | None = option(
        None, "Weight of the KL to the reference; 0 loads no reference.", ge=0
    )
    kind: str | None = option(None, "Estimator: k1 | abs | k2 | k3 | k1+ | k3+ | file.py:name.")
    place: Literal["loss", "reward"] | None = option(None, "Where it enters.")
    clamp: Literal["bounded", "zero"] | None = option(
        None, "Gradient of k3 where its value is clamped."
    )
    ratio_correct: bool | None = option(
        None, "In the loss: multiply by the ratio, so that its gradient is that of the old policy."
    )
    controller: Literal["fixed", "adaptive"] | None = option(
        None, "adaptive moves coef until the KL is at target."
    )
    target: float | None = option(None, "KL per token that the adaptive coef aims at.", gt=0)
    horizon: float | None = option(
        None, "Sequences over which the adaptive coef may double or halve, roughly.", gt=0
    )
    update: Literal["none", "copy", "ema"] | None = option(
        None, "What becomes of the reference: nothing, the policy, or a blend with it."
    )
    update_every: int | None = option(None, "Steps between two updates of the reference.", ge=1)
    ema: float | None = option(None, "Share of the policy in each blend.", gt=0, le=1)


class FilterConfig(Section):
    dynamic: bool | None = option(
        None, "Drop groups whose raw outcome is constant or extreme, and refill the step."
    )
    low: float | None = option(None, "Keep a group when its mean outcome is above this.")
    high: float | None = option(None, "Keep a group when its mean outcome is below this.")
    max_rounds: int | None = option(None, "Generation rounds before giving up on refilling.", ge=1)
    on_exhausted: Literal["train_partial", "skip", "stop"] | None = option(
        None, "What then happens to the step."
    )
    keep_surplus: bool | None = option(
        None, "Carry kept groups that the step has no room for to the next one."
    )
    function: str | None = option(
        None, "file.py:name of your own: gets the scored groups, returns those to train on."
    )


class OverlongConfig(Section):
    buffer: int | None = option(
        None, "Tokens before the limit over which the penalty grows; 0 turns it off.", ge=0
    )
    factor: float | None = option(None, "Largest penalty.", ge=0)


class CorrectionConfig(Section):
    name: str = option(
        ...,
        "tis.token | tis.sequence | tis.geometric | icepop | seq_mask | seq_mask_tis | opsm | "
        "reject.token.k1 … | file.py:name.",
    )
    low: float | None = option(None, "Lower bound; empty: the correction's own.", ge=0)
    high: float | None = option(None, "Upper bound; empty: the correction's own.", ge=0)
    threshold: float | None = option(None, "opsm: largest mean gap of a bad sequence.", gt=0)


class FireConfig(Section):
    temperature: float | None = option(
        None, "Temperature of an episode's first token; 0 turns it off.", ge=0
    )
    top_k: int | None = option(None, "That token is one of the k likeliest; -1: any.", ge=-1)
    first_token: Literal["is", "mask"] | None = option(
        None, "Train on that token with an importance weight, or not at all."
    )
    cap: float | None = option(None, "Largest importance weight of that token.", gt=0)


class CriticConfig(Section):
    lr: float | None = option(None, "Learning rate of the critic; its schedule is train's.", gt=0)
    clip: float | None = option(None, "How far a value may move per step; 0: freely.", ge=0)
    warmup_steps: int | None = option(None, "First steps in which only the critic learns.", ge=0)
    bootstrap_truncated: bool | None = option(
        None, "Value a truncated response by the critic's estimate instead of 0 at its end."
    )
    path: str | None = option(None, "Model folder of the critic; empty: that of the policy.")


class AlgorithmConfig(Section):
    preset: str = option(
        "grpo",
        "Row of the table and add-ons, as in dapo+tis; `saccade algorithms` lists both. What "
        "follows overrides its cells.",
    )
    advantage: str | None = option(None, "Estimator, or file.py:name.")
    policy_loss: str | None = option(None, "Surrogate, or file.py:name.")
    aggregation: str | None = option(None, "How token losses become one number, or file.py:name.")
    args: dict[str, Any] = option({}, "Options of your own functions, by parameter name.")
    # advantages
    std_eps: float | None = option(None, "Added to a standard deviation that divides.", ge=0)
    gamma: float | None = option(None, "Discount per sampled token.", gt=0, le=1)
    lam: float | None = option(None, "gae: weight of longer looks ahead.", ge=0, le=1)
    whiten: bool | None = option(None, "Whiten advantages over the tokens of the step.")
    whiten_std: bool | None = option(None, "Whitening divides by the deviation, too.")
    adv_clip: float | None = option(None, "Symmetric limit of advantages; 0: none.", ge=0)
    divide_by_std: bool | None = option(None, "grpo_passk: divide the lead by the group's std.")
    gpg_alpha: Literal["nonconstant", "nonzero_rewards"] | None = option(
        None, "gpg: which members count as carrying a signal."
    )
    gpg_alpha_max: float | None = option(None, "gpg: largest factor.", gt=0)
    gpg_divisor: Literal["one", "std"] | None = option(None, "gpg: what divides R - mean.")
    gdpo_whiten: Literal["seq", "token"] | None = option(
        None, "gdpo: whiten over sequences or over tokens."
    )
    cpgd_weight: Literal["std", "clip_filter", "none"] | None = option(
        None, "cpgd: divide by the group's std, scale for dead groups, or neither."
    )
    drpo_renorm: Literal["std", "rms"] | None = option(
        None, "drpo: divide by the std of the step, or keep the size of grpo's advantages."
    )
    drpo_kl_damp: float | None = option(
        None,
        "drpo: damp members far from the reference, from this quantile on; 0: none.",
        ge=0,
        lt=1,
    )
    reward_range: tuple[float, float] | None = option(
        None, "drpo: lowest and highest possible outcome."
    )
    # policy losses
    clip: float | None = option(None, "Both clip widths of the ratio.", ge=0)
    clip_low: float | None = option(None, "Lower clip width of the ratio.", ge=0)
    clip_high: float | None = option(None, "Upper clip width of the ratio.", ge=0)
    dual_clip: float | None = option(
        None, "Bound (above 1) on the loss of negative advantages; 0: none.", ge=0
    )
    delta: float | None = option(None, "Upper bound (above 1) of the free ratio; 0: none.", ge=0)
    weight_bound: Literal["cap", "around_one", "delta"] | None = option(
        None, "cispo: limits of the weight: (0, cap), or around 1 by clip_low and clip_high."
    )
    weight_cap: float | None = option(None, "Largest weight of cispo and dppo.", gt=0)
    tau_positive: float | None = option(None, "sapo: gate of good tokens.", gt=0)
    tau_negative: float | None = option(None, "sapo: gate of bad tokens.", gt=0)
    drift_coef: float | None = option(None, "cpgd: weight of the drift from old.", ge=0)
    drift_cap: float | None = option(None, "cpgd: largest slope of the drift.", gt=0)
    cov_fraction: float | None = option(
        None, "kl_cov, clip_cov: share of tokens treated apart.", gt=0, le=1
    )
    cov_coef: float | None = option(None, "kl_cov: weight of their distance to old.", ge=0)
    cov_low: float | None = option(None, "clip_cov: least covariance of such a token.")
    cov_high: float | None = option(None, "clip_cov: largest covariance of such a token.")
    topr_split: Literal["reward", "advantage"] | None = option(
        None, "topr: what says whether a member was good."
    )
    kimi_tau: float | None = option(None, "kimi, dro: weight of the squared log-ratio.", ge=0)
    kimi_level: Literal["token", "sequence"] | None = option(
        None, "kimi, dro: square the log-ratio of tokens or of whole sequences."
    )
    vespo_positive: tuple[float, float] | None = option(None, "vespo: (k, lambda) where A >= 0.")
    vespo_negative: tuple[float, float] | None = option(None, "vespo: (k, lambda) where A < 0.")
    fixed_length: int | None = option(
        None, "Constant of the 'fixed' aggregation; empty: the longest response.", ge=1
    )
    # entropy
    entropy_coef: float | None = option(None, "Weight of the entropy bonus.", ge=0)
    entropy_target: float | None = option(
        None, "Entropy that the bonus is steered to, a step at a time; 0: a fixed bonus.", ge=0
    )
    entropy_step: float | None = option(None, "Change of entropy_coef per step.", gt=0)
    entropy_range: tuple[float, float] | None = option(None, "Limits of a steered entropy_coef.")
    entropy_top: float | None = option(
        None,
        "Policy loss only on this share of tokens, those of highest entropy; 0: on all.",
        ge=0,
        lt=1,
    )
    entropy_scope: Literal["step", "sequence"] | None = option(
        None, "Where entropy_top takes its share."
    )
    # off-policy
    old: Literal["auto", "recompute", "rollout", "detach"] | None = option(
        None, "Old log-probs; auto: detached current ones when strictly on-policy, else recomputed."
    )
    correct: tuple[CorrectionConfig, ...] | None = option(
        None, "What mends a gap between engine and trainer; a plain name also works."
    )
    self_normalise: bool | None = option(None, "Correction weights average to 1.")
    denominator: Literal["original", "kept"] | None = option(
        None, "Divide the policy loss by all live tokens, or by those that filters kept."
    )
    # who takes part
    drop_constant: bool | None = option(None, "Leave members of constant groups out of the update.")
    exclude_status: tuple[str, ...] | None = option(
        None, "Also exclude these: truncated, overturn, void."
    )
    excluded_in_baseline: bool | None = option(
        None, "Keep members excluded by status in the group baseline."
    )
    kl: KLConfig = section(KLConfig, "Distance to the reference model.")
    filter: FilterConfig = section(FilterConfig, "Dynamic sampling.")
    overlong: OverlongConfig = section(OverlongConfig, "Soft penalty before the length limit.")
    fire: FireConfig = section(FireConfig, "A hot first token, for variety.")
    critic: CriticConfig = section(CriticConfig, "The value model of gae.")

    @field_validator("correct", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        return value if value is None else _entries(value, "name")


class TrainConfig(Section):
    prompts_per_step: int = option(
        128, "Prompts (rl) or rows (sft, dpo, reward-model) of one step.", ge=1
    )
    samples_per_prompt: int | None = option(
        None, "Rollouts of each prompt; empty: the preset's.", ge=1
    )
    updates_per_step: int | None = option(
        None,
        "Optimizer steps on the samples of a step, each on whole groups; empty: the preset's.",
        ge=1,
    )
    epochs_per_batch: int = option(1, "Passes over the samples of a step.", ge=1)
    epochs: float = option(
        1.0, "Passes over the data when run.max_steps is empty; sft: 2 unless set.", gt=0
    )
    micro_tokens: int = option(
        16_384, "Tokens of one forward and backward, media tokens included.", ge=1
    )
    lr: float | None = option(
        None,
        "Peak learning rate; empty: 1e-6 (rl), 5e-6 (sft), 1e-5 (dpo), 9e-6 or for processes 1e-6 "
        "(reward-model), filled in before a run.",
        gt=0,
    )
    lr_scale: dict[str, float] = option({}, "Factors per tower: vision, projector, llm, audio.")
    schedule: Literal["constant", "linear", "cosine", "cosine_with_min_lr"] = option(
        "constant", "Shape of the learning rate; but for rl cosine_with_min_lr unless set."
    )
    warmup: float = option(
        0.0,
        "Warm-up steps, or a share of all steps when below 1; but for rl 0.03 unless set.",
        ge=0,
    )
    min_lr: float = option(
        0.0,
        "Floor of the schedule as a share of lr; cosine_with_min_lr: 0.1 unless above 0.",
        ge=0,
        le=1,
    )
    optimizer: Literal["adamw", "adamw_bf16"] = option(
        "adamw",
        "adamw keeps fp32 masters; adamw_bf16 updates bf16 weights with Kahan compensation.",
    )
    betas: tuple[float, float] = option((0.9, 0.95), "Moments of AdamW.")
    eps: float = option(1e-8, "Added to the root of the second moment.", gt=0)
    weight_decay: float = option(0.01, "Decay of matrices; biases and norms have none.", ge=0)
    grad_norm: float = option(1.0, "Largest global gradient norm.", gt=0)
    on_nonfinite: Literal["skip", "stop"] = option(
        "skip", "A non-finite loss or gradient: skip the update, or stop."
    )
    max_bad_updates: int = option(3, "Stop after this many skipped updates in a row.", ge=1)
    ptx_coef: float = option(
        0.0,
        "rl: weight of the supervised loss on data.demonstrations in every update, on as many rows "
        "as it has prompts.",
        ge=0,
    )
    aux_coef: float = option(
        0.0,
        "Weight of the loss that evens out the use of experts, for mixtures of them; the only term "
        "that depends on how rows are packed into forests.",
        ge=0,
    )
    ema: float = option(
        0.0,
        "Keep an average of the weights beside them, in state/ema of a checkpoint: the share of "
        "the old average at each update, such as 0.992; 0: none.",
        ge=0,
        lt=1,
    )


class SftConfig(Section):
    mode: Literal["chat", "pretrain"] = option(
        "chat",
        "chat: conversations; pretrain: documents of a text column, every token of them trained.",
    )
    loss_on: Literal["assistant", "last_turn", "all"] = option(
        "assistant", "Trained tokens of a conversation."
    )
    max_tokens: int = option(
        2048,
        "Longest row; longer ones follow data.overlong, documents are cut into pieces.",
        ge=1,
    )
    teacher: str | None = option(
        None, "Model folder of a teacher whose distribution is learned beside the tokens."
    )
    kd_coef: float = option(0.4, "Share of the teacher's term in the loss.", ge=0, le=1)
    reward_tag: str | None = option(
        None,
        "Text with {reward} after the question, filled from the row's reward (or label); "
        "validation asks for the best of the training rows.",
    )


class DpoConfig(Section):
    loss: Literal[
        "dpo",
        "cdpo",
        "robust",
        "ipo",
        "ipo_sum",
        "dpo_norm",
        "reference_free",
        "hinge",
        "simpo",
        "kto",
    ] = option("dpo", "Loss on pairs or, kto, on responses that were labelled one by one.")
    beta: float | None = option(
        None, "Scale of the log-ratios; empty: 0.1, simpo 2, kto 0.01.", gt=0
    )
    label_smoothing: float | None = option(
        None, "cdpo, robust: share of labels that are taken to be wrong; empty: 0.1.", ge=0, lt=0.5
    )
    gamma: float | None = option(None, "simpo: margin to be ahead by; empty: 1.", ge=0)
    desirable_weight: float | None = option(None, "kto: weight of good responses; empty: 1.", ge=0)
    undesirable_weight: float | None = option(None, "kto: weight of bad ones; empty: 1.", ge=0)
    nll_coef: float = option(0.0, "Weight of the mean -log p of the tokens of chosen.", ge=0)
    reference: Literal["precompute", "compute"] = option(
        "precompute",
        "Score all rows with the start model once, before it is freed; or keep it and score every "
        "step.",
    )
    max_tokens: int | None = option(
        None,
        "Longest prompt with a response; longer ones follow data.overlong. Empty: 512, kto 2048.",
        ge=1,
    )


class RewardModelConfig(Section):
    kind: Literal["scalar", "process"] = option(
        "scalar", "scalar: pairs of responses or media; process: a label for every step."
    )
    loss: Literal["bt", "logexp", "hps"] = option(
        "bt", "scalar: Bradley-Terry with a margin, without one, or with a learned scale."
    )
    margin: float | None = option(
        None, "bt: lead that is asked for where a row has no margin of its own; empty: 0.1.", ge=0
    )
    heads: dict[str, float] = option(
        {"preference": 1.0},
        "scalar: named scores and their weights in the loss; a list of names also works. Rows "
        "label them in `labels`; chosen and rejected alone label `preference`.",
    )
    pooling: Literal["last", "mean", "attention"] = option(
        "last", "scalar: what is scored: the last token, or an average over the response."
    )
    pooling_heads: int | None = option(
        None,
        "attention: parts of a state that are averaged each with weights of its own; empty: 4.",
        ge=1,
    )
    probe_layer: int = option(
        -1,
        "scalar: whose output is scored, through the final norm: 0 is the first block, -1 the "
        "last. Blocks above are neither computed nor trained.",
    )
    head: Literal["linear", "mlp"] = option(
        "linear", "scalar: what makes the scores; mlp: linear, RMSNorm, SiLU, linear."
    )
    bounded: bool | None = option(
        None, "scalar: scores are sigmoids, between 0 and 1; empty: false."
    )
    center_coef: float = option(0.0, "scalar: weight of (sum of both scores)^2.", ge=0)
    tie_coef: float = option(0.01, "scalar: weight of |difference| where a pair is a tie.", ge=0)
    placeholder: str = option("ки", "process: what stands behind every step of a row.")
    tokens: tuple[str, ...] = option(
        ("+", "-"), "process: labels, the best first; a number is the probability of the first."
    )
    max_tokens: int | None = option(
        None,
        "Longest prompt with a response; longer ones follow data.overlong. Empty: 512, process "
        "2048.",
        ge=1,
    )

    @field_validator("heads", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        names = [value] if isinstance(value, str) else value
        return dict.fromkeys(names, 1.0) if isinstance(names, list | tuple) else names


class ValConfig(Section):
    every: int = option(20, "Validate every N steps; 0 never.", ge=0)
    before: bool = option(True, "Validate before the first step.")
    n: int = option(
        1,
        "Samples per prompt: 1 is greedy unless a temperature is set, more give avg@k and pass@k.",
        ge=1,
    )
    temperature: float | None = option(None, "Empty: 0 for n = 1, else 1.", ge=0)
    top_p: float = option(1.0, "Nucleus of validation sampling.", gt=0, le=1)
    max_tokens: int | None = option(None, "Longest response; empty: rollout.max_tokens.", ge=1)
    turns: tuple[int, ...] = option(
        (),
        "Limits of turns to report accuracy under, such as [1,2,4,6,8,12,16,32]; the largest is "
        "that of the episodes, in place of env.eval.max_turns.",
    )
    log_generations: int = option(
        16, "Responses of each set that are stored with their pictures.", ge=0
    )


class EvalConfig(Section):
    suites: tuple[str, ...] = option(
        (),
        "Public sets to measure on: vstar | visualprobe_easy | visualprobe_medium | "
        "visualprobe_hard | hrbench4k | hrbench8k.",
    )
    folder: str = option("data", "Folder that holds them, each as it is downloaded.")


class GenerateConfig(Section):
    output: str = option(
        "generations.jsonl",
        "File of responses inside the run folder; rows already there are skipped.",
    )
    n: int = option(1, "Responses per prompt.", ge=1)
    select: Literal["all", "correct", "best", "best_worst", "threshold"] = option(
        "all",
        "Also write rows to train on. By reward, to OUTPUT.SELECT.jsonl: the best response of each "
        "prompt (sft), pairs of best and worst (dpo), or every response from the threshold on. "
        "correct: episodes that earned the full outcome, all turns and pictures, to coldstart/. "
        "Episodes have the limits of evaluation (env.eval).",
    )
    threshold: float | None = option(None, "Least reward of a response that is learned from.")


class SaveConfig(Section):
    every: int = option(50, "Checkpoint every N steps; 0: only at the end.", ge=0)
    keep: int = option(3, "Newest checkpoints to keep, the best one beside them.", ge=1)
    best_metric: str | None = option(
        None, "Metric that names the best checkpoint; empty: accuracy of the first set."
    )


class TrackConfig(Section):
    tensorboard: bool = option(True, "Write TensorBoard event files.")
    wandb: bool = option(
        False, "Log to Weights & Biases, offline unless WANDB_MODE says otherwise."
    )
    trajectories_every: int = option(10, "Store rollouts every N steps; 0 never.", ge=0)
    trajectories_groups: int = option(8, "Groups stored each time.", ge=1)


class Config(Section):
    run: RunConfig = section(RunConfig, "Name, folder, seed, length and resume.")
    model: ModelConfig = section(ModelConfig, "Which model, and what of it is trained.")
    data: DataConfig = section(DataConfig, "Training and validation sets and their hygiene.")
    prompt: PromptConfig = section(PromptConfig, "How a row becomes a conversation.")
    rollout: RolloutConfig = section(RolloutConfig, "Engine and sampling.")
    env: EnvConfig = section(EnvConfig, "What the policy talks to.")
    reward: RewardConfig = section(RewardConfig, "What a response is worth.")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "How rewards become an update.")
    train: TrainConfig = section(TrainConfig, "Batch arithmetic and optimizer.")
    sft: SftConfig = section(SftConfig, "Supervised fine-tuning only.")
    dpo: DpoConfig = section(DpoConfig, "Preference training only.")
    reward_model: RewardModelConfig = section(RewardModelConfig, "`saccade reward-model` only.")
    val: ValConfig = section(ValConfig, "Validation during training, and eval.")
    eval: EvalConfig = section(EvalConfig, "What eval measures on besides data.val.")
    generate: GenerateConfig = section(GenerateConfig, "Batch inference only.")
    save: SaveConfig = section(SaveConfig, "Checkpoints.")
    track: TrackConfig = section(TrackConfig, "Loggers and stored rollouts.")


def options(kind: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, field) of every leaf, in order."""
    for name, info in kind.model_fields.items():
        annotation = info.annotation
        if isinstance(annotation, type) and issubclass(annotation, Section):
            yield from options(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def type_name(annotation: Any) -> str:
    """A type as a reader of the reference wants to see it."""
    text = (
        str(annotation)
        if get_args(annotation)
        else getattr(annotation, "__name__", str(annotation))
    )
    for noise in ("typing.", "saccade.config.", "NoneType"):
        text = text.replace(noise, "None" if noise == "NoneType" else "")
    return text

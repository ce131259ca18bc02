"""Options of the update, and of single commands."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator, model_validator

from saccade.config.schema.section import TRAINING, VALIDATING, Section, When, is_name, option

DECAYING = When("train.schedule != 'constant'", "train.schedule=linear")
TOWERS = ("vision", "projector", "llm", "audio", "series")
TRAINED_TOWERS = When(
    "not set(train.lr_scale) & set(model.train.removeprefix('freeze:').replace(' ', '').split(','))",
    "model.train=full",
    "towers that model.train trains",
)
TEACHER = When("sft.teacher", "sft.teacher=FOLDER")
CHAT = When("sft.mode == 'chat'", "sft.mode=chat")
SCALAR = When("reward_model.kind == 'scalar'", "reward_model.kind=scalar")
PROCESS = When("reward_model.kind == 'process'", "reward_model.kind=process")
BRADLEY_TERRY = When("reward_model.loss == 'bt'", "reward_model.loss=bt")
ATTENTION = When("reward_model.pooling == 'attention'", "reward_model.pooling=attention")
VALIDATES = When("val.every > 0 or not (val.before and data.val)", "val.every=50", "val.every > 0")
SELECTING = When("generate.select not in ('all', 'correct')", "generate.select=threshold", "generate.select")


class TrainConfig(Section):
    layout: Literal["auto", "whole", "sharded", "hybrid"] = option(
        "auto",
        "On several GPUs: each holds the whole model; a part of it (slower); or a part, and each machine the whole. "
        "auto: whole if that fits, else the faster of the others that do, by the estimate.",
        when=When(
            "run.gpus > 1 or train.layout in ('auto', 'whole')", "run.gpus=2 (or train.layout=auto)", "run.gpus > 1"
        ),
    )
    sequence_parallel: int = option(
        1,
        "GPUs that compute a forest together, for long contexts; a divisor of run.gpus and of the attention heads.",
        ge=1,
        when=When("run.gpus > 1", "run.gpus={train.sequence_parallel}"),
        commands=("rl", "sft", "dpo"),
    )
    prompts_per_step: int = option(128, "Prompts (rl) or rows (sft, dpo, reward-model) of one step.", ge=1)
    samples_per_prompt: int = option(8, "Rollouts of each prompt; presets may differ.", ge=1, commands=("rl",))
    updates_per_step: int = option(1, "Optimizer steps per step, of whole groups; see presets.", ge=1, commands=("rl",))
    epochs_per_batch: int = option(1, "Passes over the samples of a step.", ge=1, commands=("rl",))
    epochs: float = option(1.0, "Passes over the data when run.max_steps is empty; sft: 2 unless set.", gt=0)
    micro_tokens: int = option(
        16_384,
        "Tokens of one forward and backward, media tokens included.",
        ge=1,
        commands=(*TRAINING, "eval", "generate"),  # which may score with a reward model
    )
    lr: float = option(1e-6, "Peak learning rate; sft 5e-6, dpo 1e-5, reward-model 9e-6 (process 1e-6).", gt=0)
    lr_scale: dict[str, float] = option({}, "lr factors: vision, projector, llm, audio, series.", when=TRAINED_TOWERS)
    schedule: Literal["constant", "linear", "cosine", "cosine_with_min_lr"] = option(
        "constant", "Shape of the learning rate; but for rl cosine_with_min_lr unless set."
    )
    warmup: float = option(0.0, "Warm-up steps, or a share of all steps when below 1; not rl: 0.03 unless set.", ge=0)
    min_lr: float = option(0.0, "Floor as a share of lr; 0: of cosine_with_min_lr 0.1.", ge=0, le=1, when=DECAYING)
    optimizer: Literal["adamw", "adamw_bf16", "adamw_8bit"] = option(
        "adamw", "adamw_bf16: bf16 weights with Kahan compensation; adamw_8bit: also moments of 8 bits, on one GPU."
    )
    offload: bool = option(False, "State and reference lie in main memory; the numbers stay equal to the bit.")
    betas: tuple[float, float] = option((0.9, 0.95), "Moments of AdamW.")
    eps: float = option(1e-8, "Added to the root of the second moment.", gt=0)
    weight_decay: float = option(0.01, "Decay of matrices; biases and norms have none.", ge=0)
    grad_norm: float = option(1.0, "Largest global gradient norm.", gt=0)
    on_nonfinite: Literal["skip", "stop"] = option("skip", "A non-finite loss or gradient: skip the update, or stop.")
    max_bad_updates: int = option(3, "Stop after this many skipped updates in a row.", ge=1)
    sft_coef: float = option(0.0, "Weight of the loss on data.demonstrations, one per prompt.", ge=0, commands=("rl",))
    aux_coef: float = option(0.0, "Weight of the loss that balances experts; it depends on packing.", ge=0)
    ema: float = option(0.0, "Decay of an average of weights in state/ema, such as 0.992; 0: none.", ge=0, lt=1)

    @field_validator("lr_scale")
    @classmethod
    def _towers(cls, scales: dict[str, float]) -> dict[str, float]:
        if wrong := [name for name, factor in scales.items() if name not in TOWERS or factor <= 0]:
            raise ValueError(f"{wrong[0]}: expects factors above 0 of {', '.join(TOWERS)}")
        return scales


class SftConfig(Section):
    mode: Literal["chat", "pretrain"] = option("chat", "chat: conversations; pretrain: all tokens of a text column.")
    loss_on: Literal["assistant", "last_turn", "all"] = option("assistant", "Trained tokens of a chat.", when=CHAT)
    max_tokens: int = option(2048, "Longest row; others follow data.overlong, documents are cut into pieces.", ge=1)
    teacher: str | None = option(None, "Folder of a teacher whose distribution is learned, too.", path=True)
    kd_coef: float = option(0.4, "Share of the teacher's term in the loss.", ge=0, le=1, when=TEACHER)
    reward_tag: str | None = option(None, "Text with {reward} after the question; val asks for the best.", when=CHAT)


class DpoConfig(Section):
    loss: Literal["dpo", "cdpo", "robust", "ipo", "ipo_sum", "dpo_norm", "reference_free", "hinge", "simpo", "kto"] = (
        option("dpo", "Loss on pairs or, kto, on responses that were labelled one by one.")
    )
    beta: float = option(0.1, "Scale of the log-ratios; unless set simpo 2, kto 0.01.", gt=0)
    args: dict[str, Any] = option({}, "label_smoothing (cdpo, robust), gamma (simpo), (un)desirable_weight (kto).")
    nll_coef: float = option(0.0, "Weight of the mean -log p of the tokens of chosen.", ge=0)
    reference: Literal["precompute", "compute"] = option("precompute", "Score rows once at the start, or every step.")
    max_tokens: int | None = option(None, "Longest row; others follow data.overlong; empty: 512, kto 2048.", ge=1)

    @model_validator(mode="after")
    def _usual_beta(self) -> DpoConfig:
        if "beta" not in self.model_fields_set:
            self.__dict__["beta"] = {"simpo": 2.0, "kto": 0.01}.get(self.loss, 0.1)
        return self


class RewardModelConfig(Section):
    kind: Literal["scalar", "process"] = option(
        "scalar", "scalar: pairs; process: labelled steps. Verdicts in words: sft with data.pair_view=verdict."
    )
    loss: Literal["bt", "logexp", "hps"] = option("bt", "bt: with a margin; hps: with a learned scale.", when=SCALAR)
    margin: float = option(0.1, "Margin of rows without one.", ge=0, when=(SCALAR, BRADLEY_TERRY))
    heads: dict[str, float] = option(
        {"preference": 1.0}, "scalar: named scores and their weights; rows label them in `labels`.", when=SCALAR
    )
    pooling: Literal["last", "mean", "attention"] = option(
        "last", "scalar: what is scored: the last token, or an average over the response.", when=SCALAR
    )
    pooling_heads: int = option(4, "attention: number of heads.", ge=1, when=(SCALAR, ATTENTION))
    probe_layer: int = option(-1, "scalar: block that is scored, -1 the last; those above are left out.", when=SCALAR)
    head: Literal["linear", "mlp"] = option("linear", "scalar: mlp is linear, RMSNorm, SiLU, linear.", when=SCALAR)
    bounded: bool = option(False, "scalar: scores are sigmoids, between 0 and 1.", when=SCALAR)
    center_coef: float = option(0.0, "scalar: weight of (sum of both scores)^2.", ge=0, when=SCALAR)
    tie_coef: float = option(0.01, "scalar: weight of |difference| where a pair is a tie.", ge=0, when=SCALAR)
    placeholder: str = option("ки", "process: what stands behind every step of a row.", when=PROCESS)
    tokens: tuple[str, ...] = option(("+", "-"), "process: labels, best first; a number is P(first).", when=PROCESS)
    max_tokens: int | None = option(None, "Longest row; others follow data.overlong; empty: 512, process 2048.", ge=1)

    @field_validator("heads", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        names = [value] if isinstance(value, str) else value
        return dict.fromkeys(names, 1.0) if isinstance(names, list | tuple) else names


class ValConfig(Section):
    every: int = option(20, "Validate every N steps; 0 never.", ge=0, commands=TRAINING)
    before: bool = option(True, "Validate before the first step.", when=VALIDATES, commands=TRAINING)
    n: int = option(1, "Samples per prompt; 1 is greedy unless temperature is set.", ge=1, commands=VALIDATING)
    temperature: float = option(0.0, "Unless set 0, and 1 when n is above 1.", ge=0, commands=VALIDATING)
    top_p: float = option(1.0, "Nucleus of validation sampling.", gt=0, le=1, commands=VALIDATING)
    max_tokens: int = option(2048, "Longest response; rollout.max_tokens unless set.", ge=1, commands=VALIDATING)
    turns: tuple[int, ...] = option(
        (), "Limits to report accuracy under, [1,2,4]; the largest replaces env.eval.max_turns.", commands=VALIDATING
    )
    log_generations: int = option(16, "Stored responses of each set, with images.", ge=0, commands=VALIDATING)

    @model_validator(mode="after")
    def _derived(self) -> ValConfig:
        if "temperature" not in self.model_fields_set:
            self.__dict__["temperature"] = float(self.n > 1)
        return self


class EvalConfig(Section):
    suites: tuple[str, ...] = option((), "Public test sets by name, such as mathvista; docs/evaluation.md lists them.")
    folder: str = option("data", "Folder that holds them, each as it is downloaded.", path=True)


class GenerateConfig(Section):
    output: str = option("generations.jsonl", "File of responses in the run folder; unchanged rows are skipped.")
    n: int = option(1, "Responses per prompt.", ge=1)
    select: Literal["all", "correct", "best", "best_worst", "threshold"] = option(
        "all",
        "Also write rows to train on. By reward, to OUTPUT.SELECT.jsonl: the best response of each "
        "prompt (sft), pairs of best and worst (dpo), or every response from the threshold on. "
        "correct: episodes that earned the full outcome, all turns and images, to coldstart/. "
        "Episodes have the limits of evaluation (env.eval).",
    )
    threshold: float | None = option(None, "Least reward of a response that is learned from.", when=SELECTING)

    @field_validator("output")
    @classmethod
    def _inside(cls, output: str) -> str:
        if not all(map(is_name, output.split("/"))):
            raise ValueError("expects a file inside the run folder, such as generations.jsonl")
        return output

"""Options of the run itself: model, checkpoints, logging."""

from typing import Any, Literal

from pydantic import field_validator, model_validator

from saccade.config.schema.section import TRAINING, Section, When, is_name, mapping, option, section
from saccade.registry import HOOKS


class StopConfig(Section):
    patience: int | None = option(None, "Validations in a row that do not beat the best one.", ge=1)
    target: float | None = option(None, "Score of the best validation that is enough.")
    stalled: float = option(
        1200, "Seconds without a sign of life, after which it ends with exit code 5; 0: never.", ge=0
    )


class RunConfig(Section):
    name: str = option("run", "Name of the run; its folder is OUT/NAME.")
    out: str = option("runs", "Folder that holds the run folders.", path=True)
    seed: int = option(42, "Seed of data order, sampling noise, order of choices and tiny models.")
    resume: str = option(
        "none", "none | auto (latest checkpoint, or start) | best | path of a checkpoint.", path=True, commands=TRAINING
    )
    max_steps: int | None = option(
        None, "Stop after this many steps; empty: when the epochs are over.", ge=1, commands=TRAINING
    )
    max_hours: float | None = option(
        None, "Stop cleanly, with a validation and a checkpoint, after this many hours.", gt=0, commands=TRAINING
    )
    stop: StopConfig = mapping(StopConfig, "What ends a run before its steps are over.", commands=TRAINING)
    device: Literal["auto", "cpu", "cuda"] = option("auto", "Where the model lives; auto: a GPU if there is one.")
    gpus: int = option(
        1,
        "GPUs that share the run, a process for each; all: those of this machine; on a CPU: processes.",
        ge=1,
        commands=TRAINING,
    )
    launcher: Literal["local", "ray", "join"] = option(
        "local",
        "Who starts a process for each GPU: this machine; a Ray cluster; `saccade rank`, under Slurm or torchrun.",
        when=When("run.gpus > 1", "run.gpus=2"),
        commands=TRAINING,
    )
    restarts: int = option(
        0,
        "How often a run that lost one of its processes starts again from the last checkpoint.",
        ge=0,
        when=When("run.gpus > 1", "run.gpus=2"),
        commands=TRAINING,
    )
    min_gpus: int | None = option(
        None,
        "The fewest GPUs that a restart may go on with where the Ray cluster has lost machines; replicas shrink with "
        "them. Empty: all of run.gpus.",
        ge=2,
        when=When("run.restarts and run.launcher == 'ray'", "run.restarts=3 run.launcher=ray"),
        commands=TRAINING,
    )
    gpu_memory_gib: float | None = option(None, "GiB of the GPU for this process; empty: all that is free.", gt=0)
    overcommit: bool = option(False, "Start although the estimate exceeds free GPU memory by far.", commands=("rl",))
    trace: bool = option(
        False, "Write a profiler trace of the third step (or the last, if there are fewer).", commands=TRAINING
    )

    @model_validator(mode="before")
    @classmethod
    def _all_gpus(cls, values: Any) -> Any:
        """Count the GPUs once, when the config is read; a launcher of several machines needs a number."""
        if isinstance(values, dict) and values.get("gpus") == "all" and values.get("launcher", "local") == "local":
            return values | {"gpus": HOOKS["gpus_here"](values.get("device", "auto"))}
        return values

    @field_validator("name")
    @classmethod
    def _one_folder(cls, name: str) -> str:
        if not is_name(name):
            raise ValueError("expects one folder name such as geo-1; run.out=FOLDER says where it is")
        return name


ADAPTED = ("lora", "qlora")  # values of model.train that train adapters only
ADAPTERS = When(f"model.train in {ADAPTED}", "model.train=lora (model.lora={{}} takes all of them out)")
ALL_LINEAR = When("model.lora.targets == 'all-linear'", "model.lora.targets=all-linear")


class LoraConfig(Section):
    rank: int = option(64, "Rank of the adapters.", ge=1, when=ADAPTERS)
    alpha: int = option(16, "Adapters are scaled by alpha / rank.", ge=1, when=ADAPTERS)
    dropout: float = option(0.0, "Dropout before the adapters; sft and dpo only.", ge=0, lt=1, when=ADAPTERS)
    targets: str = option("all-linear", "all-linear (language model), or PATTERNS as in model.train.", when=ADAPTERS)
    exclude: str = option("", "PATTERNS of layers among them that get none.", when=ADAPTERS)
    vision: bool = option(False, "all-linear means vision tower and projector, too.", when=(ADAPTERS, ALL_LINEAR))


class SeriesConfig(Section):
    encoder: str | None = option(None, "patches, or FILE.py:FUNCTION; empty: what model.path holds.", path=True)
    channels: int = option(8, "Leads of every series.", ge=1)
    patch: int = option(50, "patches: samples that all leads show in one token.", ge=1)
    width: int = option(256, "patches: numbers of a token inside the encoder.", ge=2, multiple_of=2)
    layers: int = option(2, "patches: transformer layers, over all patches of a series.", ge=0)
    token: str | None = option(None, "Special token whose id stands for a series; empty: an id that nothing else uses.")


class ModelConfig(Section):
    path: str = option("", "Hugging Face model folder, or tiny:FAMILY for a model built in place.", path=True)
    family: str | None = option(None, "Force a family; empty: detected from model_type in config.json.")
    dtype: Literal["auto", "float32", "bfloat16"] = option("auto", "Compute type; auto: bfloat16 on GPU, else float32.")
    train: str = option(
        "full", "full | lora | qlora | freeze:PATTERNS of vision, projector, llm, audio, series, NAME, re:REGEX."
    )
    lora: LoraConfig = section(LoraConfig, "Adapters, with train=lora or qlora.")
    series: SeriesConfig = mapping(SeriesConfig, "An encoder for time series beside the model.")
    checkpointing: Literal["auto", "on", "off"] = option("auto", "Recompute activations; auto: as few layers as fit.")
    trust_remote_code: bool = option(False, "Run Python code shipped inside the model folder.")


class SaveConfig(Section):
    every: int = option(50, "Checkpoint every N steps; 0: only at the end.", ge=0)
    keep: int = option(3, "Newest checkpoints to keep, the best one beside them.", ge=1)
    background: bool = option(True, "Copy the state to main memory and write it while training goes on, if it fits.")
    best_metric: str | None = option(None, "Such as val/SET/accuracy; empty: accuracy or score of the first set.")


class TrackConfig(Section):
    tensorboard: bool = option(True, "Write TensorBoard event files.")
    loggers: tuple[str, ...] = option((), "Further ones, with tables of rollouts: wandb, mlflow, swanlab.")
    trajectories_every: int = option(10, "Store rollouts every N steps; 0 never.", ge=0, commands=("rl",))
    trajectories_groups: int = option(8, "Groups stored each time.", ge=1, commands=("rl",))

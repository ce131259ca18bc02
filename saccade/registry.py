"""Lookup tables that plugins extend. The "spine" is the core package, without `plugins/`.

A table holds the rows of the spine. `PLUGINS` below names the rows of our plugins, and entry points name those of
installed packages; each is imported when it is first looked up. So the spine imports no plugin.

    [project.entry-points."saccade.verifiers"]
    palindrome = "my_package:palindrome"

    >>> from saccade.media.kinds import KINDS
    >>> KINDS["series"].article
    'a time series'
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from saccade.errors import EnvironmentProblem

Row = TypeVar("Row")

# (table, module in `saccade.plugins`, rows). A row is NAME or NAME=ATTRIBUTE of the module; with MODULE:ATTRIBUTE,
# that attribute is a mapping that holds all of the rows.
PLUGINS: tuple[tuple[str, str, str], ...] = (
    ("advantages", "more_algorithms.more_advantages:ROWS", "batch_std opo gpg max_rl grpo_passk cpgd gdpo drpo"),
    ("advantages", "more_algorithms.more_advantages:ROWS", "turn_grpo"),
    ("aggregations", "more_algorithms.more_losses:ROWS", "sample_mean group_mean token_sum"),
    ("corrections", "more_algorithms.more_losses:ROWS", "reject.token.k1 reject.seq_sum.k1 reject.seq_mean.k1"),
    ("corrections", "more_algorithms.more_losses:ROWS", "reject.token.k2 reject.seq_sum.k2 reject.seq_mean.k2"),
    ("corrections", "more_algorithms.more_losses:ROWS", "reject.token.k3 reject.seq_sum.k3 reject.seq_mean.k3"),
    ("corrections", "more_algorithms.more_losses:ROWS", "reject.seq_max.k2 reject.seq_max.k3 seq_mask"),
    ("corrections", "more_algorithms.more_losses:ROWS", "seq_mask_tis opsm"),
    ("engines", "engines.vllm", "vllm=VllmEngine"),
    ("engines", "engines.sglang", "sglang=SglangEngine"),
    ("engines", "engines.http", "http=from_settings"),
    ("engines", "engines.parity", "parity=compare"),
    ("engines", "engines.replicas.replica_pool", "replicas=start_replicas"),
    ("environments", "tools.tool_environment", "crop=CROP calculator=CALCULATOR tools=USER_TOOLS"),
    ("environments", "sokoban.sokoban_environment", "sokoban_step=KIND"),
    ("families", "families.timed_frames", "qwen3_vl=QWEN3_VL qwen3_vl_moe=QWEN3_VL"),
    ("families", "linear.gated_layers", "qwen3_5=VISION qwen3_5_moe=VISION qwen3_5_text=TEXT qwen3_5_moe_text=TEXT"),
    ("families", "linear.gated_layers", "qwen3_next=TEXT"),
    ("families", "linear.short_convolutions", "lfm2=TEXT lfm2_moe=TEXT"),
    ("families", "families.hearing", "qwen2_audio=AUDIO qwen2_5_omni=OMNI qwen2_5_omni_thinker=OMNI"),
    ("formats", "verifiers.response_shape:ROWS", "think_answer counting think_boxed boxed answer_line hash letter"),
    ("formats", "verifiers.response_shape:ROWS", "grounding boxes_json direct none"),
    ("kernels", "gpu.fused", "fuse"),
    ("kernels", "gpu.logits", "read_logits=read write_gradient"),
    ("kernels", "gpu.row_sums", "sum_rows"),
    ("kernels", "gpu.kernels", "copy_pages write_pages"),
    ("kernels", "gpu.graphs", "graphs=Graphs"),
    ("kernels", "gpu.fused_decode", "projections=Projections"),
    ("kernels", "gpu.step_kernels", "convolve_step delta_step gate_step"),
    ("hooks", "averages.ema", "average=set_up_ema"),
    ("hooks", "check_data.length_cache", "cached_lengths"),
    ("hooks", "check_data.row_warnings", "warn_of_rewards warn_of_rows"),
    ("hooks", "check_data.self_test", "check_known_answers"),
    ("hooks", "estimate.work", "rates rollout_work rl_work offline_work"),
    ("hooks", "evaluation.breakdown", "breakdown=Breakdown"),
    ("hooks", "families.generic", "any_family=GENERIC"),
    ("hooks", "families.tiny_kinds", "tiny_model=build"),
    ("hooks", "imitation.imitation_sources", "demonstrations=Demonstrations reward_tagged asking_for_the_best"),
    ("hooks", "imitation.imitation_sources", "teacher=teacher_of distillation=DistillationLoss"),
    ("hooks", "imitation.imitation_sources", "supervised=SupervisedLoss"),
    ("hooks", "judges.judge", "judge=Judge"),
    ("hooks", "linear.segments", "recurrent_plan=RecurrentPlan recurrent_states=RecurrentStates"),
    ("hooks", "loggers.live_display", "live_display=LiveDisplay"),
    ("hooks", "offload.eight_bits", "eight_bits=EightBits"),
    ("hooks", "offload.host_state", "state_in_main_memory=HostState"),
    ("hooks", "offload.host_trainer", "host_trainer=HostTrainer"),
    ("hooks", "preferences.mappings", "mapped_rows=mapped"),
    ("hooks", "preferences.preference_rows", "chosen=chosen_view verdict=verdict_view"),
    ("hooks", "ranks.rank_trainer", "start_several=start_policy"),
    ("hooks", "ranks.divided", "divided_optimizer=DividedOptimizer"),
    ("hooks", "ranks.layouts", "gpus_here"),
    ("hooks", "ranks.sequence", "divided_trainer=trainer_class"),
    ("hooks", "ranks.by_rows", "by_rows=by_rows_of"),
    ("hooks", "ranks.sharded", "gathered"),
    ("hooks", "reports.diagnosis", "diagnose diagnose_answers"),
    ("hooks", "reports.trajectories", "trajectories=TrajectoryWriter"),
    ("hooks", "ranks.rank_rewards", "load_reward_model=open_reward place_reward_models=place_rewards"),
    ("hooks", "reward_models.learned_reward", "require_reward_models=require_folders"),
    ("hooks", "reward_models.reward_head", "start_critic"),
    ("hooks", "reward_models.reward_model_term", "reward_model_terms=LearnedTerms"),
    ("hooks", "reward_models.reward_rows", "reward_model_rows=rows_of"),
    ("hooks", "series.series_tower", "plug_series=plugged attach_series=attach without_series"),
    ("hooks", "series.series_tower", "series_file=file series_fingerprint=fingerprint"),
    ("hooks", "suites.suites", "suite_problems=problems"),
    ("hooks", "reward_workers.pool", "reward_workers=WorkerPool"),
    ("hooks", "user_environments.env_process", "environment_host=host_of"),
    ("hooks", "verifiers.extract", "extract_answer=extract"),
    ("hooks", "watchdog.watchdog", "watchdog=Watchdog"),
    ("kl_kinds", "more_algorithms.more_losses:ROWS", "abs k1+ k3+"),
    ("row_formats", "row_formats.foreign_rows", "r1v=R1V minio3=MINIO3 lightrft=LIGHTRFT sharegpt=SHAREGPT"),
    ("row_formats", "preferences.preference_rows", "pairs=PAIRS sides=SIDES labels=LABELLED steps=STEPS"),
    ("mappings", "preferences.mappings", "hpdv3 imagerewarddb imagegen_cot rapidata-t2v rapidata-i2v"),
    ("mappings", "preferences.mappings", "omnireward-t2i omnireward-t2v omnireward-t2a genai_bench"),
    ("mappings", "preferences.mappings", "genai_bench-video videodpo videogen_rewardbench audio_alpaca"),
    ("mappings", "preferences.mappings", "rewardbench vl_rewardbench hpdv3-test"),
    ("metrics", "reports.response_metrics", "responses=response_metrics"),
    ("metrics", "tools.tool_metrics", "tools=tool_metrics"),
    ("loggers", "loggers.metric_sinks", "tensorboard wandb mlflow swanlab"),
    ("media_kinds", "media.videos", "video=KIND"),
    ("media_kinds", "media.sounds", "audio=KIND"),
    ("media_kinds", "series.series_files", "series=KIND"),
    ("policy_losses", "more_algorithms.more_losses:ROWS", "gspo_token gmpo sapo cpgd kl_cov clip_cov topr kimi"),
    ("policy_losses", "more_algorithms.more_losses:ROWS", "dppo_tv dppo_kl vespo dro"),
    ("rules", "preferences.preference_losses", "preferences=check"),
    ("rules", "reward_models.reward_losses", "rating=check"),
    ("rules", "generate.selection", "selection=check"),
    ("rules", "series.series_checks", "series trained_series"),
    ("services", "judges.remote", "remote=open_remote"),
    ("containers", "containers.folders", "folder=folder_rows hub=hub_rows python=python_rows"),
    ("file_kinds", "containers.table_files", ".csv=csv_rows .parquet=parquet_rows .arrow=arrow_rows"),
    ("overlong", "overlong.shorten", "shrink drop_turns truncate_text"),
    ("set_checks", "check_data.unused_media", "unread_media=refuse_unread"),
    ("set_checks", "check_data.option_numbers", "option_numbers=read_as_indices"),
    ("verifiers", "sokoban.sokoban_verifier", "sokoban=VERIFIER"),
    ("verifiers", "reward_models.reward_model_term", "model=MODEL"),
    ("verifiers", "verifiers.maths:ROWS", "math geo3k"),
    ("verifiers", "verifiers.numbers:ROWS", "count number relaxed gsm8k"),
    ("verifiers", "verifiers.text_match:ROWS", "exact contains_one_of regex labels_f1 labels_recall token_f1"),
    ("verifiers", "verifiers.text_match:ROWS", "token_recall anls"),
    ("verifiers", "verifiers.short_answers:ROWS", "choice digit dapo_math avqa verdict judge hybrid"),
    ("verifiers", "verifiers.question_kinds:ROWS", "choice_or_math typed"),
    ("verifiers", "verifiers.grounding:ROWS", "iou point medical"),
    ("verifiers", "verifiers.response_shape:ROWS", "format:think_answer format:counting format:think_boxed"),
    ("verifiers", "verifiers.response_shape:ROWS", "format:boxed format:answer_line format:hash format:letter"),
    ("verifiers", "verifiers.response_shape:ROWS", "format:grounding format:boxes_json overlong repetition length"),
    ("verifiers", "verifiers.response_shape:ROWS", "tool_use"),
)


class Table(MutableMapping[str, Row]):
    """Rows by name: `rows` of the spine, then those of plugins and of installed packages. `adapt(name, object)`
    converts what a package registered, such as a plain function, to a row.
    """

    def __init__(self, name: str, rows: Mapping[str, Row], adapt: Callable[[str, Any], Row] | None = None) -> None:
        self.name, self._rows, self._adapt = name, dict(rows), adapt

    def __getitem__(self, key: str) -> Row:
        if key not in self._rows:
            found = _plugin_rows(self.name)[key]
            row = _load(self.name, found)
            self._rows[key] = self._adapt(key, row) if self._adapt else row
        return self._rows[key]

    def __setitem__(self, key: str, row: Row) -> None:
        self._rows[key] = row

    def __delitem__(self, key: str) -> None:
        del self._rows[key]

    def __contains__(self, key: object) -> bool:
        return key in self._rows or key in _plugin_rows(self.name)

    def __iter__(self) -> Iterator[str]:
        others = _plugin_rows(self.name)  # last, so the order does not depend on what was imported
        return iter([*(key for key in self._rows if key not in others), *others])

    def __len__(self) -> int:
        return len({**self._rows, **_plugin_rows(self.name)})


class Place(NamedTuple):
    """Location of a plugin's row, with the same attributes as an entry point."""

    name: str
    module: str
    attr: str
    dist: None = None


@cache
def _plugin_rows(table: str) -> dict[str, Any]:
    """Locations of rows outside the spine, by name. A plugin wins over a package that uses the same name."""
    points: dict[str, Any] = {point.name: point for point in _installed(f"saccade.{table}")}
    for _, place, rows in (ours for ours in PLUGINS if ours[0] == table):
        module, _, shared = place.partition(":")
        for row in rows.split():
            name, _, attribute = row.partition("=")
            points[name] = Place(name, f"saccade.plugins.{module}", shared or attribute or name.replace("-", "_"))
    return points


def _installed(group: str) -> Iterable[Any]:
    """Entry points of other packages. `importlib.metadata` is slow to import, so it is used only if a package registers
    rows for saccade.
    """
    if not _named():
        return ()
    from importlib.metadata import entry_points

    return entry_points(group=group)


@cache
def _named() -> bool:
    lists = (file for folder in sys.path for file in Path(folder).glob("*-info/entry_points.txt"))
    for file in lists:
        with suppress(OSError):  # the package may be half installed or removed
            if b"[saccade." in file.read_bytes():
                return True
    return False


def _load(table: str, found: Any) -> Any:
    try:
        return getattr(import_module(found.module), found.attr)
    except Exception as error:
        who = f" of the package {found.dist.name}" if found.dist else ""
        where = f"{found.module}:{found.attr}"
        raise EnvironmentProblem(
            f"{table} {found.name!r}{who}: {where} cannot be imported: {type(error).__name__}: {error}"
        ) from error


HOOKS: Table[Any] = Table("hooks", {})  # plugin functions that the spine calls by name; users do not choose them

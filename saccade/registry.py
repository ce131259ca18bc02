"""The rows that plugins add to the tables of the spine.

A table holds the spine's own rows. A plugin's row is named here, and one of an installed package in
its entry points; it is imported when somebody looks it up. So the spine imports no plugin.

    [project.entry-points."saccade.verifiers"]
    palindrome = "my_package:palindrome"

    >>> from saccade.media.kinds import KINDS
    >>> KINDS["series"].article
    'a time series'
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from saccade.errors import EnvironmentProblem

Row = TypeVar("Row")

# Response formats whose shape a verifier can check.
CHECKED = (
    *("think_answer", "counting", "think_boxed", "boxed", "answer_line", "hash", "letter"),
    *("grounding", "boxes_json"),
)

# table → name → where its row is
PLUGINS: Mapping[str, Mapping[str, str]] = {
    "advantages": {
        name: f"saccade.plugins.more_algorithms.more_advantages:{name}"
        for name in ("batch_std", "opo", "gpg", "max_rl", "grpo_passk", "cpgd", "gdpo", "drpo")
    },
    "aggregations": {
        name: f"saccade.plugins.more_algorithms.more_aggregations:{name}"
        for name in ("sample_mean", "group_mean", "token_sum")
    },
    "answers": {"extract": "saccade.plugins.verifiers.extract:extract"},
    "averages": {"ema": "saccade.plugins.averages.ema:follow"},
    "corrections": dict.fromkeys(
        [f"reject.{level}.{kind}" for kind in ("k1", "k2", "k3") for level in ("token", "seq_sum", "seq_mean")]
        + ["reject.seq_max.k2", "reject.seq_max.k3", "seq_mask", "seq_mask_tis", "opsm"],
        "saccade.plugins.more_algorithms.more_corrections:ROWS",
    ),
    "engines": {
        "vllm": "saccade.plugins.engines.vllm:VllmEngine",
        "sglang": "saccade.plugins.engines.sglang:SglangEngine",
        "http": "saccade.plugins.engines.http:from_settings",
        "http_family": "saccade.plugins.engines.http_family:endpoint_family",
        "parity": "saccade.plugins.engines.parity:check",
        "replicas": "saccade.plugins.engines.replicas.replica_pool:start_replicas",
    },
    "environment_hosts": {"process": "saccade.plugins.user_environments.env_process:host_of"},
    "environments": {
        "crop": "saccade.plugins.tools.tool_environment:CROP",
        "calculator": "saccade.plugins.tools.tool_environment:CALCULATOR",
        "tools": "saccade.plugins.tools.tool_environment:OWN_TOOLS",
        "sokoban_step": "saccade.plugins.sokoban.sokoban_environment:KIND",
    },
    "families": {
        "internvl": "saccade.plugins.families.squares:INTERNVL",
        "llava": "saccade.plugins.families.squares:LLAVA",
        "qwen2_audio": "saccade.plugins.families.hearing:AUDIO",
        "qwen2_5_omni": "saccade.plugins.families.hearing:OMNI",
        "qwen2_5_omni_thinker": "saccade.plugins.families.hearing:OMNI",
    },
    "formats": dict.fromkeys((*CHECKED, "direct", "none"), "saccade.plugins.verifiers.response_shape:ROWS"),
    "judges": {"chat": "saccade.plugins.judges.judge:Judge"},
    "kl_kinds": {
        name: f"saccade.plugins.more_algorithms.more_losses:{function}"
        for name, function in {"abs": "absolute", "k1+": "k1_plus", "k3+": "k3_plus"}.items()
    },
    "losses": {"distillation": "saccade.plugins.distillation.distil:DistillationLoss"},
    "evaluations": {
        "rescore": "saccade.plugins.generate.rescore:run",
        "reward_model": "saccade.plugins.reward_models.reward_training:evaluate",
    },
    "row_formats": {
        **{
            name: f"saccade.plugins.row_formats.foreign_rows:{name.upper()}"
            for name in ("r1v", "minio3", "lightrft", "sharegpt")
        },
        "pairs": "saccade.plugins.preferences.preference_rows:PAIRS",
        "sides": "saccade.plugins.preferences.preference_rows:SIDES",
        "labels": "saccade.plugins.preferences.preference_rows:LABELLED",
        "steps": "saccade.plugins.preferences.preference_rows:STEPS",
    },
    "mappings": {
        name: f"saccade.plugins.preferences.preference_sets:{name.replace('-', '_')}"
        for name in (
            *("hpdv3", "imagerewarddb", "imagegen_cot", "rapidata-t2v", "rapidata-i2v"),
            *("omnireward-t2i", "omnireward-t2v", "omnireward-t2a", "genai_bench"),
            *("genai_bench-video", "videodpo", "videogen_rewardbench", "audio_alpaca"),
        )
    },
    "displays": {"live": "saccade.plugins.loggers.live_display:LiveDisplay"},
    "imitation": {
        "demonstrations": "saccade.plugins.imitation.demonstrations:Demonstrations",
        "teacher": "saccade.plugins.imitation.teacher:load_teacher",
    },
    "lengths": {"cached": "saccade.plugins.check_data.length_cache:cached_lengths"},
    "loggers": {
        "tensorboard": "saccade.plugins.loggers.metric_sinks:tensorboard",
        "wandb": "saccade.plugins.loggers.metric_sinks:wandb",
    },
    "media_kinds": {
        "video": "saccade.plugins.media.videos:KIND",
        "audio": "saccade.plugins.media.sounds:KIND",
        "series": "saccade.plugins.series.series_files:KIND",
    },
    "policy_losses": {
        name: f"saccade.plugins.more_algorithms.more_losses:{name}"
        for name in (
            "gspo_token",
            "gmpo",
            "sapo",
            "cpgd",
            "kl_cov",
            "clip_cov",
            "topr",
            "kimi",
            "dppo_tv",
            "dppo_kl",
            "vespo",
        )
    }
    | {"dro": "saccade.plugins.more_algorithms.more_losses:kimi"},
    "preferences": {
        "mapped": "saccade.plugins.preferences.mappings:mapped",
        "chosen": "saccade.plugins.preferences.preference_rows:chosen_view",
        "verdict": "saccade.plugins.preferences.preference_rows:verdict_view",
    },
    "reports": {
        "evaluation_lines": "saccade.plugins.reports.report:table_lines",
        "evaluation_page": "saccade.plugins.reports.report:write_eval_report",
        "pictures": "saccade.plugins.reports.stored_pictures:StoredPictures",
        "diagnose": "saccade.plugins.reports.diagnosis:diagnose",
        "unread_answers": "saccade.plugins.reports.diagnosis:unread_answers",
    },
    "reward_models": {
        "rows": "saccade.plugins.reward_models.reward_rows:rows_of",
        "terms": "saccade.plugins.reward_models.reward_model_term:Learned",
        "card": "saccade.plugins.reward_models.reward_card:read_card",
        "score": "saccade.plugins.reward_models.learned_reward:load_learned",
        "start_critic": "saccade.plugins.reward_models.reward_head:start_critic",
        "require": "saccade.plugins.reward_models.learned_reward:require_folders",
    },
    "rules": {
        "preferences": "saccade.plugins.preferences.preference_losses:check",
        "rating": "saccade.plugins.reward_models.reward_losses:check",
        "selection": "saccade.plugins.generate.selection:check",
        "series": "saccade.plugins.series.series_checks:series",
        "trained_series": "saccade.plugins.series.series_checks:trained_series",
    },
    "self_tests": {"known_answers": "saccade.plugins.check_data.self_test:check_known_answers"},
    "services": {"remote": "saccade.plugins.judges.remote:open_remote"},
    "containers": {kind: f"saccade.plugins.containers.folders:{kind}_rows" for kind in ("folder", "hub", "python")},
    "file_kinds": {
        f".{kind}": f"saccade.plugins.containers.table_files:{kind}_rows" for kind in ("csv", "parquet", "arrow")
    },
    "overlong": {
        name: f"saccade.plugins.overlong.shorten:{name}" for name in ("shrink", "drop_turns", "truncate_text")
    },
    "set_checks": {"unread_media": "saccade.plugins.check_data.unused_media:refuse_unread"},
    "suites": {
        name: f"saccade.plugins.suites.public_suites:{name.upper()}"
        for name in ("vstar", *(f"visualprobe_{x}" for x in ("easy", "medium", "hard")), "hrbench4k", "hrbench8k")
    },
    "tiny_models": {"build": "saccade.plugins.families.tiny:build"},
    "towers": {"series": "saccade.plugins.series.series_tower:TOWER"},
    "verifiers": {
        "sokoban": "saccade.plugins.sokoban.sokoban_verifier:VERIFIER",
        "model": "saccade.plugins.reward_models.reward_model_term:MODEL",
        **{
            name: f"saccade.plugins.verifiers.{file}:ROWS"
            for file, names in {
                "maths": ("math", "geo3k"),
                "numbers": ("count", "number", "relaxed", "gsm8k"),
                "text_match": (
                    *("exact", "contains_one_of", "regex"),
                    *("labels_f1", "labels_recall", "token_f1", "token_recall"),
                ),
                "short_answers": ("choice", "digit", "dapo_math", "avqa", "verdict"),
                "grounding": ("iou", "point", "medical"),
                "hybrid": ("judge", "hybrid"),
                "response_shape": (
                    *(f"format:{name}" for name in CHECKED),
                    *("overlong", "repetition", "length", "tool_use"),
                ),
            }.items()
            for name in names
        },
    },
    "warnings": {
        "rewards": "saccade.plugins.check_data.row_warnings:warn_of_rewards",
        "rows": "saccade.plugins.check_data.row_warnings:warn_of_rows",
    },
    "work": {
        "rates": "saccade.plugins.estimate.work:rates",
        "rl": "saccade.plugins.estimate.work:rl_work",
        "offline": "saccade.plugins.estimate.work:offline_work",
    },
}


class Table(MutableMapping[str, Row]):
    """Rows by name: `rows` of the spine, then those of plugins and of installed packages. `adapt`
    makes a row of what a package registered, such as a plain function.
    """

    def __init__(self, name: str, rows: Mapping[str, Row], adapt: Callable[[str, Any], Row] | None = None) -> None:
        self.name, self._rows, self._adapt = name, dict(rows), adapt

    def __getitem__(self, key: str) -> Row:
        if key not in self._rows:
            found = _elsewhere(self.name)[key]
            row = _load(self.name, found)
            self._rows[key] = self._adapt(key, row) if self._adapt else row
        return self._rows[key]

    def __setitem__(self, key: str, row: Row) -> None:
        self._rows[key] = row

    def __delitem__(self, key: str) -> None:
        del self._rows[key]

    def __contains__(self, key: object) -> bool:
        return key in self._rows or key in _elsewhere(self.name)

    def __iter__(self) -> Iterator[str]:
        others = _elsewhere(self.name)  # in the same order whichever of them is imported first
        return iter([*(key for key in self._rows if key not in others), *others])

    def __len__(self) -> int:
        return len({**self._rows, **_elsewhere(self.name)})


@cache
def _elsewhere(table: str) -> dict[str, EntryPoint]:
    """Rows that are not imported yet, by name. A name of ours cannot be taken."""
    group = f"saccade.{table}"
    ours = {n: EntryPoint(n, where, group) for n, where in PLUGINS.get(table, {}).items()}
    return {point.name: point for point in entry_points(group=group)} | ours


def _load(table: str, found: EntryPoint) -> Any:
    try:
        return getattr(import_module(found.module), found.attr)
    except Exception as error:
        who = f" of the package {found.dist.name}" if found.dist else ""
        raise EnvironmentProblem(
            f"{table} {found.name!r}{who}: {found.value} cannot be imported: {type(error).__name__}: {error}"
        ) from error

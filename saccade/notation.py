"""How values are written in config files and overrides, and what other systems call our options.

YAML, with two differences from its version 1.1: only true and false are truth values (`off` and
`no` are words), and 1e-6 is a number. Dates, octal and base-60 numbers stay text. Knows no option.

    >>> parse("{a: off, b: 1e-6, c: 2024-01-01}")
    {'a': 'off', 'b': 1e-06, 'c': '2024-01-01'}
"""

from __future__ import annotations

import re
from typing import Any

import yaml

INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$")
FLOAT = re.compile(
    r"""(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?
        |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
        |[-+]?\.(?:inf|Inf|INF)
        |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)
TRUTH = re.compile(r"(?:true|True|TRUE|false|False|FALSE)$")
OURS = (
    ("bool", TRUTH, "tTfF"),
    ("int", INTEGER, "-+0123456789"),
    ("float", FLOAT, "-+.0123456789"),
)
REPLACED = {f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float", "timestamp")}


class Reader(yaml.SafeLoader):
    """The one reader of config text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML looks it up on the class)
        first: [(tag, pattern) for tag, pattern in rules if tag not in REPLACED]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        """Plain YAML keeps the last of two equal keys and says nothing."""
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"{', '.join(twice)} is there twice; put all of it in one place",
                node.start_mark,
            )
        return super().construct_mapping(node, deep=deep)


class Writer(yaml.SafeDumper):
    """Quotes text that either this reader or a plain YAML 1.1 reader would take for a value."""


for _name, _pattern, _first in OURS:
    Reader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, list(_first))
    Writer.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, list(_first))


def parse(text: str) -> Any:
    return yaml.load(text, Reader)


def write(tree: Any, *, flow: bool = False) -> str:
    """`flow`: in one line."""
    how = {"default_flow_style": True, "width": float("inf")} if flow else {}
    return yaml.dump(tree, Dumper=Writer, sort_keys=False, allow_unicode=True, **how)


# -- names from elsewhere --------------------------------------------------------------------------

# Our option: what TRL, OpenRLHF, verl and their descendants call it.
NAMES = {
    "run.name": "experiment_name run_name exp_name",
    "run.out": "output_dir save_path ckpt_path save_checkpoint_path",
    "run.max_steps": "total_training_steps num_steps",
    "run.resume": "resume_from_checkpoint load_checkpoint_path load_checkpoint",
    "model.path": "model_name_or_path model_path pretrain model_name",
    "model.dtype": "torch_dtype bf16 param_dtype",
    "model.train": "freeze_vision_tower freeze_vision_modules freeze_prefix freeze",
    "model.checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "data.train": "dataset dataset_name train_files prompt_data train_file",
    "data.val": "eval_dataset val_files eval_data test_files",
    "data.keys": "prompt_key answer_key image_key images_key input_key label_key",
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len max_prompt_len",
    "prompt.system": "system_prompt",
    "prompt.template": "format_prompt input_template",
    "rollout.max_tokens": "max_new_tokens max_completion_length max_response_length "
    "generate_max_len response_length",
    "reward.terms": "reward_funcs reward_function reward_fn remote_rm_url",
    "algorithm.preset": "algo",
    "algorithm.advantage": "adv_estimator advantage_estimator",
    "algorithm.aggregation": "loss_agg_mode loss_type loss_avg_mode",
    "train.aux_coef": "aux_loss_coef router_aux_loss_coef",
    "algorithm.kl.coef": "beta kl_coef init_kl_coef kl_loss_coef kl_beta",
    "algorithm.kl.kind": "kl_estimator kl_loss_type kl_penalty",
    "algorithm.clip_low": "epsilon epsilon_low eps_clip clip_ratio clip_ratio_low cliprange",
    "algorithm.clip_high": "epsilon_high eps_clip_high clip_ratio_high",
    "algorithm.dual_clip": "clip_ratio_dual clip_ratio_c",
    "algorithm.entropy_coef": "entropy_coeff entropy_loss_coef",
    "algorithm.filter.dynamic": "dynamic_sampling dynamic_filtering online_filtering filter_groups",
    "train.lr": "learning_rate actor_learning_rate",
    "train.prompts_per_step": "batch_size rollout_batch_size train_batch_size",
    "train.samples_per_prompt": "num_generations group_size n n_samples_per_prompt num_samples",
    "train.updates_per_step": "global_batch_size mini_batch_size ppo_mini_batch_size",
    "train.epochs_per_batch": "num_iterations ppo_epochs num_ppo_epochs",
    "train.epochs": "num_train_epochs total_epochs max_epochs num_episodes num_epochs",
    "train.micro_tokens": "per_device_train_batch_size micro_batch_size micro_train_batch_size "
    "gradient_accumulation_steps",
    "train.schedule": "lr_scheduler_type lr_scheduler",
    "train.warmup": "warmup_ratio warmup_steps lr_warmup_ratio lr_warmup_steps",
    "train.betas": "adam_beta1 adam_beta2 adam_betas",
    "train.grad_norm": "max_grad_norm max_norm grad_clip",
    "sft.max_tokens": "max_seq_length max_length max_len cutoff_len",
    "val.every": "eval_steps val_freq test_freq",
    "val.before": "val_before_train eval_on_start",
    "save.every": "save_steps save_freq",
    "save.keep": "save_total_limit save_limit max_ckpt_num",
    "track.wandb": "report_to use_wandb logger",
}
ELSEWHERE = {name: option for option, names in NAMES.items() for name in names.split()}

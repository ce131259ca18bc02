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
OURS = (("bool", TRUTH, "tTfF"), ("int", INTEGER, "-+0123456789"), ("float", FLOAT, "-+.0123456789"))
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
                None, None, f"{', '.join(twice)} is there twice; put all of it in one place", node.start_mark
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

# Our option: what TRL, OpenRLHF, verl and their descendants call it. A name that would not do alone
# has the section above it. docs/migration.md shows most of them; a test compares.
NAMES = {
    "run.name": "experiment_name run_name exp_name",
    "run.out": "output_dir save_path ckpt_path save_checkpoint_path default_local_dir",
    "run.max_steps": "total_training_steps num_steps",
    "run.resume": "resume_from_checkpoint load_checkpoint_path load_checkpoint resume_mode find_last_checkpoint",
    "model.path": "model_name_or_path model_path pretrain model_name",
    "model.dtype": "torch_dtype bf16 param_dtype",
    "model.train": "freeze_vision_tower freeze_vision_modules freeze_prefix freeze load_in_4bit",
    "model.lora.rank": "lora_rank lora_r",
    "model.lora.alpha": "lora_alpha",
    "model.checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "data.train": "dataset dataset_name dataset_train_split train_files prompt_data train_file",
    "data.val": "eval_dataset val_files eval_data test_files",
    "data.keys": "prompt_key answer_key image_key images_key video_key input_key label_key",
    "data.order": "shuffle",
    "data.fps": "video_fps",
    "data.max_images": "limit_images",
    "data.overlong": "filter_overlong_prompts",
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len max_prompt_len",
    "prompt.system": "system_prompt",
    "prompt.template": "format_prompt input_template",
    "prompt.chat_template": "override_chat_template",
    "rollout.engine": "rollout.name use_vllm engine_type",
    "rollout.replicas": "vllm_num_engines",
    "rollout.tensor_parallel": "tensor_parallel_size tensor_model_parallel_size "
    "vllm_tensor_parallel_size engine_tp_size",
    "rollout.memory_share": "gpu_memory_utilization vllm_gpu_memory_utilization engine_mem_util",
    "rollout.max_sequences": "max_num_seqs",
    "rollout.max_tokens": "max_new_tokens max_completion_length max_response_length generate_max_len response_length",
    "env.max_turns": "max_generation_round",
    "env.coordinates": "use_relative_coordinates",
    "reward.terms": "reward_funcs reward_function reward_function_kwargs score_function reward_fn "
    "reward_pretrain custom_reward_function.path custom_reward_function.name",
    "reward.remote.url": "remote_rm_url",
    "reward.accuracy_term": "filter_key",
    "reward.running_norm": "reward_running_norm reward_running_norm_minus_mean",
    "reward.clip": "reward_clip",
    "algorithm.preset": "algo",
    "algorithm.advantage": "adv_estimator advantage_estimator",
    "algorithm.args.lam": "lambd",
    "algorithm.adv_clip": "advantage_clip",
    "algorithm.aggregation": "loss_agg_mode loss_type loss_avg_mode",
    "algorithm.kl.coef": "beta kl_coef init_kl_coef kl_loss_coef kl_beta disable_kl",
    "algorithm.kl.kind": "kl_estimator kl_loss_type kl_penalty",
    "algorithm.kl.place": "use_kl_loss use_kl_in_reward",
    "algorithm.kl.controller": "kl_type kl_ctrl.type",
    "algorithm.kl.target": "kl_target target_kl",
    "algorithm.kl.horizon": "kl_horizon",
    "algorithm.clip": "eps_clip clip_ratio cliprange",
    "algorithm.clip_low": "epsilon epsilon_low clip_ratio_low",
    "algorithm.clip_high": "epsilon_high eps_clip_high clip_ratio_high",
    "algorithm.dual_clip": "clip_ratio_dual clip_ratio_c",
    "algorithm.entropy_coef": "entropy_coeff entropy_loss_coef",
    "algorithm.filter.dynamic": "dynamic_sampling dynamic_filtering online_filtering filter_groups",
    "algorithm.filter.low": "filter_low",
    "algorithm.filter.high": "filter_high",
    "algorithm.filter.max_rounds": "max_try_make_batch max_num_gen_batches",
    "algorithm.critic.path": "critic_pretrain",
    "algorithm.critic.lr": "critic_learning_rate",
    "algorithm.critic.clip": "value_clip cliprange_value",
    "algorithm.critic.warmup_steps": "freezing_actor_steps critic_warmup",
    "train.lr": "learning_rate actor_learning_rate",
    "train.optimizer": "optim.strategy",
    "train.weight_decay": "l2",
    "train.prompts_per_step": "batch_size rollout_batch_size data.train_batch_size",
    "train.samples_per_prompt": "num_generations group_size n n_samples_per_prompt num_samples",
    "train.updates_per_step": "global_batch_size mini_batch_size ppo_mini_batch_size train_batch_size",
    "train.epochs_per_batch": "num_iterations ppo_epochs num_ppo_epochs max_epochs",
    "train.epochs": "num_train_epochs total_epochs num_episodes total_episodes num_epochs",
    "train.micro_tokens": "per_device_train_batch_size micro_batch_size micro_train_batch_size "
    "micro_rollout_batch_size gradient_accumulation_steps micro_batch_size_per_device_for_update "
    "micro_batch_size_per_device_for_experience ppo_micro_batch_size_per_gpu "
    "ppo_max_token_len_per_gpu log_prob_micro_batch_size_per_gpu",
    "train.aux_coef": "aux_loss_coef router_aux_loss_coef",
    "train.schedule": "lr_scheduler_type lr_scheduler warmup_style",
    "train.warmup": "warmup_ratio warmup_steps lr_warmup_ratio lr_warmup_steps lr_warmup_steps_ratio",
    "train.betas": "adam_beta1 adam_beta2 adam_betas",
    "train.grad_norm": "max_grad_norm max_norm grad_clip",
    "sft.max_tokens": "max_seq_length max_length max_len cutoff_len",
    "val.n": "val_n val_override_config.n",
    "val.temperature": "val_do_sample val_override_config val_override_config.temperature",
    "val.top_p": "val_override_config.top_p",
    "val.max_tokens": "val_override_config.max_tokens",
    "val.every": "eval_steps val_freq test_freq",
    "val.before": "val_before_train eval_on_start",
    "val.log_generations": "val_generations_to_log",
    "save.every": "save_steps save_freq",
    "save.keep": "save_total_limit save_limit max_ckpt_num max_actor_ckpt_to_keep",
    "save.best_metric": "save_best_metric",
    "track.wandb": "report_to use_wandb logger",
    "track.tensorboard": "use_tensorboard",
}
# Options of older versions (or a section of them): their name now, or what to write instead.
_ARGS = (
    "lam divide_by_std gpg_alpha gpg_alpha_max gpg_divisor gdpo_whiten cpgd_weight "
    "drpo_renorm drpo_kl_damp weight_cap tau_positive tau_negative drift_coef drift_cap "
    "cov_fraction cov_coef cov_low cov_high topr_split kimi_tau kimi_level "
    "vespo_positive vespo_negative fixed_length"
)
RENAMED = {
    **{f"algorithm.{name}": f"algorithm.args.{name}" for name in _ARGS.split()},
    "algorithm.fire": "algorithm.hot_first_token",
    "data.compare": "data.pair_view",
    "data.side_seed": "data.pair_order_seed",
    "env.reserve": "env.min_turn_tokens",
    **{
        f"dpo.{name}": f"dpo.args.{name}"
        for name in ("label_smoothing", "gamma", "desirable_weight", "undesirable_weight")
    },
    "reward.normalise": "reward.running_norm",
    "reward.outcome": "reward.accuracy_term",
    "reward.renormalise": "reward.reweight_abstained",
    "rollout.support": "rollout.truncated_sampling",
    "run.memory": "run.gpu_memory_gib",
    "train.ptx_coef": "train.sft_coef",
    "algorithm.weight_bound": "write the limits of cispo's weight as "
    "algorithm.args.weight_floor and algorithm.args.weight_cap",
}
ELSEWHERE = {name: option for option, names in NAMES.items() for name in names.split()}
# Sections there that a typo of ours could be taken for.
FOREIGN = {"worker", "trainer", "actor_rollout_ref", "critic"}
# Parts of a key that nothing here corresponds to.
NOWHERE = (
    "fsdp fsdp_config offload deepspeed zero_stage ray_kwargs padding_free use_remove_padding "
    "ulysses_sequence_parallel_size ulysses_size ring_attn_size use_dynamic_bsz dynamic_batching "
    "enforce_eager enable_chunked_prefill max_num_batched_tokens max_model_len disable_log_stats "
    "disable_tqdm free_cache_engine load_format nnodes n_gpus_per_node project_name "
    "val_batch_size reward_type reward_manager skip_special_tokens use_torch_compile flash_attn "
    "attn_implementation packing_samples colocate_all_models use_fused_kernels balance_batch "
    "filter_overlong_prompts_workers dataloader_num_workers save_model_only"
)
INSTEAD = dict.fromkeys(NOWHERE.split(), "nothing here corresponds to it, remove it")
INSTEAD["val_only"] = "use `saccade eval`"

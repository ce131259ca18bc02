"""Tiny decoders of many kinds: windows, chunks, layers of different sizes, keys and values of different sizes, layers
that share them, logits that are scaled or capped.
"""

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from saccade.models.families import load_family
from saccade.plugins.families import tiny
from saccade.types import Request, Sampling

WINDOW = 8
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW, "num_hidden_layers": 4}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
SHARED = {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 8}
NARROW = {"num_key_value_heads": 2, "head_dim": 32}
RECURRENT = tiny.CONFIGS["qwen3_next"].text  # of a mixture
# model type → what its config says beside the sizes of every tiny model
KINDS = {
    "qwen3_5_text": RECURRENT,
    "qwen3_5_moe_text": RECURRENT,
    "qwen3_next": RECURRENT,
    "lfm2": {**MIXED, "layer_types": ["conv", "full_attention", "conv", "conv"]},
    "lfm2_moe": {**MIXED, "layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 2,
                 "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mistral": {"sliding_window": WINDOW},
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0, "num_experts": 4,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 32, "final_logit_softcapping": 2.0},
    "cohere2": {**MIXED, "logit_scale": 0.25},
    "exaone4": {**MIXED, "sliding_window_pattern": 2},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "deepseek_v3": {**LATENT, **EXPERTS, "num_key_value_heads": 2, "first_k_dense_replace": 1, "head_dim": None},
    "llama4_text": {"attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"] * 2,
                    "num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0], "num_local_experts": 2,
                    "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2, "floor_scale": 4096},
    "gemma3n_text": {**MIXED, **SHARED, "laurel_rank": 8, "altup_num_inputs": 2,
                     "activation_sparsity_pattern": [0.0] * 4, "final_logit_softcapping": 5.0,
                     "intermediate_size": [128] * 4},
    "gemma4_text": {**MIXED, **SHARED, "global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
                    "final_logit_softcapping": 5.0, "num_key_value_heads": 2},
}  # fmt: skip


def build(kind, folder):
    """Its family, and the model as transformers itself runs it."""
    tokenizer = tiny.make_tokenizer(None)
    ends = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    sizes = {**tiny.TEXT, "vocab_size": len(tokenizer), **ends, **KINDS[kind]}
    config = AutoConfig.for_model(kind, **{name: value for name, value in sizes.items() if value is not None})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for layer in model.modules():
        if hasattr(layer, "A_log"):  # states that last; those of random weights are soon forgotten
            layer.A_log.data = torch.linspace(-4, -1, len(layer.A_log))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    stock = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return load_family(str(folder)), stock.eval()


def asked(family, lengths=(5, 21), repeats=2, **sampling):
    draw = np.random.default_rng(0)
    how = Sampling(**{"temperature": 1.0, "max_tokens": 10, "ignore_eos": True, **sampling})
    free = np.flatnonzero(~family.banned)
    prompts = [draw.choice(free, length) for length in lengths]
    return [
        Request(key=f"{n}/{r}", ids=ids, sampling=how, noise=10 * n + r, episode=f"{n}/{r}")
        for n, ids in enumerate(prompts)
        for r in range(repeats)
    ]

"""Random models of every family we claim, small enough to build in milliseconds."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 199
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-rope3": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        }
    },
    "mistral": {"sliding_window": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "phi3": {"tie_word_embeddings": False},
    "olmo2": {},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    "cohere": {"logit_scale": 0.25},
}  # fmt: skip


def tiny_model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A random float32 causal LM of `family`, whose logits are well apart."""
    torch.manual_seed(seed)
    options = {**_COMMON, "initializer_range": 0.3, **FAMILIES.get(family, {}), **overrides}
    config = AutoConfig.for_model(family.split("-")[0], **options)
    # Soft-capped attention is refused by stock SDPA, so eager is the reference everywhere.
    network = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return network.eval().requires_grad_(False)

"""Tiny random-weight models of every supported family.

The initializer range is 0.2: with the default 0.02 attention is nearly uniform and a wrong position moves the logits by
too little to be seen.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 384
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = 12  # shorter than most chunks of the tests

# what each family adds to or changes in COMMON; a None removes the key
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3-scaled": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        }
    },
    "llama-yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        }
    },
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {},
    "qwen2-window": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "phi": {"head_dim": None},
    "phi3": {"head_dim": None, "sliding_window": WINDOW},
    "starcoder2": {"head_dim": None, "sliding_window": WINDOW},
    "granite": {"head_dim": None, "attention_multiplier": 0.25},
    "olmo2": {"head_dim": None},
    "olmo3": {"head_dim": None, "sliding_window": WINDOW, "num_hidden_layers": 4},
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "num_hidden_layers": 6},
    "gpt_neox": {"head_dim": None, "num_key_value_heads": None},
    "gpt_oss": {
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
    "smollm3": {"num_hidden_layers": 4, "head_dim": None},
    "cohere": {"head_dim": None},
    "cohere2": {"sliding_window": WINDOW, "num_hidden_layers": 4},
    "glm": {},
    "glm4": {},
}


def tiny_config(name: str) -> Any:
    fields = {key: value for key, value in {**COMMON, **FAMILIES[name]}.items() if value is not None}
    kind = name.split("-")[0]
    if kind == "llama3":
        kind = "llama"
    if name == "mixtral":
        fields["sliding_window"] = None
    return AutoConfig.for_model(kind, **fields)


def tiny_model(name: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of the family with its own weights for each seed, in eval mode, on eager attention."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(name), attn_implementation="eager", dtype=dtype).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.normal_()
    return model

"""Facts per model family that cannot be read from tensors: how rotary dims pair, and which layers have no RoPE.

A family is listed only when `tests/test_exactness.py` proves it against the stock model. Everything else a layer needs
(sizes, scale, window, soft cap, sinks) arrives with each attention call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from lazy_rag_kernels import Rotation
from torch import nn

from lazy_rag.errors import UnsupportedModelError
from lazy_rag.rope import LayerRope, RopeTable


@dataclass(frozen=True)
class Family:
    """`no_rope`: "none", "use_rope" (a flag on the attention module) or "full_attention" (layers without a window)."""

    pairing: Literal["half", "interleaved"] = "half"
    no_rope: Literal["none", "use_rope", "full_attention"] = "none"


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "qwen3_moe": Family(),
    "phi": Family(),
    "phi3": Family(),
    "starcoder2": Family(),
    "granite": Family(),
    "olmo2": Family(),
    "olmo3": Family(),
    "gemma2": Family(),
    "gemma3_text": Family(),
    "gpt_neox": Family(),
    "gpt_oss": Family(),
    "smollm3": Family(no_rope="use_rope"),
    "cohere": Family("interleaved"),
    "cohere2": Family("interleaved", no_rope="full_attention"),
    "glm": Family("interleaved"),
    "glm4": Family("interleaved"),
}

_REFUSED = {
    "gpt2": "learned absolute position embeddings are part of every key and value",
    "opt": "learned absolute position embeddings are part of every key and value",
    "qwen3_next": "recurrent layers carry state across chunk borders",
    "jamba": "recurrent layers carry state across chunk borders",
}
_LENGTH_DEPENDENT = ("longrope", "dynamic")


def family_of(config: Any) -> Family:
    """The family of a model, or UnsupportedModelError with the reason."""
    kind = config.model_type
    if kind in _REFUSED:
        raise UnsupportedModelError(f"model type {kind!r} cannot work with position-free chunks: {_REFUSED[kind]}")
    if kind not in FAMILIES:
        raise UnsupportedModelError(
            f"model type {kind!r} is not proven to work; supported: {', '.join(sorted(FAMILIES))}"
        )
    recurrent = [t for t in getattr(config, "layer_types", None) or () if not t.endswith("_attention")]
    if recurrent or "linear_attention" in (getattr(config, "layer_types", None) or ()):
        raise UnsupportedModelError(f"{kind}: layers without ordinary attention cannot be cached by chunk")
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModelError(f"{kind}: bidirectional attention cannot be cached by chunk")
    for name in _rope_types(getattr(config, "rope_parameters", None) or {}):
        if name in _LENGTH_DEPENDENT:
            raise UnsupportedModelError(
                f"{kind} with rope_type {name!r}: its frequencies change with the length of a prompt, "
                "so cached keys would silently stop matching"
            )
    return FAMILIES[kind]


def _rope_types(parameters: dict[str, Any]) -> list[str]:
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return [str(p.get("rope_type", "default")) for p in (nested or [parameters])]


def rope_table(config: Any, decoder: nn.Module, attention_modules: list[nn.Module]) -> RopeTable:
    """Read a model's frequencies and which layer uses which.

    Args:
        decoder: the inner text model, which owns `rotary_emb`.
        attention_modules: in layer order.
    """
    family = family_of(config)
    rotary: Any = decoder.rotary_emb
    layer_types = getattr(config, "layer_types", None) or [None] * len(attention_modules)
    buffers = {name.removesuffix("inv_freq").rstrip("_"): value for name, value in rotary.named_buffers()
               if name.endswith("inv_freq") and "original" not in name}  # fmt: skip
    if not buffers:
        raise UnsupportedModelError(f"{config.model_type}: no inv_freq found in {type(rotary).__name__}")
    # clones: some rotary modules overwrite their buffer in place
    inv_freq = {name: value.detach().clone().to("cpu", torch.float64) for name, value in buffers.items()}
    layers: list[LayerRope | None] = []
    for module, layer_type in zip(attention_modules, layer_types, strict=True):
        if _without_rope(family, module):
            layers.append(None)
            continue
        name = layer_type if layer_type in inv_freq else ""
        if name not in inv_freq:
            raise UnsupportedModelError(f"{config.model_type}: no frequencies for layers of type {layer_type!r}")
        layers.append(LayerRope(Rotation(family.pairing, 2 * inv_freq[name].numel()), name))
    return RopeTable(inv_freq, tuple(layers))


def _without_rope(family: Family, module: nn.Module) -> bool:
    if family.no_rope == "use_rope":
        return not module.use_rope
    if family.no_rope == "full_attention":
        return module.sliding_window is None
    return False

"""The exactness oracle, written from the contract alone: one stock forward pass over flat tokens.

Every segment is preceded by a copy of the encode prefix its chunk was encoded behind. Position ids and a 4-D mask say
who stands where and who sees whom; nothing of the runtime's own code takes part, except the layout being judged.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lazy_rag.layout import LiveRun, PromptLayout


class Flat(NamedTuple):
    tokens: list[int]
    positions: list[int]
    owner: list[int]  # index of the segment a token belongs to (its prefix copy too), -1 for live tokens
    placed: list[bool]  # the token stands in the layout itself (not a copy, not an unused part of a chunk)
    copies: list[bool]


def flatten(layout: PromptLayout, extra: list[int] = ()) -> Flat:  # type: ignore[assignment]
    """The layout, followed by `extra` live tokens (an answer so far)."""
    flat = Flat([], [], [], [], [])
    columns: list[list[Any]] = list(flat)

    def put(token: int, position: int, owner: int, placed: bool, copy: bool = False) -> None:
        for column, value in zip(columns, (token, position, owner, placed, copy), strict=True):
            column.append(value)

    for number, item in enumerate(layout.items):
        if isinstance(item, LiveRun):
            for i, token in enumerate(item.token_ids):
                put(token, item.offset + i, -1, True)
            continue
        chunk = layout.chunks[item.chunk_id]
        prefix = () if layout.prefix is None or chunk.base == 0 else layout.prefix.token_ids
        assert len(prefix) == chunk.base
        for j, token in enumerate(prefix):
            put(token, j + item.delta, number, False, True)
        for i, token in enumerate(chunk.token_ids):
            used = item.start <= i < item.start + item.length
            put(token, chunk.base + i + item.delta, number, used)
    for i, token in enumerate(extra):
        put(token, len(layout) + i, -1, True)
    return flat


def visible(flat: Flat, window: int | None) -> Tensor:
    """bool [T, T]: may the row token see the column token?"""
    count = len(flat.tokens)
    position = torch.tensor(flat.positions)
    owner = torch.tensor(flat.owner)
    placed = torch.tensor(flat.placed)
    order = torch.arange(count)
    in_chunk = (owner[:, None] == owner[None, :]) & (order[None, :] <= order[:, None]) & (owner[:, None] >= 0)
    from_live = (owner[:, None] < 0) & placed[None, :] & (position[None, :] <= position[:, None])
    seen = in_chunk | from_live
    if window is not None:
        seen &= position[:, None] - position[None, :] < window
    return seen


def _mask(flat: Flat, window: int | None, dtype: torch.dtype) -> Tensor:
    seen = visible(flat, window)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[None, None]


def masks(model: PreTrainedModel, flat: Flat) -> Any:
    """One 4-D mask, or one per layer type where the model keeps several."""
    window = getattr(model.config, "sliding_window", None)
    kinds = set(getattr(model.config, "layer_types", None) or ())
    if "sliding_attention" in kinds and model.config.model_type not in ("mistral", "phi3", "starcoder2", "mixtral"):
        full, sliding = _mask(flat, None, model.dtype), _mask(flat, window, model.dtype)
        return {"full_attention": full, "sliding_attention": sliding}
    if kinds == {"full_attention"}:
        return _mask(flat, None, model.dtype)
    return _mask(flat, window, model.dtype)


def oracle_all(model: PreTrainedModel, layout: PromptLayout, extra: list[int] = ()) -> Tensor:  # type: ignore[assignment]
    """Stock logits [T, vocab] of every flat token, copies and unused ones included."""
    flat = flatten(layout, list(extra))
    shift = max(0, -min(flat.positions))
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor([flat.tokens]),
            position_ids=torch.tensor([flat.positions]) + shift,
            attention_mask=masks(model, flat),
            use_cache=False,
        )
    return output.logits[0]


def oracle_logits(model: PreTrainedModel, layout: PromptLayout, extra: list[int] = ()) -> Tensor:  # type: ignore[assignment]
    """Stock logits [1 + len(extra), vocab] after the layout's last token and after each extra one."""
    return oracle_all(model, layout, extra)[-1 - len(extra) :]


def full_attention_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """The stock model as everyone runs it: logits [vocab] after the last token, no mask, no position ids."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


def tolerance(logits: Tensor) -> float:
    """The contract's bound for CPU float32 up to 2048 positions."""
    return 1e-4 * max(1.0, float(logits.abs().max()) / 10)

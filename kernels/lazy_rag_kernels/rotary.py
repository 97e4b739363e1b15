"""Eager rotation of a block of heads by per-row angles; the meaning of `Rotation` in code."""

from __future__ import annotations

import torch
from torch import Tensor

from lazy_rag_kernels.plan import Rotation


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rotation: Rotation, *, inverse: bool = False) -> Tensor:
    """Turn the rotary dims of `x` by the angles whose cosine and sine are given; other dims pass through.

    Args:
        x: [..., D], any float dtype.
        cos, sin: broadcastable to [..., rotation.dim // 2].
        inverse: turn by the negated angles.

    Returns a new tensor of x's dtype (computed in float32 at least).
    """
    dim, start = rotation.dim, rotation.start
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    sin = -sin if inverse else sin
    block = wide[..., start : start + dim]
    if rotation.pairing == "half":
        a, b = block[..., : dim // 2], block[..., dim // 2 :]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a, b = block[..., 0::2], block[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    if dim == x.shape[-1]:
        return turned.to(x.dtype)
    # the angles may have dims that x lacks (one set per segment), which the product above has added
    wide = wide.expand(*turned.shape[:-1], x.shape[-1])
    return torch.cat((wide[..., :start], turned, wide[..., start + dim :]), dim=-1).to(x.dtype)

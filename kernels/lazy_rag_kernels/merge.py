"""Merging partial attention results by their log-sum-exp (Hydragen, arXiv 2402.05099, eq. 5)."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over a union of disjoint key sets, from the results over each set.

    Args:
        outs: float32 or float64 [parts, ..., D], each normalised over its own keys; anything where lse is -inf.
        lses: same dtype [parts, ...], log of the sum of exponentiated scores; -inf where a part has no visible key.

    Returns (out [..., D], lse [...]); where no part has a visible key, out is 0 and lse is -inf.
    """
    lse = torch.logsumexp(lses, dim=0)
    # -inf - -inf is nan: a row without any key gets weight 0 everywhere
    weights = torch.exp(lses - torch.where(torch.isinf(lse), torch.zeros_like(lse), lse))
    # a part without keys may hold nan or uninitialised memory; 0 * nan would spread
    outs = torch.where(weights.unsqueeze(-1) > 0, outs, torch.zeros_like(outs))
    return (outs * weights.unsqueeze(-1)).sum(dim=0), lse

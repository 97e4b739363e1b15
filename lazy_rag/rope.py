"""Position-free keys: the stored form and the sign convention, stated once. Other files refer to this page.

*Stored form.* A chunk's keys are kept exactly as the model produced them while the chunk was encoded: token i rotated
to its chunk-local position `x = base + i`, where base is the length of the encode prefix. A scaling of cos and sin
(YaRN's attention factor) is part of the stored key.

*Sign.* A segment uses tokens a..b-1 of a chunk with token a at offset S. Its stored keys act as if they stood at
`x + delta`, with `delta = S - base - a`. The model rotates a query at absolute position p as usual, and

    (R(p) q) . (R(x + delta) k)  =  (R(-delta) R(p) q) . (R(x) k),

so attention turns the *query* by **-delta** against stored keys, or the stored key by **+delta** against the query:
the same score (RoFormer, arXiv 2104.09864, eq. 16; LazyAttention, arXiv 2606.04302). R is a pure rotation: the
attention factor is not applied a second time. One rotation, always from the stored original, never accumulated, never
written back.

*Angles.* `delta * inv_freq[i]`, from the model's own float32 frequencies, multiplied in float64, cos and sin stored in
float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from lazy_rag_kernels import Rotation, SegmentAngles
from torch import Tensor


@dataclass(frozen=True)
class LayerRope:
    """How one layer encodes positions: which dims turn, and by which frequency set."""

    rotation: Rotation
    frequencies: str


@dataclass(frozen=True)
class RopeTable:
    """The position encoding of a whole model: its distinct frequency sets, and one entry per layer (None: no RoPE)."""

    inv_freq: dict[str, Tensor]  # name to float64 [rotary dim / 2], on the host
    layers: tuple[LayerRope | None, ...]
    _copies: dict[torch.device, dict[str, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def angles(self, deltas: Sequence[int], device: torch.device) -> dict[str, SegmentAngles]:
        """cos and sin of `delta * inv_freq` for each segment, float32 [S, rotary dim / 2], per frequency set."""
        steps = torch.tensor(deltas, dtype=torch.float64)[:, None]
        tables = {}
        for name, inv_freq in self.inv_freq.items():
            angle = steps * inv_freq[None, :]
            both = torch.stack((angle.cos(), angle.sin())).to(torch.float32)
            if device.type == "cuda":  # from pageable memory the copy would wait for what runs there
                both = both.pin_memory()
            both = both.to(device, non_blocking=True)
            tables[name] = SegmentAngles(both[0], both[1])
        return tables

    def refresh(self, tables: dict[str, SegmentAngles], deltas: Tensor) -> None:
        """`angles` on the device, in place: `deltas` int32 [S], tables as `angles` returns them."""
        steps = deltas.to(torch.float64)[:, None]
        for name, table in tables.items():
            angle = steps * self.on(deltas.device)[name]
            table.cos.copy_(angle.cos())
            table.sin.copy_(angle.sin())

    def on(self, device: torch.device) -> dict[str, Tensor]:
        """The frequencies on a device, copied there once."""
        if device not in self._copies:
            self._copies[device] = {name: inv_freq.to(device) for name, inv_freq in self.inv_freq.items()}
        return self._copies[device]

    def describe(self) -> str:
        """A stable text of everything here, for keys."""
        parts = [f"{name}={self.inv_freq[name].tolist()}" for name in sorted(self.inv_freq)]
        return "; ".join((*parts, *(str(layer) for layer in self.layers)))


def segment_delta(offset: int, base: int, start: int) -> int:
    """The one integer that places a segment: token `start` of a chunk stored from `base` acts at `offset`."""
    return offset - base - start

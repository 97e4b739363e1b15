"""Launching the warp-specialised partial kernel of `gluon_kernels`: on which devices, for which layers, with what.

Everything it does not take goes to `triton_kernels.partial_kernel`, which computes the same from the same tables.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError

from lazy_rag_kernels.plan import LayerPages

if TYPE_CHECKING:
    from lazy_rag_kernels.triton_schedule import Slab, TritonState

logger = logging.getLogger(__name__)

HEAD_DIMS = (64, 128)
# sequences of a step whose tiles have 16 packed rows (decoding, for most models) up to which they are for this kernel.
# Of 1, 2, 4, 8 and 32 that were measured (kernels/NOTES.md), 8 gain where chunks are short or shared and nothing where
# they are long and distinct; 32 lose, as it multiplies 64 rows where a request has four and meets the power limit
MOST_SEQUENCES = 8


class TileSizes(NamedTuple):
    """What fits a multiprocessor: 227 KiB of shared memory, 64 Ki registers."""

    block_n: int  # keys of a block
    ring_bytes: int  # of the blocks of K and V held ahead
    registers: int | None  # of a thread at the start; None: what the compiler finds
    programs: int  # that run at once

    def stages(self, dim: int) -> int:
        """Blocks of 16-bit K and V in the ring."""
        return self.ring_bytes // (self.block_n * 2 * dim * 2)


# tiles of up to 64 packed rows, one warpgroup; of 128, two
ONE_GROUP = TileSizes(block_n=64, ring_bytes=96 << 10, registers=128, programs=2)
TWO_GROUPS = TileSizes(block_n=128, ring_bytes=192 << 10, registers=None, programs=1)


def sizes_of(block_m: int) -> TileSizes:
    """For tiles of so many packed rows, 128 at most."""
    return TWO_GROUPS if block_m == 128 else ONE_GROUP


@dataclass
class _Installed:
    """`gluon_kernels`, or None where the installed Triton lacks what it needs. One for the process, as Triton is."""

    kernels: ModuleType | None

    def give_up(self) -> None:
        """Gluon is experimental: names move and passes change. The portable kernel does the same, more slowly."""
        logger.warning("this Triton does not take the warp-specialised kernel, the portable one runs", exc_info=True)
        self.kernels = None


@cache
def _installed() -> _Installed:
    installed = _Installed(None)
    try:
        from lazy_rag_kernels import gluon_kernels
    except Exception:  # noqa: BLE001  what an import of moved names raises differs from version to version
        installed.give_up()
    else:
        installed.kernels = gluon_kernels
    return installed


def available(device: torch.device) -> bool:
    """Whether the kernel runs on a CUDA device: Hopper, and a Triton that has its operations."""
    return torch.cuda.get_device_capability(device)[0] == 9 and _installed().kernels is not None


def takes(q: Tensor, pages: LayerPages, block_m: int, window: int | None) -> bool:
    """Whether the kernel takes a layer of head dims and tiles that it was made for (`TileShape.specialized`).

    A window hides most of a long context: the portable kernel looks for the part that is left, this one does not.
    """
    page_size = pages.k.shape[1]
    return (
        window is None
        and page_size % 8 == 0
        and sizes_of(block_m).block_n % page_size == 0
        and all(
            x.dtype == q.dtype
            and x.stride()[2:] == (x.shape[3], 1)
            and x.data_ptr() % 16 == 0
            and all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:2])
            for x in (pages.k, pages.v)
        )
    )


def launch_partial(
    q: Tensor,
    pages: LayerPages,
    state: TritonState,
    slab: Slab,
    part_out: Tensor,
    part_lse: Tensor,
    layer: dict[str, Any],
    fields: tuple[int, int],
) -> bool:
    """The partial results of a slab, or False with nothing launched: the installed Triton does not compile the kernel.

    Args:
        layer: as for the portable kernel.
        fields: of a program, of a work item.
    """
    installed = _installed()
    kernels = installed.kernels
    if kernels is None:
        return False
    _, heads, dim = q.shape
    kv_heads, page_size = pages.k.shape[2], state.plan.page_size
    block_m = part_out.shape[2]
    sizes = sizes_of(block_m)
    # 16-bit boxes of a page's slots and 64 dims
    box = kernels.gl.NVMMASharedLayout(128, 16, 3)
    k_desc, v_desc = (
        kernels.TensorDescriptor(
            x, [x.shape[0], page_size, kv_heads * dim], [x.stride(0), x.stride(1), 1], [1, page_size, 64], box
        )
        for x in (pages.k, pages.v)
    )
    # without a rotation no table is read
    cos, sin = (part_lse, part_lse) if layer["cos"] is None else (layer["cos"], layer["sin"])
    launch = kernels.specialized_partial_kernel[(kv_heads, len(slab.programs))]
    try:
        launch(
            k_desc=k_desc,
            v_desc=v_desc,
            q=q,
            positions=state.plan.positions,
            stored_positions=state.stored_positions,
            pages=state.pages,
            programs=slab.programs,
            work=slab.work,
            cos=cos,
            sin=sin,
            part_out=part_out,
            part_lse=part_lse,
            # Triton makes an integer 1 a constant, which the kernel does not take
            scaling=float(layer["scaling"]),
            q_stride_row=q.stride(0),
            q_stride_head=q.stride(1),
            HKV=kv_heads,
            G=heads // kv_heads,
            D=dim,
            P=page_size,
            ROTARY_START=layer["ROTARY_START"],
            ROTARY_DIM=layer["ROTARY_DIM"],
            INTERLEAVED=layer["INTERLEAVED"],
            SOFTCAP=layer["SOFTCAP"] or 0.0,
            BLOCK_M=block_m,
            BLOCK_N=sizes.block_n,
            STAGES=sizes.stages(dim),
            PROGRAM_FIELDS=fields[0],
            WORK_FIELDS=fields[1],
            OVERLAPPED=state.limits.overlaps,
            num_warps=4,
            maxnreg=sizes.registers,
        )
    except Exception as error:
        # what a compiler raises differs too: a failed pass is a plain RuntimeError; what the device raises is no reason
        # to go on
        if not isinstance(error, TritonError) and "CUDA" in str(error):
            raise
        installed.give_up()
        return False
    return True

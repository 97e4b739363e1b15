"""The partial kernel on Hopper, warp-specialised, in Gluon.

The same programs, work items and results as `triton_kernels.partial_kernel`, whose names this file uses. One warp
copies K and V, page by page, into a ring of shared memory (bulk tensor copies that complete on barriers); a warpgroup,
or two for a tile of 128 packed rows, take them from there. Each issues Q K^T of the next block of keys before the
softmax of this one, and two take turns at it, so that the tensor cores work while exponentials are taken
(FlashAttention-3, arXiv 2407.08608). The Triton compiler waits for Q K^T where it is issued. The copying warp goes on
to the next segment by itself: its keys arrive while the queries are turned for it.

A warpgroup multiplies 64 rows, whatever the tile has. Those beyond the tile hold anything, and nothing reads what
becomes of them.

The last page of a segment may be partly filled, with anything in its other slots. Its copy begins at a negative slot:
what lies outside the tensor arrives as zeros, in front, and the filled slots stand at the end of the page's rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, call-arg"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TensorDescriptor
from triton.language import core
from triton.language.extra.cuda import gdc_launch_dependents

# renamed or made public after Triton 3.6
_aggregate = getattr(gluon, "aggregate", None) or core._aggregate
_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

# renamed likewise
_REINTERPRET: gl.constexpr = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)
# 16-bit dims in a row of the 128-byte swizzle, and so in a box of a copy
COLUMNS: gl.constexpr = gl.constexpr(64)
# packed rows of a warpgroup
GROUP_ROWS: gl.constexpr = gl.constexpr(64)
# beyond every position: layouts bound positions and deltas (`lazy_rag.layout.LIMIT`)
FAR: gl.constexpr = gl.constexpr(2**30)


def _struct(cls):
    """Annotated fields that travel as one argument. Triton 3.6 asks for the __init__ that later versions make."""
    names = tuple(cls.__annotations__)

    def __init__(self, *values):
        for name, value in zip(names, values, strict=True):
            setattr(self, name, value)

    # a function that kernels may call while they are compiled
    __init__.__triton_builtin__ = True
    cls.__init__ = __init__
    return _aggregate(cls)


@_struct
class Sizes:
    """What the kernel is compiled for, named as its parameters."""

    Q_STRIDE_ROW: gl.constexpr
    Q_STRIDE_HEAD: gl.constexpr
    HKV: gl.constexpr
    G: gl.constexpr
    D: gl.constexpr
    P: gl.constexpr
    ROTARY_START: gl.constexpr
    ROTARY_DIM: gl.constexpr
    INTERLEAVED: gl.constexpr
    SOFTCAP: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr
    WORK_FIELDS: gl.constexpr
    OVERLAPPED: gl.constexpr


@_struct
class Ring:
    """Blocks of K and V in shared memory, and barriers: a block has arrived, its place is free again."""

    k_boxes: gl.shared_memory_descriptor
    v_boxes: gl.shared_memory_descriptor
    k_ready: gl.shared_memory_descriptor
    k_free: gl.shared_memory_descriptor
    v_ready: gl.shared_memory_descriptor
    v_free: gl.shared_memory_descriptor


@_struct
class Task:
    """The tensors of a launch, and which part of its work is this program's."""

    q: gl.tensor
    positions: gl.tensor
    stored_positions: gl.tensor
    pages: gl.tensor
    work: gl.tensor
    cos: gl.tensor
    sin: gl.tensor
    part_out: gl.tensor
    part_lse: gl.tensor
    scaling: gl.tensor
    work_begin: gl.tensor
    work_end: gl.tensor
    i_hkv: gl.tensor


@gluon.jit
def _reinterpreted(shared, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    if _REINTERPRET:
        return shared.reinterpret(shared.dtype, SHAPE, LAYOUT)
    else:
        return shared._reinterpret(shared.dtype, SHAPE, LAYOUT)


@gluon.jit
def _advance(stage, phase, STAGES: gl.constexpr):
    stage += 1
    wrapped = stage == STAGES
    return gl.where(wrapped, 0, stage), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def _copy_block(desc, boxes, ready, base, ids, left, column, WHOLE: gl.constexpr, D: gl.constexpr, P: gl.constexpr):
    """Copy K or V of a block, of which `left` keys are left in the work item, to its boxes in the ring."""
    PAGES: gl.constexpr = len(ids)
    mbarrier.expect(ready, PAGES * P * D * 2)
    for i in gl.static_range(PAGES):
        slot = 0 if WHOLE else gl.minimum(gl.maximum(left - i * P, 0), P) - P
        for h in gl.static_range(D // COLUMNS):
            _tma_load(desc, [ids[i], slot, column + h * COLUMNS], ready, boxes.index(base + h * PAGES + i))


@gluon.jit
def _produce(k_desc, v_desc, ring, task, sizes):
    """Copy the K and V of all blocks of a program's work items, as room in the ring becomes free."""
    D: gl.constexpr = sizes.D
    P: gl.constexpr = sizes.P
    BLOCK_N: gl.constexpr = sizes.BLOCK_N
    PAGES: gl.constexpr = BLOCK_N // P
    column = task.i_hkv * D
    stage = 0
    phase = 0
    for i_w in range(task.work_begin, task.work_end):
        p_work = task.work + i_w * sizes.WORK_FIELDS
        p_pages = task.pages + gl.load(p_work + 1)
        key_start = gl.load(p_work + 2)
        key_end = gl.load(p_work + 3)
        last_page = (key_end - 1) // P
        for start in range(key_start, key_end, BLOCK_N):
            # before the wait, so that they arrive during it
            ids = ()
            for i in gl.static_range(PAGES):
                ids += (gl.load(p_pages + gl.minimum(start // P + i, last_page)),)
            base = stage * (PAGES * (D // COLUMNS))
            left = key_end - start
            mbarrier.wait(ring.k_free.index(stage), phase ^ 1)
            # slots are computed in a segment's last block only: it cost several percent in every block (NOTES.md)
            if left >= BLOCK_N:
                _copy_block(k_desc, ring.k_boxes, ring.k_ready.index(stage), base, ids, left, column, True, D, P)
                mbarrier.wait(ring.v_free.index(stage), phase ^ 1)
                _copy_block(v_desc, ring.v_boxes, ring.v_ready.index(stage), base, ids, left, column, True, D, P)
            else:
                _copy_block(k_desc, ring.k_boxes, ring.k_ready.index(stage), base, ids, left, column, False, D, P)
                mbarrier.wait(ring.v_free.index(stage), phase ^ 1)
                _copy_block(v_desc, ring.v_boxes, ring.v_ready.index(stage), base, ids, left, column, False, D, P)
            stage, phase = _advance(stage, phase, sizes.STAGES)


@gluon.jit
def _store_turned_back(
    boxes,
    p_row,
    m_row,
    p_cos,
    p_sin,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    ROTARY_START: gl.constexpr,
    ROTARY_DIM: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Rows [ROWS, D] at pointers `p_row`, their rotary dims turned by the negated angles of one segment, to the first
    rows of `boxes`."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # pieces of a box of 64 rows
    PIECES: gl.constexpr = GROUP_ROWS // ROWS
    boxes = _reinterpreted(boxes, [D // COLUMNS * PIECES, ROWS, COLUMNS], TILE)
    b_x = ()
    b_partner = ()
    b_cos = ()
    b_sin = ()
    # all loads before the first use: they wait for one another only
    for h in gl.static_range(D // COLUMNS):
        o_d = h * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
        # [ROWS, COLUMNS]
        b_x += (gl.load(gl.expand_dims(p_row, 1) + gl.expand_dims(o_d, 0), mask=gl.expand_dims(m_row, 1), other=0.0),)
        if ROTARY_DIM > 0:
            o_r = o_d - ROTARY_START
            m_r = (o_r >= 0) & (o_r < ROTARY_DIM)
            if INTERLEAVED:
                m_first = o_r % 2 == 0
                o_pair = o_r // 2
                o_partner = gl.where(m_first, o_d + 1, o_d - 1)
            else:
                m_first = o_r < ROTARY_DIM // 2
                o_pair = gl.where(m_first, o_r, o_r - ROTARY_DIM // 2)
                o_partner = gl.where(m_first, o_d + ROTARY_DIM // 2, o_d - ROTARY_DIM // 2)
            m_partner = gl.expand_dims(m_row, 1) & gl.expand_dims(m_r, 0)
            # [ROWS, COLUMNS]
            b_partner += (gl.load(gl.expand_dims(p_row, 1) + gl.expand_dims(o_partner, 0), mask=m_partner, other=0.0),)
            # [COLUMNS]
            b_cos += (gl.load(p_cos + o_pair, mask=m_r, other=1.0),)
            # [COLUMNS]
            b_s = gl.load(p_sin + o_pair, mask=m_r, other=0.0)
            b_sin += (gl.where(m_first, b_s, -b_s),)
    for h in gl.static_range(D // COLUMNS):
        if ROTARY_DIM > 0:
            b_turned = b_x[h].to(gl.float32) * gl.expand_dims(b_cos[h], 0)
            b_turned += b_partner[h].to(gl.float32) * gl.expand_dims(b_sin[h], 0)
            boxes.index(h * PIECES).store(b_turned.to(b_x[h].dtype))
        else:
            boxes.index(h * PIECES).store(b_x[h])


@gluon.jit
def _softcapped(b_s, CAP: gl.constexpr):
    """CAP * tanh(b_s / CAP)."""
    b_x = b_s / CAP
    b_e = gl.exp(-2.0 * gl.abs(b_x))
    b_tanh = (1.0 - b_e) / (1.0 + b_e)
    return CAP * gl.where(b_x < 0, -b_tanh, b_tanh)


@gluon.jit
def _softmax_step(b_s, b_m, b_l, scaling, SOFTCAP: gl.constexpr):
    """Weights of a block of scores that every row sees, and the state after it."""
    if SOFTCAP == 0:
        scale_log2 = scaling * LOG2E
    else:
        b_s = _softcapped(b_s * scaling, SOFTCAP)
        scale_log2 = LOG2E
    b_m_new = gl.maximum(b_m, gl.max(b_s, axis=1) * scale_log2)
    b_p = gl.exp2(b_s * scale_log2 - gl.expand_dims(b_m_new, 1))
    b_scale = gl.exp2(b_m - b_m_new)
    b_l = b_l * b_scale + gl.sum(b_p, axis=1)
    return b_p, b_scale, b_m_new, b_l


@gluon.jit
def _consume(q_boxes, ring, turns, task, sizes, GROUP: gl.constexpr):
    """Rows GROUP * 64 ... of the tile over a program's work items. `turns`: barriers of two that alternate;
    one alone does not read them."""
    D: gl.constexpr = sizes.D
    P: gl.constexpr = sizes.P
    BLOCK_N: gl.constexpr = sizes.BLOCK_N
    G: gl.constexpr = sizes.G
    # of the tile, in this warpgroup
    ROWS: gl.constexpr = min(sizes.BLOCK_M, GROUP_ROWS)
    ALTERNATING: gl.constexpr = sizes.BLOCK_M > GROUP_ROWS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    N_LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    OPERAND: gl.constexpr = task.q.dtype.element_ty
    q_shared = _reinterpreted(q_boxes, [1, GROUP_ROWS, D], TILE).index(0)
    k_shared = _reinterpreted(ring.k_boxes, [sizes.STAGES, BLOCK_N, D], TILE)
    v_shared = _reinterpreted(ring.v_boxes, [sizes.STAGES, BLOCK_N, D], TILE)

    # [M]
    b_m = gl.full([GROUP_ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    # [M]
    b_l = gl.zeros([GROUP_ROWS], gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    # [M, N]
    b_zero = gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, layout=S_LAYOUT)
    # [M, D]
    b_acc = gl.zeros([GROUP_ROWS, D], gl.float32, layout=O_LAYOUT)
    stage = 0
    phase = 0
    # of the barrier that says it is this warpgroup's turn; the first begins
    turn = 1 - GROUP
    for i_w in range(task.work_begin, task.work_end):
        p_work = task.work + i_w * sizes.WORK_FIELDS
        segment = gl.load(p_work)
        p_pages = task.pages + gl.load(p_work + 1)
        key_start = gl.load(p_work + 2)
        key_end = gl.load(p_work + 3)
        delta = gl.load(p_work + 4)
        hidden = gl.load(p_work + 5)
        row_start = gl.load(p_work + 6)
        row_end = gl.load(p_work + 7)
        # [ROWS]
        o_m = GROUP * GROUP_ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, Q_LAYOUT))
        o_row = row_start + o_m // G
        o_head = task.i_hkv * G + o_m % G
        p_row = task.q + o_row.to(gl.int64) * sizes.Q_STRIDE_ROW + o_head.to(gl.int64) * sizes.Q_STRIDE_HEAD
        o_angle = segment.to(gl.int64) * (sizes.ROTARY_DIM // 2)
        _store_turned_back(
            q_boxes,
            p_row,
            o_row < row_end,
            task.cos + o_angle,
            task.sin + o_angle,
            ROWS,
            D,
            sizes.ROTARY_START,
            sizes.ROTARY_DIM,
            sizes.INTERLEAVED,
            Q_LAYOUT,
        )
        fence_async_shared()
        _barrier()

        blocks = gl.where(hidden == 0, (key_end - key_start) // BLOCK_N, 0)
        if blocks > 0:
            mbarrier.wait(ring.k_ready.index(stage), phase)
            b_s = warpgroup_mma(q_shared, k_shared.index(stage).permute((1, 0)), b_zero, use_acc=False, is_async=True)
            b_s = warpgroup_mma_wait(0, deps=(b_s,))
            mbarrier.arrive(ring.k_free.index(stage))
            b_p, b_scale, b_m, b_l = _softmax_step(b_s, b_m, b_l, task.scaling, sizes.SOFTCAP)
            b_acc = b_acc * gl.expand_dims(gl.convert_layout(b_scale, gl.SliceLayout(1, O_LAYOUT)), 1)
            b_w = gl.convert_layout(b_p.to(OPERAND), P_LAYOUT)
            for _ in range(1, blocks):
                next_stage, next_phase = _advance(stage, phase, sizes.STAGES)
                mbarrier.wait(ring.k_ready.index(next_stage), next_phase)
                if ALTERNATING:
                    mbarrier.wait(turns.index(GROUP), turn)
                    turn ^= 1
                b_s = warpgroup_mma(
                    q_shared, k_shared.index(next_stage).permute((1, 0)), b_zero, use_acc=False, is_async=True
                )
                mbarrier.wait(ring.v_ready.index(stage), phase)
                b_next = warpgroup_mma(b_w, v_shared.index(stage), b_acc, is_async=True)
                if ALTERNATING:
                    mbarrier.arrive(turns.index(1 - GROUP))
                b_s = warpgroup_mma_wait(1, deps=(b_s,))
                mbarrier.arrive(ring.k_free.index(next_stage))
                b_p, b_scale, b_m, b_l = _softmax_step(b_s, b_m, b_l, task.scaling, sizes.SOFTCAP)
                b_acc = warpgroup_mma_wait(0, deps=(b_next,))
                mbarrier.arrive(ring.v_free.index(stage))
                b_acc = b_acc * gl.expand_dims(gl.convert_layout(b_scale, gl.SliceLayout(1, O_LAYOUT)), 1)
                b_w = gl.convert_layout(b_p.to(OPERAND), P_LAYOUT)
                stage = next_stage
                phase = next_phase
            mbarrier.wait(ring.v_ready.index(stage), phase)
            b_next = warpgroup_mma(b_w, v_shared.index(stage), b_acc, is_async=True)
            b_acc = warpgroup_mma_wait(0, deps=(b_next,))
            mbarrier.arrive(ring.v_free.index(stage))
            stage, phase = _advance(stage, phase, sizes.STAGES)

        # [M]
        o_m_s = GROUP * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
        o_row_s = row_start + o_m_s // G
        # where every row sees every key, the rest of a block is all that is masked
        b_pos = gl.load(task.positions + o_row_s, mask=(o_row_s < row_end) & (hidden != 0), other=0).to(gl.int32)
        for start in range(key_start + blocks * BLOCK_N, key_end, BLOCK_N):
            # [N]
            o_n = gl.arange(0, BLOCK_N, layout=N_LAYOUT)
            o_page = start // P + o_n // P
            # what is copied of a partly filled page stands at the end of its rows
            o_slot = o_n % P - (P - gl.minimum(gl.maximum(key_end - o_page * P, 0), P))
            m_n = (o_slot >= 0) & (hidden != 0)
            b_page = gl.load(p_pages + o_page, mask=m_n, other=0)
            b_key_pos = gl.load(task.stored_positions + b_page.to(gl.int64) * P + o_slot, mask=m_n, other=-FAR) + delta
            b_key_pos = gl.convert_layout(gl.where(o_slot >= 0, b_key_pos, FAR), gl.SliceLayout(0, S_LAYOUT))
            m_s = gl.expand_dims(b_key_pos, 0) <= gl.expand_dims(b_pos, 1)
            mbarrier.wait(ring.k_ready.index(stage), phase)
            b_s = warpgroup_mma(q_shared, k_shared.index(stage).permute((1, 0)), b_zero, use_acc=False, is_async=True)
            b_s = warpgroup_mma_wait(0, deps=(b_s,))
            mbarrier.arrive(ring.k_free.index(stage))
            if sizes.SOFTCAP == 0:
                scale_log2 = task.scaling * LOG2E
            else:
                b_s = _softcapped(b_s * task.scaling, sizes.SOFTCAP)
                scale_log2 = LOG2E
            b_s = gl.where(m_s, b_s, float("-inf"))
            b_m_new = gl.maximum(b_m, gl.max(b_s, axis=1) * scale_log2)
            # -inf - -inf is nan: a row that has seen no key yet subtracts 0
            b_shift = gl.where(b_m_new == float("-inf"), 0.0, b_m_new)
            b_p = gl.exp2(b_s * scale_log2 - gl.expand_dims(b_shift, 1))
            b_scale = gl.exp2(b_m - b_shift)
            b_l = b_l * b_scale + gl.sum(b_p, axis=1)
            b_m = b_m_new
            b_acc = b_acc * gl.expand_dims(gl.convert_layout(b_scale, gl.SliceLayout(1, O_LAYOUT)), 1)
            mbarrier.wait(ring.v_ready.index(stage), phase)
            b_w = gl.convert_layout(b_p.to(OPERAND), P_LAYOUT)
            b_next = warpgroup_mma(b_w, v_shared.index(stage), b_acc, is_async=True)
            b_acc = warpgroup_mma_wait(0, deps=(b_next,))
            mbarrier.arrive(ring.v_free.index(stage))
            stage, phase = _advance(stage, phase, sizes.STAGES)

    if sizes.OVERLAPPED:
        gdc_launch_dependents()
    p_work = task.work + task.work_begin * sizes.WORK_FIELDS
    row_start = gl.load(p_work + 6)
    row_end = gl.load(p_work + 7)
    place = gl.load(p_work + 8)
    # a row that saw no key: 0, and log-sum-exp -inf from b_m
    b_l = gl.where(b_l > 0, b_l, 1.0)
    o_m = GROUP * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    o_part = (place * sizes.HKV + task.i_hkv).to(gl.int64) * sizes.BLOCK_M
    gl.store(task.part_lse + o_part + o_m, b_m + gl.log2(b_l), mask=row_start + o_m // G < row_end)
    o_m = GROUP * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, O_LAYOUT))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, O_LAYOUT))
    p_out = task.part_out + o_part * D + gl.expand_dims(o_m, 1) * D + gl.expand_dims(o_d, 0)
    m_row = gl.expand_dims(row_start + o_m // G < row_end, 1)
    b_out = b_acc / gl.expand_dims(gl.convert_layout(b_l, gl.SliceLayout(1, O_LAYOUT)), 1)
    gl.store(p_out, b_out, mask=m_row)


@gluon.jit
def specialized_partial_kernel(
    k_desc,
    v_desc,
    q,
    positions,
    stored_positions,
    pages,
    programs,
    work,
    cos,
    sin,
    part_out,
    part_lse,
    scaling,
    q_stride_row: gl.constexpr,
    q_stride_head: gl.constexpr,
    HKV: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    P: gl.constexpr,
    ROTARY_START: gl.constexpr,
    ROTARY_DIM: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    SOFTCAP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    PROGRAM_FIELDS: gl.constexpr,
    WORK_FIELDS: gl.constexpr,
    OVERLAPPED: gl.constexpr,
):
    """See `triton_kernels.partial_kernel`: 16, 32, 64 or 128 packed rows, 16-bit K and V of equal head dims, no window.

    `BLOCK_N` keys, a multiple of the P of a page, make a block, and `STAGES` blocks the ring.
    """
    HALVES: gl.constexpr = D // COLUMNS
    OPERAND: gl.constexpr = q.dtype.element_ty
    BOX: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    GROUPS: gl.constexpr = 2 if BLOCK_M > GROUP_ROWS else 1
    i_hkv = gl.program_id(0)
    i_p = gl.program_id(1)
    work_begin = gl.load(programs + i_p * PROGRAM_FIELDS)
    work_end = gl.load(programs + i_p * PROGRAM_FIELDS + 1)
    if work_begin == work_end:
        return
    boxes: gl.constexpr = STAGES * HALVES * (BLOCK_N // P)
    ring = Ring(
        gl.allocate_shared_memory(OPERAND, [boxes, 1, P, COLUMNS], BOX),
        gl.allocate_shared_memory(OPERAND, [boxes, 1, P, COLUMNS], BOX),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(ring.k_ready.index(i), count=1)
        mbarrier.init(ring.v_ready.index(i), count=1)
        # every warpgroup
        mbarrier.init(ring.k_free.index(i), count=GROUPS)
        mbarrier.init(ring.v_free.index(i), count=GROUPS)
    task = Task(
        q,
        positions,
        stored_positions,
        pages,
        work,
        cos,
        sin,
        part_out,
        part_lse,
        scaling,
        work_begin,
        work_end,
        i_hkv,
    )
    sizes = Sizes(
        q_stride_row,
        q_stride_head,
        HKV,
        G,
        D,
        P,
        ROTARY_START,
        ROTARY_DIM,
        INTERLEAVED,
        SOFTCAP,
        BLOCK_M,
        BLOCK_N,
        STAGES,
        WORK_FIELDS,
        OVERLAPPED,
    )
    q_first = gl.allocate_shared_memory(OPERAND, [HALVES, GROUP_ROWS, COLUMNS], TILE)
    # last: warps, and registers of a thread, beside the first warpgroup
    if GROUPS == 2:
        q_second = gl.allocate_shared_memory(OPERAND, [HALVES, GROUP_ROWS, COLUMNS], TILE)
        turns = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
        mbarrier.init(turns.index(0), count=1)
        mbarrier.init(turns.index(1), count=1)
        gl.warp_specialize(
            [
                (_consume, (q_first, ring, turns, task, sizes, 0)),
                (_consume, (q_second, ring, turns, task, sizes, 1)),
                (_produce, (k_desc, v_desc, ring, task, sizes)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        # k_free stands in for turns, which one group does not read: Triton 3.6 gave barriers that nobody used the
        # memory of values passed between warps
        gl.warp_specialize(
            [
                (_consume, (q_first, ring, ring.k_free, task, sizes, 0)),
                (_produce, (k_desc, v_desc, ring, task, sizes)),
            ],
            [1],
            [24],
        )

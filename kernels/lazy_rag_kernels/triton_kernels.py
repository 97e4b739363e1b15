"""Triton kernels of segment attention: partial results per work item, and their merge by log-sum-exp.

Names: i_ program and loop indices, o_ offsets, m_ masks, p_ pointers, b_ blocks; sizes in upper case. M counts the
packed rows of a tile: a row's G query heads of one KV head lie next to one another, (row, g) at row * G + g. The
launchers in `triton_attention` check what the kernels assume.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
# positions looked at in one go when a work item searches for its visible keys
SCAN: tl.constexpr = tl.constexpr(512)
# `hidden` of a work item: every row sees all its keys (0), or some key is hidden from some row
SOME_HIDDEN: tl.constexpr = tl.constexpr(1)


@triton.jit
def _load_turned_back(
    p_row,
    m_row,
    o_d,
    p_cos,
    p_sin,
    D: tl.constexpr,
    ROTARY_START: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ACC: tl.constexpr,
):
    """Rows [M, D] at pointers `p_row`, their rotary dims turned by the negated angles of one segment, as ACC."""
    o_r = o_d - ROTARY_START
    m_r = (o_r >= 0) & (o_r < ROTARY_DIM)
    if INTERLEAVED:
        m_first = o_r % 2 == 0
        o_pair = o_r // 2
        o_partner = tl.where(m_first, o_d + 1, o_d - 1)
    else:
        m_first = o_r < ROTARY_DIM // 2
        o_pair = tl.where(m_first, o_r, o_r - ROTARY_DIM // 2)
        o_partner = tl.where(m_first, o_d + ROTARY_DIM // 2, o_d - ROTARY_DIM // 2)
    # [M, D]
    b_x = tl.load(p_row[:, None] + o_d[None, :], mask=m_row[:, None] & (o_d < D)[None, :], other=0.0).to(ACC)
    # [M, D]
    b_partner = tl.load(p_row[:, None] + o_partner[None, :], mask=m_row[:, None] & m_r[None, :], other=0.0).to(ACC)
    # [D]
    b_cos = tl.load(p_cos + o_pair, mask=m_r, other=1.0).to(ACC)
    # [D]
    b_sin = tl.load(p_sin + o_pair, mask=m_r, other=0.0).to(ACC)
    b_sin = tl.where(m_first, b_sin, -b_sin)
    return b_x * b_cos[None, :] + b_partner * b_sin[None, :]


@triton.jit
def _softcapped(b_s, CAP: tl.constexpr):
    """CAP * tanh(b_s / CAP)."""
    b_x = b_s / CAP
    b_e = tl.exp(-2.0 * tl.abs(b_x))
    b_tanh = (1.0 - b_e) / (1.0 + b_e)
    return CAP * tl.where(b_x < 0, -b_tanh, b_tanh)


@triton.jit
def _attend(
    b_q,
    b_m,
    b_l,
    b_acc,
    key_start,
    key_end,
    p_k_head,
    p_v_head,
    p_pages,
    stored_positions,
    delta,
    b_pos,
    scaling,
    window,
    k_stride_page: tl.constexpr,
    k_stride_slot: tl.constexpr,
    v_stride_page: tl.constexpr,
    v_stride_slot: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    P: tl.constexpr,
    SOFTCAP: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Continue an online softmax (b_m, b_l, b_acc) over the keys `key_start : key_end` of a segment.

    Unmasked, every row sees every key and the keys are whole blocks: nothing is read but page ids, K and V. The loop
    has no branches and carries the next block's page ids, so that K and V of later blocks load without waiting.
    """
    o_dk = tl.arange(0, BLOCK_DK)
    o_dv = tl.arange(0, BLOCK_DV)
    scale_log2 = tl.full([], LOG2E, b_l.dtype)
    if SOFTCAP is None:
        scale_log2 *= scaling
    o_n = key_start + tl.arange(0, BLOCK_N)
    # [N]
    b_page = tl.load(p_pages + o_n // P, mask=o_n < key_end, other=0)
    # without a window, masked blocks are few: buffers for loading ahead would only take registers from the other loop
    for start in tl.range(key_start, key_end, BLOCK_N, num_stages=1 if MASKED and window is None else None):
        o_n = start + tl.arange(0, BLOCK_N)
        # where blocks begin with a page, slots are the same in every block
        o_slot = (tl.arange(0, BLOCK_N) % P if BLOCK_N % P == 0 else o_n % P).to(tl.int64)
        # K and V of equal strides share these offsets
        o_k = b_page.to(tl.int64) * k_stride_page + o_slot * k_stride_slot
        o_v = b_page.to(tl.int64) * v_stride_page + o_slot * v_stride_slot
        p_k = p_k_head + o_k[:, None] + o_dk[None, :]
        p_v = p_v_head + o_v[:, None] + o_dv[None, :]
        m_k = (o_dk < DK)[None, :]
        m_v = (o_dv < DV)[None, :]
        if MASKED:
            m_k = m_k & (o_n < key_end)[:, None]
            m_v = m_v & (o_n < key_end)[:, None]
            # [N]
            b_stored = tl.load(stored_positions + b_page.to(tl.int64) * P + o_slot, mask=o_n < key_end, other=0)
            b_key_pos = b_stored + delta
        o_next = o_n + BLOCK_N
        b_page = tl.load(p_pages + o_next // P, mask=o_next < key_end, other=0)
        # [N, DK]
        b_k = tl.load(p_k, mask=m_k, other=0.0) if MASKED or DK < BLOCK_DK else tl.load(p_k)
        # [M, N]
        b_s = tl.dot(b_q, tl.trans(b_k.to(OPERAND)), input_precision="ieee")
        if SOFTCAP is not None:
            b_s = _softcapped(b_s * scaling, SOFTCAP)
        if MASKED:
            m_s = (o_n < key_end)[None, :] & (b_key_pos[None, :] <= b_pos[:, None])
            if window is not None:
                m_s = m_s & (b_pos[:, None] - b_key_pos[None, :] < window)
            b_s = tl.where(m_s, b_s, float("-inf"))
        # [M]
        b_m_new = tl.maximum(b_m, tl.max(b_s, axis=1) * scale_log2)
        # -inf - -inf is nan: a row that has seen no key yet subtracts 0
        b_shift = tl.where(b_m_new == float("-inf"), 0.0, b_m_new) if MASKED else b_m_new
        # [M, N]
        b_p = tl.exp2(b_s * scale_log2 - b_shift[:, None])
        b_scale = tl.exp2(b_m - b_shift)
        b_l = b_l * b_scale + tl.sum(b_p, axis=1)
        # [N, DV]
        b_v = tl.load(p_v, mask=m_v, other=0.0) if MASKED or DV < BLOCK_DV else tl.load(p_v)
        b_p = b_p.to(b_v.dtype).to(OPERAND)
        b_acc = tl.dot(b_p, b_v.to(OPERAND), b_acc * b_scale[:, None], input_precision="ieee")
        b_m = b_m_new
    return b_m, b_l, b_acc


@triton.jit
def partial_kernel(
    q,
    k,
    v,
    positions,
    stored_positions,
    pages,
    programs,
    work,
    cos,
    sin,
    turned,
    part_out,
    part_lse,
    scaling,
    window,
    q_stride_row: tl.constexpr,
    q_stride_head: tl.constexpr,
    k_stride_page: tl.constexpr,
    k_stride_slot: tl.constexpr,
    k_stride_head: tl.constexpr,
    v_stride_page: tl.constexpr,
    v_stride_slot: tl.constexpr,
    v_stride_head: tl.constexpr,
    HKV: tl.constexpr,
    G: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    P: tl.constexpr,
    ROTARY_START: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_MASKED: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PROGRAM_FIELDS: tl.constexpr,
    WORK_FIELDS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """One row tile of one KV head over consecutive pieces of its segments: normalised output, base-2 log-sum-exp."""
    ACC: tl.constexpr = part_out.dtype.element_ty
    # heads first: programs without work, for which a captured grid has room, all come after those with work
    i_hkv, i_p = tl.program_id(0), tl.program_id(1)
    p_program = programs + i_p * PROGRAM_FIELDS
    work_begin = tl.load(p_program)
    work_end = tl.load(p_program + 1)
    if work_begin == work_end:
        return

    o_m = tl.arange(0, BLOCK_M)
    o_dk = tl.arange(0, BLOCK_DK)
    p_k_head = k + i_hkv.to(tl.int64) * k_stride_head
    p_v_head = v + i_hkv.to(tl.int64) * v_stride_head
    # [M]
    b_m = tl.full([BLOCK_M], float("-inf"), ACC)
    # [M]
    b_l = tl.zeros([BLOCK_M], ACC)
    # [M, DV]
    b_acc = tl.zeros([BLOCK_M, BLOCK_DV], ACC)
    for i_w in range(work_begin, work_end):
        p_work = work + i_w * WORK_FIELDS
        segment = tl.load(p_work)
        p_pages = pages + tl.load(p_work + 1)
        key_start = tl.load(p_work + 2)
        key_end = tl.load(p_work + 3)
        delta = tl.load(p_work + 4)
        hidden = tl.load(p_work + 5)
        # the same in all work items of a program; read here so that nothing computed from them lives in registers
        # through the loops over keys
        row_start = tl.load(p_work + 6)
        row_end = tl.load(p_work + 7)
        place = tl.load(p_work + 8)
        o_head = i_hkv * G + o_m % G
        o_row = row_start + o_m // G
        m_row = o_row < row_end
        p_row = q + o_row.to(tl.int64) * q_stride_row + o_head.to(tl.int64) * q_stride_head
        # [M, DK]
        if cos is None:
            b_q = tl.load(p_row[:, None] + o_dk[None, :], mask=m_row[:, None] & (o_dk < DK)[None, :], other=0.0)
        else:
            o_angle = segment.to(tl.int64) * (ROTARY_DIM // 2)
            b_q = _load_turned_back(
                p_row, m_row, o_dk, cos + o_angle, sin + o_angle, DK, ROTARY_START, ROTARY_DIM, INTERLEAVED, ACC
            ).to(q.dtype.element_ty)
        if turned is not None:
            # Hopper multiplies straight from shared memory only what was loaded as it stands; Triton copies a computed
            # operand to registers again for every key block, so it goes out and back through L2 (gain: NOTES.md)
            o_part = (place * HKV + i_hkv).to(tl.int64) * BLOCK_M + o_m
            p_turned = turned + o_part[:, None] * BLOCK_DK + o_dk[None, :]
            tl.debug_barrier()
            tl.store(p_turned, b_q)
            tl.debug_barrier()
            b_q = tl.load(p_turned)
        b_q = b_q.to(OPERAND)

        # keys key_start : whole_end are seen by every row
        whole_end = key_end
        if hidden == SOME_HIDDEN:
            whole_end = key_start
        if window is not None:
            # most keys of a long segment may be hidden: look for the range that is not
            # [M]
            b_pos = tl.load(positions + o_row, mask=m_row, other=0).to(tl.int32)
            pos_last = tl.max(tl.where(m_row, b_pos, -(2**31)), axis=0)
            pos_first = tl.min(tl.where(m_row, b_pos, 2**31 - 1), axis=0)
            seen_first, seen_end = key_end, key_start
            for start in range(key_start, key_end, SCAN):
                o_n = start + tl.arange(0, SCAN)
                m_n = o_n < key_end
                # [SCAN]
                b_page = tl.load(p_pages + o_n // P, mask=m_n, other=0)
                b_key_pos = tl.load(stored_positions + b_page.to(tl.int64) * P + o_n % P, mask=m_n, other=0) + delta
                m_n = m_n & (b_key_pos <= pos_last) & (pos_first - b_key_pos < window)
                seen_first = tl.minimum(seen_first, tl.min(tl.where(m_n, o_n, key_end), axis=0))
                seen_end = tl.maximum(seen_end, tl.max(tl.where(m_n, o_n + 1, key_start), axis=0))
            key_start += (seen_first - key_start) // BLOCK_N * BLOCK_N
            key_end = seen_end
            whole_end = key_start
        whole_end = key_start + (whole_end - key_start) // BLOCK_N * BLOCK_N

        for MASKED in tl.static_range(2):
            start = whole_end if MASKED else key_start
            end = key_end if MASKED else whole_end
            if start < end:
                # [M]
                b_pos = tl.load(positions + o_row, mask=m_row, other=0).to(tl.int32)
                b_m, b_l, b_acc = _attend(
                    b_q,
                    b_m,
                    b_l,
                    b_acc,
                    start,
                    end,
                    p_k_head,
                    p_v_head,
                    p_pages,
                    stored_positions,
                    delta,
                    b_pos,
                    scaling,
                    window,
                    k_stride_page,
                    k_stride_slot,
                    v_stride_page,
                    v_stride_slot,
                    DK,
                    DV,
                    P,
                    SOFTCAP,
                    OPERAND,
                    BLOCK_MASKED if MASKED else BLOCK_N,
                    BLOCK_DK,
                    BLOCK_DV,
                    MASKED == 1,
                )

    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    p_work = work + work_begin * WORK_FIELDS
    row_start = tl.load(p_work + 6)
    row_end = tl.load(p_work + 7)
    place = tl.load(p_work + 8)
    m_row = row_start + o_m // G < row_end
    o_part = (place * HKV + i_hkv).to(tl.int64) * BLOCK_M + o_m
    # a row that saw no key: 0, and log-sum-exp -inf from b_m
    b_l = tl.where(b_l > 0, b_l, 1.0)
    b_out = b_acc / b_l[:, None]
    o_dv = tl.arange(0, BLOCK_DV)
    tl.store(part_out + o_part[:, None] * DV + o_dv[None, :], b_out, mask=m_row[:, None] & (o_dv < DV)[None, :])
    tl.store(part_lse + o_part, b_m + tl.log2(b_l), mask=m_row)


@triton.jit
def merge_kernel(
    part_out,
    part_lse,
    rows,
    sinks,
    other_out,
    other_lse,
    out,
    lse,
    HKV: tl.constexpr,
    G: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    FIELDS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """One row and head: the union of its tile's partial results, of what attention over other keys gave (`other_out`,
    natural log-sum-exp), and of the sink logit, which has no value."""
    ACC: tl.constexpr = part_out.dtype.element_ty
    i_row, i_h = tl.program_id(0), tl.program_id(1)
    p_record = rows + i_row * FIELDS
    i_t = tl.load(p_record)
    o_m = tl.load(p_record + 1) * G + i_h % G
    place_begin = tl.load(p_record + 2)
    place_end = tl.load(p_record + 3)
    if OVERLAPPED:
        # started while the partial kernel still runs: what it writes is there from here on
        tl.extra.cuda.gdc_wait()
    o_dv = tl.arange(0, BLOCK_DV)
    if sinks is None:
        b_m = tl.full([], float("-inf"), ACC)
        b_l = tl.full([], 0.0, ACC)
    else:
        b_m = tl.load(sinks + i_h).to(ACC) * LOG2E
        b_l = tl.full([], 1.0, ACC)
    o_out = i_t.to(tl.int64) * (HKV * G) + i_h
    # [DV]
    b_acc = tl.zeros([BLOCK_DV], ACC)
    if other_out is not None:
        b_other = tl.load(other_lse + o_out).to(ACC) * LOG2E
        b_both = tl.maximum(b_m, b_other)
        b_base = tl.where(b_both == float("-inf"), 0.0, b_both)
        b_share = tl.exp2(b_other - b_base)
        b_l = b_l * tl.exp2(b_m - b_base) + b_share
        b_acc += tl.load(other_out + o_out * DV + o_dv, mask=o_dv < DV, other=0.0).to(ACC) * b_share
        b_m = b_both
    for start in range(place_begin, place_end, BLOCK_PARTS):
        o_place = start + tl.arange(0, BLOCK_PARTS)
        o_part = (o_place * HKV + i_h // G).to(tl.int64) * BLOCK_M + o_m
        # [PARTS]
        b_lse = tl.load(part_lse + o_part, mask=o_place < place_end, other=float("-inf"))
        m_part = (o_place < place_end)[:, None] & (o_dv < DV)[None, :]
        # [PARTS, DV]
        b_part = tl.load(part_out + o_part[:, None] * DV + o_dv[None, :], mask=m_part, other=0.0)
        b_m_new = tl.maximum(b_m, tl.max(b_lse, axis=0))
        b_shift = tl.where(b_m_new == float("-inf"), 0.0, b_m_new)
        b_weight = tl.exp2(b_lse - b_shift)
        b_scale = tl.exp2(b_m - b_shift)
        b_l = b_l * b_scale + tl.sum(b_weight, axis=0)
        b_acc = b_acc * b_scale + tl.sum(b_part * b_weight[:, None], axis=0)
        b_m = b_m_new
    b_l = tl.where(b_l > 0, b_l, 1.0)
    b_out = b_acc / b_l
    tl.store(out + o_out * DV + o_dv, b_out.to(out.dtype.element_ty), mask=o_dv < DV)
    if lse is not None:
        tl.store(lse + o_out, (b_m + tl.log2(b_l)) * LN2)


@triton.jit(do_not_specialize=["k_stride_row", "k_stride_head", "v_stride_row", "v_stride_head"])
def write_kernel(
    k,
    v,
    k_rows,
    v_rows,
    k_index,
    v_index,
    k_stride_row,
    k_stride_head,
    v_stride_row,
    v_stride_head,
    HKV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One row and KV head: its key and its value go to their rows of the flat page views."""
    i_t, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o_k = tl.load(k_index + i_t) * HKV + i_h
    o_v = tl.load(v_index + i_t) * HKV + i_h
    o_dk = tl.arange(0, BLOCK_DK)
    o_dv = tl.arange(0, BLOCK_DV)
    b_k = tl.load(k + i_t * k_stride_row + i_h * k_stride_head + o_dk, mask=o_dk < DK, other=0.0)
    b_v = tl.load(v + i_t * v_stride_row + i_h * v_stride_head + o_dv, mask=o_dv < DV, other=0.0)
    tl.store(k_rows + o_k * DK + o_dk, b_k, mask=o_dk < DK)
    tl.store(v_rows + o_v * DV + o_dv, b_v, mask=o_dv < DV)

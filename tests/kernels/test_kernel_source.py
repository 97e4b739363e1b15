"""What the kernels' source promises: every parameter is read, and no stride is multiplied in 32 bits."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from lazy_rag_kernels import Rotation, prepare, segment_attention, triton_kernels

from tests.kernels.oracle import check
from tests.kernels.plans import Case, Heads, Piece, SequenceSpec, StepSpec, build

FILES = [Path(triton_kernels.__file__), Path(triton_kernels.__file__).with_name("gluon_kernels.py")]
KERNELS = {
    f"{file.stem}.{node.name}": node
    for file in FILES
    for node in ast.walk(ast.parse(file.read_text()))
    if isinstance(node, ast.FunctionDef)
    and any(ast.unparse(d) in ("triton.jit", "gluon.jit") for d in node.decorator_list)
}
WIDENED = (".to(tl.int64)", ".to(gl.int64)")


def test_there_are_kernels() -> None:
    names = {"triton_kernels.partial_kernel", "triton_kernels.merge_kernel"}
    assert names | {"gluon_kernels.specialized_partial_kernel"} <= KERNELS.keys()


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_parameter_is_read(kernel: str) -> None:
    """An unused constexpr is a hidden reason to compile again, an unused tensor a lie in the signature."""
    function = KERNELS[kernel]
    read = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    assert {argument.arg for argument in function.args.args} - read == set()


@pytest.mark.parametrize("kernel", KERNELS)
def test_strides_are_multiplied_in_int64(kernel: str) -> None:
    """The other factor of a stride is a page id (an int64 tensor) or was cast to int64."""
    wide = {"b_page"}
    for node in ast.walk(KERNELS[kernel]):
        if isinstance(node, ast.Assign) and ast.unparse(node.value).endswith(WIDENED):
            wide |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(KERNELS[kernel]):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            factors = [ast.unparse(node.left), ast.unparse(node.right)]
            if any("_stride_" in factor for factor in factors):
                assert any(f in wide or f.endswith(WIDENED) for f in factors), ast.unparse(node)


def spread_out(case: Case, page_elements: int) -> Case:
    """The same case with its pages so far apart that element offsets pass 2**31; memory is mapped on first touch."""
    num_pages = case.pages.k.shape[0]
    pool = torch.empty(num_pages * page_elements, dtype=case.heads.dtype, device=case.q.device)
    views = {}
    for name, paged, offset in (("k", case.pages.k, 0), ("v", case.pages.v, page_elements // 2)):
        views[name] = pool.as_strided(paged.shape, (page_elements, *paged.stride()[1:]), offset)
        views[name].copy_(paged)
    return replace(case, pages=replace(case.pages, **views))  # type: ignore[arg-type]


def test_pages_beyond_2_to_the_31_elements() -> None:
    heads = Heads(dtype=torch.float16, rotation=Rotation("half", 16))
    pieces = [Piece(0, 0, 16, 0), Piece(0, 16, 14, 40)]
    small = build(StepSpec([30], [3], [SequenceSpec(pieces, [60, 61], 2)], page_size=2), heads)
    case = spread_out(small.to("cuda") if torch.cuda.is_available() else small, page_elements=1 << 27)
    assert int(case.plan.pages.max()) * case.pages.k.stride(0) > 2**31
    plan = prepare(replace(case.plan, impl="triton"), case.stored_positions)
    out, lse = segment_attention(case.q, case.pages, plan, return_lse=True, **case.arguments())
    check(small, out.cpu(), lse.cpu() if lse is not None else None)

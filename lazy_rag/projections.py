"""Projections that read the same tensor, computed as one matrix product while the rows are few.

Q, K and V of a layer are products of one input, and so are an MLP's gate and up. With few rows the time goes into
reading weights, and small products do not fill a GPU: over 32 layers of the Llama-3.1-8B shape with 64 rows, all linear
layers take 4.84 ms, with Q, K and V as one 4.40, with gate and up too 4.24 (H200). With 4096 rows and more joining
gains nothing and costs up to 5 % in the MLP, so there the layers compute alone.

The weights become slices of one tensor: names, state dict and total memory stay as they were. Which projections belong
together is seen in a forward pass, not guessed from names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# the largest bucket of live tokens; beyond, products fill the device alone
FEW_ROWS = 512


class _Product:
    """The stacked weights of some projections, and what they gave for the input seen last until all have taken it."""

    def __init__(self, members: Sequence[nn.Linear]) -> None:
        self.sizes = [member.out_features for member in members]
        self.weight = torch.cat([member.weight.data for member in members])
        biases = [member.bias.data for member in members if member.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        self.input: Tensor | None = None
        self.parts: list[Tensor] = []
        for place, member in enumerate(members):
            # data, not a new Parameter: whoever holds the Parameter sees the same weights as before
            member.weight.data = self.weight.split(self.sizes)[place]
            if self.bias is not None:
                member.bias.data = self.bias.split(self.sizes)[place]

    def part(self, member: nn.Linear, place: int, x: Tensor) -> Tensor:
        if x.numel() > FEW_ROWS * x.shape[-1]:
            return functional.linear(x, member.weight, member.bias)
        if place == 0:
            self.input, self.parts = x, list(functional.linear(x, self.weight, self.bias).split(self.sizes, dim=-1))
        if self.input is not x:  # another caller's tensor, or another order than the one seen
            return functional.linear(x, member.weight, member.bias)
        part = self.parts[place]
        if place == len(self.sizes) - 1:
            self.input, self.parts = None, []
        return part


class _Joined(nn.Linear):
    """One of several projections of the same input; `join` makes it of an nn.Linear, `separate` undoes it."""

    product: _Product
    place: int

    def forward(self, x: Tensor) -> Tensor:
        return self.product.part(self, self.place, x)


@contextmanager
def seen_inputs(model: nn.Module) -> Iterator[list[tuple[nn.Linear, Tensor]]]:
    """Which plain linear layers of a model are given what, call by call, inside the block."""
    calls: list[tuple[nn.Linear, Tensor]] = []

    def note(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(module, nn.Linear)
        calls.append((module, arguments[0]))

    # subclasses (adapters, quantised weights) compute in ways of their own
    handles = [module.register_forward_pre_hook(note) for module in model.modules() if type(module) is nn.Linear]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def siblings(model: nn.Module, calls: Sequence[tuple[nn.Linear, Tensor]]) -> list[list[nn.Linear]]:
    """Layers of one parent that were given the same tensor, in order of calls; of those that can be joined."""
    parents = {id(module): name.rpartition(".")[0] for name, module in model.named_modules()}
    groups: dict[tuple[str, int], list[nn.Linear]] = {}
    for module, x in calls:
        groups.setdefault((parents[id(module)], id(x)), []).append(module)
    times = Counter(id(module) for module, _ in calls)
    owners = Counter(id(module.weight) for module in {id(m): m for m, _ in calls}.values())
    return [
        group
        for group in groups.values()
        if len(group) > 1
        and all(times[id(m)] == 1 and owners[id(m.weight)] == 1 and not _has_hooks(m) for m in group)
        and len({(m.in_features, m.weight.dtype, m.weight.device, m.bias is None) for m in group}) == 1
    ]


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def join(groups: Sequence[Sequence[nn.Linear]]) -> Callable[[], None]:
    """Compute each group as one product; returns what undoes it. Between the calls only one thread may use them."""
    for group in groups:
        product = _Product(group)
        for place, member in enumerate(group):
            member.__class__ = _Joined
            member.product, member.place = product, place  # type: ignore[assignment]

    def separate() -> None:
        for group in groups:
            for member in group:
                member.__class__ = nn.Linear
                del member.product, member.place

    return separate

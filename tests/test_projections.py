"""Joined projections compute what separate ones do, and leave the model as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lazy_rag import projections
from lazy_rag.model import LanguageModel
from lazy_rag.projections import _Joined, join, seen_inputs, siblings
from tests.tiny_models import tiny_model


class Attention(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, n, bias=bias) for n in (12, 4, 4))
        self.out = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.q(x), self.k(x), self.v(x)


def joined(attention: Attention) -> list[list[nn.Linear]]:
    with seen_inputs(attention) as calls:
        attention(torch.randn(1, 3, 8))
    return siblings(attention, calls)


def test_results_state_and_types_stay_as_they_were() -> None:
    for bias in (False, True):
        attention, x = Attention(bias).double(), torch.randn(1, 5, 8, dtype=torch.float64)
        before, state = attention(x), {k: v.clone() for k, v in attention.state_dict().items()}
        kept = list(attention.parameters())
        separate = join([[attention.q, attention.k, attention.v]])
        assert isinstance(attention.q, _Joined)
        assert len({m.weight.untyped_storage().data_ptr() for m in (attention.q, attention.k, attention.v)}) == 1
        for _ in range(2):
            torch.testing.assert_close(attention(x), before, rtol=1e-12, atol=1e-12)
        assert all(a is b for a, b in zip(attention.parameters(), kept, strict=True))
        separate()
        assert type(attention.q) is nn.Linear and set(vars(attention.q)) == set(vars(nn.Linear(1, 1)))
        torch.testing.assert_close(dict(attention.state_dict()), state, rtol=0, atol=0)
        torch.testing.assert_close(attention(x), before, rtol=0, atol=0)


def test_other_orders_and_other_tensors_are_computed_alone() -> None:
    attention = Attention().double()
    x, y = torch.randn(2, 1, 3, 8, dtype=torch.float64).unbind()
    want = {name: (getattr(attention, name)(x), getattr(attention, name)(y)) for name in "qkv"}
    join([[attention.q, attention.k, attention.v]])
    for order in ("vkq", "kqv", "qqv", "qvk", "qkv"):
        for name in order:
            torch.testing.assert_close(getattr(attention, name)(x), want[name][0], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(getattr(attention, name)(y), want[name][1], rtol=1e-12, atol=1e-12)
    attention.q(x)
    torch.testing.assert_close(attention.k(y), want["k"][1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(attention.v(x), want["v"][0], rtol=1e-12, atol=1e-12)


def test_nothing_is_kept_alive_after_the_last_projection() -> None:
    attention = Attention()
    join([[attention.q, attention.k, attention.v]])
    attention(torch.randn(1, 3, 8))
    assert attention.q.product.input is None and attention.q.product.parts == []  # type: ignore[union-attr]


def test_only_plain_layers_of_one_kind_are_joined() -> None:
    assert joined(Attention()) and len(joined(Attention())[0]) == 3

    class Adapted(nn.Linear):
        pass

    adapted = Attention()
    adapted.v = Adapted(8, 4, bias=False)
    assert [len(group) for group in joined(adapted)] == [2]
    hooked = Attention()
    hooked.k.register_forward_hook(lambda *_: None)
    assert joined(hooked) == []
    mixed = Attention()
    mixed.k = nn.Linear(8, 4, bias=True)
    assert joined(mixed) == []
    tied = Attention()
    tied.v.weight = tied.k.weight
    assert joined(tied) == []
    patched = Attention()
    patched.k.forward = patched.k.forward  # type: ignore[method-assign]  an offloading library does this
    assert joined(patched) == []

    class Twice(Attention):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.q(x), self.k(x), self.k(x)

    assert joined(Twice()) == []


def test_many_rows_are_computed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = Attention().double()
    few, many = torch.randn(1, 4, 8, dtype=torch.float64), torch.randn(1, 5, 8, dtype=torch.float64)
    want = attention(few), attention(many)
    monkeypatch.setattr(projections, "FEW_ROWS", 4)
    join([[attention.q, attention.k, attention.v]])
    for x, expected in zip((few, many), want, strict=True):
        torch.testing.assert_close(attention(x), expected, rtol=1e-12, atol=1e-12)
    q, k, _ = attention(few)
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    q, k, _ = attention(many)
    assert q.untyped_storage().data_ptr() != k.untyped_storage().data_ptr()


def test_a_language_model_joins_its_projections_until_it_is_released() -> None:
    for family in ("llama", "qwen2", "qwen3"):
        model = tiny_model(family)
        driven = LanguageModel(model)
        joined_layers = [name for name, module in model.named_modules() if isinstance(module, _Joined)]
        assert len(joined_layers) == 5 * model.config.num_hidden_layers  # q, k, v; gate, up
        driven.release()
        assert not any(isinstance(module, _Joined) for module in model.modules())

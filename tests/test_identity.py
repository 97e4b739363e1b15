"""Stale identity: KV made under one condition is never found under another, in memory's ids or on disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lazy_rag import Runtime
from lazy_rag.building import key_fields
from lazy_rag.errors import StoreError
from lazy_rag.keys import KeySpace
from lazy_rag.model import LanguageModel
from lazy_rag.tokens import TextTokenizer
from tests.fixtures import CHATML, make_runtime
from tests.test_caching import SHORT, TEXTS
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import tiny_tokenizer


def other_tokenizer() -> Any:
    """The same tokens for the same text, but for one word that no text of these tests holds."""
    tokenizer = tiny_tokenizer(chat_template=CHATML)
    tokenizer.add_tokens(["zyzzyva"])
    return tokenizer


CHANGES: dict[str, Callable[[], dict[str, Any]]] = {
    "weights": lambda: {"seed": 1},
    "tokenizer": lambda: {"tokenizer": other_tokenizer()},
    "dtype": lambda: {"to": ("cpu", torch.float64)},
    "rope": lambda: {"family": "llama-yarn"},  # the same weights, other frequencies
    "prefix": lambda: {"prefix": "Another opening."},
    "no prefix": lambda: {"prefix": "none"},
    "page size": lambda: {"page_size": 16},
}


def tokens_of(rt: Runtime, ids: list[Any]) -> list[tuple[int, ...]]:
    return [rt.chunk(i).token_ids for i in ids]


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_stale_is_found(tmp_path: Path, change: str) -> None:
    """The same texts give the same tokens and other ids; the store is refused; and a record that lies where the other
    runtime would look for its own, by whatever accident, is set aside."""
    store, moved = tmp_path / "store", tmp_path / "moved"
    with make_runtime(store=store) as rt:
        old = rt.add_chunks(TEXTS[:3])
        rt.generate("Q", old, sampling=SHORT)
        old_tokens = tokens_of(rt, old)
        old_records = rt._parts.records
        assert old_records is not None
    options = CHANGES[change]()
    with pytest.raises(StoreError, match="made with another"):
        make_runtime(store=store, **options)
    with make_runtime(**options) as fresh:
        expected = fresh.generate("Q", fresh.add_chunks(TEXTS[:3]), sampling=SHORT).token_ids
    options = CHANGES[change]()
    with make_runtime(store=moved, **options) as rt:
        new = rt.add_chunks(TEXTS[:3])
        assert tokens_of(rt, new) == old_tokens
        assert not set(new) & set(old)
        records = rt._parts.records
        assert records is not None
        for mine, theirs in zip(new, old, strict=True):
            records.path(mine).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(old_records.path(theirs), records.path(mine))
        answer = rt.generate("Q", new, sampling=SHORT)
        assert [use.tier for use in answer.receipt.chunks if use.chunk_id in new] == ["encoded"] * 3
        assert sorted(records.quarantined) == sorted(new)
        assert answer.token_ids == expected


def test_weights_that_change_under_a_name_change_the_key(tmp_path: Path) -> None:
    """One parameter by one bit: names and paths count for nothing."""
    model = tiny_model()
    tokens = TextTokenizer(tiny_tokenizer(chat_template=CHATML))

    def key() -> str:
        language_model = LanguageModel(model)
        try:
            return KeySpace(key_fields(language_model, tokens, "layout")).id
        finally:
            language_model.release()

    before = key()
    assert key() == before

    def flip() -> None:  # asked anew each time: a runtime may move weights to other memory
        model.model.layers[1].mlp.up_proj.weight.data.view(torch.int32)[3, 4] ^= 1

    flip()
    assert key() != before
    flip()
    assert key() == before


def adapter(rank: int, alpha: float, path: str = "a") -> Any:
    fields = {"r": rank, "lora_alpha": alpha, "target_modules": {"q_proj", "v_proj"}, "base_model_name_or_path": path}
    return SimpleNamespace(to_dict=lambda: dict(fields))


def test_adapters_are_told_apart_by_what_they_do_and_not_by_where_they_lie() -> None:
    """Settings and which adapter is active; the weights of adapters are among the model's."""
    tokens = TextTokenizer(tiny_tokenizer(chat_template=CHATML))
    seen = {}
    for name, configs, active in (
        ("none", {}, []),
        ("one", {"a": adapter(8, 16)}, ["a"]),
        ("moved", {"a": adapter(8, 16, "/elsewhere")}, ["a"]),
        ("scaled", {"a": adapter(8, 32)}, ["a"]),
        ("two", {"a": adapter(8, 16), "b": adapter(8, 16)}, ["a"]),
        ("switched", {"a": adapter(8, 16), "b": adapter(8, 16)}, ["b"]),
        ("off", {"a": adapter(8, 16)}, []),
    ):
        model: Any = tiny_model()
        if configs:
            model.peft_config = configs
            model.active_adapters = lambda active=active: active
        language_model = LanguageModel(model)
        try:
            seen[name] = KeySpace(key_fields(language_model, tokens, "layout")).id
        finally:
            language_model.release()
    assert seen["one"] == seen["moved"]
    del seen["moved"]
    assert len(set(seen.values())) == len(seen)


def test_an_adapters_weights_are_part_of_the_key(tmp_path: Path) -> None:
    """Reloading another adapter under the old name was a bug elsewhere; here the bytes decide."""
    tokens = TextTokenizer(tiny_tokenizer(chat_template=CHATML))
    keys = []
    for seed in (0, 1, 0):
        model: Any = tiny_model()
        torch.manual_seed(seed)
        model.model.layers[0].self_attn.q_proj.lora_A = torch.nn.Linear(64, 4, bias=False)
        language_model = LanguageModel(model)
        try:
            keys.append(KeySpace(key_fields(language_model, tokens, "layout")).id)
        finally:
            language_model.release()
    assert keys[0] == keys[2] != keys[1]

"""Sampling parameters, the draw of a token, and streamed text with stop strings."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence, Strip
from tokenizers.models import BPE

from lazy_rag.errors import ConfigError, EngineError
from lazy_rag.sampling import Sampler, SamplingParams, TextStream
from lazy_rag.tokens import TextTokenizer
from tests.tiny_tokenizer import tiny_tokenizer

VIEW = TextTokenizer(tiny_tokenizer())
PROBABILITIES = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15])
LOGITS = PROBABILITIES.log()
NEUTRAL: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def draws(count: int, logits: torch.Tensor = LOGITS, **params: Any) -> list[int]:
    resolved = SamplingParams(**{"seed": 0, "temperature": 1.0, **params}).resolve()
    sampler = Sampler(resolved, "cpu")
    return [sampler.sample(logits)[0] for _ in range(count)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.5),
        ("min_p", math.nan),
        ("repetition_penalty", 0),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a", 3]),
        ("stop", 5),
        ("ignore_eos", 1),
        ("logprobs", None),
    ],
)
def test_bad_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**{name: value})


def test_stop_becomes_a_tuple() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams().stop == ()


def test_resolve_takes_the_models_defaults() -> None:
    config = SimpleNamespace(do_sample=True, temperature=0.6, top_k=20, top_p=0.9, min_p=None, repetition_penalty=1.1)
    assert SamplingParams().resolve(config) == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.9, min_p=0.0, repetition_penalty=1.1
    )
    mine = SamplingParams(temperature=0.0, top_k=5, top_p=1.0, repetition_penalty=1.0, stop="x", seed=3)
    resolved = mine.resolve(config)
    assert (resolved.temperature, resolved.top_k, resolved.top_p, resolved.repetition_penalty) == (0.0, 5, 1.0, 1.0)
    assert (resolved.stop, resolved.seed) == (("x",), 3)
    assert resolved.greedy


@pytest.mark.parametrize("do_sample", [False, None])
def test_resolve_is_greedy_unless_the_model_samples(do_sample: bool | None) -> None:
    config = SimpleNamespace(do_sample=do_sample, temperature=0.6, top_k=20)
    assert SamplingParams().resolve(config).temperature == 0.0
    assert SamplingParams(temperature=0.8).resolve(config).temperature == 0.8
    assert SamplingParams().resolve(None) == SamplingParams(temperature=0.0, **NEUTRAL)


def test_greedy_takes_the_lowest_index_on_ties() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, -math.inf])
    assert draws(3, logits, temperature=0.0) == [1, 1, 1]
    assert draws(3, logits, top_k=1) == [1, 1, 1]
    assert draws(3, logits, temperature=1e-9) == [1, 1, 1]
    assert draws(3, logits.bfloat16(), temperature=0.0) == [1, 1, 1]


@pytest.mark.parametrize(
    ("params", "support"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.75}, {1, 3, 4}),
        ({"top_p": 0.5}, {1, 3}),
        ({"top_p": 1e-6}, {1}),
        ({"min_p": 0.3}, {1, 3, 4}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 3, "min_p": 0.7}, {1, 3}),
    ],
)
def test_support_is_exact(params: dict[str, Any], support: set[int]) -> None:
    assert set(draws(600, **params)) == support


def test_frequencies_follow_the_distribution() -> None:
    count = 8000
    for temperature in (1.0, 0.5):
        expected = torch.softmax(LOGITS / temperature, dim=-1)
        counts = torch.bincount(torch.tensor(draws(count, temperature=temperature)), minlength=5)
        # Five standard deviations of a binomial count.
        bound = 5 * (count * expected * (1 - expected)).sqrt()
        assert bool(((counts - count * expected).abs() < bound).all())


def test_same_seed_same_draws_whatever_else_runs() -> None:
    alone = draws(50, seed=7)
    params = SamplingParams(temperature=1.0, seed=7).resolve()
    mine, other = Sampler(params, "cpu"), Sampler(SamplingParams(temperature=1.0, seed=8).resolve(), "cpu")
    mixed = []
    for _ in range(50):
        other.sample(LOGITS)
        torch.rand(3)
        mixed.append(mine.sample(LOGITS)[0])
    assert mixed == alone
    assert draws(50, seed=8) != alone
    assert draws(50, seed=None) != draws(50, seed=None)


def test_repetition_penalty_covers_prompt_and_answer() -> None:
    logits = torch.tensor([2.0, 1.9, 1.8, -1.0])
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0).resolve()
    sampler = Sampler(params, "cpu", lambda: [0])
    # 0 is in the prompt (2.0 -> 1.0); each chosen token is penalised from then on.
    assert [sampler.sample(logits)[0] for _ in range(3)] == [1, 2, 0]
    assert logits.tolist() == pytest.approx([2.0, 1.9, 1.8, -1.0])


def test_repetition_penalty_buffer_grows() -> None:
    vocab = 500
    logits = torch.linspace(2.0, 1.5, vocab)
    sampler = Sampler(SamplingParams(temperature=0.0, repetition_penalty=3.0).resolve(), "cpu")
    assert [sampler.sample(logits)[0] for _ in range(vocab)] == list(range(vocab))


def test_logprob_is_of_the_unprocessed_distribution() -> None:
    params = SamplingParams(temperature=0.3, top_k=2, repetition_penalty=1.5, seed=1, logprobs=True).resolve()
    sampler = Sampler(params, "cpu", lambda: [3])
    for _ in range(20):
        token, logprob = sampler.sample(LOGITS * 1.0)
        assert logprob == pytest.approx(math.log(PROBABILITIES[token]), abs=1e-6)
    greedy = Sampler(SamplingParams(temperature=0.0, logprobs=True).resolve(), "cpu")
    assert greedy.sample(LOGITS) == (1, pytest.approx(math.log(0.4), abs=1e-6))
    assert draws(1, temperature=0.0) == [1]
    assert Sampler(SamplingParams().resolve(), "cpu").sample(LOGITS)[1] is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 4])
def test_unusable_logits_raise(temperature: float, bad: float, place: int) -> None:
    logits = LOGITS.clone()
    logits[place] = bad
    with pytest.raises(EngineError, match="logits"):
        draws(1, logits, temperature=temperature, repetition_penalty=1.2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_tokens_are_allowed_but_not_all(temperature: float) -> None:
    masked = torch.tensor([-math.inf, 0.0, -math.inf])
    assert set(draws(50, masked, temperature=temperature)) == {1}
    with pytest.raises(EngineError):
        draws(1, torch.full((3,), -math.inf), temperature=temperature)
    with pytest.raises(EngineError, match="shape"):
        draws(1, torch.zeros(2, 3), temperature=temperature)


def spell(pieces: list[str], ids: list[int]) -> str:
    return "".join(pieces[index] for index in ids)


def stream_all(stream: TextStream, ids: list[int]) -> str:
    return "".join(stream.push(index) for index in ids) + stream.finish()


def sentencepiece_like() -> Tokenizer:
    """A decoder in the manner of Llama-2: words carry their space, the first one is stripped, bytes fall back."""
    pieces = ["<unk>", "▁", "▁Hello", "▁world", "!", "é", "▁▁"] + [f"<0x{byte:02X}>" for byte in range(256)]
    backend = Tokenizer(BPE({piece: index for index, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    backend.decoder = Sequence([Replace("▁", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)])
    return backend


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60))
def test_stream_equals_decoding_everything(text: str) -> None:
    ids = list(VIEW.content(text))
    stream = TextStream(VIEW.decode)
    assert stream_all(stream, ids) == text
    assert stream.text == text
    assert not stream.stopped


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 383), max_size=80))
def test_stream_of_any_tokens_equals_decoding_everything(ids: list[int]) -> None:
    """Broken bytes and special tokens included."""
    assert stream_all(TextStream(VIEW.decode), ids) == VIEW.decode(ids)


@settings(max_examples=60, deadline=None)
@given(st.integers(128, 191), st.integers(30, 90), st.text(max_size=5))
def test_long_runs_of_broken_bytes_stay_exact(byte: int, count: int, tail: str) -> None:
    by_byte = [index for index in range(3, 384) if VIEW.decode([index]) == "\ufffd"]
    ids = [by_byte[byte % len(by_byte)]] * count + list(VIEW.content(tail))
    assert stream_all(TextStream(VIEW.decode), ids) == VIEW.decode(ids)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["w1", "w2", "w3", "▁", "▁▁", "!", "é", "emoji", "cjk"]), max_size=30))
def test_stream_of_sentencepiece_keeps_spaces(words: list[str]) -> None:
    backend = sentencepiece_like()
    byte = backend.token_to_id("<0x00>")
    assert byte is not None
    spelled = {"w1": [2], "w2": [3], "w3": [2], "▁": [1], "▁▁": [6], "!": [4], "é": [5]}
    spelled["emoji"] = [byte + value for value in "🙂".encode()]
    spelled["cjk"] = [byte + value for value in "中".encode()]
    ids = [index for word in words for index in spelled[word]]
    pushed = []
    stream = TextStream(backend.decode)
    for index in ids:
        pushed.append(stream.push(index))
        assert "\ufffd" not in pushed[-1]
    assert "".join(pushed) + stream.finish() == backend.decode(ids)


def test_no_half_character_is_emitted() -> None:
    ids = list(VIEW.content("a🙂b"))
    stream = TextStream(VIEW.decode)
    assert [stream.push(index) for index in ids] == ["a", "", "", "", "🙂", "b"]
    cut = TextStream(VIEW.decode)
    assert [cut.push(index) for index in ids[:3]] == ["a", "", ""]
    assert cut.finish() == "\ufffd"
    assert cut.text == "a\ufffd"


@pytest.mark.parametrize("pieces", [["a END b"], ["a E", "N", "D b"], ["a ", "E", "N", "D", " b"], ["a EN", "D"]])
def test_stop_string_split_over_tokens(pieces: list[str]) -> None:
    stream = TextStream(partial(spell, pieces), ("END", "never"))
    out = [stream.push(index) for index in range(len(pieces))]
    assert "".join(out) == "a "
    assert stream.stopped
    assert stream.push(0) == ""
    assert stream.finish() == ""
    assert stream.text == "a "


def test_text_that_only_began_a_stop_string_is_released() -> None:
    pieces = ["x\n", "\nUse", "d", " more", "\n\nUs"]
    stream = TextStream(partial(spell, pieces), ("\n\nUser:",))
    assert [stream.push(index) for index in range(5)] == ["x", "", "\n\nUsed", " more", ""]
    assert stream.finish() == "\n\nUs"
    assert not stream.stopped


def test_overlapping_stop_strings_stop_at_the_first_complete_one() -> None:
    for pieces in (["zabc"], ["z", "a", "b", "c"], ["za", "bc"]):
        stream = TextStream(partial(spell, pieces), ("abc", "b"))
        assert "".join(stream.push(index) for index in range(len(pieces))) == "za"
        assert stream.stopped


def test_stop_string_after_a_repeated_beginning() -> None:
    pieces = list("aaab!")
    stream = TextStream(partial(spell, pieces), ("aab",))
    assert "".join(stream.push(index) for index in range(5)) == "a"
    assert stream.stopped


@settings(max_examples=150, deadline=None)
@given(st.text("ab🙂 ", max_size=40), st.lists(st.text("ab🙂", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_act_as_on_the_whole_text(text: str, stops: list[str]) -> None:
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    stream = TextStream(VIEW.decode, tuple(stops))
    assert stream_all(stream, list(VIEW.content(text))) == (text[: min(ends)[1]] if ends else text)
    assert stream.stopped == bool(ends)


def test_cost_is_linear_also_with_invisible_or_broken_tokens() -> None:
    seen: list[int] = []

    def decode(ids: list[int]) -> str:
        seen.append(len(ids))
        return VIEW.decode(ids)

    text = list(VIEW.content("The cache holds 🙂 " * 100))
    broken = [index for index in range(3, 384) if VIEW.decode([index]) == "\ufffd"][:1] * 600
    for ids in (text, text[:1] + [2] * 600, text[:1] + broken):
        seen.clear()
        stream_all(TextStream(decode), ids)
        assert sum(seen) <= 130 * len(ids)
        assert max(seen) <= 40

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lazy_rag.errors import ConfigError
from lazy_rag.splitting import Splitter, split_text

WORDS = ("alpha", "beta", "gamma", "delta")


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE that merges the words above to one token each; everything else is one token per byte. The special
    token is one token when read as special, ten when it is plain text."""
    vocab = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        pairs = [(word[:length], word[length]) for length in range(1, len(word))]
        for left, right in [*pairs, ("Ġ", word)]:
            vocab[left + right] = len(vocab)
            merges.append((left, right))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")


TOKENIZER = tiny_tokenizer()


def lengths(pieces: list[str], tokenizer: Any = TOKENIZER) -> list[int]:
    return [len(tokenizer(piece, add_special_tokens=False, split_special_tokens=True)["input_ids"]) for piece in pieces]


class SlowTokenizer:
    """A tokenizer with no fast backend: one token per character."""

    def __call__(self, texts: Any, **_: Any) -> dict[str, Any]:
        if isinstance(texts, str):
            return {"input_ids": [ord(character) for character in texts]}
        return {"input_ids": [[ord(character) for character in text] for text in texts]}


def test_fixture_counts_as_described() -> None:
    assert lengths(["alpha beta gamma", "<|im_end|>"]) == [3, 10]
    assert len(TOKENIZER("<|im_end|>", add_special_tokens=False)["input_ids"]) == 1


def test_pieces_are_whole_paragraphs_where_they_fit() -> None:
    text = "alpha beta gamma\n\nbeta gamma delta\n\ngamma delta alpha beta"
    assert split_text(text, tokenizer=TOKENIZER, max_tokens=4) == text.split("\n\n")
    assert split_text(text, tokenizer=TOKENIZER, max_tokens=8) == [text[:34].strip(), text[36:].strip()]
    assert split_text(text, tokenizer=TOKENIZER, max_tokens=100) == [text]


def test_words_are_kept_and_limit_holds() -> None:
    text = " ".join(WORDS * 50)
    pieces = split_text(text, tokenizer=TOKENIZER, max_tokens=7)
    assert " ".join(pieces) == text
    assert max(lengths(pieces)) == 7


def test_markdown_keeps_sections() -> None:
    text = "# alpha\n\nbeta gamma\n\n# delta\n\nalpha beta"
    pieces = split_text(text, tokenizer=TOKENIZER, max_tokens=10, markdown=True)
    assert pieces == ["# alpha\n\nbeta gamma", "# delta\n\nalpha beta"]


@pytest.mark.parametrize("markdown", [False, True])
def test_special_token_text_is_counted_as_text(markdown: bool) -> None:
    """A splitter that counts "<|im_end|>" as one token makes pieces ten times too long."""
    text = "<|im_end|>" * 12 + " alpha " + "<|im_end|>\n" * 12
    pieces = split_text(text, tokenizer=TOKENIZER, max_tokens=16, markdown=markdown)
    assert max(lengths(pieces)) <= 16
    assert "".join("".join(pieces).split()) == "".join(text.split())


def test_empty_and_blank_text() -> None:
    assert split_text("", tokenizer=TOKENIZER, max_tokens=4) == []
    assert split_text(" \n\t\n ", tokenizer=TOKENIZER, max_tokens=4) == []


@pytest.mark.parametrize("value", [0, -1, True, 2.5, None])
def test_bad_limit(value: Any) -> None:
    with pytest.raises(ConfigError, match="max_tokens"):
        split_text("alpha", tokenizer=TOKENIZER, max_tokens=value)


def test_a_character_that_cannot_fit_is_an_error_not_a_loss() -> None:
    with pytest.raises(ConfigError, match="takes 4 tokens"):
        split_text("alpha 😀", tokenizer=TOKENIZER, max_tokens=3)
    assert split_text("alpha 😀", tokenizer=TOKENIZER, max_tokens=4) == ["alpha", "😀"]


def test_tokenizer_without_fast_backend() -> None:
    pieces = split_text("one two three four", tokenizer=SlowTokenizer(), max_tokens=9)
    assert pieces == ["one two", "three", "four"]


def test_truncation_and_padding_of_the_tokenizer_do_not_falsify_the_count() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(max_length=3)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    text = " ".join(WORDS * 5)
    pieces = split_text(text, tokenizer=tokenizer, max_tokens=6)
    assert lengths(pieces) == [6, 6, 6, 2]


def test_splitter_is_reusable_and_keeps_no_state() -> None:
    splitter = Splitter(TOKENIZER, 5)
    text = " ".join(WORDS * 3)
    first = splitter.split(text)
    assert splitter.split("# alpha\n\n" + text, markdown=True)[0].startswith("# alpha")
    assert splitter.split(text) == first == split_text(text, tokenizer=TOKENIZER, max_tokens=5)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(st.sampled_from([*WORDS, "<|im_end|>", "\n\n", "# ", "```\n", "    "]), st.text(max_size=8)),
        max_size=25,
    ),
    st.integers(4, 20),
    st.booleans(),
)
def test_no_text_is_lost_and_the_limit_always_holds(parts: list[str], max_tokens: int, markdown: bool) -> None:
    text = " ".join(parts)
    pieces = split_text(text, tokenizer=TOKENIZER, max_tokens=max_tokens, markdown=markdown)
    assert all(piece and piece == piece.strip() for piece in pieces)
    assert all(length <= max_tokens for length in lengths(pieces))
    assert "".join("".join(pieces).split()) == "".join(text.split())

"""Cutting text into chunks that are measured with the model's own tokens."""

from __future__ import annotations

from typing import Any

from lazy_rag.errors import ConfigError


class Splitter:
    """Cuts texts into pieces of at most `max_tokens` tokens of `tokenizer`, at the largest semantic unit that fits.

    Keep one for a run of documents: building the underlying splitters copies the tokenizer's vocabulary. Like the
    tokenizer itself it is not to be used by two threads at once."""

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        """`tokenizer`: a transformers tokenizer, fast or slow. `max_tokens`: upper limit, special tokens not counted.
        Raises ConfigError when `max_tokens` is not a positive integer."""
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens <= 0:
            raise ConfigError(f"max_tokens must be a positive integer, not {max_tokens!r}")
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._fast: dict[bool, Any] = {}

    def split(self, text: str, *, markdown: bool = False) -> list[str]:
        """The pieces of `text` in order, stripped, none empty. With `markdown` headings, lists and code blocks are kept
        together where they fit. Raises ConfigError when one character alone is longer than `max_tokens`."""
        if not text.strip():
            return []
        pieces = _stripped(self._fast_splitter(markdown).chunks(text))
        result: list[str] = []
        for piece, length in zip(pieces, self._lengths(pieces), strict=True):
            result += [piece] if length <= self._max_tokens else self._split_exactly(piece, markdown)
        return result

    def _fast_splitter(self, markdown: bool) -> Any:
        """A splitter that counts in native code where the tokenizer allows it. It reads "<|im_end|>" in a text as one
        special token, hence its pieces can be too long and are counted again."""
        if markdown not in self._fast:
            from tokenizers import Tokenizer

            backend = getattr(self._tokenizer, "backend_tokenizer", None)
            if isinstance(backend, Tokenizer):
                if backend.truncation is not None or backend.padding is not None:
                    # Both would falsify the count; the caller's tokenizer is left as it is.
                    backend = Tokenizer.from_str(backend.to_str())
                    backend.no_truncation()
                    backend.no_padding()
                self._fast[markdown] = _kind(markdown).from_huggingface_tokenizer(backend, self._max_tokens)
            else:
                self._fast[markdown] = self._exact_splitter(markdown)
        return self._fast[markdown]

    def _exact_splitter(self, markdown: bool) -> Any:
        return _kind(markdown).from_callback(lambda piece: self._lengths([piece])[0], self._max_tokens)

    def _split_exactly(self, piece: str, markdown: bool) -> list[str]:
        """Pieces of a text that is too long, every one counted as the model will see it."""
        parts = _stripped(self._exact_splitter(markdown).chunks(piece))
        result: list[str] = []
        for part, length in zip(parts, self._lengths(parts), strict=True):
            if length <= self._max_tokens:
                result.append(part)
            elif len(part) == 1:
                raise ConfigError(
                    f"max_tokens={self._max_tokens} is too small: the character {part!r} alone takes {length} tokens"
                )
            else:
                # The parts' own stripping can change how their first word is tokenised. Halving always ends.
                middle = len(part) // 2
                for half in _stripped([part[:middle], part[middle:]]):
                    result += self._split_exactly(half, markdown)
        return result

    def _lengths(self, pieces: list[str]) -> list[int]:
        if not pieces:
            return []
        encoded = self._tokenizer(pieces, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return [len(ids) for ids in encoded["input_ids"]]


def split_text(text: str, *, tokenizer: Any, max_tokens: int, markdown: bool = False) -> list[str]:
    """Cut one text; see `Splitter.split`. Every piece has at most `max_tokens` tokens when tokenised alone with
    `tokenizer(piece, add_special_tokens=False, split_special_tokens=True)`."""
    return Splitter(tokenizer, max_tokens).split(text, markdown=markdown)


def _kind(markdown: bool) -> Any:
    from semantic_text_splitter import MarkdownSplitter, TextSplitter

    return MarkdownSplitter if markdown else TextSplitter


def _stripped(pieces: list[str]) -> list[str]:
    return [stripped for piece in pieces if (stripped := piece.strip())]

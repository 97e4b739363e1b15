"""From text to chunks: the tokens a chunk stores and the id they get.

A chunk holds `tokens(strip(text))` followed by `tokens(separator)`, each tokenised alone and unable to yield a special
token, so the same text is the same chunk in every document, template and framework.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from lazy_rag.catalog import ChunkRecord
from lazy_rag.documents import Document
from lazy_rag.errors import ConfigError, ContextOverflowError, LazyRAGError, StoreError
from lazy_rag.keys import ChunkId, KeySpace
from lazy_rag.layout import Chunk
from lazy_rag.splitting import Splitter
from lazy_rag.tokens import TextTokenizer

_TOLD = 1 << 16  # records of which the number of text tokens is known


class Chunker:
    """Makes chunks for one model and one encode prefix.

    Args:
        base: stored position of a chunk's first token, the length of the encode prefix.
        max_tokens: longest chunk the context can hold.
    """

    def __init__(self, tokens: TextTokenizer, keys: KeySpace, *, separator: str, base: int, max_tokens: int) -> None:
        self._tokens = tokens
        self._keys = keys
        self.separator = separator
        self._separator = tokens.content(separator)
        self._base = base
        self._max_tokens = max_tokens
        self._text_tokens: dict[tuple[str, str, int, int], int | None] = {}  # of records that were asked for
        self._made: WeakValueDictionary[int, Chunk] = WeakValueDictionary()  # by address

    def record(self, text: str, namespace: str) -> ChunkRecord:
        """The chunk of a text, as the catalog stores it."""
        if not isinstance(text, str):
            raise ConfigError(f"a chunk's text must be a string, not {text!r}")
        stripped = text.strip()
        if not stripped:
            raise ConfigError("a chunk has no text")
        token_ids = self._tokens.content(stripped) + self._separator
        if len(token_ids) > self._max_tokens:
            raise ContextOverflowError(
                f"a chunk of {len(token_ids)} tokens is longer than the context allows ({self._max_tokens}): "
                "split it, or use add_documents, which does"
            )
        return ChunkRecord(self._keys.chunk_id(namespace, token_ids), namespace, stripped, token_ids)

    def chunk(self, record: ChunkRecord, as_of: int) -> Chunk:
        """Raises StoreError for a record whose token ids do not give its id: KV of other tokens would be served as its.

        Args:
            as_of: `Residency.deletions` from before the record was read or written.
        """
        if not self.sound(record):
            raise StoreError(damaged(record.chunk_id))
        chunk = Chunk(ChunkId(record.chunk_id), record.token_ids, self._base, record.namespace, as_of)
        self._made[id(chunk)] = chunk
        return chunk

    def sound(self, record: ChunkRecord) -> bool:
        """Does a record from a catalog hold the token ids that its id was made from?"""
        return self._keys.chunk_id(record.namespace, record.token_ids) == record.chunk_id

    def made(self, chunk: object) -> bool:
        """Is it an object that `chunk` gave, and not one that is equal to it or says so?"""
        return chunk is not None and self._made.get(id(chunk)) is chunk

    def text_tokens(self, record: ChunkRecord) -> int | None:
        """How many of a chunk's tokens are its text; the others are the separator. None where the tokens are not those
        of the text: the catalog that told them is damaged. A text is tokenised once."""
        # Python's own hashes: every request that finds the chunk in its prompt asks, and damage aims at none of them
        known = record.chunk_id, record.namespace, hash(record.text), hash(record.token_ids)
        if known not in self._text_tokens:
            if len(self._text_tokens) >= _TOLD:
                self._text_tokens.clear()
            self._text_tokens[known] = self._count(record)
        return self._text_tokens[known]

    def _count(self, record: ChunkRecord) -> int | None:
        if not self.sound(record):
            return None
        text, own = self._tokens.content(record.text), self._separator
        rest = record.token_ids[len(text) :]
        if not text or record.token_ids[: len(text)] != text:
            return None
        # not its own where a runtime of the same store was given another one; but the end of a text that was cut off
        # comes before the own separator, or holds words
        other = "" if rest == own else self._tokens.decode(rest).strip()
        cut_off = other and (any(map(str.isalnum, other)) or (own and rest[-len(own) :] == own))
        return None if cut_off else len(text)

    def problem(self, record: ChunkRecord) -> str | None:
        """What is wrong with a record from a catalog, and what to do; None when nothing is."""
        if not self.sound(record):
            return damaged(record.chunk_id)
        if self.text_tokens(record) is None:
            return f"the catalog's text of chunk {record.chunk_id} is damaged: add the chunk's text again"
        return None

    def mended(self, record: ChunkRecord) -> ChunkRecord | None:
        """What a record was before its token ids were damaged, if its text still tells; else None."""
        try:
            again = self.record(record.text, record.namespace)
        except LazyRAGError:
            return None
        return again if again.chunk_id == record.chunk_id else None

    def cut(self, text: str, chunk_tokens: int) -> list[str]:
        """The text of chunks of at most so many tokens each (a token of text at least), in order."""
        return Splitter(_Counter(self._tokens), max(1, chunk_tokens - len(self._separator))).split(text)

    def split(self, documents: Sequence[Document], namespace: str, chunk_tokens: int) -> list[list[ChunkRecord]]:
        """The chunks of each document, each at most `chunk_tokens` long with its separator."""
        if isinstance(chunk_tokens, bool) or not isinstance(chunk_tokens, int):
            raise ConfigError(f"chunk_tokens={chunk_tokens!r} must be a whole number")
        room = chunk_tokens - len(self._separator)
        if room < 1 or chunk_tokens > self._max_tokens:
            raise ConfigError(
                f"chunk_tokens={chunk_tokens} must be between {len(self._separator) + 1} and {self._max_tokens}"
            )
        splitter = Splitter(_Counter(self._tokens), room)
        return [
            [
                self.record(piece, namespace)
                for piece in splitter.split(
                    document.text, markdown=str(document.metadata.get("file_name", "")).endswith(".md")
                )
            ]
            for document in documents
        ]


def damaged(chunk_id: str) -> str:
    """In words, with what to do: adding its text puts right what the catalog holds under its id."""
    return f"the catalog's id, token ids or namespace of chunk {chunk_id} are damaged: add the chunk's text again"


class _Counter:
    """The tokenizer the splitter measures with: chunk tokens as they will be stored, never the user's own object."""

    def __init__(self, tokens: TextTokenizer) -> None:
        self._tokens = tokens
        self.backend_tokenizer = tokens.content_backend

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[tuple[int, ...]]]:
        return {"input_ids": [self._tokens.content(text) for text in texts]}

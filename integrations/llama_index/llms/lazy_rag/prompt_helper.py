"""Packing nodes into prompts without cutting any: a chunk that is cut is not the chunk whose KV is cached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.prompts.base import BasePromptTemplate

from lazy_rag import Runtime

_JOIN = "\n\n"


class ChunkPromptHelper(PromptHelper):
    """A `PromptHelper` that keeps chunks whole, in order. Only one that is alone too long for the window is cut."""

    @classmethod
    def class_name(cls) -> str:
        return "ChunkPromptHelper"

    @classmethod
    def from_runtime(cls, runtime: Runtime, num_output: int = 256) -> ChunkPromptHelper:
        """With the runtime's context and its model's own token counts."""
        window = runtime.max_context
        return cls(context_window=window, num_output=max(1, min(num_output, window // 4)), tokenizer=encoder(runtime))

    def repack(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = 5,
        llm: Any = None,
        tools: Any = None,
    ) -> list[str]:
        """As few texts as hold all chunks, each within the window."""
        room = self._get_available_chunk_size(prompt, 1, padding=padding, llm=llm, tools=tools)
        packed: list[list[str]] = []
        used = room
        for text in (text.strip() for text in text_chunks):
            size = self._tokens(text + _JOIN)
            if size > room:
                packed += [[part] for part in super().repack(prompt, [text], padding, llm, tools)]
                used = room
            elif text and used + size <= room:
                packed[-1].append(text)
                used += size
            elif text:
                packed.append([text])
                used = size
        return [_JOIN.join(texts) for texts in packed]

    def truncate(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = 5,
        llm: Any = None,
        tools: Any = None,
    ) -> list[str]:
        """The first chunks that fit together, whole; at least one, cut if it must be."""
        room = self._get_available_chunk_size(prompt, 1, padding=padding, llm=llm, tools=tools)
        kept: list[str] = []
        for text in text_chunks:
            room -= self._tokens(text + _JOIN)
            if room < 0:
                break
            kept.append(text)
        return kept or list(super().truncate(prompt, text_chunks[:1], padding, llm, tools))

    def _tokens(self, text: str) -> int:
        return int(self._token_counter.get_string_tokens(text))


def encoder(runtime: Runtime) -> Any:
    """Text to token ids, by the runtime's tokenizer; no special tokens are added."""
    tokenizer = runtime.tokenizer

    def encode(text: str, **_: Any) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    return encode

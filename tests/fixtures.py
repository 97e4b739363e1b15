"""Runtimes for tests: a tiny random Llama with a hashing embedder, and options that keep it small."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from lazy_rag import Runtime
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import tiny_tokenizer

PAGE = 8
CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class WordEmbedder:
    """Bags of words, hashed: texts that share words are similar. Counts what it embeds."""

    name = "words"

    def __init__(self, dimension: int = 64) -> None:
        self.dimension = dimension
        self.texts: list[str] = []

    def encode(self, texts: list[str]) -> np.ndarray[Any, Any]:
        self.texts += texts
        vectors = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for row, text in zip(vectors, texts, strict=True):
            for word in text.lower().replace("?", " ").replace(".", " ").split():
                row[hashlib.blake2b(word.encode(), digest_size=4).digest()[0] % self.dimension] += 1
        return vectors


def make_runtime(
    family: str = "llama",
    *,
    store: Path | None = None,
    seed: int = 0,
    to: tuple[Any, ...] | None = None,
    **options: Any,
) -> Runtime:
    """A runtime over a tiny model; two of them with equal arguments share nothing but content.

    Args:
        to: device and dtype the model is moved to.
    """
    settings: dict[str, Any] = {
        "tokenizer": tiny_tokenizer(chat_template=CHATML),
        "embedder": WordEmbedder(),
        "page_size": PAGE,
        "cache_bytes": 8 << 20,
        "impl": "reference",
        "progress": False,
        "store": store,
        **options,
    }
    model = tiny_model(family, seed=seed)
    return Runtime(model if to is None else model.to(*to), **settings)


def pages(runtime: Runtime, count: int) -> int:
    """The bytes of `count` pages, for `cache_bytes`."""
    return count * runtime.stats.page_bytes

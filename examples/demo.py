"""What `make demo` runs: questions about this project's own pages, and a receipt for every answer.

The chunks of the first answer are encoded while it waits. The same question with the same chunks in another order then
encodes nothing: their KV is used again at new offsets. Exits with 1 when that is not so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from transformers.utils import logging

from lazy_rag import Answer, Runtime, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
PAGES = [page for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md") if (page := ROOT / name).exists()]
QUESTIONS = ("Which version of Python do I need?", "What does the receipt say?")
SAMPLING = SamplingParams(max_tokens=48, temperature=0, stop="\n\n")


def main() -> int:
    logging.disable_progress_bar()
    print("Loading SmolLM2-135M (the first time it is converted, which takes about 15 seconds) ...", flush=True)
    with Runtime("smollm2-135m") as runtime:
        chunks = runtime.add_documents(PAGES, encode="on_use", chunk_tokens=96)
        print(f"{len(chunks)} chunks from {', '.join(page.name for page in PAGES)}")
        answers = [ask(runtime, question) for question in QUESTIONS]
        return reorder(runtime, QUESTIONS[0], answers[0])


def ask(runtime: Runtime, question: str) -> Answer:
    print(f"\n> {question}")
    return show(runtime, runtime.stream(question, k=4, sampling=SAMPLING))


def reorder(runtime: Runtime, question: str, first: Answer) -> int:
    """Ask again with the chunks the other way round; 0 when all of their KV was used again."""
    print(f"\n> {question}   (again, the same chunks in reverse order)")
    ids = [source.chunk_id for source in reversed(first.sources)]
    pieces = runtime.chat(question, ids, stream=True, sampling=SAMPLING)
    assert isinstance(pieces, Iterator)
    again = show(runtime, pieces)
    before, after = (1000 * answer.receipt.times.first_token for answer in (first, again))
    receipt = again.receipt
    print(f"\nfirst token after {before:.0f} ms with chunks to encode, {after:.0f} ms with every chunk at a new offset")
    if receipt.reuse != 1.0 or receipt.tokens_encoded != 0:
        print(f"expected 100% reuse, got {receipt.reuse:.0%} and {receipt.tokens_encoded} encoded tokens")
        return 1
    print(f"{receipt.reuse:.0%} of the chunk tokens were reused, 0 encoded")
    return 0


def show(runtime: Runtime, pieces: Iterator[str]) -> Answer:
    for piece in pieces:
        print(piece, end="", flush=True)
    answer = runtime.last_answer
    assert answer is not None
    print(f"\n\n{answer.receipt}")
    return answer


if __name__ == "__main__":
    sys.exit(main())

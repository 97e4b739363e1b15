"""What a user gets back: the answer, where it came from, and a truthful record of what it cost."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from lazy_rag.errors import IncompleteAnswerError
from lazy_rag.keys import ChunkId
from lazy_rag.layout import PromptLayout
from lazy_rag.requests import ChunkUse, Completion, Times
from lazy_rag.tools import ToolCall


@dataclass(frozen=True)
class Source:
    """A chunk that was in the prompt. `score`: cosine similarity to the question, None when ids were given.
    `siblings`: how many chunks its document has, this one included; 1 where no document is named."""

    chunk_id: ChunkId
    text: str
    score: float | None = None
    document_id: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    siblings: int = 1


@dataclass(frozen=True)
class Explanation:
    """Whether a segment's KV would be found if the layout ran now, and why (the reasons: `lazy_rag/explain.py`).

    `tier`: "gpu", "host" or "disk", where it lies; None where it does not.
    """

    chunk_id: ChunkId
    offset: int
    hit: bool
    reason: str
    tier: str | None = None


@dataclass(frozen=True)
class Receipt:
    """The record of one request. Every prompt token is reused, history, encoded or live:

    tokens_reused    prompt tokens of chunks whose KV was already there (in memory or on disk)
    tokens_history   prompt tokens of live text whose KV an earlier request had left: a chat's earlier turns, say
    tokens_encoded   prompt tokens of chunks that were computed for the cache while this request waited (a chunk is
                     computed whole, also when the prompt uses a range of it)
    tokens_live      prompt tokens computed for this request only
    tokens_repaired  those of the live tokens that repeat a chunk's text (`repair`)
    tokens_generated tokens of the answer, of all its samples
    preempted        how often the request gave its pages up to others and was computed again from there
    searched_by      what found the chunks: FAISS on the CPU or a matrix product on a GPU; "" when ids were given
    """

    chunks: tuple[ChunkUse, ...]
    tokens_reused: int
    tokens_encoded: int
    tokens_live: int
    tokens_repaired: int
    tokens_generated: int
    times: Times
    tokens_history: int = 0
    preempted: int = 0
    searched_by: str = ""

    @property
    def prompt_tokens(self) -> int:
        return self.tokens_reused + self.tokens_history + self.tokens_encoded + self.tokens_live

    @property
    def reuse(self) -> float:
        """Share of the chunk tokens that came from the cache, 0 to 1; repaired tokens did not. 0 without chunks."""
        from_chunks = self.tokens_reused + self.tokens_encoded + self.tokens_repaired
        return self.tokens_reused / from_chunks if from_chunks else 0.0

    def __str__(self) -> str:
        lines = [f"{'chunk':<14}{'offset':>8}{'tokens':>8}  found in"]
        lines += [f"{use.chunk_id[:12]:<14}{use.offset:>8}{use.length:>8}  {use.tier}" for use in self.chunks]
        lines.append(
            f"tokens: {self.tokens_reused} reused, {self.tokens_encoded} encoded, {self.tokens_live} live"
            + (f" ({self.tokens_repaired} of them repaired)" if self.tokens_repaired else "")
            + (f", {self.tokens_history} of earlier live text" if self.tokens_history else "")
            + (f"; {self.reuse:.0%} of chunk tokens from cache" if self.chunks else "")
        )
        times = self.times
        lines.append(
            f"first token {1000 * (times.retrieve + times.first_token):.0f} ms "
            f"(retrieve {1000 * times.retrieve:.0f}, encode {1000 * times.encode:.0f}, "
            f"prefill {1000 * times.prefill:.0f})"
            + (f"; found by {self.searched_by}" if self.searched_by else "")
            + (f"; {(self.tokens_generated - 1) / times.decode:.1f} tokens/s after it" if self._has_rate() else "")
        )
        return "\n".join(lines)

    def _has_rate(self) -> bool:
        return self.tokens_generated > 1 and self.times.decode > 0

    def _repr_html_(self) -> str:
        from lazy_rag.display import receipt_html

        return receipt_html(self)


@dataclass(frozen=True)
class Sample:
    """One of the texts of an answer. `logprobs` as in `Answer`."""

    text: str
    finish_reason: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None


@dataclass(frozen=True)
class Answer:
    """`finish_reason`: "stop" (end token or stop string), "length" or "cancelled".

    `dropped` lists chunks that did not fit the context, lowest-ranked last. `logprobs` are of the chosen tokens under
    the model's own distribution, when `SamplingParams(logprobs=True)`. `tool_calls`: the calls a chat with `tools` asks
    for; the text is empty then.

    `samples` holds what `SamplingParams(n=...)` asked for, n of them in the order of their seeds; `text`,
    `finish_reason`, `token_ids` and `logprobs` are the first one's.
    """

    text: str
    sources: tuple[Source, ...]
    receipt: Receipt
    finish_reason: str
    usage: dict[str, int]
    dropped: tuple[ChunkId, ...]
    logprobs: tuple[float, ...] | None
    token_ids: tuple[int, ...]
    layout: PromptLayout
    samples: tuple[Sample, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()

    def json(self) -> Any:
        """The text read as JSON. Raises IncompleteAnswerError when it is none, having been cut off, say."""
        try:
            return json.loads(self.text)
        except ValueError as error:
            raise IncompleteAnswerError(f"the answer is no complete JSON: {self._ending()}") from error

    def _ending(self) -> str:
        count, prompt = len(self.token_ids), len(self.layout)
        if self.finish_reason == "length":
            return (
                f"it was cut off at {count} tokens, behind a prompt of {prompt}. Raise max_tokens; where both fill the "
                "context, shorten the prompt. With json_schema an answer is complete within max_tokens"
            )
        if self.finish_reason == "cancelled":
            return f"it was cancelled after {count} tokens"
        return f"it ended after {count} tokens. Ask with json_schema, and leave stop strings out: they cut it"

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        from lazy_rag.display import answer_html

        return answer_html(self)


def make_receipt(layout: PromptLayout, completion: Completion, retrieve: float, searched_by: str = "") -> Receipt:
    completion.times.retrieve = retrieve
    samples = completion.samples or (completion,)
    reused = sum(use.length for use in completion.uses if use.hit)
    return Receipt(
        chunks=completion.uses,
        tokens_reused=reused,
        tokens_encoded=sum(use.length for use in completion.uses) - reused,
        tokens_live=layout.live_tokens - completion.history,
        tokens_repaired=layout.repaired_tokens,
        tokens_generated=sum(len(sample.token_ids) for sample in samples),
        times=completion.times,
        tokens_history=completion.history,
        preempted=sum(sample.preempted for sample in samples),
        searched_by=searched_by,
    )


def make_answer(
    layout: PromptLayout,
    completion: Completion,
    sources: tuple[Source, ...],
    retrieve: float = 0.0,
    searched_by: str = "",
) -> Answer:
    receipt = make_receipt(layout, completion, retrieve, searched_by)
    return Answer(
        text=completion.text,
        sources=sources,
        receipt=receipt,
        finish_reason=completion.finish_reason,
        usage={
            "prompt_tokens": receipt.prompt_tokens,
            "completion_tokens": receipt.tokens_generated,
            "total_tokens": receipt.prompt_tokens + receipt.tokens_generated,
            "cached_tokens": receipt.tokens_reused + receipt.tokens_history,
        },
        dropped=layout.dropped,
        logprobs=completion.logprobs,
        token_ids=completion.token_ids,
        layout=layout,
        samples=tuple(
            Sample(sample.text, sample.finish_reason, sample.token_ids, sample.logprobs)
            for sample in completion.samples or (completion,)
        ),
    )

"""The runtime: documents in, answers out. The two drivers, `add_documents` and `query`, read as the pipeline.

documents ─ load ─ split ─► chunks ─ index (embed, FAISS, SQLite) ─ encode ─► page pool
question ─ retrieve ─► chunk ids ─ layout ─► prompt ─ engine (pin, plan, prefill, decode) ─► Answer + receipt
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import queue
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, aclosing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from lazy_rag import streaming
from lazy_rag.answer import Answer, Explanation, Receipt, Source, make_answer
from lazy_rag.arguments import check_namespace, checked_keywords, known_seconds
from lazy_rag.building import Settings, build
from lazy_rag.captures import GATE
from lazy_rag.display import runtime_html
from lazy_rag.documents import load_documents, unnamed
from lazy_rag.embedder import Embedder
from lazy_rag.engine import Engine
from lazy_rag.errors import (
    ConfigError,
    EmptyCorpusError,
    RuntimeClosedError,
    StoreError,
    UnknownChunkError,
)
from lazy_rag.explain import explain_layout
from lazy_rag.forks import Home
from lazy_rag.keys import ChunkId
from lazy_rag.layout import Chunk, PromptLayout, known_repair
from lazy_rag.loading import load_model
from lazy_rag.model import LanguageModel
from lazy_rag.persistence import (
    Copies,
    OpenStore,
    check_store,
    keeper,
    load_arguments,
    make_manifest,
    same_folder,
    write_store,
)
from lazy_rag.policy import EvictionPolicy, make_policy
from lazy_rag.preparing import (
    ChatMessages,
    ChatOptions,
    Piece,
    Prepared,
    Preparer,
    QueryOptions,
    RequestOptions,
)
from lazy_rag.progress import loading_bars, progress_bar
from lazy_rag.requests import Completion, Ticket
from lazy_rag.retriever import ChunkRecord, Hit, Retriever
from lazy_rag.soundness import require_layout, require_sound
from lazy_rag.stats import Occupancy, Stats, snapshot
from lazy_rag.store import change_warm, read_warm
from lazy_rag.tools import CallFilter

_log = logging.getLogger(__name__)
DEFAULT_EMBEDDER = "all-minilm-l6-v2"
RECEIPTS = 256  # how many are kept


class Runtime:
    """A language model, a page pool of position-free chunks and a retriever, in one object.

    Args:
        model: hub id, local folder, GGUF file, packaged alias ("smollm2-135m") or a live transformers model (then
            `tokenizer` must be its tokenizer object; the runtime drives the model until `close`).
        tokenizer, revision, adapter, quantization_config: as transformers takes them.
        embedder: name, path, or object with `encode(list[str])`; None: no retriever.
        device, dtype: default to the GPU and bfloat16 where there is one, else the CPU and float32.
        max_context: most tokens of prompt and answer; default and limit: the model's positions.
        prefix: "shared" (chunks are encoded behind the chat template's opening), "none", or the text itself.
        separator: stored at the end of every chunk.
        cache_bytes: the page budget. Default: 80 % of a GPU's free memory; without one a quarter of the machine's
            memory, at most 4 GiB.
        host_bytes: with a GPU: pinned host memory for chunks that leave the GPU. None: no such tier.
        store: folder in which index, metadata and KV live and survive.
        policy: "lru", "lfu", "cost" (recompute seconds × uses / bytes), or an object with the `EvictionPolicy` methods.
        namespace: salt of this runtime's chunks; a request in another namespace never sees them.
        quotas: most bytes of memory that chunks of a namespace take, by namespace.
        ttl: seconds after which KV of a chunk that is not pinned is taken from no tier any more, but computed again;
            KV of live text is used no longer than that after its own, or its oldest chunk's, was computed.
        max_queue: most requests waiting for admission, more are refused with QueueFullError; None: no bound.
        encode_tokens: most rows of one forward pass; an eighth of them when requests decode beside other work.
        page_size: token slots of a page.
        impl: "reference" or "triton"; default "triton" on a GPU.
        compile: fuse the model's small operations with torch.compile at the start, which takes about a minute.
        repair: default of every request: "none", "head" or "exact".
        progress: show progress bars on long work.

    All methods are thread-safe; what they raise on purpose derives from LazyRAGError.
    """

    _shared: ClassVar[dict[str, Runtime]] = {}
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()

    @checked_keywords()
    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        revision: str | None = None,
        adapter: str | Path | None = None,
        quantization_config: Any = None,
        embedder: Any = DEFAULT_EMBEDDER,
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
        max_context: int | None = None,
        prefix: str = "shared",
        separator: str = "\n\n",
        cache_bytes: int | None = None,
        host_bytes: int | None = None,
        store: str | Path | None = None,
        policy: str | EvictionPolicy = "lru",
        namespace: str = "",
        quotas: Mapping[str, int] | None = None,
        ttl: float | None = None,
        max_queue: int | None = None,
        encode_tokens: int = 8192,
        page_size: int = 16,
        impl: str | None = None,
        compile: bool = False,
        repair: str = "none",
        progress: bool = True,
    ) -> None:
        self._closed = False
        self._home = Home()
        self._closing = threading.Lock()
        self._progress = bool(progress)
        live = isinstance(model, PreTrainedModel)
        if live and device not in (None, model.device, model.device.type):
            raise ConfigError(f"the model is on {model.device}, not on {device!r}: move it, or leave device out")
        settings = Settings.of(
            device=model.device if live else device,
            dtype=dtype,
            impl=impl,
            prefix=prefix,
            separator=separator,
            namespace=namespace,
            max_context=max_context,
            cache_bytes=cache_bytes,
            host_bytes=host_bytes,
            encode_tokens=encode_tokens,
            page_size=page_size,
            max_queue=max_queue,
            compile=compile,
            quotas=quotas,
            ttl=ttl,
        )
        known_repair(repair)
        check_namespace(namespace)
        policy = make_policy(policy)
        if live and dtype is not None and settings.dtype != model.dtype:
            raise ConfigError(f"the model is {model.dtype}: convert it, or leave dtype out")
        with ExitStack() as undo, loading_bars(self._progress):
            self._store = None if store is None else undo.enter_context(OpenStore(store))
            self._copies = Copies()
            loaded, self.tokenizer = load_model(
                model,
                tokenizer,
                revision=revision,
                adapter=adapter,
                quantization_config=quantization_config,
                device=settings.device,
                dtype=settings.dtype,
            )
            folder = None if self._store is None else self._store.folder
            self._parts = build(loaded, self.tokenizer, settings, policy=policy, store=folder)
            self._engine = self._parts.engine
            undo.callback(self._parts.model.release)
            undo.callback(self._engine.close)
            self._manifest = make_manifest(
                self._parts,
                settings,
                model=model,
                embedder=embedder,
                tokenizer=tokenizer,
                revision=revision,
                adapter=adapter,
                repair=repair,
            )
            if self._store is not None:
                self._store.require(self._parts.keys.id)
            self.embeddings = None if embedder is None else Embedder.load(embedder, str(settings.device))
            problem, keys = self._parts.chunker.problem, self._parts.keys
            self._retriever = Retriever(self.embeddings, folder, keys.id, settings.device, lambda r: problem(r) is None)
            undo.callback(self._retriever.close)
            undo.callback(self._engine.close)  # again: before what its last writes ask
            if self._parts.records is not None:
                self._parts.records.keep = keeper(self._parts, self._retriever)
                self._parts.records.sweep()
            if self._store is not None:
                self._store.write_manifest(self._manifest)
            self._engine.start()
            self._preparer = Preparer(self._parts, self._retriever, namespace=namespace, repair=repair)
            if folder is not None:
                self._warm_up(folder)
            undo.pop_all()
        self.last_answer: Answer | None = None
        self.receipts: deque[Receipt] = deque(maxlen=RECEIPTS)  # of the latest requests, oldest first
        # a runtime nobody holds any more gives back thread, pages and model
        self._finalizer = weakref.finalize(
            self, _let_go, self._engine, self._retriever, self._parts.model, self._store, self._home
        )
        self._finalizer.atexit = False
        atexit.register(_close_at_exit, weakref.ref(self))

    # adding

    @checked_keywords()
    def add_documents(
        self,
        sources: Any,
        *,
        ids: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        encode: str = "now",
        namespace: str | None = None,
        chunk_tokens: int = 256,
    ) -> list[ChunkId]:
        """Load, split, index and (with `encode="now"`) compute documents; a document added before is replaced.

        Args:
            sources: one or many of: paths and folders (.txt .md .py .html .pdf), texts, framework documents.
            encode: "now", as far as the page budget goes without evicting, or "on_use".
            chunk_tokens: longest chunk, its separator included.

        Returns the chunk ids in order. Raises DocumentError or EmptyCorpusError, and then nothing was added.
        """
        self._require_open()
        documents = load_documents(sources, ids=ids, metadata=metadata)
        space = self._preparer.space(namespace)
        chunks = self._parts.chunker.split(documents, space, chunk_tokens)
        if not any(chunks):
            raise EmptyCorpusError("no text was found in what was given to add")
        batch = [(d.id, records, d.metadata) for d, records in zip(documents, chunks, strict=True)]
        return self._index(batch, encode, space)

    @checked_keywords()
    def add_chunks(
        self,
        texts: Sequence[str],
        *,
        ids: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        encode: str = "on_use",
        namespace: str | None = None,
        vectors: Any = None,
    ) -> list[ChunkId]:
        """Add texts as one chunk each, without splitting.

        Args:
            ids: document ids, default the chunk ids.
            vectors: `[len(texts), d]` of the runtime's embedder, instead of embedding the texts.
        """
        self._require_open()
        if isinstance(texts, str) or not isinstance(texts, Sequence):
            raise ConfigError("add_chunks takes a list of texts; for one text pass [text]")
        if not texts:
            raise EmptyCorpusError("no text was given to add")
        for number, text in enumerate(texts):
            if isinstance(text, str) and not text.strip():
                raise ConfigError(f"text number {number} of {len(texts)} is empty: leave out texts that are")
        space = self._preparer.space(namespace)
        records = [self._parts.chunker.record(text, space) for text in texts]
        names = unnamed([record.chunk_id for record in records]) if ids is None else list(_listed(ids, "ids"))
        if metadata is None or isinstance(metadata, Mapping):
            each = [metadata or {}] * len(records)
        else:
            each = list(_listed(metadata, "metadata"))
        if not len(records) == len(names) == len(each):
            raise ConfigError(f"{len(records)} texts, {len(names)} ids and {len(each)} metadata do not go together")
        if not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
            raise ConfigError("ids must be strings, each only once")
        if not all(isinstance(m, Mapping) for m in each):
            raise ConfigError("metadata must be one mapping, or one for each text")
        batch = [(n, [r], dict(m)) for n, r, m in zip(names, records, each, strict=True)]
        self._index(batch, encode, space, vectors)
        return [ChunkId(record.chunk_id) for record in records]

    @checked_keywords()
    def remember(self, texts: Sequence[str], *, encode: str = "on_use", namespace: str | None = None) -> list[ChunkId]:
        """The ids of chunks with these texts, for texts that another index holds: their KV is cached and found in
        prompts, but they are not embedded, searched or kept in a store. At most 20 000; the least recently used go, and
        those that are deleted (see `delete`).
        """
        self._require_open()
        _known_encode(encode)
        listed = list(_listed(texts, "texts"))
        space = self._preparer.space(namespace)
        return self._remembered(self._preparer.remembered.add(listed, space), encode, space)

    @checked_keywords()
    def remember_parts(self, text: str, *, encode: str = "on_use", namespace: str | None = None) -> list[ChunkId]:
        """`remember` for a text of any length: one that takes more than half of the context is cut, where sentences
        end if it can be, into parts of at most a quarter of the context each, in order."""
        self._require_open()
        _known_encode(encode)
        space = self._preparer.space(namespace)
        longest, part = self.max_context // 2, self.max_context // 4
        ids = self._preparer.remembered.add_parts(text, space, longest=longest, part=part)
        return self._remembered(ids, encode, space)

    def _remembered(self, ids: Sequence[str], encode: str, namespace: str) -> list[ChunkId]:
        if encode == "now":
            self._encode([self.chunk(i, namespace=namespace) for i in dict.fromkeys(ids)], evict=False)
        return [ChunkId(i) for i in ids]

    def _index(
        self,
        batch: Sequence[tuple[str, Sequence[ChunkRecord], Mapping[str, Any]]],
        encode: str,
        namespace: str,
        vectors: Any = None,
    ) -> list[ChunkId]:
        _known_encode(encode)
        records = [record for _, chunks, _ in batch for record in chunks]
        ids = [ChunkId(record.chunk_id) for record in records]
        as_of = self._preparer.as_of
        change = self._retriever.upsert_many(batch, namespace=namespace, progress=self._progress, vectors=vectors)
        self._forget(change.removed)
        if encode == "now":
            self._encode([self._parts.chunker.chunk(record, as_of) for record in records], evict=False)
        return ids

    def _encode(self, chunks: Sequence[Chunk], *, evict: bool, pin: bool = False, ttl: float | None = None) -> int:
        self._preparer.departures.look()
        done: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        job = self._engine.encode(chunks, evict=evict, pin=pin, ttl=ttl, on_progress=done.put)
        job.future.add_done_callback(lambda _: done.put(None))
        try:
            with progress_bar(len(chunks), "encode", "chunk", disable=not self._progress) as bar:
                while (step := done.get()) is not None:
                    bar.update(step)
        except BaseException:  # Ctrl-C, say
            self._engine.call(lambda: self._engine.residency.stop(job))
            raise
        return job.future.result()

    # finding

    @checked_keywords()
    def retrieve(
        self,
        query: str | Sequence[float],
        k: int = 5,
        *,
        filter: Mapping[str, Any] | None = None,
        namespace: str | None = None,
        per_document: bool = False,
    ) -> list[Hit]:
        """The k chunks most similar to the query (a text, or a vector of the embedder's), best first; `filter` on
        metadata applies before top-k.

        A chunk of several documents is one hit, with the oldest matching document's metadata. With `per_document` it is
        one for every matching document that is this chunk alone, oldest first, and one for all longer documents.
        """
        self._require_open()
        return self._preparer.retrieve(query, k, filter, namespace, per_document)

    @checked_keywords()
    def find(
        self,
        *,
        ids: Sequence[str] | None = None,
        filter: Mapping[str, Any] | None = None,
        namespace: str | None = None,
    ) -> list[Source]:
        """What is indexed: the chunks of these documents, or these chunks, or all; the oldest document first, in order.

        `filter` is on metadata. Ids that are not there give nothing; a chunk that stands in several documents is given
        for each of them.
        """
        self._require_open()
        wanted = None if ids is None else list(_listed(ids, "ids"))
        found = self._retriever.find(namespace=self._preparer.space(namespace), filter=filter, ids=wanted)
        return [Source(ChunkId(h.chunk_id), h.text, None, h.document_id, h.metadata, h.siblings) for h in found]

    def has_chunks(self, *, namespace: str | None = None) -> bool:
        """Whether anything was added to a namespace that a search could find."""
        self._require_open()
        return self._retriever.has_chunks(self._preparer.space(namespace))

    def vectors(self, chunk_ids: Sequence[str]) -> NDArray[np.float32]:
        """The stored unit vectors of chunks, float32 `[n, d]`. Raises UnknownChunkError."""
        self._require_open()
        return self._retriever.vectors(list(_listed(chunk_ids, "chunk_ids")))

    # asking

    @checked_keywords(QueryOptions)
    def query(self, question: str, k: int = 5, **options: Unpack[QueryOptions]) -> Answer:
        """Retrieve k chunks for the question and answer from them."""
        return self._run(self._prepared.query(question, k, options))

    @checked_keywords(QueryOptions)
    def stream(self, question: str, k: int = 5, **options: Unpack[QueryOptions]) -> streaming.TextIterator:
        """Like `query`, as an iterator of text pieces; its `answer` is the Answer once it has ended."""
        return self._stream(self._prepared.query(question, k, options))

    @checked_keywords(RequestOptions)
    def generate(
        self, question: str | PromptLayout, chunk_ids: Sequence[Piece] = (), **options: Unpack[RequestOptions]
    ) -> Answer:
        """Answer from the given chunks, ranges of chunks and live text between them, or from a layout made before."""
        return self._run(self._prepared.request(question, chunk_ids, options))

    @checked_keywords(ChatOptions)
    def chat(
        self,
        messages: ChatMessages,
        chunk_ids: Sequence[Piece] = (),
        *,
        stream: bool = False,
        **options: Unpack[ChatOptions],
    ) -> Answer | streaming.TextIterator:
        """Answer a conversation; the chunks stand before the last user's text. With `stream`, an iterator of text
        pieces, whose `answer` is the Answer after the last one.

        Chunks may stand anywhere in the messages: as `ChunkRange` pieces of a content (see `Message`), and with
        `anchor` wherever their text stands verbatim. With `tools`, the calls asked for are in `Answer.tool_calls`, and
        its text is empty then.
        """
        prepared = self._prepared.chat(messages, chunk_ids, options)
        return self._stream(prepared) if stream else self._run(prepared)

    @checked_keywords(QueryOptions)
    async def aquery(self, question: str, k: int = 5, **options: Unpack[QueryOptions]) -> Answer:
        """`query` for asyncio; cancelling the task frees the request's pages."""
        return await self._arun(await asyncio.to_thread(self._prepared.query, question, k, options))

    @checked_keywords(QueryOptions)
    async def astream(self, question: str, k: int = 5, **options: Unpack[QueryOptions]) -> AsyncIterator[str]:
        """`stream` for asyncio."""
        prepared = await asyncio.to_thread(self._prepared.query, question, k, options)
        async with aclosing(self._astream(prepared)) as pieces:
            async for piece in pieces:
                yield piece

    @checked_keywords(RequestOptions)
    async def agenerate(
        self, question: str | PromptLayout, chunk_ids: Sequence[Piece] = (), **options: Unpack[RequestOptions]
    ) -> Answer:
        """`generate` for asyncio."""
        return await self._arun(await asyncio.to_thread(self._prepared.request, question, chunk_ids, options))

    @checked_keywords(ChatOptions)
    async def achat(
        self,
        messages: ChatMessages,
        chunk_ids: Sequence[Piece] = (),
        *,
        stream: bool = False,
        **options: Unpack[ChatOptions],
    ) -> Answer | streaming.AsyncTextIterator:
        """`chat` for asyncio. With `stream`, await it first: `async for piece in await rt.achat(..., stream=True)`."""
        prepared = await asyncio.to_thread(self._prepared.chat, messages, chunk_ids, options)
        return self._astream(prepared) if stream else await self._arun(prepared)

    @checked_keywords(RequestOptions)
    def layout(self, question: str, chunk_ids: Sequence[Piece] = (), **options: Unpack[RequestOptions]) -> PromptLayout:
        """The prompt that `generate` would run, without running it."""
        return self._prepared.request(question, chunk_ids, options).layout

    @checked_keywords(ChatOptions)
    def chat_layout(
        self, messages: ChatMessages, chunk_ids: Sequence[Piece] = (), **options: Unpack[ChatOptions]
    ) -> PromptLayout:
        """The prompt that `chat` would run, without running it."""
        return self._prepared.chat(messages, chunk_ids, options).layout

    def next_token_logits(self, layout: PromptLayout) -> Tensor:
        """Logits after the layout's last token, float32 [vocab] on the host. For tests and research."""
        prepared = self._prepared.request(require_layout(layout), (), {})
        ticket = self._engine.submit(prepared.layout, replace(prepared.sampling, n=1), wants_logits=True)
        logits = streaming.run(lambda _: ticket).logits
        assert logits is not None
        return logits

    # managing the cache

    @checked_keywords()
    def explain(self, layout: PromptLayout, *, namespace: str | None = None) -> list[Explanation]:
        """For every segment of a layout: would its KV be found, in which tier, and why (not).

        Args:
            namespace: whose request it would be; None: that of each chunk. Reasons look across namespaces, so they are
                for whoever runs this process, not for its users.
        """
        self._require_open()
        require_sound(layout)
        space = None if namespace is None else check_namespace(namespace)
        return self._engine.call(lambda: explain_layout(self._parts, layout, space)).result()

    @checked_keywords()
    def prefetch(self, ids: Iterable[str], *, namespace: str | None = None) -> int:
        """Bring chunks into memory, evicting others; returns how many of them are there at the end."""
        chunks = self._chunks(ids, namespace)
        self._encode(chunks, evict=True)
        return sum(self._engine.call(lambda: [c.id in self._engine.cache for c in chunks]).result())

    @checked_keywords()
    def pin(self, ids: Iterable[str], *, ttl: float | None = None, namespace: str | None = None) -> None:
        """Bring chunks into memory and keep them there, for `ttl` seconds or until `unpin`; of several pins the longest
        counts. Raises CacheFullError, and then pins none of them.

        The pin of a chunk that is deleted or replaced ends, also when another runtime of the store does that, or when a
        remembered text has to make room for others: with the next request, `prefetch`, `pin` or `check` here.
        """
        seconds = known_seconds("ttl", ttl)
        self._encode(self._chunks(ids, namespace), evict=True, pin=True, ttl=seconds)
        self._preparer.departures.pinned()

    @checked_keywords()
    def unpin(self, ids: Iterable[str], *, namespace: str | None = None) -> None:
        """Let chunks be evicted again. Raises UnknownChunkError for ids neither held nor in memory here."""
        listed = list(_listed(ids, "ids"))
        here = self._in_memory(listed, namespace)
        self._chunks([i for i in listed if i not in here], namespace)  # unknown ones are refused
        self._engine.call(lambda: self._engine.cache.unpin(here)).result()

    def _in_memory(self, ids: Sequence[str], namespace: str | None) -> list[ChunkId]:
        """Those ids of chunks in memory, whether or not the store still holds them; never the encode prefix."""
        self._require_open()
        own = None if self.prefix is None else self.prefix.id
        space, texts = self._preparer.space(namespace), [i for i in ids if isinstance(i, str) and i != own]
        return self._engine.call(lambda: self._engine.cache.held_here(texts, space)).result()

    @checked_keywords()
    def warm(self, ids: Iterable[str], *, namespace: str | None = None) -> int:
        """Set a namespace's warm list: `prefetch` these chunks now, and in the background whenever a runtime opens this
        store. An empty list ends it. Raises ConfigError without a store."""
        chunks, space = self._chunks(ids, namespace), self._preparer.space(namespace)
        if self._store is None:
            raise ConfigError("a warm list is kept in a store, and this runtime has none: use prefetch")
        wanted: list[str] = [chunk.id for chunk in chunks]
        change_warm(self._store.folder, space, wanted)
        return self.prefetch(wanted, namespace=namespace)

    def _warm_up(self, folder: Path) -> None:
        """Start loading the warm list; chunks deleted meanwhile are passed over, and nothing is evicted for it."""
        try:
            listed = [i for ids in read_warm(folder).values() for i in ids]
        except StoreError as error:
            _log.warning("nothing is loaded ahead: %s", error)
            return
        as_of, chunker = self._preparer.as_of, self._parts.chunker
        records = [record for record in self._retriever.records(listed).values() if chunker.sound(record)]
        if records:
            self._engine.encode([chunker.chunk(record, as_of) for record in records], evict=False)

    def _chunks(self, ids: Iterable[str], namespace: str | None) -> list[Chunk]:
        """Without repetitions. Raises UnknownChunkError."""
        return list({c.id: c for c in (self.chunk(i, namespace=namespace) for i in _listed(ids, "ids"))}.values())

    @checked_keywords()
    def delete(self, ids: Sequence[str], *, missing_ok: bool = False, namespace: str | None = None) -> None:
        """Delete documents or chunks by id: vector, text and KV, in memory and on disk. Remembered texts are forgotten,
        also when a document that held the same text is deleted or replaced.

        Raises UnknownChunkError, with nothing deleted, for an id that is not there; `missing_ok` passes over those, and
        drops what this runtime has in memory of chunks that another one deleted, pinned or not.
        """
        self._require_open()
        gone = list(_listed(ids, "ids"))
        if not all(isinstance(i, str) for i in gone):
            raise UnknownChunkError("document and chunk ids are strings")
        space = self._preparer.space(namespace)
        remembered = self._preparer.remembered.own(gone, space)
        removed = self._retriever.delete(gone, namespace=space, missing_ok=missing_ok, elsewhere=remembered).removed
        here = self._in_memory(gone, namespace) if missing_ok else ()
        self._forget(list(dict.fromkeys([*removed, *remembered, *here])))

    def _forget(self, chunk_ids: Sequence[str]) -> None:
        self._preparer.remembered.forget(chunk_ids)
        gone = [ChunkId(i) for i in chunk_ids]
        if gone:
            self._engine.call(lambda: self._engine.residency.discard(gone)).result()

    @checked_keywords()
    def chunk(self, chunk_id: str, *, namespace: str | None = None) -> Chunk:
        """An added chunk, for building layouts by hand. Raises UnknownChunkError, also for one of another namespace."""
        self._require_open()
        if not isinstance(chunk_id, str):
            raise UnknownChunkError(f"{chunk_id!r} is no chunk id")
        return self._preparer.chunk(chunk_id, self._preparer.space(namespace))[0]

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._parts.max_context

    @property
    def identity(self) -> str:
        """A hash of all that chunk ids are made from: weights, tokenizer, precision, page layout, encode prefix."""
        return self._parts.keys.id

    @property
    def separator(self) -> str:
        """What is stored at the end of every chunk."""
        return self._parts.chunker.separator

    @property
    def prefix(self) -> Chunk | None:
        """The encode prefix as a chunk; None with `prefix="none"`."""
        return self._parts.prefix

    @property
    def stats(self) -> Stats:
        """A snapshot of sizes and totals."""
        self._require_open()
        documents, rows = len(self._retriever.documents(self._preparer.space(None))), len(self._retriever)
        return self._engine.call(lambda: snapshot(self._engine, documents, rows)).result()

    def occupancy(self) -> dict[str, Occupancy]:
        """What each tier holds now, by its name in receipts; the disk only with a store, whose files are listed."""
        self._require_open()
        engine, records = self._engine, self._parts.records

        def read() -> dict[str, Occupancy]:
            pool, arena = engine.pool, engine.residency.tiers.arena
            pages = sum(len(entry.pages) for entry in engine.cache)
            size = pool.page_bytes
            tiers = {engine.residency.pool_tier: Occupancy(len(engine.cache), pages * size, pool.num_pages * size)}
            if arena is not None:
                used = arena.num_pages - arena.num_free
                tiers["host"] = Occupancy(len(arena), used * size, arena.num_pages * size)
            return tiers

        tiers = engine.call(read).result()
        if records is not None:
            sizes = records.sizes()
            tiers["disk"] = Occupancy(len(sizes), sum(size for size, _ in sizes.values()), None)
        return tiers

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def about(self) -> dict[str, str]:
        """What this runtime is made of, in words."""
        model = self._parts.model
        return {
            "model": str(self._manifest.model or model.model.name_or_path or type(model.model).__name__),
            "on": f"{model.device}, {str(model.dtype).removeprefix('torch.')}",
            "embedder": "none" if self.embeddings is None else self.embeddings.name,
            "context": f"{self.max_context} tokens",
            "store": "none" if self._store is None else str(self._store.folder),
            "state": "closed" if self._closed else "open",
        }

    def __repr__(self) -> str:
        return f"Runtime({', '.join(f'{name}: {value}' for name, value in self.about().items())})"

    def _repr_html_(self) -> str:
        return runtime_html(self)

    def check(self) -> list[str]:
        """Broken invariants of the page pool and the chunk cache; empty when all is well."""
        self._preparer.departures.look()
        return self._engine.call(self._engine.check).result()

    # keeping

    @checked_keywords()
    def save(self, directory: str | Path | None = None, *, replace: bool = False) -> None:
        """Write index, metadata, warm lists and the KV in memory to a folder (default: the runtime's store).

        A store that is in the folder already is refused with a StoreError unless this runtime wrote it there and nobody
        changed its documents or warm lists since, or `replace` is True: what it holds would be lost.
        """
        self._require_open()
        place = directory if directory is not None else None if self._store is None else self._store.folder
        if place is None:
            raise ConfigError("save needs a folder: this runtime has no store")
        own = self._store is not None and same_folder(place, self._store.folder)
        with nullcontext(self._store) if own else OpenStore(place, alone=True) as target:
            assert target is not None
            target.require(self._parts.keys.id)
            if not (own or replace):
                self._copies.require_own(target)
            write_store(target, self._manifest, self._parts, self._retriever, progress=self._progress)
            if not own:
                self._copies.note(target)

    @classmethod
    def load(cls, directory: str | Path, model: Any = None, **options: Any) -> Runtime:
        """Open a store with the model it was made with, and the options that its keys depend on.

        Live objects have to be given again, and so has what only governs memory: `policy`, `quotas`, `ttl`,
        `cache_bytes`, `host_bytes`, `max_queue`.
        """
        return cls(**load_arguments(directory, model, options))

    @checked_keywords()
    def check_store(self, *, repair: bool = False) -> list[str]:
        """Verify index, metadata and every KV record; what is wrong, in words. Bad records are set aside at once.

        With `repair`, records no document refers to are deleted, missing vectors are made again, damaged token ids are
        made again from their text where that still gives their chunk's id, and what does not belong into the store is
        set aside. Any other chunk that the catalog no longer tells rightly is healed by adding its text again.
        """
        self._require_open()
        return check_store(self._parts, self._retriever, repair=repair)

    # life

    @classmethod
    def shared(cls, model: Any, **options: Any) -> Runtime:
        """A live runtime built with the same arguments, or a new one: for notebooks that run a cell again."""
        key = repr((model if isinstance(model, str) else id(model), sorted(options.items(), key=lambda item: item[0])))
        with cls._shared_lock:
            runtime = cls._shared.get(key)
            if runtime is None or runtime._closed:
                runtime = cls._shared[key] = cls(model, **options)
            return runtime

    def close(self) -> None:
        """Keep the store, stop the engine, give the model back. Idempotent; unfinished requests fail.

        Raises StoreError when the store cannot be written; everything is closed all the same.
        """
        if self._home.left:
            return  # a forked child has neither the threads nor the right to the store
        with self._closing:
            if self._closed:
                return
            try:
                if self._store is not None:
                    write_store(self._store, self._manifest, self._parts, self._retriever, progress=False)
            except RuntimeClosedError as error:
                raise StoreError(
                    f"the engine had stopped: KV that was only in memory is not stored ({error})"
                ) from error
            finally:
                self._closed = True
                self._finalizer()
                with self._shared_lock:
                    for key in [key for key, runtime in self._shared.items() if runtime is self]:
                        del self._shared[key]

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # helpers

    @property
    def _prepared(self) -> Preparer:
        self._require_open()
        return self._preparer

    def _submit(self, prepared: Prepared, on_text: Callable[[str], None] | None) -> Ticket:
        return self._engine.submit(
            prepared.layout,
            prepared.sampling,
            on_text=on_text,
            priority=prepared.priority,
            deadline=prepared.deadline,
        )

    def _run(self, prepared: Prepared) -> Answer:
        return self._answer(prepared, streaming.run(partial(self._submit, prepared)))

    def _stream(self, prepared: Prepared) -> streaming.TextIterator:
        _require_one_sample(prepared)
        done = partial(self._answer, prepared)
        return streaming.TextIterator(partial(self._submit, prepared), done, CallFilter(prepared.tools))

    async def _arun(self, prepared: Prepared) -> Answer:
        return self._answer(prepared, await streaming.arun(partial(self._submit, prepared)))

    def _astream(self, prepared: Prepared) -> streaming.AsyncTextIterator:
        _require_one_sample(prepared)
        done = partial(self._answer, prepared)
        return streaming.AsyncTextIterator(partial(self._submit, prepared), done, CallFilter(prepared.tools))

    def _answer(self, prepared: Prepared, completion: Completion) -> Answer:
        answer = make_answer(prepared.layout, completion, prepared.sources, prepared.retrieve, prepared.searched_by)
        calls = prepared.tools.read(answer.text) if prepared.tools is not None else ()
        self.last_answer = answer = replace(answer, text="", tool_calls=calls) if calls else answer
        self.receipts.append(answer.receipt)
        return answer

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeClosedError("the runtime is closed")
        self._home.require()


def _require_one_sample(prepared: Prepared) -> None:
    if prepared.sampling.n > 1:
        raise ConfigError(f"a stream is one text: n={prepared.sampling.n} samples come from query, generate or chat")


def _known_encode(encode: str) -> None:
    if encode not in ("now", "on_use"):
        raise ConfigError(f'encode={encode!r} is not one of "now", "on_use"')


def _listed(values: Any, name: str) -> Iterable[Any]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ConfigError(f"{name} takes a list; for one value pass [value]")
    return values


def _let_go(engine: Engine, retriever: Retriever, model: LanguageModel, store: OpenStore | None, home: Home) -> None:
    """End everything a runtime started, each part whatever happens to the others."""
    if home.left:
        return
    parts = ExitStack()
    if store is not None:
        parts.callback(store.close)
    parts.callback(model.release)
    parts.callback(retriever.close)
    parts.callback(engine.close)
    if GATE.held:  # garbage collection in the middle of a capture: threads to wait for may be waiting for that
        threading.Thread(target=parts.close, name="lazy-rag-end", daemon=True).start()
    else:
        parts.close()


def _close_at_exit(reference: weakref.ref[Runtime]) -> None:
    # a daemon thread inside a forward pass at interpreter exit can crash the process
    runtime = reference()
    if runtime is not None:
        runtime.close()

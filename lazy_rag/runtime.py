"""The runtime: documents in, answers out. The two drivers, `add_documents` and `query`, read as the pipeline.

documents ─ load ─ split ─► chunks ─ index (embed, FAISS, SQLite) ─ encode ─► page pool
question ─ retrieve ─► chunk ids ─ layout ─► prompt ─ engine (pin, plan, prefill, decode) ─► Answer + receipt
"""

from __future__ import annotations

import asyncio
import atexit
import queue
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypedDict, Unpack

import torch
from torch import Tensor
from tqdm.auto import tqdm

from lazy_rag import streaming
from lazy_rag.answer import Answer, Explanation, Source, make_answer
from lazy_rag.arguments import checked_keywords
from lazy_rag.assembly import Placed, as_history, as_messages, as_range
from lazy_rag.building import Settings, build, check_store_fits, open_store
from lazy_rag.documents import load_documents
from lazy_rag.embedder import Embedder
from lazy_rag.errors import (
    ConfigError,
    ContextOverflowError,
    EmptyCorpusError,
    EmptyQuestionError,
    RuntimeClosedError,
    StoreError,
    UnknownChunkError,
)
from lazy_rag.keys import ChunkId
from lazy_rag.layout import Chunk, ChunkRange, Live, PromptLayout, known_repair, repair_layout
from lazy_rag.loading import load_model
from lazy_rag.policy import EvictionPolicy
from lazy_rag.prompt import Message
from lazy_rag.requests import Completion
from lazy_rag.retriever import ChunkRecord, Hit, Retriever
from lazy_rag.sampling import SamplingParams
from lazy_rag.stats import Stats
from lazy_rag.store import KVRecords, Manifest, open_folder, write_manifest

Piece = str | ChunkRange | Live
DEFAULT_EMBEDDER = "all-minilm-l6-v2"


class RequestOptions(TypedDict, total=False):
    """What every way of asking takes.

    system:    system text of this request; changing it encodes no chunk
    history:   earlier messages, Message objects or dicts with "role" and "content"
    sampling:  how to choose tokens
    repair:    "none", "head" or "exact"
    namespace: whose chunks may be used
    """

    system: str | None
    history: Sequence[Message | dict[str, str]]
    sampling: SamplingParams | None
    repair: str | None
    namespace: str | None


class QueryOptions(RequestOptions, total=False):
    """RequestOptions, and `filter`: conditions on metadata, applied before top-k."""

    filter: Mapping[str, Any] | None


@dataclass(frozen=True)
class Prepared:
    """A validated request, not yet submitted."""

    layout: PromptLayout
    sampling: SamplingParams
    sources: tuple[Source, ...]
    retrieve: float  # seconds spent finding the chunks


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
        store: folder in which index, metadata and KV live and survive.
        policy: "lru", or an object with the `EvictionPolicy` methods.
        namespace: salt of this runtime's chunks; a request in another namespace never sees them.
        max_queue: most requests waiting for admission, more are refused with QueueFullError; None: no bound.
        encode_tokens: most rows of one forward pass.
        page_size: token slots of a page.
        impl: "reference" or "triton"; default "triton" on a GPU.
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
        store: str | Path | None = None,
        policy: str | EvictionPolicy = "lru",
        namespace: str = "",
        max_queue: int | None = None,
        encode_tokens: int = 8192,
        page_size: int = 16,
        impl: str | None = None,
        repair: str = "none",
        progress: bool = True,
    ) -> None:
        self._closed = False
        settings = Settings.of(
            device=device,
            dtype=dtype,
            impl=impl,
            prefix=prefix,
            separator=separator,
            max_context=max_context,
            cache_bytes=cache_bytes,
            encode_tokens=encode_tokens,
            page_size=page_size,
            max_queue=max_queue,
        )
        self._repair, self._namespace, self._progress = known_repair(repair), namespace, progress
        self._store = None if store is None else Path(store)
        manifest = None if self._store is None else open_store(self._store)
        loaded, self.tokenizer = load_model(
            model,
            tokenizer,
            revision=revision,
            adapter=adapter,
            quantization_config=quantization_config,
            device=settings.device,
            dtype=settings.dtype,
        )
        self._parts = build(loaded, self.tokenizer, settings, policy=policy, store=self._store)
        self._manifest = Manifest(
            key_space=self._parts.keys.id,
            model=model if isinstance(model, str) else None,
            options={
                "prefix": prefix,
                "separator": separator,
                "page_size": page_size,
                "namespace": namespace,
                "embedder": embedder if isinstance(embedder, str) else None,
                "dtype": str(self._parts.model.dtype).removeprefix("torch."),
            },
        )
        try:
            if self._store is not None:
                check_store_fits(manifest, self._parts.keys, self._store)
            self.embeddings = None if embedder is None else Embedder.load(embedder, str(settings.device))
            self._retriever = Retriever(self.embeddings, self._store)
        except BaseException:
            self._parts.model.release()
            raise
        try:
            if self._store is not None:
                write_manifest(self._store, self._manifest)
            self._engine = self._parts.engine
            self._engine.start()
        except BaseException:
            self._retriever.close()
            self._parts.model.release()
            raise
        self.last_answer: Answer | None = None
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
        documents = load_documents(sources, ids=ids, metadata=metadata)
        space = self._space(namespace)
        chunks = self._parts.chunker.split(documents, space, chunk_tokens)
        if not any(chunks):
            raise EmptyCorpusError("no text was found in what was given to add")
        batch = [(d.id, records, d.metadata) for d, records in zip(documents, chunks, strict=True)]
        return self._index(batch, encode)

    @checked_keywords()
    def add_chunks(
        self,
        texts: Sequence[str],
        *,
        ids: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        encode: str = "on_use",
        namespace: str | None = None,
    ) -> list[ChunkId]:
        """Add texts as one chunk each, without splitting. `ids`: document ids, default the chunk ids."""
        if isinstance(texts, str):
            raise ConfigError("add_chunks takes a list of texts; for one text pass [text]")
        if not texts:
            raise EmptyCorpusError("no text was given to add")
        space = self._space(namespace)
        records = [self._parts.chunker.record(text, space) for text in texts]
        names = [record.chunk_id for record in records] if ids is None else list(ids)
        each = [metadata or {}] * len(records) if metadata is None or isinstance(metadata, Mapping) else list(metadata)
        if not len(records) == len(names) == len(each):
            raise ConfigError(f"{len(records)} texts, {len(names)} ids and {len(each)} metadata do not go together")
        batch = [(name, [record], dict(m)) for name, record, m in zip(names, records, each, strict=True)]
        unique = {name: entry for name, *_ in batch for entry in [next(b for b in batch if b[0] == name)]}
        if ids is not None and len(unique) != len(batch):
            raise ConfigError("ids holds the same id twice")
        self._index(list(unique.values()), encode)
        return [ChunkId(record.chunk_id) for record in records]

    def _index(
        self, batch: Sequence[tuple[str, Sequence[ChunkRecord], Mapping[str, Any]]], encode: str
    ) -> list[ChunkId]:
        if encode not in ("now", "on_use"):
            raise ConfigError(f'encode={encode!r} is not one of "now", "on_use"')
        self._require_open()
        change = self._retriever.upsert_many(batch, progress=self._progress)
        self._forget(change.removed)
        records = [record for _, chunks, _ in batch for record in chunks]
        if encode == "now":
            self._encode([self._parts.chunker.chunk(record) for record in records], evict=False)
        return [ChunkId(record.chunk_id) for record in records]

    def _encode(self, chunks: Sequence[Chunk], *, evict: bool) -> int:
        done: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        future = self._engine.encode(chunks, evict=evict, on_progress=done.put)
        future.add_done_callback(lambda _: done.put(None))
        with tqdm(total=len(chunks), desc="encode", unit="chunk", disable=not self._progress) as bar:
            while (step := done.get()) is not None:
                bar.update(step)
        return future.result()

    # finding

    @checked_keywords()
    def retrieve(
        self, query: str, k: int = 5, *, filter: Mapping[str, Any] | None = None, namespace: str | None = None
    ) -> list[Hit]:
        """The k chunks most similar to the query, best first; `filter` on metadata applies before top-k."""
        self._require_open()
        if not isinstance(query, str) or not query.strip():
            raise EmptyQuestionError("the question has no text")
        return self._retriever.search(query, k, namespace=self._space(namespace), filter=filter)

    # asking

    @checked_keywords(QueryOptions)
    def query(self, question: str, k: int = 5, **options: Unpack[QueryOptions]) -> Answer:
        """Retrieve k chunks for the question and answer from them."""
        return self._run(self._prepare_query(question, k, options))

    @checked_keywords(QueryOptions)
    def stream(self, question: str, k: int = 5, **options: Unpack[QueryOptions]) -> Iterator[str]:
        """Like `query`, as an iterator of text pieces; afterwards the Answer is `last_answer`."""
        return self._stream(self._prepare_query(question, k, options))

    @checked_keywords(RequestOptions)
    def generate(
        self, question: str | PromptLayout, chunk_ids: Sequence[Piece] = (), **options: Unpack[RequestOptions]
    ) -> Answer:
        """Answer from the given chunks, ranges of chunks and live text between them, or from a layout made before."""
        return self._run(self._prepare(question, chunk_ids, options))

    @checked_keywords(RequestOptions)
    def chat(
        self,
        messages: str | Sequence[Message | dict[str, str]],
        chunk_ids: Sequence[Piece] = (),
        *,
        stream: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Answer | Iterator[str]:
        """Answer the last message; the chunks stand before its text. With `stream`, an iterator of text pieces."""
        prepared = self._prepare_chat(messages, chunk_ids, options)
        return self._stream(prepared) if stream else self._run(prepared)

    @checked_keywords(QueryOptions)
    async def aquery(self, question: str, k: int = 5, **options: Unpack[QueryOptions]) -> Answer:
        """`query` for asyncio; cancelling the task frees the request's pages."""
        return await self._arun(await asyncio.to_thread(self._prepare_query, question, k, options))

    @checked_keywords(QueryOptions)
    async def astream(self, question: str, k: int = 5, **options: Unpack[QueryOptions]) -> AsyncIterator[str]:
        """`stream` for asyncio."""
        prepared = await asyncio.to_thread(self._prepare_query, question, k, options)
        async for piece in self._astream(prepared):
            yield piece

    @checked_keywords(RequestOptions)
    async def agenerate(
        self, question: str | PromptLayout, chunk_ids: Sequence[Piece] = (), **options: Unpack[RequestOptions]
    ) -> Answer:
        """`generate` for asyncio."""
        return await self._arun(await asyncio.to_thread(self._prepare, question, chunk_ids, options))

    @checked_keywords(RequestOptions)
    async def achat(
        self,
        messages: str | Sequence[Message | dict[str, str]],
        chunk_ids: Sequence[Piece] = (),
        *,
        stream: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Answer | AsyncIterator[str]:
        """`chat` for asyncio. With `stream`, await it first: `async for piece in await rt.achat(..., stream=True)`."""
        prepared = await asyncio.to_thread(self._prepare_chat, messages, chunk_ids, options)
        return self._astream(prepared) if stream else await self._arun(prepared)

    @checked_keywords(RequestOptions)
    def layout(self, question: str, chunk_ids: Sequence[Piece] = (), **options: Unpack[RequestOptions]) -> PromptLayout:
        """The prompt that `generate` would run, without running it."""
        return self._prepare(question, chunk_ids, options).layout

    def next_token_logits(self, layout: PromptLayout) -> Tensor:
        """Logits after the layout's last token, float32 [vocab] on the host. For tests and research."""
        prepared = self._prepare(layout, (), {})
        logits = streaming.run(self._engine, prepared.layout, prepared.sampling, wants_logits=True).logits
        assert logits is not None
        return logits

    # managing the cache

    def explain(self, layout: PromptLayout) -> list[Explanation]:
        """For every segment of a layout: would it be found, and where."""
        segments = layout.segments
        resident = self._engine.call(lambda: [s.chunk_id in self._parts.engine.cache for s in segments]).result()
        return [self._explain(s.chunk_id, s.offset, here) for s, here in zip(segments, resident, strict=True)]

    def _explain(self, chunk_id: ChunkId, offset: int, resident: bool) -> Explanation:
        if resident:
            return Explanation(chunk_id, offset, True, "in memory")
        if self._parts.records is not None and self._parts.records.path(chunk_id).exists():
            return Explanation(chunk_id, offset, True, "on disk")
        return Explanation(chunk_id, offset, False, "not computed yet, or evicted")

    def prefetch(self, ids: Iterable[str]) -> int:
        """Bring chunks into memory, evicting others; returns how many of them are there at the end."""
        chunks = [self.chunk(i) for i in ids]
        self._encode(chunks, evict=True)
        return sum(self._engine.call(lambda: [c.id in self._engine.cache for c in chunks]).result())

    def pin(self, ids: Iterable[str]) -> None:
        """Bring chunks into memory and keep them there. Raises CacheFullError, and then pins none of them."""
        chunks = {c.id: c for c in map(self.chunk, ids)}
        self._encode(list(chunks.values()), evict=True)
        self._engine.call(lambda: self._engine.cache.pin(chunks)).result()

    def unpin(self, ids: Iterable[str]) -> None:
        """Let chunks be evicted again."""
        chunks = [self.chunk(i).id for i in ids]
        self._engine.call(lambda: self._engine.cache.unpin(chunks)).result()

    @checked_keywords()
    def delete(self, ids: Sequence[str], *, namespace: str | None = None) -> None:
        """Delete documents or chunks by id: vector, text and KV, in memory and on disk."""
        self._require_open()
        if isinstance(ids, str):
            raise ConfigError("delete takes a list of ids; for one id pass [id]")
        self._forget(self._retriever.delete(ids, namespace=self._space(namespace)).removed)

    def _forget(self, chunk_ids: Sequence[str]) -> None:
        gone = [ChunkId(i) for i in chunk_ids]
        self._engine.call(lambda: self._engine.residency.discard(gone)).result()

    def chunk(self, chunk_id: str) -> Chunk:
        """An added chunk, for building layouts by hand. Raises UnknownChunkError."""
        self._require_open()
        return self._parts.chunker.chunk(self._retriever.chunk(chunk_id))

    @property
    def prefix(self) -> Chunk | None:
        """The encode prefix as a chunk; None with `prefix="none"`."""
        return self._parts.prefix

    @property
    def stats(self) -> Stats:
        """A snapshot of sizes and totals."""
        self._require_open()
        engine = self._engine

        def read() -> dict[str, int]:
            cache, pool = engine.cache, engine.pool
            return {
                "chunks_resident": len(cache),
                "pages": pool.num_pages,
                "pages_free": pool.num_free,
                "page_bytes": pool.page_bytes,
                "evictions": cache.evictions,
                **asdict(engine.counters),
            }

        documents = len(self._retriever.documents(self._namespace))
        return Stats(documents=documents, chunks_indexed=len(self._retriever), **engine.call(read).result())

    def check(self) -> list[str]:
        """Broken invariants of the page pool and the chunk cache; empty when all is well."""
        return self._engine.call(self._engine.check).result()

    # keeping

    def save(self, directory: str | Path | None = None) -> None:
        """Write index, metadata and the KV in memory to a folder (default: the runtime's store)."""
        self._require_open()
        target = self._store if directory is None else Path(directory)
        if target is None:
            raise ConfigError("save needs a folder: this runtime has no store")
        self._write_store(target, progress=self._progress)

    def _write_store(self, target: Path, *, progress: bool) -> None:
        open_folder(target)
        self._retriever.save(target)
        records = KVRecords(target, self._parts.layout)
        engine = self._engine
        entries = engine.call(lambda: [entry.chunk for entry in engine.cache]).result()
        for chunk in tqdm(entries, desc="save", unit="chunk", disable=not progress):
            pages = engine.call(lambda chunk=chunk: engine.residency.read(chunk)).result()  # type: ignore[misc]
            if pages is not None:
                records.save(chunk, pages)
        write_manifest(target, self._manifest)

    @classmethod
    def load(cls, directory: str | Path, model: Any = None, **options: Any) -> Runtime:
        """Open a store with the model and options it was made with; give `model` where that was a live object."""
        manifest = None if not Path(directory).is_dir() else open_store(Path(directory))
        if manifest is None:
            raise StoreError(f"there is no store in {str(directory)!r}")
        if model is None and manifest.model is None:
            raise StoreError("the store was made with a live model object: pass it, Runtime.load(directory, model)")
        return cls(model or manifest.model, store=directory, **{**manifest.options, **options})

    def check_store(self, *, repair: bool = False) -> list[str]:
        """Verify index, metadata and every KV record; what is wrong, in words. Bad records are set aside at once.

        With `repair`, records no document refers to are deleted and missing vectors are made again.
        """
        self._require_open()
        problems = self._retriever.check(repair=repair)
        records = self._parts.records
        if records is None:
            return problems
        known = {ChunkId(i) for i in self._retriever.chunk_ids()}
        for chunk_id in records.ids():
            if chunk_id in known:
                if records.load(self.chunk(chunk_id)) is None:
                    problems.append(f"the record of chunk {chunk_id} was bad; set aside, it will be computed again")
            elif self.prefix is None or chunk_id != self.prefix.id:
                problems.append(f"a record is there for chunk {chunk_id}, which no document holds")
                if repair:
                    records.delete(chunk_id)
        return problems

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
        """Stop the engine, keep the store, give the model back. Idempotent; unfinished requests fail."""
        if self._closed:
            return
        if self._store is not None:
            self._write_store(self._store, progress=False)
        self._closed = True
        self._engine.close()
        self._retriever.close()
        self._parts.model.release()
        with self._shared_lock:
            for key in [key for key, runtime in self._shared.items() if runtime is self]:
                del self._shared[key]

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # helpers

    def _prepare_query(self, question: str, k: int, options: QueryOptions) -> Prepared:
        started = time.perf_counter()
        options = options.copy()
        condition = options.pop("filter", None)
        hits = self.retrieve(question, k, filter=condition, namespace=options.get("namespace"))
        prepared = self._prepare(question, [hit.chunk_id for hit in hits], options)  # type: ignore[arg-type]
        placed = {s.chunk_id for s in prepared.layout.segments} | {
            hit.chunk_id for hit in hits if hit.chunk_id not in prepared.layout.dropped
        }
        sources = tuple(
            Source(ChunkId(h.chunk_id), h.text, h.score, h.document_id, h.metadata)
            for h in hits
            if h.chunk_id in placed
        )
        return replace(prepared, sources=sources, retrieve=time.perf_counter() - started)

    def _prepare_chat(
        self, messages: str | Sequence[Message | dict[str, str]], chunk_ids: Sequence[Piece], options: RequestOptions
    ) -> Prepared:
        question, earlier = as_messages(messages)
        options = options.copy()
        options["history"] = [*options.get("history", ()), *earlier]
        return self._prepare(question, chunk_ids, options)

    def _prepare(self, question: str | PromptLayout, chunk_ids: Sequence[Piece], options: RequestOptions) -> Prepared:
        """Check everything and lay out the prompt; nothing has been changed when this raises."""
        self._require_open()
        parts = self._parts
        sampling = (options.get("sampling") or SamplingParams()).resolve(parts.model.model.generation_config)
        sources: list[Source] = []
        if isinstance(question, PromptLayout):
            layout = self._own_layout(question)
        else:
            pieces = self._placed(chunk_ids, self._space(options.get("namespace")), sources)
            layout = parts.assembler.layout(
                question,
                pieces,
                system=options.get("system"),
                history=as_history(options.get("history", ())),
                max_tokens=sampling.max_tokens,
            )
        repair = options.get("repair")
        layout = repair_layout(layout, self._repair if repair is None else repair)
        room = parts.max_context - len(layout)
        if room < 1:
            raise ContextOverflowError(f"the layout takes {len(layout)} tokens, the context is {parts.max_context}")
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
        return Prepared(layout, sampling, tuple(s for s in sources if s.chunk_id not in layout.dropped), 0.0)

    def _placed(self, chunk_ids: Sequence[Piece], namespace: str, sources: list[Source]) -> list[Placed | Live]:
        if isinstance(chunk_ids, str):
            raise ConfigError("chunk_ids takes a list; for one chunk pass [id]")
        pieces: list[Placed | Live] = []
        for piece in chunk_ids:
            if isinstance(piece, Live):
                pieces.append(piece)
                continue
            part = as_range(piece)
            record = self._retriever.chunk(part.chunk_id)
            if record.namespace != namespace:
                raise UnknownChunkError(f"no chunk {part.chunk_id!r} in namespace {namespace!r}")
            pieces.append(Placed(self._parts.chunker.chunk(record), part.start, part.length))
            sources.append(Source(part.chunk_id, record.text))
        return pieces

    def _own_layout(self, layout: PromptLayout) -> PromptLayout:
        """A layout built elsewhere names chunks by ids and offsets that only fit the runtime it was built for."""
        if layout.prefix != self._parts.prefix or layout.page_size != self._engine.pool.page_size:
            raise ConfigError("this layout was built for another runtime: its prefix or page size differ")
        return layout

    def _run(self, prepared: Prepared) -> Answer:
        return self._answer(prepared, streaming.run(self._engine, prepared.layout, prepared.sampling))

    def _stream(self, prepared: Prepared) -> Iterator[str]:
        return streaming.stream(
            self._engine, prepared.layout, prepared.sampling, lambda completion: self._answer(prepared, completion)
        )

    async def _arun(self, prepared: Prepared) -> Answer:
        return self._answer(prepared, await streaming.arun(self._engine, prepared.layout, prepared.sampling))

    def _astream(self, prepared: Prepared) -> AsyncIterator[str]:
        return streaming.astream(
            self._engine, prepared.layout, prepared.sampling, lambda completion: self._answer(prepared, completion)
        )

    def _answer(self, prepared: Prepared, completion: Completion) -> Answer:
        self.last_answer = make_answer(prepared.layout, completion, prepared.sources, prepared.retrieve)
        return self.last_answer

    def _space(self, namespace: str | None) -> str:
        if namespace is not None and not isinstance(namespace, str):
            raise ConfigError(f"namespace={namespace!r} must be a string")
        return self._namespace if namespace is None else namespace

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeClosedError("the runtime is closed")


def _close_at_exit(reference: weakref.ref[Runtime]) -> None:
    # a daemon thread inside a forward pass at interpreter exit can crash the process
    runtime = reference()
    if runtime is not None:
        runtime.close()

"""A LangChain vector store over a runtime's index: exact search, filters before top-k, no pickle."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore
from langchain_core.vectorstores.utils import maximal_marginal_relevance

from langchain_lazy_rag.embeddings import LazyRAGEmbeddings, embeddings_name
from lazy_rag import EmptyCorpusError, EmptyQuestionError, Hit, LazyRAGError, Runtime, Source, check_metadata

_TEXT_KEY = "lazy_rag:page_content"  # in the stored metadata, where a chunk's text is not the document's own

Filter = Mapping[str, Any]


class LazyRAGVectorStore(VectorStore):
    """Documents in a runtime, one chunk each: found here, they are already the runtime's cached chunks.

    Adding is an upsert: by the given ids, else by a hash of text and metadata, so that adding twice changes nothing.
    Deleting removes vector, text and KV. `filter` is a mapping such as `{"lang": "en", "year": {"$gte": 2020}}`, also
    with `$in`, `$and`, `$or` and `$not`; it applies before the ranking. Scores are cosine similarities. Documents of
    equal text share a chunk, and each is found, the oldest first. Async methods run in another thread.

    Args:
        runtime: with an embedder; another one's vectors cannot be mixed in.
        namespace: whose documents these are; default the runtime's own.
    """

    def __init__(self, runtime: Runtime, *, namespace: str | None = None) -> None:
        if not isinstance(runtime, Runtime):
            raise LazyRAGError("LazyRAGVectorStore takes a lazy_rag Runtime: LazyRAGVectorStore(Runtime(model))")
        self.runtime = runtime
        self.namespace = namespace
        self._embeddings = LazyRAGEmbeddings(runtime)

    @property
    def embeddings(self) -> Embeddings:
        """The runtime's embedder."""
        return self._embeddings

    # writing

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: Sequence[str | None] | None = None,
        encode: str = "on_use",
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add texts, each as one chunk; returns their ids in order.

        Args:
            ids: texts under an id that is known replace it; None where the id is made from the content.
            encode: "now" computes the KV at once, as far as there is room; "on_use" when a request first needs it.
            batch_size: without effect, the runtime chooses batches itself; LangChain's `index` passes it.

        Raises LazyRAGError, with nothing written, for an empty text and for metadata that JSON cannot hold.
        """
        _refuse(kwargs)
        if isinstance(texts, str):
            raise LazyRAGError("add_texts takes a list of texts; for one text pass [text]")
        listed = list(texts)
        given = [dict(m) for m in metadatas] if metadatas is not None else [{} for _ in listed]
        names = list(ids) if ids is not None else [None] * len(listed)
        if not len(listed) == len(given) == len(names):
            raise LazyRAGError(f"{len(listed)} texts, {len(given)} metadatas and {len(names)} ids do not go together")
        if not listed:
            return []
        for index, (metadata, name) in enumerate(zip(given, names, strict=True)):
            check_metadata(
                metadata, f"document at index {index}" if name is None else f"document {name!r} at index {index}"
            )
        keys = [
            _content_id(text, metadata) if name is None else name
            for text, metadata, name in zip(listed, given, names, strict=True)
        ]
        # the last of several with one id counts, as if they had been added one after another
        self._write({key: (text, metadata) for key, text, metadata in zip(keys, listed, given, strict=True)}, encode)
        return keys

    def _write(self, entries: dict[str, tuple[str, dict[str, Any]]], encode: str) -> None:
        self._add({key: (text, _with_text(text, metadata)) for key, (text, metadata) in entries.items()}, encode)
        # a tokenizer that normalises gives texts that differ in case or Unicode form one chunk, with the first text
        stored = {
            source.document_id: source for source in self.runtime.find(ids=list(entries), namespace=self.namespace)
        }
        changed = {
            key: (text, {**metadata, _TEXT_KEY: text})
            for key, (text, metadata) in entries.items()
            if key in stored and _text(stored[key]) != text
        }
        if changed:
            self._add(changed, encode)

    def _add(self, entries: dict[str, tuple[str, dict[str, Any]]], encode: str) -> None:
        self.runtime.add_chunks(
            [text for text, _ in entries.values()],
            ids=list(entries),
            metadata=[metadata for _, metadata in entries.values()],
            encode=encode,
            namespace=self.namespace,
        )

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """`add_texts` for documents, under their own ids where they have some. The documents are not changed."""
        if isinstance(documents, Document) or not all(isinstance(document, Document) for document in documents):
            raise LazyRAGError("add_documents takes a list of Documents; for texts there is add_texts")
        ids = kwargs.pop("ids", None)
        return self.add_texts(
            [document.page_content for document in documents],
            [document.metadata for document in documents],
            ids=[document.id for document in documents] if ids is None else ids,
            **kwargs,
        )

    async def aadd_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """`add_documents` in another thread."""
        return await asyncio.to_thread(self.add_documents, documents, **kwargs)

    async def aadd_texts(
        self, texts: Iterable[str], metadatas: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> list[str]:
        """`add_texts` in another thread."""
        return await asyncio.to_thread(self.add_texts, texts, metadatas, **kwargs)

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Delete by id: vector, text and KV. Without ids: everything.

        Always True: to LangChain an id that is not there is no failure, and its `index` and `aindex` give up at False.
        """
        _refuse(kwargs)
        if isinstance(ids, str):
            raise LazyRAGError(f"delete takes a list of ids: [{ids!r}]")
        if ids is None:
            ids = list({s.document_id for s in self.runtime.find(namespace=self.namespace) if s.document_id})
        if ids:
            self.runtime.delete(list(ids), missing_ok=True, namespace=self.namespace)
        return True

    # reading

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """The documents of those ids that exist, in the order of the ids."""
        wanted = list(dict.fromkeys(ids))
        documents: dict[str, list[Source]] = defaultdict(list)
        chunks: dict[str, Source] = {}
        for source in self.runtime.find(ids=wanted, namespace=self.namespace):
            documents[str(source.document_id)].append(source)
            chunks.setdefault(source.chunk_id, source)
        # a document of several chunks (Runtime.add_documents makes them) is several documents here, named by chunk
        found = {i: documents[i][0] if len(documents[i]) == 1 else chunks.get(i) for i in wanted}
        return [_document(source, i) for i, source in found.items() if source is not None]

    def similarity_search(self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any) -> list[Document]:
        """The k most similar documents, best first; all of them when fewer match, none when nothing was added."""
        return [document for document, _ in self.similarity_search_with_score(query, k, filter, **kwargs)]

    def similarity_search_with_score(
        self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """`similarity_search` with cosine similarities in [-1, 1], higher is better."""
        _refuse(kwargs)
        return [(document, score) for document, score, _ in self._search(query, k, filter)]

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """`similarity_search` for a vector of the runtime's embedder."""
        _refuse(kwargs)
        return [document for document, _, _ in self._search(np.asarray(embedding, dtype=np.float32), k, filter)]

    def max_marginal_relevance_search(
        self,
        query: str,
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """k of the `fetch_k` most similar documents that are also unlike each other."""
        if not query.strip():  # nothing is like nothing
            return []
        embedding = self._embeddings.embed_query(query)
        return self.max_marginal_relevance_search_by_vector(embedding, k, fetch_k, lambda_mult, filter, **kwargs)

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """`max_marginal_relevance_search` for a vector of the runtime's embedder."""
        _refuse(kwargs)
        vector = np.asarray(embedding, dtype=np.float32)
        found = self._search(vector, max(k, fetch_k), filter)
        vectors = self.runtime.vectors([chunk_id for _, _, chunk_id in found])
        chosen = maximal_marginal_relevance(vector, list(vectors), lambda_mult=lambda_mult, k=k) if found else []
        return [found[i][0] for i in chosen]

    def _search(self, query: Any, k: int, filter: Filter | None) -> list[tuple[Document, float, str]]:
        """Documents with their scores and chunk ids."""
        try:
            hits = self.runtime.retrieve(query, k, filter=filter, namespace=self.namespace, per_document=True)
        except (EmptyCorpusError, EmptyQuestionError):  # nothing is like nothing
            return []
        found = []
        for hit in hits:
            name = hit.document_id if hit.siblings == 1 else hit.chunk_id
            found.append((_document(hit, name), hit.score, hit.chunk_id))
        return found

    def _select_relevance_score_fn(self) -> Any:
        # LangChain's relevance is between 0 and 1, and rounding can lift the similarity of equal texts above 1
        return lambda similarity: min(1.0, max(0.0, similarity))

    # making and keeping

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Any = None,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        runtime: Runtime | None = None,
        namespace: str | None = None,
        **kwargs: Any,
    ) -> LazyRAGVectorStore:
        """A store of texts. `embedding`: the runtime's own (`rt.embeddings`), or nothing.

        Raises LazyRAGError for other embeddings: give them to the runtime (`embedder=LangChainEmbedder(...)`).
        """
        if runtime is None:
            raise LazyRAGError("LazyRAGVectorStore needs runtime=Runtime(model): it holds index, texts and KV")
        store = cls(runtime, namespace=namespace)
        if embedding is not None and embedding is not runtime.embeddings:
            name = embeddings_name(embedding)
            if name != store._embeddings.name:
                raise LazyRAGError(
                    f"the runtime embeds with {store._embeddings.name!r}, not with {name!r}: make it with "
                    "Runtime(model, embedder=LangChainEmbedder(embeddings)), or pass its own rt.embeddings"
                )
        store.add_texts(texts, metadatas, ids=ids, **kwargs)
        return store

    def save(self, directory: str | Path, *, replace: bool = False) -> None:
        """Write index, texts, metadata and the KV in memory to a folder. See `Runtime.save` for `replace`."""
        self.runtime.save(directory, replace=replace)

    @classmethod
    def load(cls, directory: str | Path, *, namespace: str | None = None, **options: Any) -> LazyRAGVectorStore:
        """Open a saved folder: nothing is embedded again. `options` go to `Runtime.load`."""
        return cls(Runtime.load(directory, **options), namespace=namespace)


def _refuse(kwargs: dict[str, Any]) -> None:
    if kwargs:
        raise LazyRAGError(f"LazyRAGVectorStore knows no argument {', '.join(map(repr, kwargs))} here")


def _content_id(text: str, metadata: Mapping[str, Any]) -> str:
    if not isinstance(text, str):
        raise LazyRAGError(f"a document's text must be a string, not {type(text).__name__}")
    plain = json.loads(json.dumps(metadata))  # inner keys may be of several types, and then have no order
    rest = json.dumps(plain, sort_keys=True)
    fields = (text.encode("utf-8", "surrogatepass"), rest.encode())
    digest = hashlib.blake2b(digest_size=16)
    for field in fields:
        digest.update(len(field).to_bytes(8, "little") + field)
    return digest.hexdigest()


def _with_text(text: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """A chunk is the stripped text; what was stripped must come back with the document."""
    return metadata if text == text.strip() else {**metadata, _TEXT_KEY: text}


def _text(source: Source | Hit) -> str:
    text: str = source.metadata.get(_TEXT_KEY, source.text)
    return text


def _document(source: Source | Hit, name: str) -> Document:
    metadata = {key: value for key, value in source.metadata.items() if key != _TEXT_KEY}
    return Document(page_content=_text(source), metadata=metadata, id=name)

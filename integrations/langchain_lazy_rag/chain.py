"""The retrieval chain of this package: documents reach the model as chunks, by their ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage, convert_to_messages
from langchain_core.output_parsers import StrOutputParser
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from lazy_rag import LazyRAGError


def create_lazy_rag_chain(
    llm: Runnable[Any, Any], retriever: Runnable[Any, list[Document]], *, system: str | None = None
) -> Runnable[dict[str, Any], dict[str, Any]]:
    """A chain with the keys of `create_retrieval_chain`: `input` and `chat_history` in, `context` and `answer` added.

    The documents stand before the question in the user's turn, as chunks: the prompt is the one of `Runtime.query`. A
    text that several of them share stands there once; `context` holds them all.

    Args:
        llm: a `ChatLazyRAG`, bound to arguments or not.
        retriever: a retriever, which is asked with `input`, or any runnable from the chain's input to documents.
        system: the system message; None leaves it to the chat template.
    """
    if not isinstance(retriever, Runnable):
        raise LazyRAGError(f"the chain takes a retriever, store.as_retriever() say, not a {type(retriever).__name__}")
    found: Runnable[Any, list[Document]] = (
        RunnableLambda(_question) | retriever if isinstance(retriever, BaseRetriever) else retriever
    )

    def messages(values: dict[str, Any]) -> list[BaseMessage]:
        history = convert_to_messages(values.get("chat_history") or [])
        blocks = context_blocks(distinct(values["context"]))
        question = HumanMessage(content=[*blocks, {"type": "text", "text": _question(values)}])
        return [*([] if system is None else [SystemMessage(system)]), *history, question]

    answer = RunnableLambda(messages) | llm | StrOutputParser()
    chain = RunnablePassthrough.assign(context=found.with_config(run_name="retrieve_documents")).assign(answer=answer)
    return chain.with_config(run_name="lazy_rag_chain")


def _question(values: Mapping[str, Any]) -> str:
    question = values.get("input")
    if not isinstance(question, str):
        raise LazyRAGError('the chain takes a mapping with the question as "input": invoke({"input": "..."})')
    return question


def distinct(documents: Sequence[Document]) -> list[Document]:
    """The first document of each text: what is said twice in a prompt takes room from other documents."""
    first: dict[str, Document] = {}
    for document in documents:
        first.setdefault(document.page_content.strip(), document)
    return list(first.values())


def context_blocks(documents: Sequence[Document]) -> list[dict[str, Any]]:
    """Documents as content blocks that keep their ids, for messages of your own."""
    return [
        {"type": "text-plain", "mime_type": "text/plain", "id": document.id, "text": document.page_content}
        for document in documents
    ]

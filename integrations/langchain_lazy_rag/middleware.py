"""Retrieval for `create_agent`: every question stands behind its own documents, which reach the model as chunks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, NotRequired, TypedDict

from langchain_core.documents import Document
from langchain_core.messages import AnyMessage, HumanMessage
from langchain_core.runnables import Runnable

from langchain_lazy_rag.chain import context_blocks, distinct
from langchain_lazy_rag.chat import ChatLazyRAG
from lazy_rag import LazyRAGError

try:
    from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest
    from langchain.agents.middleware.types import ModelCallResult, ModelResponse, OmitFromInput, PrivateStateAttr
except ImportError as error:
    raise ImportError(
        'LazyRAGMiddleware needs langchain, for create_agent: pip install "lazy-rag[langchain-agents]"'
    ) from error


class Retrieved(TypedDict):
    """What was found for one user message."""

    question: str
    documents: list[Document]


class LazyRAGState(AgentState[Any]):
    """An agent's state with what was retrieved.

    context: documents of the last question, best first
    lazy_rag_retrieved: those of every user message, by its id; kept by checkpointers, neither input nor output
    """

    context: NotRequired[Annotated[list[Document], OmitFromInput]]
    lazy_rag_retrieved: NotRequired[Annotated[dict[str, Retrieved], PrivateStateAttr]]


class LazyRAGMiddleware(AgentMiddleware[LazyRAGState, Any, Any]):
    """Retrieves for the last user message of a `create_agent` agent, once, and puts the documents before it as chunks.

    The messages in the state stay as the user wrote them; only what the model reads holds the documents, in every later
    turn too, so that earlier turns are found in the cache. What does not fit the context is dropped by the runtime, the
    oldest question's documents first. A model other than `ChatLazyRAG`, a fallback's say, gets them as plain text.

    Args:
        retriever: a retriever, or any runnable from a question to documents.
    """

    state_schema = LazyRAGState

    def __init__(self, retriever: Runnable[str, list[Document]]) -> None:
        super().__init__()
        if not isinstance(retriever, Runnable):
            raise LazyRAGError(
                f"LazyRAGMiddleware takes a retriever, store.as_retriever() say, not a {type(retriever).__name__}"
            )
        self._retriever = retriever

    def before_model(self, state: LazyRAGState, runtime: Any) -> dict[str, Any] | None:
        """Find documents for a question that has none yet."""
        asked = _unanswered(state)
        return None if asked is None else _update(state, asked, self._retriever.invoke(str(asked.text)))

    async def abefore_model(self, state: LazyRAGState, runtime: Any) -> dict[str, Any] | None:
        """Find documents for a question that has none yet."""
        asked = _unanswered(state)
        return None if asked is None else _update(state, asked, await self._retriever.ainvoke(str(asked.text)))

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelCallResult[Any]:
        """Call the model with every question behind its documents."""
        return handler(_with_documents(request))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelCallResult[Any]:
        """Call the model with every question behind its documents."""
        return await handler(_with_documents(request))


def _unanswered(state: LazyRAGState) -> HumanMessage | None:
    """The last user message, when it has text that was not searched for."""
    questions = [message for message in state["messages"] if isinstance(message, HumanMessage)]
    if not questions or not str(questions[-1].text).strip():
        return None
    known = state.get("lazy_rag_retrieved", {}).get(questions[-1].id or "")
    # a message may be edited under its id
    return None if known is not None and known["question"] == questions[-1].text else questions[-1]


def _update(state: LazyRAGState, question: HumanMessage, documents: Sequence[Document]) -> dict[str, Any]:
    present = {message.id for message in state["messages"]}
    kept = {key: value for key, value in state.get("lazy_rag_retrieved", {}).items() if key in present}
    kept[question.id or ""] = Retrieved(question=str(question.text), documents=list(documents))
    return {"context": list(documents), "lazy_rag_retrieved": kept}


def _with_documents(request: ModelRequest[Any]) -> ModelRequest[Any]:
    retrieved: dict[str, Retrieved] = request.state.get("lazy_rag_retrieved", {})  # type: ignore[assignment]
    chunks = isinstance(request.model, ChatLazyRAG)
    return request.override(messages=[_behind(message, retrieved, chunks) for message in request.messages])


def _behind(message: AnyMessage, retrieved: Mapping[str, Retrieved], chunks: bool) -> AnyMessage:
    """A user message behind its documents. In the state it stays as it is."""
    found = retrieved.get(message.id or "")
    if found is None or not found["documents"]:
        return message
    documents = distinct(found["documents"])
    blocks: list[Any] = (
        context_blocks(documents)
        if chunks
        else [{"type": "text", "text": f"{document.page_content}\n\n"} for document in documents]
    )
    own = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
    return message.model_copy(update={"content": [*blocks, *own]})

"""Agents of `create_agent`: questions behind their documents, tools that return documents, structured answers."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

pytest.importorskip("langchain")

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.documents import Document
from langchain_core.language_models import FakeMessagesListChatModel
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, ToolMessage
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.tools import tool
from langchain_lazy_rag import ChatLazyRAG, LazyRAGMiddleware, LazyRAGVectorStore
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from pydantic import BaseModel

from lazy_rag import LazyRAGError, Runtime
from tests.fixtures import make_runtime

TEXTS = {
    "tower": "The tower of Amble is 330 m high, and open on Sundays.",
    "bridge": "The bridge of Amble is 2.7 km long; it was built of stone.",
    "market": "The market of Amble is held in the morning, under the lime trees.",
}
TOWER, BRIDGE = "How high is the tower of Amble?", "How long is the bridge of Amble?"


@pytest.fixture
def store(rt: Runtime) -> LazyRAGVectorStore:
    return LazyRAGVectorStore.from_texts(list(TEXTS.values()), runtime=rt, ids=list(TEXTS))


class Found:
    """A retriever that finds the documents whose name is in the question, and counts the questions."""

    def __init__(self) -> None:
        self.questions: list[str] = []

    def runnable(self) -> Runnable[str, list[Document]]:
        async def afind(question: str) -> list[Document]:
            return self.find(question)

        return RunnableLambda(self.find, afunc=afind)

    def find(self, question: str) -> list[Document]:
        self.questions.append(question)
        return [Document(id=name, page_content=text) for name, text in TEXTS.items() if name in question]


class CallOnce(AgentMiddleware[Any, Any, Any]):
    """Has the model call one tool first, and then answer without tools: random weights decide nothing."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._tool = name

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        return handler(self._chosen(request))

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        return await handler(self._chosen(request))

    def _chosen(self, request: Any) -> Any:
        if any(isinstance(message, ToolMessage) for message in request.messages):
            return request.override(tools=[])
        settings = {**request.model_settings, "parallel_tool_calls": False}
        return request.override(tool_choice=self._tool, response_format=None, model_settings=settings)


def used(message: Any) -> list[tuple[str, str]]:
    """(chunk id, tier) of each chunk in the prompt of an answer, without the encode prefix."""
    return [(chunk["chunk_id"], chunk["tier"]) for chunk in message.response_metadata["chunks"] if chunk["offset"]]


def strict_saver() -> InMemorySaver:
    """Keeps threads as bytes, and reads back no type but what it is told of: what is in a state must be plain."""
    known = [("langchain_core.documents.base", "Document")]
    return InMemorySaver(serde=JsonPlusSerializer(pickle_fallback=False, allowed_msgpack_modules=known))


def thread(name: str) -> Any:
    return {"configurable": {"thread_id": name}}


async def run_each_way(agent: Any, question: str) -> list[dict[str, Any]]:
    given = {"messages": [{"role": "user", "content": question}]}
    results = [agent.invoke(given), await agent.ainvoke(given), list(agent.stream(given, stream_mode="values"))[-1]]
    return [*results, [state async for state in agent.astream(given, stream_mode="values")][-1]]


def edited(messages: list[Any], keep: str) -> list[Any]:
    return [RemoveMessage(id=message.id) for message in messages if message.id != keep]


async def ask_again(agent: Any, config: Any, message: Any, way: str) -> dict[str, Any]:
    given = {"messages": [message]}
    state: dict[str, Any] = await agent.ainvoke(given, config) if way == "async" else agent.invoke(given, config)
    return state


def test_a_text_of_several_documents_stands_once_before_the_question(rt: Runtime, model: ChatLazyRAG) -> None:
    twice = RunnableLambda(lambda _: [Document(id=name, page_content=TEXTS["tower"]) for name in ("tower", "copy")])
    state = create_agent(model, [], middleware=[LazyRAGMiddleware(twice)]).invoke({"messages": [("user", "High?")]})
    assert [i for i, _ in used(state["messages"][-1])] == rt.remember([TEXTS["tower"]])
    assert [document.id for document in state["context"]] == ["tower", "copy"]


async def test_documents_stand_before_the_question_as_chunks(rt: Runtime, model: ChatLazyRAG) -> None:
    found = Found()
    agent = create_agent(model, [], middleware=[LazyRAGMiddleware(found.runnable())])
    question = "The tower, the bridge and the market of Amble?"
    first, *others = await run_each_way(agent, question)
    ids = rt.remember(list(TEXTS.values()))
    lengths = sum(len(rt.chunk(i)) for i in ids)
    prefix = len(rt.prefix.token_ids) if rt.prefix is not None else 0
    answer = first["messages"][-1]
    assert used(answer) == [(i, "encoded") for i in ids]
    assert answer.usage_metadata["input_token_details"] == {"cache_read": prefix, "cache_creation": lengths}
    # the prompt is that of the native call
    assert len(rt.layout(question, ids)) == answer.usage_metadata["input_tokens"]
    for state in others:
        again = state["messages"][-1]
        assert again.text == answer.text
        assert [i for i, _ in used(again)] == ids and all(tier != "encoded" for _, tier in used(again))
        assert again.usage_metadata["input_token_details"]["cache_creation"] == 0
        assert again.usage_metadata["input_token_details"]["cache_read"] >= prefix + lengths
    for state in (first, *others):
        assert state["messages"][0].content == question  # as the user wrote it
        assert [document.id for document in state["context"]] == list(TEXTS)
    assert set(first) == {"messages", "context"}
    assert found.questions == [question] * 4


@pytest.mark.parametrize("way", ["sync", "async"])
async def test_every_turn_keeps_its_documents_and_is_searched_for_once(
    rt: Runtime, model: ChatLazyRAG, way: str
) -> None:
    found = Found()
    saver = strict_saver()
    agent = create_agent(model, [], middleware=[LazyRAGMiddleware(found.runnable())], checkpointer=saver)

    async def ask(question: str, name: str = "a") -> dict[str, Any]:
        given: Any = {"messages": [HumanMessage(question)]}
        return await agent.ainvoke(given, thread(name)) if way == "async" else agent.invoke(given, thread(name))

    (tower,), (bridge,) = rt.remember([TEXTS["tower"]]), rt.remember([TEXTS["bridge"]])
    assert used((await ask(TOWER))["messages"][-1]) == [(tower, "encoded")]
    second = await ask(BRIDGE)
    assert [i for i, _ in used(second["messages"][-1])] == [tower, bridge]
    details = second["messages"][-1].usage_metadata["input_token_details"]
    assert details["cache_creation"] == len(rt.chunk(bridge))
    # the first turn is found: its chunk, and live text too
    first_turn = second["messages"][1].usage_metadata
    assert details["cache_read"] > len(rt.chunk(tower)) + (len(rt.prefix.token_ids) if rt.prefix is not None else 0)
    assert details["cache_read"] <= first_turn["input_tokens"] + first_turn["output_tokens"]
    assert [document.id for document in second["context"]] == ["bridge"]
    assert found.questions == [TOWER, BRIDGE]
    # what a question found goes with it; one that is changed under its id is searched for again
    third = await ask("And who?")
    asked = third["messages"][0]
    agent.update_state(thread("a"), {"messages": [*edited(third["messages"], keep=asked.id)]})
    state = agent.get_state(thread("a")).values
    assert [message.id for message in state["messages"]] == [asked.id]
    again = await ask_again(agent, thread("a"), asked.model_copy(update={"content": BRIDGE}), way)
    assert found.questions == [TOWER, BRIDGE, "And who?", BRIDGE]
    assert [i for i, _ in used(again["messages"][-1])] == [bridge]
    assert list(agent.get_state(thread("a")).values["lazy_rag_retrieved"]) == [asked.id]


@pytest.mark.parametrize("way", ["sync", "async"])
async def test_what_a_tool_returns_is_found_too_and_retrieval_is_not_repeated(
    rt: Runtime, store: LazyRAGVectorStore, way: str
) -> None:
    @tool(response_format="content_and_artifact")
    def look_up(name: Literal["bridge"]) -> tuple[str, list[Document]]:
        """Find a page about Amble."""
        documents = store.get_by_ids([name])
        return "\n\n".join(f"Source: {d.metadata}\nContent: {d.page_content}" for d in documents), documents

    found = Found()
    middleware = [LazyRAGMiddleware(found.runnable()), CallOnce("look_up")]
    agent = create_agent(
        ChatLazyRAG(runtime=rt, temperature=0, max_tokens=100),
        [look_up],
        middleware=middleware,
        checkpointer=strict_saver(),
    )
    given: Any = {"messages": [HumanMessage(TOWER)]}
    state = await agent.ainvoke(given, thread("a")) if way == "async" else agent.invoke(given, thread("a"))
    question, call, result, answer = state["messages"]
    assert question.content == TOWER and call.tool_calls[0]["name"] == "look_up"
    assert call.tool_calls[0]["args"] == {"name": "bridge"} and result.artifact[0].id == "bridge"
    assert found.questions == [TOWER]
    tower, bridge = rt.remember([TEXTS["tower"], TEXTS["bridge"]])
    assert used(call) == [(tower, "encoded")]
    assert [i for i, _ in used(answer)] == [tower, bridge] and used(answer)[1][1] == "encoded"
    assert used(answer)[0][1] != "encoded"
    # the next turn reads the tool's message back from the checkpoint, documents and all
    config = thread("a")
    given = {"messages": [HumanMessage("And the tower?")]}
    again = await agent.ainvoke(given, config) if way == "async" else agent.invoke(given, config)
    assert [i for i, _ in used(again["messages"][-1])] == [tower, bridge, tower]
    assert again["messages"][-1].usage_metadata["input_token_details"]["cache_creation"] == 0


def test_another_model_reads_the_documents_as_text(model: ChatLazyRAG) -> None:
    class Other(FakeMessagesListChatModel):
        seen: list[Any] = []  # noqa: RUF012

        def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen.append(messages)
            return super()._generate(messages, *args, **kwargs)

    other = Other(responses=[AIMessage("330 m")])
    state = create_agent(other, [], middleware=[LazyRAGMiddleware(Found().runnable())]).invoke(
        {"messages": [HumanMessage(TOWER)]}
    )
    assert state["messages"][-1].text == "330 m"
    assert other.seen[0][-1].content == [
        {"type": "text", "text": TEXTS["tower"] + "\n\n"},
        {"type": "text", "text": TOWER},
    ]


def test_content_blocks_and_questions_without_text(model: ChatLazyRAG) -> None:
    found = Found()
    agent = create_agent(model, [], middleware=[LazyRAGMiddleware(found.runnable())])
    blocks: Any = [{"type": "text", "text": "How high is "}, {"type": "text", "text": "the tower of Amble?"}]
    state = agent.invoke({"messages": [HumanMessage(blocks)]})
    assert found.questions == [TOWER] and len(used(state["messages"][-1])) == 1
    state = agent.invoke({"messages": [HumanMessage(" "), AIMessage("Yes?"), HumanMessage("  ")]})
    assert found.questions == [TOWER] and used(state["messages"][-1]) == [] and "context" not in state
    state = agent.invoke({"messages": [HumanMessage("Nothing is found.")]})
    assert state["context"] == [] and used(state["messages"][-1]) == []


def test_the_oldest_questions_documents_go_first_when_the_context_is_full() -> None:
    with make_runtime(max_context=200) as rt:
        model = ChatLazyRAG(runtime=rt, temperature=0, max_tokens=4)
        agent = create_agent(
            model, [], middleware=[LazyRAGMiddleware(Found().runnable())], checkpointer=InMemorySaver()
        )
        tower, bridge = rt.remember([TEXTS["tower"], TEXTS["bridge"]])
        agent.invoke({"messages": [HumanMessage("The tower?")]}, thread("a"))
        answer = agent.invoke({"messages": [HumanMessage("The tower and the bridge?")]}, thread("a"))["messages"][-1]
        assert [i for i, _ in used(answer)] == [tower, bridge]
        assert answer.response_metadata["dropped"] == [tower]


def test_what_is_no_retriever_is_refused(store: LazyRAGVectorStore) -> None:
    with pytest.raises(LazyRAGError, match=r"store\.as_retriever\(\)"):
        LazyRAGMiddleware(store)  # type: ignore[arg-type]


class Trip(BaseModel):
    """A trip."""

    days: int
    guide: bool


@pytest.mark.parametrize("strategy", ["schema", "provider", "tool"])
@pytest.mark.parametrize("tools", [False, True], ids=["alone", "beside tools"])
def test_structured_answers_follow_their_schema(rt: Runtime, strategy: str, tools: bool) -> None:
    @tool
    def add(a: Literal[2], b: Literal[3]) -> int:
        """Add two numbers."""
        return a + b

    formats: dict[str, Any] = {"schema": Trip, "provider": ProviderStrategy(Trip), "tool": ToolStrategy(Trip)}
    model = ChatLazyRAG(runtime=rt, temperature=1, seed=0, max_tokens=120)
    middleware = [CallOnce("add")] if tools else []
    agent = create_agent(model, [add] if tools else [], middleware=middleware, response_format=formats[strategy])
    state = agent.invoke({"messages": [HumanMessage("2 + 3, and a trip?")]}, {"recursion_limit": 8})
    assert isinstance(state["structured_response"], Trip)
    results = [message.content for message in state["messages"] if isinstance(message, ToolMessage)]
    answered = 1 if strategy == "tool" else 0  # a call whose arguments are the answer gets a result too
    assert len(results) == answered + tools and ("5" in results) == tools


@pytest.mark.parametrize(
    "form",
    [
        "json",
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": 3}},
        {"type": "json_schema", "json_schema": {"schema": None}},
        {"type": "json_schema", "json_schema": {"name": "Trip", "strict": True}},
        {"type": "json_schema", "json_schema": Trip.model_json_schema()},
    ],
)
def test_response_formats_that_are_none_are_refused(model: ChatLazyRAG, form: Any) -> None:
    with pytest.raises(LazyRAGError, match=r"response_format=.*\"schema\": \.\.\."):
        model.invoke("A trip?", response_format=form)


def test_response_formats_in_openais_form(rt: Runtime) -> None:
    model = ChatLazyRAG(runtime=rt, temperature=1, seed=1, max_tokens=120)
    schema = Trip.model_json_schema()
    form = {"type": "json_schema", "json_schema": {"name": "Trip", "schema": schema}}
    assert Trip.model_validate_json(model.invoke("A trip?", response_format=form).text)
    assert isinstance(json.loads(model.invoke("A trip?", response_format={"type": "json_object"}).text), dict)
    assert model.invoke("A trip?", response_format={"type": "text"}).text == model.invoke("A trip?").text
    with pytest.raises(LazyRAGError, match="give one of them"):
        model.invoke("A trip?", response_format=form, json_schema=schema)
    with pytest.raises(LazyRAGError, match="max_tokens"):
        model.invoke("A trip?", response_format=form, max_tokens=4)

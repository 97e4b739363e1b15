"""ChatLazyRAG and the chain: chunks in the messages are served from the cache, whatever chain put them there."""

from __future__ import annotations

import asyncio
import copy
import pickle  # programs copy and send model objects about; none of ours is ever read from a file
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypedDict

import pytest

pytest.importorskip("langchain_core")

from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_core.tools import tool
from langchain_lazy_rag import (
    ChatLazyRAG,
    LazyRAGRetriever,
    LazyRAGVectorStore,
    context_blocks,
    create_lazy_rag_chain,
)
from pydantic import BaseModel, Field

from lazy_rag import DeadlineExceededError, LazyRAGError, Runtime, SamplingParams
from tests.fixtures import make_runtime
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import tiny_tokenizer

TEXTS = [
    "The tower of Amble is 330 m high, and open on Sundays.",
    "The bridge of Amble is 2.7 km long; it was built of stone.",
    "The market of Amble is held in the morning, under the lime trees.",
]


@pytest.fixture
def store(rt: Runtime) -> LazyRAGVectorStore:
    return LazyRAGVectorStore.from_texts(TEXTS, runtime=rt, ids=["tower", "bridge", "market"])


def chunks(message: Any) -> list[tuple[str, str]]:
    """(chunk id, tier) of the chunks in a message's prompt, without the encode prefix."""
    return [(chunk["chunk_id"], chunk["tier"]) for chunk in message.response_metadata["chunks"]]


def details(message: Any) -> tuple[int, int, int]:
    """(input, found, computed for the cache) tokens."""
    found = message.usage_metadata["input_token_details"]
    return message.usage_metadata["input_tokens"], found["cache_read"], found["cache_creation"]


def found_tokens(message: Any) -> int:
    """Prompt tokens of chunks whose KV was found."""
    return sum(c["tokens"] for c in message.response_metadata["chunks"] if c["tier"] != "encoded")


def joined(pieces: list[Any]) -> Any:
    full = pieces[0]
    for piece in pieces[1:]:
        full = full + piece
    return full


# swap only the model: a chain as LangChain's own pages write it

TEMPLATE = """Answer the question from the context only.

Context:
{context}

Question: {question}"""


def format_docs(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def stock_chain(retriever: Runnable[str, list[Document]], model: Runnable[Any, Any]) -> Runnable[str, Any]:
    prompt = ChatPromptTemplate.from_template(TEMPLATE)
    return {"context": retriever | format_docs, "question": RunnablePassthrough()} | prompt | model


async def run_each_way(chain: Runnable[Any, Any], value: Any) -> list[Any]:
    return [
        chain.invoke(value),
        await chain.ainvoke(value),
        joined(list(chain.stream(value))),
        joined([piece async for piece in chain.astream(value)]),
        *chain.batch([value, value]),
        *await chain.abatch([value, value]),
    ]


async def test_a_stock_chain_is_served_from_the_cache(store: LazyRAGVectorStore, model: ChatLazyRAG) -> None:
    rt = store.runtime
    chain = stock_chain(store.as_retriever(search_kwargs={"k": 3}), model)
    first = chain.invoke("How high is the tower?")
    ids = {source.chunk_id for source in rt.find()}
    lengths = {chunk_id: len(rt.chunk(chunk_id)) for chunk_id in ids}
    separator = len(rt.tokenizer.encode("\n\n", add_special_tokens=False))
    # the last chunk of the context is followed by "\n\nQuestion", which begins with the separator too
    prefix = len(rt.prefix.token_ids) if rt.prefix is not None else 0
    held = sum(lengths.values())
    assert details(first)[1:] == (prefix, held)
    assert found_tokens(first) == prefix
    assert {chunk_id for chunk_id, tier in chunks(first) if tier == "encoded"} == ids
    for message in await run_each_way(chain, "How high is the tower?"):
        assert message.text == first.text
        assert found_tokens(message) == prefix + held
        assert details(message)[0] == details(first)[0] and details(message)[2] == 0
        assert prefix + held <= details(message)[1] < details(message)[0]
        assert [chunk_id for chunk_id, _ in chunks(message)] == [chunk_id for chunk_id, _ in chunks(first)]
    assert separator > 0 and details(first)[0] > prefix + held


async def test_order_decoration_and_question_do_not_matter(store: LazyRAGVectorStore, model: ChatLazyRAG) -> None:
    store.runtime.prefetch([source.chunk_id for source in store.runtime.find()])
    for number, order in enumerate(([2, 0, 1], [1, 2], [0, 0, 2])):
        context = "\n".join(f"<source n={place}>{TEXTS[i]}</source>" for place, i in enumerate(order))
        prompt = [SystemMessage(f"Use these sources.\n{context}"), HumanMessage(f"Question {number}?")]
        for message in await run_each_way(model, prompt):
            assert [tier for _, tier in chunks(message)] == ["host"] * len(order)
            assert details(message)[2] == 0


def test_the_prompt_is_the_text_of_the_chain(store: LazyRAGVectorStore, model: ChatLazyRAG) -> None:
    """Token by token: what the model reads is what it would read without a cache."""
    stock_chain(store.as_retriever(search_kwargs={"k": 3}), model).invoke("How high?")
    rt = store.runtime
    assert rt.last_answer is not None
    text = rt.tokenizer.decode(rt.last_answer.layout.token_ids())
    context = format_docs(store.similarity_search("How high?", k=3))
    assert TEMPLATE.format(context=context, question="How high?") in text


def test_anchoring_can_be_switched_off_and_keeps_to_its_namespace(store: LazyRAGVectorStore) -> None:
    prompt = f"{TEXTS[0]}\n\nHow high?"
    for options in ({"anchor": False}, {"namespace": "elsewhere"}):
        message = ChatLazyRAG(runtime=store.runtime, max_tokens=2, **options).invoke(prompt)
        assert TEXTS[0] not in [source.text for source in store.runtime.last_answer.sources]  # type: ignore[union-attr]
        assert details(message)[2] == 0


# the chain of this package


async def test_the_chain_asks_what_query_asks(store: LazyRAGVectorStore, model: ChatLazyRAG) -> None:
    rt, question = store.runtime, "How long is the bridge of Amble?"
    native = rt.query(question, k=2, sampling=SamplingParams(temperature=0, max_tokens=6))
    chain = create_lazy_rag_chain(model, LazyRAGRetriever(runtime=rt, k=2))
    expected = store.similarity_search(question, k=2)
    for result in await run_each_way(chain, {"input": question}):
        assert set(result) == {"input", "context", "answer"}
        assert result["context"] == expected
        assert result["answer"] == native.text
        assert rt.last_answer is not None and rt.last_answer.layout.items == native.layout.items
        assert rt.last_answer.receipt.tokens_encoded == 0


def test_the_chain_takes_history_and_system_text(store: LazyRAGVectorStore, model: ChatLazyRAG) -> None:
    chain = create_lazy_rag_chain(model, store.as_retriever(search_kwargs={"k": 1}), system="Be brief.")
    result = chain.invoke(
        {"input": "And how long is the bridge?", "chat_history": [("human", "How high?"), AIMessage("330 m.")]}
    )
    (found,) = result["context"]
    rt = store.runtime
    text = rt.tokenizer.decode(rt.last_answer.layout.token_ids())  # type: ignore[union-attr]
    order = [text.index(part) for part in ("Be brief.", "How high?", "330 m.", found.page_content, "And how long")]
    assert order == sorted(order)


def test_documents_named_by_id_are_chunks(store: LazyRAGVectorStore, model: ChatLazyRAG) -> None:
    """Also where texts lie inside each other, which anchoring has to guess."""
    rt = store.runtime
    store.add_texts(["Amble is old.", "Amble is old. Amble"], ids=["short", "long"])
    documents = store.get_by_ids(["short", "long"])
    message = model.invoke([HumanMessage(content=[*context_blocks(documents), {"type": "text", "text": "How old?"}])])
    expected = [rt.find(ids=[name])[0].chunk_id for name in ("short", "long")]
    assert [chunk_id for chunk_id, _ in chunks(message)][-2:] == expected
    assert rt.last_answer is not None
    assert [source.document_id or source.text for source in rt.last_answer.sources] == [
        d.page_content for d in documents
    ]


def test_a_deleted_document_in_an_old_message_does_not_come_back(store: LazyRAGVectorStore, model: ChatLazyRAG) -> None:
    documents = store.get_by_ids(["tower"])
    store.delete(["tower"])
    message = model.invoke([HumanMessage(content=[*context_blocks(documents), "How high?"])])
    rt = store.runtime
    assert TEXTS[0] in rt.tokenizer.decode(rt.last_answer.layout.token_ids())  # type: ignore[union-attr]
    assert [tier for _, tier in chunks(message)][-1] == "encoded"
    assert [s.document_id for s in rt.find()] == ["bridge", "market"]
    assert TEXTS[0] not in [document.page_content for document in store.similarity_search("tower", k=9)]


async def test_documents_of_another_store_are_chunks_too(rt: Runtime, model: ChatLazyRAG) -> None:
    from langchain_core.embeddings import DeterministicFakeEmbedding
    from langchain_core.vectorstores import InMemoryVectorStore

    foreign = InMemoryVectorStore.from_texts(TEXTS, DeterministicFakeEmbedding(size=8))
    chain = create_lazy_rag_chain(model, foreign.as_retriever(search_kwargs={"k": 3}))
    first = chain.invoke({"input": "How high?"})
    assert rt.last_answer is not None
    assert {use.tier for use in rt.last_answer.receipt.chunks[1:]} == {"encoded"}
    for result in await run_each_way(chain, {"input": "How high?"}):
        assert result["answer"] == first["answer"]
        assert rt.last_answer.receipt.reuse == 1 and len(rt.last_answer.receipt.chunks) == 4
    assert rt.find() == []


def test_a_second_turn_reads_the_first_turns_live_text(rt: Runtime, model: ChatLazyRAG) -> None:
    opening = [SystemMessage("Be brief. " * 12), HumanMessage("Amble lies on a river. " * 6 + "Where does it lie?")]
    turns = [*opening, model.invoke(opening), HumanMessage("And how old is it?")]
    for ask in (model.invoke, lambda messages: joined(list(model.stream(messages)))):
        message = ask(turns)
        assert rt.last_answer is not None
        receipt = rt.last_answer.receipt
        assert receipt.tokens_history > 0
        assert details(message) == (
            receipt.prompt_tokens,
            receipt.tokens_reused + receipt.tokens_history,
            receipt.tokens_encoded,
        )


# agents: the documented retrieval tool


@pytest.mark.parametrize("place", ["here", "elsewhere"])
async def test_what_a_retrieval_tool_returns_is_served_from_the_cache(
    rt: Runtime, model: ChatLazyRAG, place: str
) -> None:
    from langchain_core.embeddings import DeterministicFakeEmbedding
    from langchain_core.vectorstores import InMemoryVectorStore

    store: Any = LazyRAGVectorStore(rt)
    if place == "elsewhere":
        store = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
    store.add_texts(TEXTS)

    @tool(response_format="content_and_artifact")
    def retrieve(query: str) -> tuple[str, list[Document]]:
        """Find pages about Amble."""
        found = store.similarity_search(query, k=2)
        return "\n\n".join(f"Source: {d.metadata}\nContent: {d.page_content}" for d in found), found

    forced = model.bind_tools([retrieve], tool_choice="any", parallel_tool_calls=False)
    messages: list[Any] = [HumanMessage("How high is the tower of Amble?")]
    call = forced.bind(max_tokens=60).invoke(messages)
    assert [c["name"] for c in call.tool_calls] == ["retrieve"]
    assert isinstance(call.tool_calls[0]["args"]["query"], str)
    call.tool_calls[0]["args"]["query"] = "tower"  # random weights ask for nothing in particular
    result = retrieve.invoke(call.tool_calls[0])
    assert isinstance(result, ToolMessage) and len(result.artifact) == 2
    final = model.bind_tools([retrieve], tool_choice="none")
    final.invoke([*messages, call, result])
    for message in await run_each_way(final, [*messages, call, result]):
        assert message.tool_calls == []
        found = {source.text for source in rt.last_answer.sources}  # type: ignore[union-attr]
        assert found == {document.page_content for document in result.artifact}
        assert details(message)[2] == 0
        assert sum(tier != "encoded" for _, tier in chunks(message)) >= 2


# tools and structured output


class Trip(BaseModel):
    """A trip."""

    place: str = Field(max_length=12)
    days: int = Field(ge=1, le=30)
    with_guide: bool = False


class TripDict(TypedDict):
    """A trip."""

    place: str
    days: int


def adder(a: int, b: int) -> int:
    """Add."""
    return a + b


async def test_forced_calls_follow_their_schema(model: ChatLazyRAG) -> None:
    short = ChatLazyRAG(runtime=model.runtime, temperature=0, max_tokens=60)
    messages = await run_each_way(short.bind_tools([adder], tool_choice="any", parallel_tool_calls=False), "1 + 2?")
    for choice in (True, "required", "adder", {"type": "function", "function": {"name": "adder"}}):
        messages.append(short.bind_tools([adder], tool_choice=choice, parallel_tool_calls=False).invoke("1 + 2?"))
    for message in messages:
        (call,) = message.tool_calls
        assert call["name"] == "adder"
        assert set(call["args"]) == {"a", "b"} and all(isinstance(value, int) for value in call["args"].values())
        assert message.text == ""
        assert message.response_metadata["finish_reason"] == "tool_calls"


def test_a_call_of_a_named_tool_is_of_that_tool(model: ChatLazyRAG) -> None:
    message = model.bind_tools([adder, Trip], tool_choice="Trip").bind(max_tokens=80).invoke("Go")
    assert {call["name"] for call in message.tool_calls} == {"Trip"}
    Trip(**message.tool_calls[0]["args"])
    with pytest.raises(LazyRAGError, match="other"):
        model.bind_tools([adder], tool_choice="other").invoke("Go")


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
async def test_structured_output_each_way(model: ChatLazyRAG, method: str) -> None:
    roomy = ChatLazyRAG(runtime=model.runtime, max_tokens=80, temperature=1, seed=3)
    for result in await run_each_way_last(roomy.with_structured_output(Trip, method=method), "A trip?"):
        assert isinstance(result, Trip)
    for result in await run_each_way_last(roomy.with_structured_output(TripDict, method=method), "A trip?"):
        assert set(result) == {"place", "days"} and isinstance(result["days"], int)
    raw = roomy.with_structured_output(Trip, method=method, include_raw=True).invoke("A trip?")
    assert isinstance(raw["raw"], AIMessage) and isinstance(raw["parsed"], Trip) and raw["parsing_error"] is None


async def run_each_way_last(chain: Runnable[Any, Any], value: Any) -> list[Any]:
    return [chain.invoke(value), await chain.ainvoke(value), list(chain.stream(value))[-1]]


class Tags(BaseModel):
    """Tags."""

    own: frozenset[Literal["a", "b"]] = Field(max_length=5)


class Odd(BaseModel):
    """What JSON has no form of its own for."""

    tags: set[int] = Field(min_length=1, max_length=4)
    data: bytes = Field(max_length=6)
    path: PurePosixPath
    inner: list[Tags] = Field(max_length=2)


def odd(tags: set[int], inner: Tags) -> None:
    """Do something."""


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
async def test_sets_bytes_and_paths_of_classes_and_functions(model: ChatLazyRAG, method: str) -> None:
    roomy = ChatLazyRAG(runtime=model.runtime, max_tokens=140, temperature=1.5, seed=3)
    chain = roomy.with_structured_output(Odd, method=method)
    for result in (chain.invoke("Odd?"), [part async for part in chain.astream("Odd?")][-1]):
        assert isinstance(result, Odd) and isinstance(result.tags, set) and isinstance(result.data, bytes)
    # a function's own arguments, and no others, also inside of them
    value: Any = roomy.with_structured_output(odd, method=method).invoke("Odd?")
    assert set(value) == {"tags", "inner"} and set(value["inner"]) == {"own"}


def test_a_schema_that_no_grammar_can_hold_is_refused_with_the_field(model: ChatLazyRAG) -> None:
    schema = {"title": "Odd", "description": "Odd.", **Odd.model_json_schema()}
    for method in ("json_schema", "function_calling"):
        with pytest.raises(LazyRAGError, match=r"at '(arguments.)?tags': .*uniqueItems.*: leave it out"):
            model.with_structured_output(schema, method=method).invoke("Odd?")
    # and open objects of a schema stay open
    bound: Any = model.with_structured_output({"title": "T", "description": "T.", "type": "object", "properties": {}})
    assert "additionalProperties" not in bound.first.kwargs["json_schema"]


class Tree(BaseModel):
    value: int
    kids: list[Tree] = Field(default=[], max_length=1)


LEAF = {"type": "boolean"}
OWN_SCHEMAS: list[tuple[dict[str, Any], Any]] = [
    ({"title": "E", "type": "object", "additionalProperties": LEAF, "minProperties": 1, "maxProperties": 2}, dict),
    ({"type": "array", "items": LEAF, "maxItems": 3}, list),
    ({"$defs": {"L": LEAF}, "type": "array", "items": {"$ref": "#/$defs/L"}, "maxItems": 3}, list),
]


@pytest.mark.parametrize(("schema", "kind"), OWN_SCHEMAS)
def test_a_schema_without_properties_is_held(schema: dict[str, Any], kind: type, model: ChatLazyRAG) -> None:
    for seed in range(3):
        answer = model.with_structured_output(schema).invoke("Say.", seed=seed, temperature=0.9, max_tokens=80)
        assert isinstance(answer, kind)
        assert all(isinstance(value, bool) for value in (answer.values() if isinstance(answer, dict) else answer))


def test_a_class_that_holds_itself_is_held(model: ChatLazyRAG) -> None:
    for seed in range(3):
        answer = model.with_structured_output(Tree).invoke("Say.", seed=seed, temperature=0.9, max_tokens=200)
        assert isinstance(answer, Tree)


def test_a_structured_answer_never_ends_half_way(model: ChatLazyRAG) -> None:
    for seed in range(8):
        trip = ChatLazyRAG(runtime=model.runtime, max_tokens=40, temperature=1.5, seed=seed)
        assert isinstance(trip.with_structured_output(Trip).invoke("A trip?"), Trip)
    stopped = ChatLazyRAG(runtime=model.runtime, max_tokens=40, stop=["days"]).with_structured_output(Trip)
    with pytest.raises(LazyRAGError, match=r"no complete JSON: it ended after \d+ tokens. .* leave stop strings out"):
        stopped.invoke("A trip?")
    with pytest.raises(LazyRAGError, match="max_tokens=3 is too small"):
        ChatLazyRAG(runtime=model.runtime, max_tokens=3).with_structured_output(Trip).invoke("A trip?")


# arguments


def test_sampling_comes_from_the_constructor_and_from_the_call(rt: Runtime) -> None:
    model = ChatLazyRAG(runtime=rt, temperature=0, max_tokens=5)
    assert model.invoke("Hello").usage_metadata["output_tokens"] <= 5  # type: ignore[index]
    assert model.invoke("Hello", max_tokens=2).usage_metadata["output_tokens"] <= 2  # type: ignore[index]
    warm = ChatLazyRAG(runtime=rt, temperature=5.0, max_tokens=8)
    assert (
        warm.invoke("Hello", seed=1).text == warm.bind(seed=1).invoke("Hello").text != warm.invoke("Hello", seed=2).text
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m.invoke("x", fitler=1), "no argument 'fitler'"),
        (lambda m: m.invoke("x", model="other"), "another one for another model"),
        (lambda m: m.invoke("x", temperature=-1), "temperature"),
        (lambda m: m.with_structured_output(Trip, method="magic"), "json_schema, json_mode"),
        (lambda m: m.invoke([HumanMessage([{"type": "image", "url": "x"}])]), "type 'image'"),
        (lambda m: m.invoke([HumanMessage(" ")]), "no text"),
        (lambda m: ChatLazyRAG(), "needs runtime="),
        (lambda m: ChatLazyRAG(runtime=m.runtime, runtime_options={"dtype": "float32"}), "leave out one"),
    ],
)
def test_wrong_arguments_are_refused(model: ChatLazyRAG, call: Any, words: str) -> None:
    with pytest.raises(LazyRAGError, match=words):
        call(model)


def test_every_kind_of_message_has_its_place(model: ChatLazyRAG) -> None:
    from langchain_core.messages import ChatMessage, FunctionMessage

    conversation = [
        SystemMessage("s1"),
        ChatMessage(role="user", content="u1"),
        HumanMessage(["u2 ", {"type": "text", "text": "u3"}], name="someone"),
        AIMessage([{"type": "thinking", "thinking": "hidden"}, {"type": "text", "text": "a1"}]),
        FunctionMessage(name="f", content="f1"),
        HumanMessage("u4"),
    ]
    model.invoke(conversation)
    rt = model.get_runtime()
    text = rt.tokenizer.decode(rt.last_answer.layout.token_ids())  # type: ignore[union-attr]
    order = [text.index(part) for part in ("s1", "u1", "u2 u3", "a1", "f1", "u4")]
    assert order == sorted(order) and "hidden" not in text


def test_profile_and_parameters(model: ChatLazyRAG) -> None:
    rt = model.get_runtime()
    assert model.profile is not None and model.profile["max_input_tokens"] == rt.max_context - 1
    assert model.profile["tool_calling"] and model.profile["structured_output"]
    params = ChatLazyRAG(runtime=rt, stop="x", temperature=0.5)._get_ls_params()
    assert (params["ls_provider"], params["ls_stop"], params["ls_temperature"]) == ("lazyrag", ["x"], 0.5)


def test_the_model_is_loaded_when_it_is_needed(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    options = {"embedder": None, "cache_bytes": 1 << 20, "progress": False}
    first, second = (ChatLazyRAG(model=str(tmp_path), max_tokens=2, runtime_options=options) for _ in range(2))
    assert str(tmp_path) not in repr(Runtime._shared)
    first.invoke("Hello")
    with first.get_runtime() as runtime:
        assert second.get_runtime() is runtime
        assert first.invoke("Hello").response_metadata["model_name"] == str(tmp_path)


async def test_callbacks_get_every_token_once(model: ChatLazyRAG) -> None:
    from langchain_core.callbacks import BaseCallbackHandler

    class Collect(BaseCallbackHandler):
        def __init__(self) -> None:
            self.tokens: list[str] = []

        def on_llm_new_token(self, token: str, **_: Any) -> None:
            self.tokens.append(token)

    handler = Collect()
    text = joined(list(model.stream("Hello", config={"callbacks": [handler]}))).text
    assert "".join(handler.tokens) == text
    handler = Collect()
    pieces = [piece async for piece in model.astream("Hello", config={"callbacks": [handler]})]
    assert "".join(handler.tokens) == joined(pieces).text == text
    assert all(isinstance(piece, AIMessageChunk) for piece in pieces)


LONG = {"max_tokens": 3000, "temperature": 0.0}


async def test_an_answer_that_takes_too_long_is_cancelled(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = SamplingParams.__init__

    def never_ends(self: SamplingParams, **fields: Any) -> None:
        endless(self, **{**fields, "ignore_eos": True})

    monkeypatch.setattr(SamplingParams, "__init__", never_ends)
    free = rt.stats.pages_free
    model = ChatLazyRAG(runtime=rt, timeout=0.2, **LONG)
    with pytest.raises(DeadlineExceededError):
        model.invoke("Count")
    with pytest.raises(DeadlineExceededError):
        list(model.stream("Count"))
    with pytest.raises(DeadlineExceededError):
        await model.ainvoke("Count")
    with pytest.raises(DeadlineExceededError):
        [piece async for piece in model.astream("Count")]
    while rt.stats.pages_free != free:
        await asyncio.sleep(0.001)
    assert ChatLazyRAG(runtime=rt, timeout=60, max_tokens=2).invoke("Count").usage_metadata is not None


def test_copies_share_the_runtime_and_pickles_leave_it_out(rt: Runtime) -> None:
    model = ChatLazyRAG(runtime=rt, max_tokens=2, temperature=0.0)
    for copied in (copy.deepcopy(model), model.model_copy(deep=True)):
        assert copied.runtime is rt and copied.invoke("Count").content == model.invoke("Count").content
    assert pickle.loads(pickle.dumps(model)).runtime is None


def test_a_cache_of_answers_tells_two_models_of_one_name_apart(rt: Runtime) -> None:
    cache = InMemoryCache()
    with make_runtime(seed=1) as other:
        models = [ChatLazyRAG(runtime=each, max_tokens=6, temperature=0.0, cache=cache) for each in (rt, other)]
        texts = [model.invoke("hi").content for model in models]
        alone = ChatLazyRAG(runtime=other, max_tokens=6, temperature=0.0).invoke("hi").content
        assert texts[1] == alone != texts[0]


# without the framework

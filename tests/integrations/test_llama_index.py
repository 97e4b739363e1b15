"""LlamaIndex: its contracts (events, deltas, usage, structured output, tools), and both promises with exact counts."""

from __future__ import annotations

import asyncio
import copy
import io
import json
import pickle  # programs copy and send model objects about; none of ours is ever read from a file
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llama_index.core import Document, PromptTemplate, Settings, VectorStoreIndex
from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    CitableBlock,
    DocumentBlock,
    ImageBlock,
    MessageRole,
    TextBlock,
    ToolCallBlock,
)
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.tools import FunctionTool
from llama_index.core.types import PydanticProgramMode
from llama_index.llms.lazy_rag import (
    ChunkPromptHelper,
    LazyRAGChatEngine,
    LazyRAGEmbedding,
    LazyRAGLLM,
    LazyRAGPrefill,
    LazyRAGQueryEngine,
    LazyRAGRetriever,
    LazyRAGSynthesizer,
    LazyRAGVectorStore,
    use_in_llama_index,
)
from llama_index.llms.lazy_rag.llm import read_object
from pydantic import BaseModel, Field, field_validator

from lazy_rag import LazyRAGError, Runtime, SamplingParams
from tests.fixtures import WordEmbedder, make_runtime

TEXTS = [
    "The tower in Paris is 330 m high. It was built in 1889.",
    "The bridge in Kobe is 3911 m long,\nand its towers are 283 m high.",
    "The dam in Itaipu is 196 m high. It holds a very large lake.",
]
QUERY = "How high is the tower?"
MODES = ["compact", "refine", "tree_summarize", "accumulate", "compact_accumulate"]


class Events(BaseEventHandler):
    seen: list[Any] = Field(default_factory=list)

    @classmethod
    def class_name(cls) -> str:
        return "Events"

    def handle(self, event: Any, **kwargs: Any) -> None:
        self.seen.append(event)

    def names(self) -> list[str]:
        return [event.class_name() for event in self.seen]

    def cache(self) -> list[Any]:
        return [event for event in self.seen if event.class_name() == "ChunkCacheHitEvent"]


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with make_runtime() as rt:
        yield rt


@pytest.fixture
def fresh() -> Iterator[Runtime]:
    with make_runtime() as rt:
        yield rt


@pytest.fixture
def events() -> Iterator[Events]:
    handler = Events()
    root = get_dispatcher()
    root.add_event_handler(handler)
    yield handler
    root.event_handlers.remove(handler)


def llm_of(rt: Runtime, **fields: Any) -> LazyRAGLLM:
    return LazyRAGLLM(rt, **{"max_tokens": 4, "temperature": 0.0, **fields})


def nodes() -> list[TextNode]:
    return [
        TextNode(text=text, id_=f"n{number}", metadata={"file": f"{number}.txt", "number": number})
        for number, text in enumerate(TEXTS)
    ]


def index_of(rt: Runtime) -> VectorStoreIndex:
    return VectorStoreIndex(nodes(), embed_model=LazyRAGEmbedding(rt))


# Promise one: swap only the LLM


@pytest.mark.parametrize("how", ["sync", "async", "stream", "async stream"])
@pytest.mark.parametrize("mode", MODES)
def test_only_the_llm_is_swapped_and_every_chunk_is_served(fresh: Runtime, events: Events, mode: str, how: str) -> None:
    streaming = "stream" in how and "accumulate" not in mode
    engine = index_of(fresh).as_query_engine(
        llm=llm_of(fresh), similarity_top_k=3, response_mode=mode, streaming=streaming
    )

    async def ask_async() -> str:
        response = await engine.aquery(QUERY)
        if streaming:
            return "".join([piece async for piece in response.async_response_gen()])
        return str(response)

    def ask() -> tuple[str, list[bool], list[str]]:
        events.seen.clear()
        if "async" in how:
            text = asyncio.run(ask_async())
        else:
            response = engine.query(QUERY)
            text = "".join(response.response_gen) if streaming else str(response)
        cache = events.cache()
        return text, [hit for e in cache for hit in e.hits], [i for e in cache for i in e.chunk_ids]

    first, first_hits, first_ids = ask()
    second, second_hits, second_ids = ask()
    assert first_hits == [False] * 3  # each chunk stands in one prompt once, and is encoded there
    assert second_hits == [True] * 3
    assert sorted(first_ids) == sorted(second_ids) == sorted(fresh.remember(TEXTS))
    assert first == second and first.strip()
    assert fresh.check() == []


@pytest.mark.parametrize("how", ["sync", "async", "stream", "async stream"])
@pytest.mark.parametrize("kind", [ContextChatEngine, CondensePlusContextChatEngine])
def test_the_stock_chat_engines_are_served_over_turns(fresh: Runtime, events: Events, kind: Any, how: str) -> None:
    engine = kind.from_defaults(
        retriever=index_of(fresh).as_retriever(similarity_top_k=3),
        llm=llm_of(fresh),
        memory=ChatMemoryBuffer.from_defaults(token_limit=1500),
    )

    async def ask_async() -> None:
        if how == "async":
            await engine.achat(QUERY)
            return
        response = await engine.astream_chat(QUERY)
        assert [token async for token in response.async_response_gen()]

    def ask() -> list[bool]:
        events.seen.clear()
        if "async" in how:
            asyncio.run(ask_async())
        elif how == "sync":
            engine.chat(QUERY)
        else:
            assert "".join(engine.stream_chat(QUERY).response_gen).strip()
        return [hit for event in events.cache() for hit in event.hits]

    assert ask() == [False] * 3
    assert ask() == [True] * 3
    assert ask() == [True] * 3


def test_simple_summarize_keeps_the_right_text_without_hits(fresh: Runtime, events: Events) -> None:
    engine = index_of(fresh).as_query_engine(llm=llm_of(fresh), similarity_top_k=3, response_mode="simple_summarize")
    assert str(engine.query(QUERY)).strip()
    assert str(engine.query(QUERY)).strip()
    # the stock mode puts a Python list into the prompt: line ends are escaped, single lines stay verbatim
    assert sum(hit for event in events.cache() for hit in event.hits) <= 2


def test_metadata_modes_and_templates_share_one_copy_of_a_chunk(fresh: Runtime, events: Events) -> None:
    llm = llm_of(fresh)
    llm.remember_nodes([NodeWithScore(node=node) for node in nodes()])
    for template in ("{}", "Sources:\n- {}\n", "file: a.txt\nnumber: 1\n\n{}\n---"):
        llm.complete(template.format(TEXTS[0]) + " " + QUERY)
    assert [event.hits for event in events.cache()] == [[False], [True], [True]]
    assert len({i for event in events.cache() for i in event.chunk_ids}) == 1


# Promise two: nodes stay nodes


@pytest.mark.parametrize("how", ["sync", "async", "stream", "async stream"])
def test_the_synthesizer_tokenises_no_chunk_text(
    fresh: Runtime, events: Events, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    streaming = "stream" in how
    engine = index_of(fresh).as_query_engine(
        similarity_top_k=3,
        llm=llm_of(fresh),
        response_synthesizer=LazyRAGSynthesizer(llm_of(fresh), streaming=streaming),
    )

    async def ask_async() -> Any:
        response = await engine.aquery(QUERY)
        if streaming:
            assert [piece async for piece in response.async_response_gen()]
        return response

    def ask() -> Any:
        events.seen.clear()
        if "async" in how:
            return asyncio.run(ask_async())
        response = engine.query(QUERY)
        assert ("".join(response.response_gen) if streaming else str(response)).strip()
        return response

    ask()
    assert [event.hits for event in events.cache()] == [[False] * 3]
    tokenised: list[str] = []
    content = fresh._parts.tokens.content
    monkeypatch.setattr(fresh._parts.tokens, "content", lambda text: tokenised.append(text) or content(text))
    response = ask()
    assert [event.hits for event in events.cache()] == [[True] * 3]
    assert tokenised and not any(text in piece for text in TEXTS for piece in tokenised)
    ids = fresh.remember([node.node.text for node in response.source_nodes])
    assert events.cache()[0].chunk_ids == ids  # in the retriever's order


def test_the_synthesizers_prompt_is_plain_text_with_metadata_and_question(fresh: Runtime) -> None:
    llm = llm_of(fresh)
    scored = [NodeWithScore(node=node, score=1.0) for node in nodes()]
    answer = LazyRAGSynthesizer(llm).synthesize(QUERY, scored)
    prompt = fresh.tokenizer.decode(fresh.last_answer.layout.token_ids())
    assert "['" not in prompt
    assert all(f"file: {n}.txt\nnumber: {n}\n{text}\n\n" in prompt for n, text in enumerate(TEXTS))
    assert f"Query: {QUERY}" in prompt
    assert [node.node_id for node in answer.source_nodes] == ["n0", "n1", "n2"]
    custom = PromptTemplate("Q: {query_str}\nC: {context_str}")
    LazyRAGSynthesizer(llm, text_qa_template=custom).synthesize(QUERY, scored[:1])
    prompt = fresh.tokenizer.decode(fresh.last_answer.layout.token_ids())
    assert f"Q: {QUERY}\nC: file: 0.txt\nnumber: 0\n{TEXTS[0]}" in prompt


def test_the_synthesizers_structured_and_empty_answers(fresh: Runtime) -> None:
    scored = [NodeWithScore(node=node, score=1.0) for node in nodes()]
    llm = llm_of(fresh, max_tokens=60)
    by_class = LazyRAGSynthesizer(llm, output_cls=Tower).synthesize(QUERY, scored)
    assert isinstance(by_class.response, Tower)
    by_llm = LazyRAGSynthesizer(llm.as_structured_llm(Tower)).synthesize(QUERY, scored)
    assert isinstance(by_llm.response, Tower)
    assert str(LazyRAGSynthesizer(llm).synthesize(QUERY, [])) == "Empty Response"
    answered = LazyRAGSynthesizer(llm, on_empty="answer")
    assert str(answered.synthesize(QUERY, [])) not in ("", "Empty Response")
    assert str(asyncio.run(answered.asynthesize(QUERY, []))) not in ("", "Empty Response")
    with pytest.raises(LazyRAGError, match="on_empty"):
        LazyRAGSynthesizer(llm, on_empty="shrug")
    from llama_index.core.llms import MockLLM

    with pytest.raises(LazyRAGError, match="LazyRAGLLM"):
        LazyRAGSynthesizer(MockLLM())
    assert set(LazyRAGSynthesizer(llm).get_prompts()) == {"text_qa_template"}


def test_the_engines_over_a_runtime(fresh: Runtime, events: Events) -> None:
    fresh.add_chunks(TEXTS, ids=["a", "b", "c"])
    engine = LazyRAGQueryEngine.from_runtime(fresh, similarity_top_k=2, max_tokens=4, temperature=0.0)
    response = engine.query(QUERY)
    assert response.source_nodes[0].node.text == TEXTS[0]
    assert [node.score for node in response.source_nodes] == sorted(
        (node.score for node in response.source_nodes), reverse=True
    )
    chat = LazyRAGChatEngine.from_runtime(fresh, similarity_top_k=2, max_tokens=4, temperature=0.0)
    events.seen.clear()
    assert chat.chat(QUERY).response.strip()
    assert chat.chat("And the bridge?").response.strip()
    assert "".join(chat.stream_chat("Thanks, and now?").response_gen).strip()
    assert all(event.hits in ([], [True, True], [True, False], [False, True]) for event in events.cache())
    asked = [event for event in events.cache() if event.chunk_ids]
    assert len(asked) == 3
    assert len(chat.chat_history) == 6


# The LLM's contracts


def test_the_order_of_events_of_a_query(fresh: Runtime, events: Events) -> None:
    engine = index_of(fresh).as_query_engine(llm=llm_of(fresh), similarity_top_k=2)
    events.seen.clear()
    engine.query(QUERY)
    wanted = [
        "QueryStartEvent",
        "RetrievalStartEvent",
        "EmbeddingStartEvent",
        "EmbeddingEndEvent",
        "RetrievalEndEvent",
        "SynthesizeStartEvent",
        "GetResponseStartEvent",
        "LLMChatStartEvent",
        "ChunkCacheHitEvent",
        "LLMChatEndEvent",
        "GetResponseEndEvent",
        "SynthesizeEndEvent",
        "QueryEndEvent",
    ]
    assert [name for name in events.names() if name in wanted] == wanted
    own = index_of(fresh).as_query_engine(
        llm=llm_of(fresh), similarity_top_k=2, response_synthesizer=LazyRAGSynthesizer(llm_of(fresh))
    )
    events.seen.clear()
    own.query(QUERY)
    assert [name for name in events.names() if name in wanted] == wanted


def test_a_stream_has_a_cumulative_message_and_incremental_deltas(runtime: Runtime, events: Events) -> None:
    llm = llm_of(runtime, max_tokens=12)
    whole = llm.chat([ChatMessage(content=QUERY)])
    events.seen.clear()
    parts = list(llm.stream_chat([ChatMessage(content=QUERY)]))
    text = ""
    for part in parts:
        text += part.delta
        assert part.message.content == text
        assert part.message.role == MessageRole.ASSISTANT
    assert text == whole.message.content
    assert [part.raw is None for part in parts] == [True] * (len(parts) - 1) + [False]
    streamed, first = dict(parts[-1].raw["usage"]), dict(whole.raw["usage"])
    # the second time, full pages of the live text are there too
    assert streamed.pop("cached_tokens") >= first.pop("cached_tokens")
    assert streamed == first
    assert events.names()[0] == "LLMChatStartEvent" and events.names()[-1] == "LLMChatEndEvent"
    completions = list(llm.stream_complete(QUERY))
    assert "".join(part.delta for part in completions) == completions[-1].text == llm.complete(QUERY).text


def test_async_methods_give_the_same_and_do_not_block_the_loop(runtime: Runtime) -> None:
    llm = llm_of(runtime, max_tokens=12)
    messages = [ChatMessage(content=QUERY)]

    async def run() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        ticker = asyncio.create_task(tick())
        chat = await llm.achat(messages)
        assert chat.message.content == llm.chat(messages).message.content
        streamed = [part async for part in await llm.astream_chat(messages)]
        assert "".join(part.delta for part in streamed) == streamed[-1].message.content == chat.message.content
        assert (await llm.acomplete(QUERY)).text == chat.message.content
        parts = [part async for part in await llm.astream_complete(QUERY)]
        assert parts[-1].text == chat.message.content
        ticker.cancel()
        assert ticks > 10

    asyncio.run(run())


def test_usage_is_counted_by_the_models_tokenizer(runtime: Runtime) -> None:
    counter = TokenCountingHandler(tokenizer=lambda text: [0] * 10_000)
    llm = llm_of(runtime, callback_manager=CallbackManager([counter]))
    response = llm.chat([ChatMessage(content="A question that nobody has asked before, of some length.")])
    usage = response.raw["usage"]
    assert counter.prompt_llm_token_count == usage["prompt_tokens"] < 200
    assert counter.completion_llm_token_count == usage["completion_tokens"] == 4
    assert usage["total_tokens"] == usage["prompt_tokens"] + 4
    assert usage["cached_tokens"] == len(runtime.prefix)
    json.dumps(response.raw)


def test_keywords_reach_the_sampling_and_unknown_ones_are_refused(runtime: Runtime) -> None:
    llm = llm_of(runtime, stop=["zzz"])
    assert llm.complete(QUERY, max_tokens=2).raw["usage"]["completion_tokens"] == 2
    full = llm.complete(QUERY, max_tokens=20).text
    stop = full[3:6]
    assert llm.complete(QUERY, max_tokens=20, stop=[stop]).text == full[: full.index(stop)]
    assert len({llm.complete(QUERY, temperature=2.0, seed=seed, max_tokens=8).text for seed in range(4)}) > 1
    assert llm.complete(QUERY, regex="[0-9]{3}", max_tokens=8).text.isdigit()
    with pytest.raises(LazyRAGError, match="max_new_tokens"):
        llm.complete(QUERY, max_new_tokens=3)


def test_none_in_a_call_restores_the_default(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LazyRAGLLM(runtime, max_tokens=3, temperature=0.5, top_k=3, seed=7, stop=["zzz"])
    asked: list[SamplingParams] = []
    chat = runtime.chat
    monkeypatch.setattr(
        runtime, "chat", lambda turns, **options: asked.append(options["sampling"]) or chat(turns, **options)
    )
    llm.complete(QUERY)
    llm.complete(QUERY, temperature=None, top_k=None, seed=None, stop=None)
    llm.complete(QUERY, max_tokens=None, regex="[0-9]{3}")
    assert asked == [
        SamplingParams(max_tokens=3, temperature=0.5, top_k=3, seed=7, stop=("zzz",)),
        SamplingParams(max_tokens=3),
        SamplingParams(temperature=0.5, top_k=3, seed=7, stop=("zzz",), regex="[0-9]{3}"),
    ]


def test_metadata_and_payload_hold_for_any_window(runtime: Runtime) -> None:
    llm = llm_of(runtime, max_tokens=100_000)
    assert llm.metadata.context_window == 4096
    assert llm.metadata.num_output == 1024
    assert llm.metadata.is_chat_model and llm.metadata.is_function_calling_model
    assert llm.class_name() == "LazyRAGLLM"
    assert "runtime" not in json.dumps(llm.to_payload())
    assert LazyRAGLLM.class_name() in llm.to_json()
    with pytest.raises(LazyRAGError, match="runtime"):
        LazyRAGLLM()
    assert copy.deepcopy(llm).runtime is runtime
    with pytest.raises(LazyRAGError, match="make a new one"):
        _ = pickle.loads(pickle.dumps(llm)).runtime


def test_roles_and_blocks(runtime: Runtime) -> None:
    llm = llm_of(runtime)
    text = "Blocks hold this chunk of text, and it is cited."
    messages = [
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", blocks=[TextBlock(text="One."), TextBlock(text="Two.")]),
        ChatMessage(role="assistant", blocks=[ToolCallBlock(tool_call_id="1", tool_name="f", tool_kwargs='{"a": 1}')]),
        ChatMessage(role="tool", content="3", additional_kwargs={"tool_call_id": "1"}),
        ChatMessage(
            role="user",
            blocks=[
                TextBlock(text="See: "),
                CitableBlock(title="a.txt", source="x", content=[TextBlock(text=text)]),
                CachePoint(cache_control={"type": "ephemeral"}),
                TextBlock(text="Well?"),
            ],
        ),
    ]
    response = llm.chat(messages)
    prompt = runtime.tokenizer.decode(runtime.last_answer.layout.token_ids())
    assert f"See: a.txt\n{text}\n\nWell?" in prompt
    assert "One.\nTwo." in prompt and '{"name": "f", "arguments": {"a": 1}}' in prompt
    assert [chunk["hit"] for chunk in response.raw["chunks"]] == [False]
    assert [chunk["hit"] for chunk in llm.chat(messages).raw["chunks"]] == [True]
    with pytest.raises(LazyRAGError, match="ImageBlock"):
        llm.chat([ChatMessage(role="user", blocks=[ImageBlock(url="http://localhost/a.png")])])


def cited(text: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", blocks=[CitableBlock(title="", source="x", content=[TextBlock(text=text)])])]


@pytest.mark.parametrize("how", ["sync", "async", "stream", "async stream"])
def test_cited_blocks_belong_to_the_namespace_of_the_call(fresh: Runtime, how: str) -> None:
    llm = llm_of(fresh)

    async def ask_async(namespace: str) -> Any:
        if how == "async":
            return await llm.achat(cited(TEXTS[0]), namespace=namespace)
        return [part async for part in await llm.astream_chat(cited(TEXTS[0]), namespace=namespace)][-1]

    def ask(namespace: str) -> list[bool]:
        if "async" in how:
            response = asyncio.run(ask_async(namespace))
        elif how == "stream":
            response = [*llm.stream_chat(cited(TEXTS[0]), namespace=namespace)][-1]
        else:
            response = llm.chat(cited(TEXTS[0]), namespace=namespace)
        (chunk,) = response.raw["chunks"]
        assert fresh.chunk(chunk["chunk_id"], namespace=namespace).namespace == namespace
        return [chunk["hit"]]

    assert [ask("x"), ask("x"), ask("y")] == [[False], [True], [False]]


def test_async_methods_wait_for_the_engine_in_another_thread(fresh: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remembering texts waits for the engine: on an event loop's thread it would hold up every other task."""
    engine, remember, callers = index_of(fresh).as_query_engine(llm=llm_of(fresh)), fresh.remember_parts, []

    def noted(text: str, **options: Any) -> Any:
        callers.append(threading.get_ident())
        return remember(text, **options)

    monkeypatch.setattr(fresh, "remember_parts", noted)

    async def run() -> None:
        llm = llm_of(fresh)
        await llm.achat(cited(TEXTS[0]))
        [part async for part in await llm.astream_chat(cited(TEXTS[1]))]
        llm.remember_nodes([NodeWithScore(node=nodes()[2])])
        await llm.acomplete(TEXTS[2])
        llm.remember_nodes([NodeWithScore(node=nodes()[2])])
        [part async for part in await llm.astream_complete(TEXTS[2])]
        assert [use.hit for use in fresh.last_answer.receipt.chunks][-1]
        await engine.aquery(QUERY)  # a stock synthesizer: LlamaIndex's own span gives the hint
        await LazyRAGSynthesizer(llm).asynthesize(QUERY, [NodeWithScore(node=node) for node in nodes()])
        assert len(callers) >= 6 and threading.get_ident() not in callers

    asyncio.run(run())


def test_a_hint_that_is_no_chunk_takes_no_other_with_it(fresh: Runtime) -> None:
    llm = llm_of(fresh)
    texts = ["word " * 20_000, *TEXTS]
    llm.remember_nodes([NodeWithScore(node=TextNode(text=text)) for text in texts])
    assert len(llm.complete(" ".join(TEXTS)).raw["chunks"]) == 3


def call_with(arguments: str) -> ChatMessage:
    return ChatMessage(role="assistant", blocks=[ToolCallBlock(tool_name="f", tool_kwargs=arguments)])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (call_with("{"), "no JSON"),
        (call_with("[1]"), "no JSON object"),
        (call_with("3"), "no JSON object"),
        (document := ChatMessage(blocks=[DocumentBlock(data=b"\xff\xfe", document_mimetype="text/plain")]), "UTF-8"),
        (ChatMessage(blocks=[CitableBlock(title="", source="x", content=document.blocks)]), "UTF-8"),
        (ChatMessage(blocks=[DocumentBlock(data=io.BytesIO(), document_mimetype="text/plain")]), "zero bytes"),
    ],
)
def test_unreadable_content_is_refused_with_our_error(runtime: Runtime, message: ChatMessage, words: str) -> None:
    """LlamaIndex's refine synthesizer swallows a ValueError into "Empty Response"."""
    llm = llm_of(runtime)
    with pytest.raises(LazyRAGError, match=words):
        llm.chat([message, ChatMessage(content="Well?")])
    if message.role == MessageRole.ASSISTANT:
        with pytest.raises(LazyRAGError, match=words):
            llm.get_tool_calls_from_response(ChatResponse(message=message))


# Structured output and tools


class Tower(BaseModel):
    name: str
    height: int


class Even(BaseModel):
    number: int

    @field_validator("number")
    @classmethod
    def check(cls, value: int) -> int:
        raise ValueError("never good enough")


def test_the_four_structured_methods(runtime: Runtime, events: Events) -> None:
    llm = llm_of(runtime, max_tokens=60, temperature=1.0, seed=3)
    prompt = PromptTemplate("Describe the tower in {place}.")
    wanted = llm.structured_predict(Tower, prompt, place="Paris")
    assert isinstance(wanted, Tower)
    assert {"LLMStructuredPredictStartEvent", "LLMStructuredPredictEndEvent"} <= set(events.names())
    parts = list(llm.stream_structured_predict(Tower, prompt, place="Paris"))
    assert parts[-1] == wanted and len(parts) > 1

    async def run() -> None:
        assert await llm.astructured_predict(Tower, prompt, place="Paris") == wanted
        stream = await llm.astream_structured_predict(Tower, prompt, place="Paris")
        assert [part async for part in stream][-1] == wanted

    asyncio.run(run())
    structured = llm.as_structured_llm(Tower)
    assert structured.complete("Describe a tower.").raw is not None
    by_tools = llm_of(
        runtime, max_tokens=90, temperature=1.0, seed=3, pydantic_program_mode=PydanticProgramMode.FUNCTION
    )
    made = by_tools.structured_predict(Tower, prompt, place="Paris")
    assert isinstance(made, Tower)
    cut = llm.chat([ChatMessage(role="user", content="Go.")], max_tokens=4)
    with pytest.raises(LazyRAGError, match=r"no Tower \(it was cut off at 4 tokens: raise max_tokens, of the LLM"):
        read_object(Tower, cut)
    with pytest.raises(LazyRAGError, match="no Even"):
        llm.structured_predict(Even, prompt, place="Paris")


@pytest.mark.parametrize(
    "kind", [LazyRAGLLM, LazyRAGVectorStore, LazyRAGRetriever, LazyRAGEmbedding, LazyRAGPrefill, use_in_llama_index]
)
def test_what_is_no_runtime_is_refused_at_once(kind: Any) -> None:
    for wrong in ("smollm2-135m", object()):
        with pytest.raises(LazyRAGError, match=f"takes a lazy_rag Runtime, not a {type(wrong).__name__}: "):
            kind(wrong)


def test_unknown_fields_and_wrong_objects_are_refused(runtime: Runtime) -> None:
    for make in (LazyRAGLLM, LazyRAGQueryEngine.from_runtime, LazyRAGChatEngine.from_runtime, use_in_llama_index):
        with pytest.raises(LazyRAGError, match=r"no field 'max_token': it takes .*max_tokens"):
            make(runtime, max_token=5)  # type: ignore[operator]
    with pytest.raises(LazyRAGError, match=r"needs a LazyRAGLLM, not Runtime: LazyRAGSynthesizer\(LazyRAGLLM\("):
        LazyRAGSynthesizer(runtime)
    for nodes in (TextNode(text="a"), ["a"]):
        with pytest.raises(LazyRAGError, match="a list of nodes"):
            LazyRAGVectorStore(runtime).add(nodes)  # type: ignore[arg-type]
    assert isinstance(LazyRAGLLM.from_dict(LazyRAGLLM(runtime, model="m", max_tokens=5).to_dict()), LazyRAGLLM)


class Odd(BaseModel):
    """What JSON has no form of its own for."""

    tags: set[int] = Field(max_length=4)
    data: bytes = Field(max_length=6)
    inner: list[Tower] = Field(max_length=2)


def test_sets_and_bytes_of_classes_and_tools(runtime: Runtime) -> None:
    llm = llm_of(runtime, max_tokens=150, temperature=1.5, seed=0)
    prompt = PromptTemplate("Odd?")
    wanted = llm.structured_predict(Odd, prompt)
    assert isinstance(wanted.tags, set) and isinstance(wanted.data, bytes)
    assert list(llm.stream_structured_predict(Odd, prompt))[-1] == wanted
    assert asyncio.run(llm.astructured_predict(Odd, prompt)) == wanted

    def mark(**fields: Any) -> str:
        """Mark something."""
        return "done"

    tool = FunctionTool.from_defaults(fn=mark, fn_schema=Odd)
    (selection,) = llm.get_tool_calls_from_response(llm.chat_with_tools([tool], "Mark it.", tool_required=True))
    assert set(selection.tool_kwargs) == {"tags", "data", "inner"}
    assert all(set(tower) == {"name", "height"} for tower in selection.tool_kwargs["inner"])


def test_tools_are_called_with_valid_arguments(runtime: Runtime) -> None:
    called: list[tuple[int, int]] = []

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        called.append((a, b))
        return a + b

    tool = FunctionTool.from_defaults(fn=add)
    llm = llm_of(runtime, max_tokens=80, temperature=1.0, seed=1)
    response = llm.chat_with_tools([tool], "What is 1 + 2?", tool_required=True)
    (selection,) = llm.get_tool_calls_from_response(response)
    assert selection.tool_name == "add" and set(selection.tool_kwargs) == {"a", "b"}
    answer = llm.predict_and_call([tool], "What is 1 + 2?", tool_choice="required")
    assert answer.response == str(sum(called[-1]))

    async def run() -> None:
        again = await llm.achat_with_tools([tool], "What is 1 + 2?", tool_required=True)
        assert llm.get_tool_calls_from_response(again)[0].tool_kwargs == selection.tool_kwargs
        stream = await llm.astream_chat_with_tools([tool], "What is 1 + 2?", tool_required=True)
        last = [part async for part in stream][-1]
        assert llm.get_tool_calls_from_response(last)[0].tool_kwargs == selection.tool_kwargs

    asyncio.run(run())
    *_, last = llm.stream_chat_with_tools([tool], "What is 1 + 2?", tool_required=True)
    assert llm.get_tool_calls_from_response(last)[0].tool_kwargs == selection.tool_kwargs
    for choice in ("any", "add", {"type": "function", "function": {"name": "add"}}):
        assert llm.get_tool_calls_from_response(llm.chat_with_tools([tool], "1 + 2?", tool_choice=choice))
    plain = llm.chat([ChatMessage(content="Hello")])
    assert llm.get_tool_calls_from_response(plain, error_on_no_tool_call=False) == []
    with pytest.raises(LazyRAGError, match="called no tool"):
        llm.get_tool_calls_from_response(plain)


# Life


def test_closing_a_stream_and_cancelling_a_task_free_everything(fresh: Runtime) -> None:
    llm = llm_of(fresh, max_tokens=2000)
    llm.complete(QUERY, max_tokens=2)
    free = fresh.stats.pages_free
    stream = llm.stream_chat([ChatMessage(content=QUERY)])
    next(stream)
    stream.close()
    llm.complete(QUERY, max_tokens=2)  # the engine has taken notice when this is done
    assert fresh.stats.pages_free == free

    async def run() -> None:
        pieces = await llm.astream_chat([ChatMessage(content=QUERY)])
        await anext(pieces)
        await pieces.aclose()
        started = asyncio.create_task(llm.achat([ChatMessage(content=QUERY)]))
        await asyncio.sleep(0.05)
        started.cancel()
        with pytest.raises(asyncio.CancelledError):
            await started

    asyncio.run(run())
    assert llm.complete(QUERY, max_tokens=2).text
    assert fresh.stats.pages_free == free
    assert fresh.check() == []


def test_many_threads_and_tasks_give_what_one_gives(fresh: Runtime) -> None:
    llm = llm_of(fresh, max_tokens=8)
    questions = [f"{TEXTS[n % 3]} Question {n}?" for n in range(8)]
    llm.remember_nodes([NodeWithScore(node=node) for node in nodes()])
    expected = [llm.complete(question).text for question in questions]
    with ThreadPoolExecutor(8) as pool:
        assert [r.text for r in pool.map(llm.complete, questions)] == expected

    async def run() -> list[str]:
        return [r.text for r in await asyncio.gather(*map(llm.acomplete, questions))]

    assert asyncio.run(run()) == expected


def test_hints_do_not_come_from_other_llms_and_are_installed_once(fresh: Runtime) -> None:
    from llama_index.core.llms import MockLLM
    from llama_index.llms.lazy_rag.events import NodeHints

    llm_of(fresh), llm_of(fresh)
    assert sum(isinstance(handler, NodeHints) for handler in get_dispatcher().span_handlers) == 1
    engine = index_of(fresh).as_query_engine(llm=MockLLM())
    engine.query(QUERY)
    assert len(fresh._retriever.anchors) == 0


def test_prefill_makes_the_first_query_warm(fresh: Runtime, events: Events) -> None:
    pipeline = IngestionPipeline(transformations=[LazyRAGPrefill(fresh)])
    made = pipeline.run(nodes=nodes())
    assert [node.text for node in made] == TEXTS
    asyncio.run(pipeline.arun(nodes=nodes()))
    index = VectorStoreIndex(made, embed_model=LazyRAGEmbedding(fresh))
    index.as_query_engine(llm=llm_of(fresh), similarity_top_k=3).query(QUERY)
    assert [event.hits for event in events.cache()] == [[True] * 3]


def test_the_prompt_helper_cuts_no_chunk_and_keeps_the_order(fresh: Runtime) -> None:
    helper = ChunkPromptHelper.from_runtime(fresh)
    prompt = PromptTemplate("{context_str} {query_str}")
    assert helper.repack(prompt, TEXTS) == ["\n\n".join(TEXTS)]
    small = ChunkPromptHelper(context_window=115, num_output=20, tokenizer=lambda text: list(range(len(text))))
    assert small.repack(prompt, [*TEXTS, " "]) == TEXTS
    assert small.truncate(prompt, TEXTS) == TEXTS[:1]
    parts = small.repack(prompt, ["word " * 100, TEXTS[0]])
    assert parts[-1] == TEXTS[0] and len(parts) > 2
    assert small.repack(prompt, []) == []


def test_one_call_sets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_llm", "_embed_model", "_prompt_helper", "_tokenizer"):
        monkeypatch.setattr(Settings, name, None, raising=False)
    with make_runtime(embedder=WordEmbedder()) as rt:
        llm = use_in_llama_index(rt, max_tokens=4, temperature=0.0)
        assert Settings.llm is llm
        assert isinstance(Settings.prompt_helper, ChunkPromptHelper)
        assert Settings.tokenizer("The tower") == rt.tokenizer("The tower", add_special_tokens=False).input_ids
        index = VectorStoreIndex.from_documents([Document(text=text) for text in TEXTS])
        assert str(index.as_query_engine().query(QUERY)).strip()
        assert str(index.as_chat_engine(chat_mode="context").chat(QUERY)).strip()
        engine = RetrieverQueryEngine.from_args(LazyRAGRetriever(rt), response_mode=ResponseMode.COMPACT)
        assert engine is not None


def test_a_runtime_without_an_embedder_has_no_embedding() -> None:
    with make_runtime(embedder=None) as rt, pytest.raises(LazyRAGError, match="no embedder"):
        LazyRAGEmbedding(rt)


def test_embeddings_are_the_runtimes(runtime: Runtime) -> None:
    embedding = LazyRAGEmbedding(runtime)
    assert embedding.model_name == "words"
    expected = runtime.embeddings.embed(TEXTS).tolist()
    assert embedding.get_text_embedding_batch(TEXTS) == expected
    assert embedding.get_query_embedding(TEXTS[0]) == expected[0]

    async def run() -> None:
        assert await embedding.aget_text_embedding_batch(TEXTS) == expected
        assert await embedding.aget_query_embedding(TEXTS[0]) == expected[0]
        assert await embedding.aget_text_embedding(TEXTS[1]) == expected[1]

    asyncio.run(run())


def test_a_failing_engine_reaches_the_consumer_of_a_stream(fresh: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    llm = llm_of(fresh, max_tokens=30)
    stream = llm.stream_chat([ChatMessage(content=QUERY)])
    next(stream)
    monkeypatch.setattr(fresh._engine.executor, "run", fail)
    failed: list[BaseException] = []

    def consume() -> None:
        try:
            list(stream)
        except LazyRAGError as error:
            failed.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    thread.join(timeout=5)
    assert not thread.is_alive()
    assert "no room" in str(failed[0])

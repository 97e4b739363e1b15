"""What frameworks hand over that is malformed, too long or ambiguous: a typed error, or the right prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("langchain_core")
pytest.importorskip("llama_index.core")

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_lazy_rag import ChatLazyRAG, LazyRAGVectorStore, context_blocks, create_lazy_rag_chain
from llama_index.core.schema import MetadataMode, Node, NodeWithScore, TextNode
from llama_index.llms.lazy_rag import LazyRAGLLM, LazyRAGPrefill, LazyRAGSynthesizer

from lazy_rag import ContextOverflowError, LazyRAGError, Runtime
from tests.fixtures import make_runtime

CONTEXT = 1600
LONG = " ".join(f"Sentence {i} of a long report, which says little." for i in range(120))
SHORT = "The tower is 330 m high."


@pytest.fixture(scope="module")
def rt() -> Iterator[Runtime]:
    with make_runtime(max_context=CONTEXT) as runtime:
        yield runtime
        assert runtime.check() == []


@pytest.fixture
def model(rt: Runtime) -> ChatLazyRAG:
    return ChatLazyRAG(runtime=rt, temperature=0, max_tokens=4)


@pytest.fixture
def llm(rt: Runtime) -> LazyRAGLLM:
    return LazyRAGLLM(rt, temperature=0, max_tokens=4)


def prompt_of(rt: Runtime) -> str:
    text: str = rt.tokenizer.decode(rt.last_answer.layout.token_ids())  # type: ignore[union-attr]
    return text


def chunks_of(rt: Runtime) -> list[Any]:
    """The segments of the last prompt, without the encode prefix."""
    layout = rt.last_answer.layout  # type: ignore[union-attr]
    return [segment for segment in layout.segments if rt.prefix is None or segment.chunk_id != rt.prefix.id]


def scored(*nodes: Any) -> list[NodeWithScore]:
    return [NodeWithScore(node=node, score=1.0) for node in nodes]


# content blocks


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "text"}, "holds no text"),
        ({"type": "text", "text": None}, "holds no text"),
        ({"type": "text-plain", "url": "http://localhost/a.txt"}, "holds no text"),
        ({"type": "text-plain", "text": 3}, "holds no text"),
        ({"type": "image", "url": "http://localhost/a.png"}, "reads text only"),
        ({"type": "hologram"}, "reads text only"),
        ({"type": None}, "reads text only"),
        ({"type": ["text"]}, "reads text only"),
        ({}, "reads text only"),
        (None, "reads text only"),
        (3, "reads text only"),
        (["text"], "reads text only"),
    ],
)
@pytest.mark.parametrize("kind", ["human", "ai", "tool"])
def test_malformed_content_blocks_are_named(model: ChatLazyRAG, block: Any, words: str, kind: str) -> None:
    # None and numbers pass only where pydantic does not look, in a message that a program has built itself
    content = [{"type": "text", "text": "See: "}, block]
    message: Any = {
        "human": HumanMessage.model_construct(content=content, type="human"),
        "ai": AIMessage.model_construct(content=content, type="ai", tool_calls=[], invalid_tool_calls=[]),
        "tool": ToolMessage.model_construct(content=content, type="tool", tool_call_id="1", artifact=None, name="f"),
    }[kind]
    with pytest.raises(LazyRAGError, match=words):
        model._generate([message, HumanMessage("Well?")])


def test_a_content_that_is_no_list_is_named(model: ChatLazyRAG) -> None:
    with pytest.raises(LazyRAGError, match="reads text only"):
        model._generate([HumanMessage.model_construct(content=None, type="human")])


@pytest.mark.parametrize(
    "parameters", [{"type": "string"}, {"type": ["object", "null"]}, {"type": None}, "text", 3, [1]], ids=str
)
def test_parameters_that_are_no_object_are_refused(rt: Runtime, parameters: Any) -> None:
    with pytest.raises(LazyRAGError, match="JSON schema of an object"):
        rt.chat("Go.", tools=[{"name": "f", "parameters": parameters}])


def test_parameters_of_any_form_give_objects(rt: Runtime) -> None:
    inner = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    forms: list[Any] = [None, {}, {"$ref": "#/$defs/x", "$defs": {"x": inner}}, {"anyOf": [{"type": "string"}, inner]}]
    model = ChatLazyRAG(runtime=rt, temperature=1, seed=0, max_tokens=100)
    for form in forms:
        tool = {"type": "function", "function": {"name": "f", "parameters": form}}
        (call,) = model.invoke("Go.", tools=[tool], tool_choice="f", parallel_tool_calls=False).tool_calls
        assert isinstance(call["args"], dict)
        assert not form or call["args"] == {"a": 1}


# texts that are too long


def test_a_node_longer_than_the_context_is_answered_from_its_parts(rt: Runtime, llm: LazyRAGLLM) -> None:
    with pytest.raises(ContextOverflowError):
        rt.remember([LONG])
    synthesizer = LazyRAGSynthesizer(llm)
    nodes = scored(TextNode(text=SHORT, id_="short"), TextNode(text=LONG, id_="long"))
    response = synthesizer.synthesize("What does it say?", nodes)
    assert [node.node.node_id for node in response.source_nodes] == ["short", "long"]
    answer = rt.last_answer
    assert answer is not None and SHORT in prompt_of(rt) and LONG[:200] in prompt_of(rt)
    parts = rt.remember_parts(LONG)
    assert len(parts) > 2 and all(len(rt.chunk(i)) <= CONTEXT // 4 for i in parts)
    short, *used = [segment.chunk_id for segment in chunks_of(rt)]
    assert short == rt.remember([SHORT])[0] and 0 < len(used) < len(parts)
    assert used == parts[: len(used)] and list(answer.dropped)[::-1] == parts[len(used) :]  # whole, the last first
    synthesizer.synthesize("What does it say?", nodes)
    assert all(use.hit for use in rt.last_answer.receipt.chunks)  # type: ignore[union-attr]
    # so is a node that is a chunk, but leaves no room
    half = LONG[: len(LONG) * CONTEXT * 2 // 3 // len(rt.tokenizer.encode(LONG))]
    assert CONTEXT // 2 < len(rt.chunk(rt.remember([half])[0])) < CONTEXT
    synthesizer.synthesize("What does it say?", scored(TextNode(text=half)))
    assert half[:200] in prompt_of(rt)


@pytest.mark.parametrize("share", [0.4, 0.67, 0.9], ids=str)
def test_a_node_is_prefilled_in_the_form_in_which_it_is_used(share: float) -> None:
    """Between half a context and a whole one it is both: a chunk for `remember`, several where it is used."""
    with make_runtime(max_context=CONTEXT) as fresh:
        text = LONG[: int(len(LONG) * CONTEXT * share / len(fresh.tokenizer.encode(LONG)))]
        nodes = [TextNode(text=text)]
        LazyRAGPrefill(fresh)(nodes)
        cached = fresh.stats.chunks_resident
        LazyRAGSynthesizer(LazyRAGLLM(fresh, max_tokens=4)).synthesize("What does it say?", scored(*nodes))
        assert all(use.hit for use in fresh.last_answer.receipt.chunks)  # type: ignore[union-attr]
        assert (len(chunks_of(fresh)) > 1) == (share > 0.5)
        assert fresh.stats.chunks_resident == cached  # nothing was encoded that is not used


def test_a_long_node_is_prefilled_in_the_parts_that_are_used() -> None:
    with make_runtime(max_context=CONTEXT) as fresh:
        nodes = [TextNode(text=SHORT), TextNode(text=LONG), TextNode(text=" ")]
        assert LazyRAGPrefill(fresh)(nodes) == nodes
        LazyRAGSynthesizer(LazyRAGLLM(fresh, max_tokens=4)).synthesize("What does it say?", scored(*nodes))
        assert all(use.hit for use in fresh.last_answer.receipt.chunks)  # type: ignore[union-attr]
        assert len(chunks_of(fresh)) > 1 and fresh.last_answer.dropped  # type: ignore[union-attr]


@pytest.mark.parametrize("way", ["blocks", "chain"])
def test_a_document_longer_than_the_context_is_answered_from_its_parts(
    rt: Runtime, model: ChatLazyRAG, way: str
) -> None:
    documents = [Document(SHORT), Document(LONG)]
    if way == "blocks":
        blocks: Any = [*context_blocks(documents), {"type": "text", "text": "What does it say?"}]
        model.invoke([HumanMessage(blocks)])
    else:
        create_lazy_rag_chain(model, model_retriever(documents)).invoke({"input": "What does it say?"})
    answer = rt.last_answer
    assert answer is not None and SHORT in prompt_of(rt) and LONG[:200] in prompt_of(rt)
    assert "What does it say?" in prompt_of(rt)
    assert set(answer.dropped) < set(rt.remember_parts(LONG))


def model_retriever(documents: list[Document]) -> Any:
    from langchain_core.runnables import RunnableLambda

    return RunnableLambda(lambda _: documents)


def test_an_artifact_that_is_no_chunk_leaves_its_message_alone(rt: Runtime, model: ChatLazyRAG) -> None:
    """One document of an artifact that was too long for a chunk failed the whole request."""
    call = AIMessage("", tool_calls=[{"name": "find", "args": {}, "id": "1"}])
    artifact = [Document(LONG), {"page_content": SHORT, "metadata": {}}, Document("  "), None, 3, {"page_content": 4}]
    for given in (artifact, tuple(artifact), artifact[1]):
        result = ToolMessage(f"Found: {SHORT}", artifact=given, tool_call_id="1")
        answer = model.invoke([HumanMessage("Height?"), call, result])
        assert rt.remember([SHORT])[0] in [chunk["chunk_id"] for chunk in answer.response_metadata["chunks"]]


# nodes whose text stands in their metadata


@pytest.mark.parametrize("make", [TextNode, Node], ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    ("text", "metadata", "template"),
    [
        ("tower", {"title": "The tower", "author": "tower"}, "{metadata_str}\n\n{content}"),
        ("tower", {"title": "The tower"}, "{content}\n({metadata_str})"),
        ("a", {"file": "a.txt", "a": "a"}, "<{metadata_str}|{content}|{metadata_str}>"),
        (" padded \n", {"file": "padded"}, "{metadata_str}\n\n{content}"),
        ("{content}", {"file": "{content} {metadata_str}"}, "{metadata_str}\n\n{content}"),
        ("plain", {}, "{metadata_str}\n\n{content}"),
    ],
)
def test_the_text_of_a_node_is_told_from_the_same_words_in_its_metadata(
    rt: Runtime, llm: LazyRAGLLM, make: Any, text: str, metadata: dict[str, str], template: str
) -> None:
    if make is TextNode:
        node = TextNode(text=text, metadata=metadata, text_template=template)
    else:
        node = Node(metadata=metadata, text_template=template)
        node.set_content(text)
    LazyRAGSynthesizer(llm).synthesize("Which?", scored(node))
    shown = node.get_content(metadata_mode=MetadataMode.LLM)
    squeezed = " ".join(shown.split()).replace(" ", "")
    assert squeezed in "".join(prompt_of(rt).split())
    segment, *_ = chunks_of(rt)  # in what follows it, the same words are found too
    assert rt.chunk(segment.chunk_id).token_ids == rt.chunk(rt.remember([text])[0]).token_ids
    before = rt.tokenizer.decode(rt.last_answer.layout.token_ids()[: segment.offset])  # type: ignore[union-attr]
    lead = template.partition("{content}")[0].replace("{metadata_str}", node.get_metadata_str(MetadataMode.LLM))
    assert "".join(before.split()).endswith("".join(lead.split())) or not metadata


def test_a_node_that_shows_something_else_than_its_text(rt: Runtime, llm: LazyRAGLLM) -> None:
    class Summarised(TextNode):
        def get_content(self, metadata_mode: MetadataMode = MetadataMode.NONE) -> str:
            return "A summary." if metadata_mode == MetadataMode.LLM else self.text

    LazyRAGSynthesizer(llm).synthesize("Which?", scored(Summarised(text="What it is a summary of.")))
    assert "A summary." in prompt_of(rt) and "What it is" not in prompt_of(rt)


# searches for nothing


@pytest.mark.parametrize("query", ["", " \n"])
async def test_an_empty_query_finds_nothing_each_way(rt: Runtime, query: str) -> None:
    store = LazyRAGVectorStore(rt, namespace="empty queries")
    store.add_texts(["tea", "milk"])
    assert store.similarity_search(query) == []
    assert store.similarity_search_with_relevance_scores(query) == []
    assert store.max_marginal_relevance_search(query) == []
    assert await store.amax_marginal_relevance_search(query) == []
    for search_type in ("similarity", "mmr"):
        assert store.as_retriever(search_type=search_type).invoke(query) == []


def test_an_empty_document_of_many_is_named(rt: Runtime) -> None:
    documents = [Document(page_content="a page"), Document(page_content=" \n"), Document(page_content="another")]
    with pytest.raises(LazyRAGError, match="text number 1 of 3 is empty: leave out"):
        LazyRAGVectorStore(rt).add_documents(documents)
    assert not rt.find()

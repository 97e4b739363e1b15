"""Applications as the frameworks' own tutorials build them, step by step; only the lines that choose models are ours.

The steps are those of LangChain's "Build a RAG agent" (langchain-ai/docs, src/oss/langchain/rag.mdx) and of
LlamaIndex's starter tutorial with local models (run-llama/llama_index, starter_example_local.mdx), both under the MIT
licence. What a tutorial fetches from the web is a page of our own. Random weights call no tool by themselves, so the
models here call the tool they are told, and then answer; searches are for one of two subjects.
"""

import asyncio
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("langchain")
pytest.importorskip("langchain_text_splitters")
pytest.importorskip("llama_index.core")

from langchain.agents import AgentState, create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest, dynamic_prompt
from langchain.tools import tool
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_lazy_rag import ChatLazyRAG, LazyRAGEmbeddings, LazyRAGVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter
from llama_index.core import Settings, SimpleDirectoryReader, StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent
from llama_index.core.base.llms.types import MessageRole
from llama_index.core.memory import Memory
from llama_index.llms.lazy_rag import LazyRAGEmbedding, LazyRAGLLM

from lazy_rag import Runtime

PAGE = "\n\n".join(
    f"Part {number} of the report on {topic}.\n{topic.capitalize()} of Amble: "
    + " ".join(f"Detail {number}.{detail} concerns {topic} and little else." for detail in range(4))
    for number, topic in enumerate(("towers", "bridges", "markets", "gardens", "harbours"))
)


Subject = Literal["towers of Amble", "bridges of Amble"]


def every_chunk_was_found(rt: Runtime, texts: list[str]) -> bool:
    """Whether all these texts were in the last prompt as chunks, and computed for an earlier one."""
    answer = rt.last_answer
    assert answer is not None and {source.text for source in answer.sources} >= {text.strip() for text in texts}
    return answer.receipt.tokens_encoded == 0 and all(use.hit for use in answer.receipt.chunks)


# LangChain


class Calling(ChatLazyRAG):
    """Calls the first tool it is given, and answers when there is a result."""

    def _request(self, messages: Any, stop: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("tools"):
            done = any(isinstance(message, ToolMessage) for message in messages)
            name = kwargs["tools"][0]["function"]["name"]
            kwargs = {**kwargs, "tool_choice": "none" if done else name, "parallel_tool_calls": False}
            kwargs["max_tokens"] = 8 if done else 100
        return super()._request(messages, stop, kwargs)


def indexed(store: VectorStore) -> VectorStore:
    documents = [Document(PAGE, metadata={"source": "report.html"})]
    splitter = RecursiveCharacterTextSplitter(chunk_size=300, chunk_overlap=60, add_start_index=True)
    pieces = splitter.split_documents(documents)
    assert len(pieces) > 4
    assert len(store.add_documents(documents=pieces)) == len(pieces)
    return store


@pytest.mark.parametrize("where", ["ours", "in memory"])
def test_langchains_rag_agent(rt: Runtime, where: str) -> None:
    model = Calling(runtime=rt, temperature=0)
    vector_store = indexed(LazyRAGVectorStore(rt) if where == "ours" else InMemoryVectorStore(LazyRAGEmbeddings(rt)))

    @tool(response_format="content_and_artifact")
    def look_up_passages(query: Subject) -> tuple[str, list[Document]]:
        """Search the report for passages that help to answer."""
        passages = vector_store.similarity_search(query, k=2)
        text = "\n\n".join(f"Source: {passage.metadata}\nContent: {passage.page_content}" for passage in passages)
        return text, passages

    agent = create_agent(model, [look_up_passages], system_prompt="A tool searches a report. Use it to answer.")
    asked = {"messages": [{"role": "user", "content": "What is said of towers?\n\nAnd then, of bridges?"}]}
    runs = []
    for turn in range(2):
        *_, last = agent.stream(asked, stream_mode="values")
        messages = last["messages"]
        assert [type(message).__name__ for message in messages] == [
            "HumanMessage",
            "AIMessage",
            "ToolMessage",
            "AIMessage",
        ]
        texts = [passage.page_content for passage in messages[2].artifact]
        assert len(texts) == 2 and every_chunk_was_found(rt, texts) == (turn == 1)
        for message in messages:
            assert message.pretty_repr()
        runs.append([message.text for message in messages])
    assert runs[0] == runs[1]


def ask_twice(rt: Runtime, agent: Any, texts: list[str]) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "What is said of the markets of Amble?"}]}
    *_, first = agent.stream(asked, stream_mode="values")
    assert not every_chunk_was_found(rt, texts)
    *_, second = agent.stream(asked, stream_mode="values")
    assert every_chunk_was_found(rt, texts)
    assert isinstance(second["messages"][-1], AIMessage)
    assert second["messages"][-1].text == first["messages"][-1].text
    state: dict[str, Any] = second
    return state


def test_langchains_rag_chain_with_a_dynamic_prompt(rt: Runtime) -> None:
    model = ChatLazyRAG(runtime=rt, temperature=0, max_tokens=6)
    vector_store = indexed(LazyRAGVectorStore(rt))

    @dynamic_prompt
    def with_passages(request: ModelRequest) -> str:
        question = request.state["messages"][-1].text
        passages = vector_store.similarity_search(question)
        joined = "\n\n".join(passage.page_content for passage in passages)
        return f"Answer with the help of these passages:\n\n{joined}"

    found = vector_store.similarity_search("What is said of the markets of Amble?")
    assert len(found) == 4
    ask_twice(rt, create_agent(model, tools=[], middleware=[with_passages]), [one.page_content for one in found])


def test_langchains_rag_chain_that_returns_its_sources(rt: Runtime) -> None:
    model = ChatLazyRAG(runtime=rt, temperature=0, max_tokens=6)
    vector_store = indexed(LazyRAGVectorStore(rt))

    class State(AgentState[Any]):
        context: list[Document]

    class WithPassages(AgentMiddleware[State, Any, Any]):
        state_schema = State

        def before_model(self, state: State, runtime: Any) -> dict[str, Any]:
            question = state["messages"][-1]
            passages = vector_store.similarity_search(str(question.text))
            joined = "\n\n".join(passage.page_content for passage in passages)
            content = f"{question.text}\n\nThese passages may help:\n{joined}"
            return {"messages": [question.model_copy(update={"content": content})], "context": passages}

    found = vector_store.similarity_search("What is said of the markets of Amble?")
    state = ask_twice(
        rt, create_agent(model, tools=[], middleware=[WithPassages()]), [one.page_content for one in found]
    )
    assert state["context"] == found


# LlamaIndex


class CallingLLM(LazyRAGLLM):
    """Calls the last tool it is given, and answers when there is a result."""

    def _prepare_chat_with_tools(self, tools: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        prepared = super()._prepare_chat_with_tools(tools, *args, **kwargs)
        done = prepared["messages"][-1].role == MessageRole.TOOL
        choice = {"tool_choice": "none"} if done else {"tool_choice": tools[-1].metadata.name, "max_tokens": 120}
        return {**prepared, **choice, "parallel_tool_calls": False}


@pytest.fixture
def settings(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> LazyRAGLLM:
    for name in ("_llm", "_embed_model", "_prompt_helper", "_tokenizer", "_node_parser", "_transformations"):
        monkeypatch.setattr(f"llama_index.core.Settings.{name}", None, raising=False)
    Settings.embed_model = LazyRAGEmbedding(rt)
    Settings.llm = CallingLLM(rt, temperature=0, max_tokens=8)
    return Settings.llm


def product(a: int, b: int) -> int:
    """Multiply two numbers."""
    return int(a) * int(b)


async def test_llama_indexs_agent_with_a_tool_and_its_memory(rt: Runtime, settings: LazyRAGLLM) -> None:
    agent = FunctionAgent(tools=[product], llm=settings, system_prompt="You multiply numbers.")
    response = await agent.run("How much is 12 times 34?")
    (call,) = response.tool_calls
    assert call.tool_name == "product" and not call.tool_output.is_error
    assert str(response) == rt.last_answer.text  # type: ignore[union-attr]
    # the tutorial passes a Context; with llama-index-workflows 2.26 it loses the agent's memory between two runs
    memory = Memory.from_defaults()
    await agent.run("My name is Ada.", memory=memory)
    await agent.run("What is my name?", memory=memory)
    prompt = rt.tokenizer.decode(rt.last_answer.layout.token_ids())  # type: ignore[union-attr]
    assert "My name is Ada." in prompt and "What is my name?" in prompt


async def test_llama_indexs_agent_over_documents_kept_on_disk(
    rt: Runtime, settings: LazyRAGLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "report.txt").write_text(PAGE)
    monkeypatch.chdir(tmp_path)
    index = VectorStoreIndex.from_documents(SimpleDirectoryReader("data").load_data())
    query_engine = index.as_query_engine()

    async def search_report(query: Subject) -> str:
        """Answer questions from a report on Amble."""
        response = await query_engine.aquery(query)
        nodes.append([node.text for node in response.source_nodes])
        found.append(every_chunk_was_found(rt, nodes[-1]))
        return str(response)

    nodes: list[list[str]] = []
    found: list[bool] = []
    agent = AgentWorkflow.from_tools_or_functions(
        [product, search_report], llm=Settings.llm, system_prompt="You calculate, and search a report."
    )
    question = "What is said of towers? And how much is 7 times 8?"
    answers = [str(await agent.run(question)) for _ in range(2)]
    assert answers[0] == answers[1] and nodes[0] == nodes[1] != [] and found == [False, True]

    index.storage_context.persist("storage")
    loaded = load_index_from_storage(StorageContext.from_defaults(persist_dir="storage"))
    query_engine = loaded.as_query_engine()
    assert str(await agent.run(question)) == answers[0] and found == [False, True, True]
    # the same from a thread without a loop
    response = await asyncio.to_thread(loaded.as_query_engine().query, "What is said of gardens?")
    assert len(response.source_nodes) == len(nodes[0])

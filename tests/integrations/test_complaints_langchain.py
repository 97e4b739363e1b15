"""Public complaints about RAG with LangChain on one's own GPU, and about notebooks: a test each of what happens here.

Numbers are those of the project's list; the thread is named in each docstring.
"""

from __future__ import annotations

import ast
import asyncio
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langchain_core")

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_lazy_rag import ChatLazyRAG, LazyRAGVectorStore, context_blocks, create_lazy_rag_chain
from pydantic import BaseModel

from lazy_rag import LazyRAGError, Runtime, SamplingParams
from lazy_rag.errors import CacheFullError
from tests.fixtures import make_runtime, pages
from tests.notebooks import run_cells

ROOT = Path(__file__).resolve().parent.parent.parent


def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer ends by itself."""
    made = SamplingParams.__init__
    monkeypatch.setattr(SamplingParams, "__init__", lambda self, **f: made(self, **{**f, "ignore_eos": True}))


@pytest.fixture(scope="module")
def notebook() -> dict[str, Any]:
    """One kernel for the complaints about notebooks."""
    pytest.importorskip("nbclient")
    cells = {
        "setup": """
import warnings
from tests.fixtures import make_runtime
from langchain_lazy_rag import ChatLazyRAG, LazyRAGVectorStore, create_lazy_rag_chain
rt = make_runtime(progress=True)
store = LazyRAGVectorStore.from_texts(["tea is hot", "ice is cold"], runtime=rt, encode="now")
chain = create_lazy_rag_chain(ChatLazyRAG(runtime=rt, max_tokens=4, temperature=0), store.as_retriever())""",
        "sync": """
one = chain.invoke({'input': 'tea?'})['answer']
print(len(list(chain.stream({'input': 'tea?'}))) > 0)""",
        "async": """
two = (await chain.ainvoke({'input': 'tea?'}))['answer']
print(one == two)""",
        "stream": """
parts = [part.get('answer', '') async for part in chain.astream({'input': 'tea?'})]
print(''.join(parts) == one)""",
        "close": "rt.close()",
    }
    return dict(zip(cells, run_cells([cell.strip() for cell in cells.values()]), strict=True))


def out(outputs: list[Any], name: str = "stdout") -> str:
    return "".join(o.text for o in outputs if o.output_type == "stream" and o.name == name)


def test_complaint_7_asyncio_run_in_notebooks(notebook: dict[str, Any]) -> None:
    """run-llama/llama_index#9978, #8586: sync and async entry points work in a live kernel, whose loop is running."""
    for cell in ("sync", "async", "stream"):
        assert out(notebook[cell]).split() == ["True"]


def test_complaint_36_progress_warnings(notebook: dict[str, Any]) -> None:
    """gwmod/nlmod#423, tqdm/tqdm#1072: no IProgress warning on import or at the first bar of a kernel."""
    text = out(notebook["setup"], "stderr")
    assert "encode" in text and "Warning" not in text and "IProgress" not in text


async def test_complaint_10_generation_goes_on_after_the_client_left(
    rt: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """huggingface/transformers#27927, #31963: a closed stream or a cancelled task frees its pages at once."""
    endless(monkeypatch)
    model = ChatLazyRAG(runtime=rt, max_tokens=3000, temperature=0)
    free = rt.stats.pages_free

    async def all_free() -> None:
        while rt.stats.pages_free != free:
            await asyncio.sleep(0.001)

    stream = model.stream("Count")
    next(stream)
    assert rt.stats.pages_free < free
    stream.close()  # type: ignore[attr-defined]
    await all_free()
    pieces = model.astream("Count")
    await anext(pieces)
    await pieces.aclose()  # type: ignore[attr-defined]
    await all_free()
    task = asyncio.create_task(model.ainvoke("Count"))
    while rt.stats.pages_free == free:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await all_free()
    assert rt.stats.tokens_generated < 2000


async def test_complaint_11_batches_and_threads_mix_outputs(rt: Runtime) -> None:
    """xorbitsai/inference#54, huggingface/transformers#48286: threads and batches give what one by one gives."""
    store = LazyRAGVectorStore.from_texts([f"fact {i}: item {i * i}" for i in range(6)], runtime=rt)
    model = ChatLazyRAG(runtime=rt, max_tokens=8, temperature=0)
    chain = create_lazy_rag_chain(model, store.as_retriever(search_kwargs={"k": 3}))
    questions = [{"input": f"item {i}?"} for i in range(8)]
    expected = [chain.invoke(question)["answer"] for question in questions]
    assert [r["answer"] for r in chain.batch(questions)] == expected
    assert [r["answer"] for r in await chain.abatch(questions)] == expected
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda question: chain.invoke(question)["answer"], questions)) == expected


def test_complaint_12_batch_or_more_documents_run_out_of_memory() -> None:
    """langchain-ai/langchain#16824, h2oai/h2ogpt#694: the budget never grows; requests queue, and what can never fit is
    refused by name."""
    with make_runtime(cache_bytes=pages_of(40)) as rt:
        store = LazyRAGVectorStore.from_texts([f"page {i} of the book " * 4 for i in range(30)], runtime=rt)
        model = ChatLazyRAG(runtime=rt, max_tokens=4, temperature=0)
        chain = create_lazy_rag_chain(model, store.as_retriever(search_kwargs={"k": 2}))
        results = chain.batch([{"input": f"page {i}?"} for i in range(12)])
        assert all(len(result["context"]) == 2 for result in results)
        stats = rt.stats
        assert stats.pages == 40 and stats.evictions > 0
        everything = [HumanMessage([*context_blocks(store.similarity_search("page", k=30)), "All?"])]
        with pytest.raises(CacheFullError, match="raise cache_bytes"):
            model.invoke(everything)
        assert rt.check() == []


def pages_of(count: int) -> int:
    with make_runtime() as rt:
        return pages(rt, count)


async def test_complaint_13_async_is_not_supported(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """langchain-ai/langchain#34134, #3869: async is native; the event loop keeps turning while tokens are made."""
    endless(monkeypatch)
    model = ChatLazyRAG(runtime=rt, max_tokens=200, temperature=0)
    lags: list[float] = []
    done = asyncio.Event()

    async def watch() -> None:
        while not done.is_set():
            started = time.perf_counter()
            await asyncio.sleep(0)
            lags.append(time.perf_counter() - started)
            await asyncio.sleep(0.001)

    watcher = asyncio.create_task(watch())
    pieces = [piece async for piece in model.astream("Count")]
    message = await model.ainvoke("Count")
    done.set()
    await watcher
    assert message.usage_metadata is not None and message.usage_metadata["output_tokens"] == 200
    assert len(pieces) > 20
    lags.sort()
    # the bound is on the loop, not on a machine that is busy with other things: 99 of 100 turns
    assert len(lags) > 100 and lags[int(0.99 * len(lags))] < 0.05


def test_complaint_14_structured_output_never_works(rt: Runtime) -> None:
    """langchain-ai/langchain#30453, #29569: tools and schemas hold, whatever the weights."""

    class Person(BaseModel):
        name: str
        age: int
        tags: list[str] = []

    for seed in range(4):
        model = ChatLazyRAG(runtime=rt, max_tokens=120, temperature=1.0, seed=seed)
        assert isinstance(model.with_structured_output(Person).invoke("Who?"), Person)
        message = model.bind_tools([Person], tool_choice="any").invoke("Who?")
        assert message.tool_calls and all(Person(**call["args"]) for call in message.tool_calls)


@pytest.mark.parametrize("way", ["invoke", "stream", "bind", "constructor"])
def test_complaint_17_stop_strings_are_ignored(rt: Runtime, way: str) -> None:
    """langchain-ai/langchain#19770, amaiya/onprem#189: `stop` works everywhere, over token borders, and is unseen."""
    base = {"runtime": rt, "max_tokens": 40, "temperature": 0}
    whole = ChatLazyRAG(**base).invoke("Tell").text
    # a string over the border of two tokens: from the middle of one piece into the next
    pieces = [p.text for p in ChatLazyRAG(**base).stream("Tell") if p.text]
    place = next(
        i
        for i in range(2, len(pieces) - 1)
        if whole.find(pieces[i] + pieces[i + 1][:1]) == len("".join(pieces[:i])) and "\ufffd" not in pieces[i]
    )
    stop = pieces[place] + pieces[place + 1][:1]
    model = ChatLazyRAG(**base, stop=[stop]) if way == "constructor" else ChatLazyRAG(**base)
    if way == "invoke":
        text = model.invoke("Tell", stop=[stop]).text
    elif way == "stream":
        text = "".join(chunk.text for chunk in model.stream("Tell", stop=[stop]))
    elif way == "bind":
        text = model.bind(stop=[stop]).invoke("Tell").text
    else:
        text = model.invoke("Tell").text
    assert text == whole[: whole.index(stop)] == "".join(pieces[:place])


def test_complaint_19_conversation_roles_must_alternate() -> None:
    """PromtEngineer/localGPT#720: neighbours are merged and system text is folded where a template refuses them."""
    strict = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
        "[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
    )
    from tests.tiny_tokenizer import tiny_tokenizer

    with make_runtime(tokenizer=tiny_tokenizer(chat_template=strict)) as rt:
        model = ChatLazyRAG(runtime=rt, max_tokens=2, temperature=0)
        model.invoke([SystemMessage("sys"), HumanMessage("a"), HumanMessage("b"), AIMessage("c"), HumanMessage("d")])
        assert rt.last_answer is not None
        text = rt.tokenizer.decode(rt.last_answer.layout.token_ids())
        assert [text.count(role) for role in ("[user]", "[assistant]")] == [2, 2]
        assert [text.index(part) for part in ("sys", "a", "b", "c", "d")] == sorted(
            text.index(part) for part in ("sys", "a", "b", "c", "d")
        )


def test_complaint_24_filter_after_top_k(rt: Runtime) -> None:
    """langchain-ai/langchain#28413, mem0ai/mem0#6998: k hits whenever k documents pass the filter."""
    texts = ["red tea"] * 1 + [f"red tea number {i}" for i in range(60)] + [f"far away {i}" for i in range(5)]
    metadatas = [{"lang": "en"} for _ in range(61)] + [{"lang": "fr"} for _ in range(5)]
    store = LazyRAGVectorStore.from_texts(texts, metadatas=metadatas, runtime=rt)
    for k in (1, 3, 5):
        found = store.similarity_search("red tea", k=k, filter={"lang": "fr"})
        assert len(found) == k and {document.metadata["lang"] for document in found} == {"fr"}
    assert len(store.similarity_search("red tea", k=9, filter={"lang": "fr"})) == 5
    assert store.similarity_search("red tea", k=9, filter={"lang": "de"}) == []


def test_complaint_25_duplicate_and_misaligned_ids(rt: Runtime) -> None:
    """langchain-ai/langchain#9019, #3896: adding twice changes nothing; a bad document in a batch writes nothing."""
    embedder = rt.embeddings._model  # type: ignore[union-attr]
    store = LazyRAGVectorStore(rt)
    documents = [Document(page_content=f"page {i}", metadata={"i": i}) for i in range(4)]
    ids = store.add_documents(documents)
    embedded = len(embedder.texts)
    assert store.add_documents(list(reversed(documents))) == ids[::-1]
    assert len(embedder.texts) == embedded and len(rt.find()) == 4
    with pytest.raises(LazyRAGError):
        store.add_documents([Document(page_content="new"), Document(page_content="x", metadata={"f": object()})])
    store.delete([ids[1]])
    store.add_texts(["another"], ids=["z"])
    found = {document.id: document.page_content for document in store.get_by_ids([*ids, "z"])}
    assert found == {ids[0]: "page 0", ids[2]: "page 2", ids[3]: "page 3", "z": "another"}


def test_complaint_26_stores_that_run_code(rt: Runtime, tmp_path: Path) -> None:
    """aws-samples/serverless-pdf-chat#45, NorthlandPositronics/Cogtrix#1009: no pickle in the code or the files."""
    LazyRAGVectorStore.from_texts(["tea"], runtime=rt, encode="now").save(tmp_path / "s")
    for file in (path for path in (tmp_path / "s").rglob("*") if path.is_file()):
        data = file.read_bytes()
        # a pickle begins with its protocol; a zip file may hold some, as torch.save's does
        assert not data.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK")), file
    for source in (ROOT / "integrations").rglob("*.py"):
        names = {node.id for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Name)}
        assert not names & {"pickle", "eval", "exec", "allow_dangerous_deserialization"}, source


def test_complaint_33_token_counts_of_another_model(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """langchain-ai/langchain#4815, langchain-nvidia#164: counts are the model's own, offline."""

    def no_network(*_: Any, **__: Any) -> None:
        raise AssertionError("a network connection was tried")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    model = ChatLazyRAG(runtime=rt, max_tokens=2)
    text = "The quick brown fox, twice: 你好"
    assert model.get_num_tokens(text) == len(rt.tokenizer.encode(text, add_special_tokens=False))
    messages = [SystemMessage("Be brief."), HumanMessage(text)]
    counted = model.get_num_tokens_from_messages(messages)
    assert model.invoke(messages).usage_metadata["input_tokens"] == counted  # type: ignore[index]

    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    with_tools = model.get_num_tokens_from_messages(messages, tools=[add])
    used = model.bind_tools([add], tool_choice="none").invoke(messages).usage_metadata
    assert used is not None and used["input_tokens"] == with_tools > counted


def test_complaint_35_memory_stuck_after_running_a_cell_again(rt: Runtime) -> None:
    """jupyter/notebook#5421, marimo-team/marimo#806; for a kernel see test_notebook.py. A chain keeps nothing."""
    store = LazyRAGVectorStore.from_texts([f"page {i}" for i in range(3)], runtime=rt)
    free = None
    for _ in range(3):  # the cell runs again
        chain = create_lazy_rag_chain(ChatLazyRAG(runtime=rt, max_tokens=3), store.as_retriever())
        chain.invoke({"input": "page?"})
        assert free in (None, rt.stats.pages_free)
        free = rt.stats.pages_free

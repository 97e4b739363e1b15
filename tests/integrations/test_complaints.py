"""Complaints about other local RAG set-ups, as cases: each test is named by the number of its complaint.

Those about LangChain and notebooks are in `test_complaints_langchain.py`.
"""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llama_index.core import Document, PromptTemplate, Settings, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters
from llama_index.llms.lazy_rag import (
    ChunkPromptHelper,
    LazyRAGEmbedding,
    LazyRAGLLM,
    LazyRAGRetriever,
    LazyRAGSynthesizer,
    LazyRAGVectorStore,
    use_in_llama_index,
)
from pydantic import BaseModel

from lazy_rag import LazyRAGError, Message, Runtime, SamplingParams
from lazy_rag.errors import CacheFullError, ContextOverflowError, RetrieverError
from lazy_rag.vector_index import VectorIndex
from tests.fixtures import CHATML, WordEmbedder, make_runtime, pages
from tests.test_conversation import HERMES, STRICT
from tests.tiny_tokenizer import tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [f"Fact {n}: the number {n} was written on stone {n * 7} long ago." for n in range(6)]
QUERY = "Which number was written?"
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
LLAMA3 = (
    "{{ '<|begin|>' }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n\n{{ message['content'] | trim }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
MISTRAL = (
    "{{ '<|begin|>' }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% elif message['role'] == 'assistant' %} {{ message['content'] }}<|im_end|>"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ '<|begin|>' }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "<|im_start|>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n{{ message['content'] | trim }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with make_runtime() as rt:
        yield rt


@pytest.fixture
def fresh() -> Iterator[Runtime]:
    with make_runtime() as rt:
        yield rt


def llm_of(rt: Runtime, **fields: Any) -> LazyRAGLLM:
    return LazyRAGLLM(rt, **{"max_tokens": 4, "temperature": 0.0, **fields})


def scored(texts: list[str] = TEXTS) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=text, id_=f"n{n}"), score=1 - n / 10) for n, text in enumerate(texts)]


def prompt_of(rt: Runtime) -> str:
    assert rt.last_answer is not None
    return str(rt.tokenizer.decode(rt.last_answer.layout.token_ids()))


def index_of(rt: Runtime) -> VectorStoreIndex:
    nodes = [TextNode(text=text, id_=f"n{n}") for n, text in enumerate(TEXTS)]
    return VectorStoreIndex(nodes, embed_model=LazyRAGEmbedding(rt))


def test_complaint_01_the_retrievers_order_is_kept(runtime: Runtime) -> None:
    LazyRAGSynthesizer(llm_of(runtime)).synthesize(QUERY, scored())
    assert runtime.last_answer is not None
    segments = runtime.last_answer.layout.segments
    assert [s.chunk_id for s in segments] == runtime.remember(TEXTS)
    assert [s.offset for s in segments] == sorted(s.offset for s in segments)


def test_complaint_02_no_list_of_python_in_our_prompt(runtime: Runtime) -> None:
    LazyRAGSynthesizer(llm_of(runtime)).synthesize(QUERY, scored())
    assert "['" not in prompt_of(runtime)
    assert "\n\n".join(TEXTS) in prompt_of(runtime)


def test_complaint_03_too_many_nodes_are_dropped_whole_and_reported() -> None:
    with make_runtime(max_context=640) as rt:
        llm = llm_of(rt)
        response = llm.chat([ChatMessage(content="Hello?")])
        texts = [f"{text} {text}" for text in TEXTS] + [f"Extra {n}: " + "words of stone " * 8 for n in range(8)]
        LazyRAGSynthesizer(llm).synthesize(QUERY, scored(texts))
        ids, answer = rt.remember(texts), rt.last_answer
        assert response.raw["dropped"] == [] and answer is not None
        kept = [s.chunk_id for s in answer.layout.segments]
        assert 0 < len(kept) < len(ids) and kept == ids[: len(kept)]
        assert sorted(answer.dropped) == sorted(ids[len(kept) :])
        assert all(text in prompt_of(rt) for text in texts[: len(kept)])
        assert QUERY in prompt_of(rt)


@pytest.mark.parametrize("max_context", [64, 100, 1000])
@pytest.mark.parametrize("max_tokens", [1, 256, 100_000])
def test_complaint_04_no_negative_context_size(max_context: int, max_tokens: int) -> None:
    with make_runtime(max_context=max_context) as rt:
        metadata = llm_of(rt, max_tokens=max_tokens).metadata
        assert 1 <= metadata.num_output <= max(1, metadata.context_window // 4)
        prompt = PromptTemplate("{context_str}")
        for helper in (PromptHelper.from_llm_metadata(metadata), ChunkPromptHelper.from_runtime(rt, max_tokens)):
            assert helper.repack(prompt, ["a b"]) == ["a b"]


def test_complaint_05_errors_are_raised_and_never_an_empty_response(fresh: Runtime) -> None:
    engine = index_of(fresh).as_query_engine(llm=llm_of(fresh), similarity_top_k=2)
    first, second = engine.query(QUERY), engine.query(QUERY)
    assert str(first) == str(second) != "Empty Response"
    nothing = LazyRAGSynthesizer(llm_of(fresh), on_empty="answer").synthesize(QUERY, [])
    assert str(nothing) not in ("", "Empty Response")
    stock = [
        get_response_synthesizer(llm_of(fresh), response_mode=mode, prompt_helper=ChunkPromptHelper.from_runtime(fresh))
        for mode in (ResponseMode.COMPACT, ResponseMode.REFINE)
    ]
    fresh.close()
    for synthesizer in stock:
        with pytest.raises(RuntimeError, match="closed"):
            synthesizer.synthesize(QUERY, scored())


def test_complaint_06_nobody_is_asked_for_a_key_or_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setitem(sys.modules, "openai", None)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    for name in ("_llm", "_embed_model", "_prompt_helper", "_tokenizer"):
        monkeypatch.setattr(Settings, name, None, raising=False)
    with make_runtime() as rt:
        use_in_llama_index(rt, max_tokens=4)
        index = VectorStoreIndex.from_documents([Document(text=text) for text in TEXTS])
        assert str(index.as_query_engine().query(QUERY))
        assert str(index.as_chat_engine().chat(QUERY))


def test_complaint_07_sync_and_async_entry_points_work_inside_a_running_loop(fresh: Runtime) -> None:
    engine = index_of(fresh).as_query_engine(llm=llm_of(fresh), similarity_top_k=2)

    async def cell() -> None:
        sync = str(engine.query(QUERY))
        assert str(await engine.aquery(QUERY)) == sync
        assert fresh.chat("Hello?", sampling=GREEDY).text == (await fresh.achat("Hello?", sampling=GREEDY)).text

    asyncio.run(cell())


def test_complaint_08_a_printed_stream_prints_the_text_once(fresh: Runtime, capsys: pytest.CaptureFixture[str]) -> None:
    index = index_of(fresh)
    whole = str(index.as_query_engine(llm=llm_of(fresh, max_tokens=12)).query(QUERY))
    capsys.readouterr()
    index.as_query_engine(llm=llm_of(fresh, max_tokens=12), streaming=True).query(QUERY).print_response_stream()
    assert capsys.readouterr().out == whole


def test_complaint_09_a_failure_in_the_engine_reaches_the_stream_at_once(
    fresh: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("out of memory")

    stream = llm_of(fresh, max_tokens=500).stream_complete(QUERY)
    next(stream)
    monkeypatch.setattr(fresh._engine.executor, "run", fail)
    started = time.monotonic()
    with pytest.raises(LazyRAGError, match="out of memory"):
        list(stream)
    assert time.monotonic() - started < 5  # the limit of the complaint is 1 s, on a machine of one's own
    monkeypatch.undo()
    assert llm_of(fresh).complete(QUERY).text


def test_complaint_10_generation_ends_with_its_consumer(fresh: Runtime) -> None:
    llm = llm_of(fresh, max_tokens=3000)
    llm.complete(QUERY, max_tokens=1)
    free = fresh.stats.pages_free
    pieces: Any = fresh.chat(QUERY, stream=True, sampling=SamplingParams(max_tokens=3000, ignore_eos=True))
    next(pieces)
    waiting = threading.Thread(target=lambda: [None for _ in pieces])
    waiting.start()
    pieces.close()  # while another thread waits in it
    waiting.join(5)
    assert not waiting.is_alive()

    async def cancelled() -> None:
        task = asyncio.create_task(llm.acomplete(QUERY))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    llm.complete(QUERY, max_tokens=1)  # when it is done, the engine has seen the others end
    assert fresh.stats.pages_free == free


def test_complaint_11_threads_get_what_they_would_get_alone(fresh: Runtime) -> None:
    llm = llm_of(fresh, max_tokens=8)
    prompts = [f"{TEXTS[n % 6]} {n}?" for n in range(12)]
    expected = [llm.complete(prompt).text for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        assert [r.text for r in pool.map(llm.complete, prompts)] == expected


def test_complaint_12_more_documents_than_memory_wait_or_fail_typed() -> None:
    with make_runtime() as probe:
        budget = pages(probe, 40)
    with make_runtime(cache_bytes=budget) as rt:
        ids = rt.add_chunks([f"Number {n}. " + "Many words of stone. " * 4 for n in range(30)])
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda i: rt.generate("Which?", [ids[i]], sampling=GREEDY).text, range(30)))
        assert all(answers) and rt.stats.evictions > 0
        with pytest.raises(CacheFullError, match="cache_bytes"):
            rt.generate("Which?", ids, sampling=GREEDY)
        assert rt.check() == []


class Stone(BaseModel):
    name: str
    number: int
    marks: list[str]


def test_complaint_15_objects_of_a_random_model_are_valid(runtime: Runtime) -> None:
    """`tests/test_grammar.py` has the 200; here they go through LlamaIndex."""
    prompt = PromptTemplate("Describe stone {n}.")

    def ask(n: int) -> BaseModel:
        llm = llm_of(runtime, max_tokens=45, temperature=1.5, seed=n)
        return llm.structured_predict(Stone, prompt, n=n)

    with ThreadPoolExecutor(10) as pool:
        assert all(isinstance(stone, Stone) for stone in pool.map(ask, range(20)))


def test_complaint_16_whitespace_is_bounded_and_a_cut_answer_is_an_error(runtime: Runtime) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
    texts = [
        llm_of(runtime, max_tokens=30, temperature=3.0, seed=seed).complete("Go.", json_schema=schema).text
        for seed in range(8)
    ]
    assert all(text.endswith("}") and not re.search(r"\s{17}", text) for text in texts)
    spaces = '{ "a" : [ ] }'
    assert runtime.chat("Go.", sampling=SamplingParams(regex=re.escape(spaces), max_tokens=30)).json() == {"a": []}
    with pytest.raises(LazyRAGError, match="too small"):
        llm_of(runtime, max_tokens=3).structured_predict(Stone, PromptTemplate("Go."))


@pytest.mark.parametrize("length", [1, 2, 5])
def test_complaint_17_stop_strings_end_the_answer_wherever_they_fall(runtime: Runtime, length: int) -> None:
    llm = llm_of(runtime, max_tokens=24)
    full = llm.complete(QUERY).text
    for at in range(2, min(12, len(full) - length)):
        stop = full[at : at + length]
        expected = full[: full.index(stop)]
        assert llm.complete(QUERY, stop=[stop]).text == expected
        assert "".join(r.delta for r in llm.stream_complete(QUERY, stop=[stop])) == expected
    assert llm_of(runtime, max_tokens=24, stop=[full[3:5]]).complete(QUERY).text == full[: full.index(full[3:5])]


def test_complaint_18_every_end_token_ends_the_answer() -> None:
    specials = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|eos|>", "<|other|>")
    tokenizer = tiny_tokenizer(CHATML, specials, eos_token="<|eos|>")
    with make_runtime(tokenizer=tokenizer) as rt:
        config = rt._parts.model.model.generation_config
        config.eos_token_id = [4, 2]
        assert rt._parts.tokens.eos_ids(config) == frozenset((2, 3, 4))
        assert {2, 3} <= rt._engine._end_ids


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MISTRAL, GEMMA, HERMES, STRICT])
def test_complaint_19_and_20_any_roles_and_exactly_one_bos(template: str) -> None:
    specials = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|begin|>")
    tokenizer = tiny_tokenizer(template, specials, bos_token="<|begin|>", eos_token="<|im_end|>", add_bos=True)
    bos = tokenizer.bos_token_id
    conversations = [
        ["system", "user"],
        ["system", "system", "user"],
        ["user", "user"],
        ["assistant", "user"],
        ["system", "user", "assistant", "assistant", "user", "system", "user"],
        ["user", "assistant"],
        ["system"],
    ]
    with make_runtime(tokenizer=tokenizer) as rt:
        rt.add_chunks([TEXTS[0]])
        for roles in conversations:
            messages = [{"role": role, "content": f"text {n}: {TEXTS[0]}"} for n, role in enumerate(roles)]
            layout = rt._preparer.chat(messages, (), {"anchor": True}).layout
            tokens = layout.token_ids()
            assert tokens[0] == bos and tokens.count(bos) == 1
            prompt = rt.tokenizer.decode(tokens)
            assert [prompt.count(f"text {n}: {TEXTS[0]}") for n in range(len(roles))] == [1] * len(roles)
            chunks = [s for s in layout.segments if s.chunk_id != layout.prefix.id]
            assert len(chunks) == len(roles)
        assert all(bos not in rt.chunk(i).token_ids for i in rt.remember([TEXTS[0]]))


def test_complaint_21_the_question_and_the_system_text_are_never_cut() -> None:
    assert SamplingParams().max_tokens == 256
    with make_runtime(max_context=300) as rt:
        rt.add_documents([" ".join(TEXTS * 5)], ids=["d"], chunk_tokens=64)
        answer = rt.query(QUERY, k=8, system="Be brief and kind.", sampling=SamplingParams(max_tokens=20))
        assert QUERY in prompt_of(rt) and "Be brief and kind." in prompt_of(rt)
        assert answer.dropped
        with pytest.raises(ContextOverflowError):
            rt.query("word " * 400, k=1)


def test_complaint_22_and_23_delete_update_and_reload(tmp_path: Path) -> None:
    embedder = WordEmbedder()
    with make_runtime(store=tmp_path / "s", embedder=embedder) as rt:
        store = LazyRAGVectorStore(rt)
        index = VectorStoreIndex.from_vector_store(store, embed_model=LazyRAGEmbedding(rt))
        for n, text in enumerate(TEXTS):
            index.insert(Document(text=text, doc_id=f"d{n}"))
        llm_of(rt).complete(TEXTS[0])
        index.delete_ref_doc("d0")
        index.delete_ref_doc("d0")
        index.delete_ref_doc("never added")
        index.update_ref_doc(Document(text="Changed stone.", doc_id="d1"))
        assert llm_of(rt).complete(TEXTS[0]).raw["chunks"] == []
    counting = WordEmbedder()
    with make_runtime(store=tmp_path / "s", embedder=counting) as rt:
        assert counting.texts == ["dimension"]
        index = VectorStoreIndex.from_vector_store(LazyRAGVectorStore(rt), embed_model=LazyRAGEmbedding(rt))
        found = {n.node.ref_doc_id: n.node.text for n in index.as_retriever(similarity_top_k=9).retrieve("stone")}
        assert found == {"d1": "Changed stone.", **{f"d{n}": TEXTS[n] for n in range(2, 6)}}
        index.insert(Document(text="Added later.", doc_id="later"))
        assert len(LazyRAGVectorStore(rt).get_nodes()) == 6


def test_complaint_24_filters_hold_before_the_best_are_chosen(fresh: Runtime) -> None:
    fresh.add_chunks(TEXTS * 1 + [f"stone {n}" for n in range(40)], metadata=[{"n": n} for n in range(46)])
    rare = MetadataFilters(filters=[MetadataFilter(key="n", operator="<", value=3)])
    assert len(LazyRAGRetriever(fresh, similarity_top_k=3, filters=rare).retrieve("stone 7")) == 3


def test_complaint_26_nothing_is_pickled() -> None:
    sources = [*(ROOT / "lazy_rag").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")]
    assert len(sources) > 40
    for path in sources:
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not re.match(r"\s*(import|from)\s+(pickle|dill|cloudpickle|joblib|shelve)\b", line), path


def test_complaint_27_what_is_searched_on_a_device_is_saved_and_comes_back(tmp_path: Path) -> None:
    """The index file never depends on where a search runs."""
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(50, 16)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    ids = np.arange(50, dtype=np.int64)
    index = VectorIndex(16)
    index.search_on(torch.device("cpu"))
    index.add(ids, vectors)
    index.remove([3])
    index.write(tmp_path / "index.faiss")
    again = VectorIndex.read(tmp_path / "index.faiss", 16)
    plain = again.search(vectors[7], 3, again.ids)
    again.search_on(torch.device("cpu"))
    for found in (plain, again.search(vectors[7], 3, again.ids)):
        assert found[0][0] == 7
        np.testing.assert_array_equal(found[0][:3], index.search(vectors[7], 3, index.ids)[0][:3])


def test_complaint_28_faiss_may_be_imported_before_torch() -> None:
    """The other order is what every other test does."""
    code = (
        "import faiss\nimport numpy as np\nimport torch\nfrom lazy_rag.vector_index import VectorIndex\n"
        "index = VectorIndex(64)\nvectors = np.eye(64, dtype=np.float32)\n"
        "index.add(np.arange(64), vectors)\nproduct = torch.eye(512) @ torch.ones(512, 512)\n"
        "ids, _ = index.search(vectors[7], 1, np.arange(64))\nassert ids[0] == 7 and product.sum() == 512 * 512\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120, capture_output=True)


def test_complaint_29_another_embedder_is_named_with_the_remedy(tmp_path: Path) -> None:
    with make_runtime(store=tmp_path / "s") as rt:
        rt.add_chunks(TEXTS)
    with pytest.raises(RetrieverError, match=r"'words' \(dimension 64\).*dimension 32.*open it with"):
        make_runtime(store=tmp_path / "s", embedder=WordEmbedder(32))


def test_complaint_30_any_order_position_and_length_hits(fresh: Runtime) -> None:
    texts = ["One.", *TEXTS, "A much longer stone. " * 20]
    llm = llm_of(fresh)
    llm.remember_nodes(scored(texts))
    cold = llm.complete("\n\n".join(texts))
    assert [chunk["hit"] for chunk in cold.raw["chunks"]] == [False] * len(texts)
    for order in (texts[::-1], texts[3:] + texts[:3], texts[::2] * 2):
        warm = llm.complete("Look:\n" + "\n".join(order) + " Well?")
        chunks = warm.raw["chunks"]
        assert [chunk["hit"] for chunk in chunks] == [True] * len(order)
        prefix = len(fresh.prefix or ())
        assert warm.raw["usage"]["cached_tokens"] == sum(chunk["tokens"] for chunk in chunks) + prefix


def test_complaint_31_cold_and_warm_are_equal_and_pages_stay_constant(fresh: Runtime) -> None:
    messages: list[Any] = [Message("user", f"{TEXTS[0]}\n\n{TEXTS[1]} Well?")]
    fresh.add_chunks(TEXTS)
    cold: Any = fresh.chat(messages, anchor=True, sampling=GREEDY)
    warm: Any = fresh.chat(messages, anchor=True, sampling=GREEDY)
    assert cold.text == warm.text and cold.receipt.tokens_encoded > 0 == warm.receipt.tokens_encoded
    free = fresh.stats.pages_free
    for turn in range(12):
        fresh.chat([*messages, Message("assistant", "Yes."), Message("user", f"{turn}?")], anchor=True, sampling=GREEDY)
    assert fresh.stats.pages_free == free
    assert fresh.check() == []


def test_complaint_32_exact_mode_is_full_attention_and_says_so(fresh: Runtime) -> None:
    fresh.add_chunks(TEXTS, encode="now")
    message = [Message("user", f"{TEXTS[0]} {TEXTS[1]} Well?")]
    exact: Any = fresh.chat(message, anchor=True, repair="exact", sampling=GREEDY)
    plain: Any = fresh.chat(message, anchor=True, sampling=GREEDY)
    assert exact.layout.token_ids() == plain.layout.token_ids()
    assert exact.receipt.tokens_repaired > 0 == plain.receipt.tokens_repaired
    assert exact.receipt.tokens_reused == len(fresh.prefix or ())
    assert "*Approximate.*" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_complaint_33_tokens_are_counted_by_the_models_tokenizer(runtime: Runtime) -> None:
    answer: Any = runtime.chat([Message("user", QUERY)], anchor=True, sampling=GREEDY)
    assert answer.usage["prompt_tokens"] == len(answer.layout.token_ids())
    assert llm_of(runtime).complete(QUERY).raw["usage"]["prompt_tokens"] == answer.usage["prompt_tokens"]


def test_complaint_34_metadata_longer_than_a_chunk_is_no_obstacle(fresh: Runtime) -> None:
    long = {"note": "long words " * 300}
    ids = fresh.add_documents([" ".join(TEXTS)], ids=["d"], metadata=long, chunk_tokens=64)
    assert all(len(fresh.chunk(i)) <= 64 for i in ids)
    document = Document(text=" ".join(TEXTS), metadata=long, excluded_llm_metadata_keys=["note"])
    document.excluded_embed_metadata_keys = ["note"]
    nodes = SentenceSplitter(chunk_size=64, chunk_overlap=0).get_nodes_from_documents([document])
    store = LazyRAGVectorStore(fresh, namespace="li")
    store.add(nodes)
    assert store.get_nodes()[0].metadata == long
    LazyRAGSynthesizer(llm_of(fresh)).synthesize(QUERY, [NodeWithScore(node=node) for node in nodes])
    assert "long words" not in prompt_of(fresh)

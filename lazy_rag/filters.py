"""Metadata as stored JSON, and filters on them as SQL conditions.

Keys are percent-encoded in the stored JSON: SQLite versions disagree on quotes in JSON paths.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from lazy_rag.errors import RetrieverError


def _quoted(key: str) -> str:
    return quote(key, safe="", errors="surrogatepass")


def check_metadata(metadata: Any, of: str = "") -> None:
    """Raises RetrieverError for metadata that cannot be stored: what is no mapping, keys that are no strings, values
    that JSON cannot hold. The message says where, and what to use instead. `of`: what the metadata belongs to."""
    of = f"{of}: " if of else ""
    if not isinstance(metadata, Mapping):
        raise RetrieverError(f"{of}metadata must be a mapping, not {type(metadata).__name__}")
    for key, value in metadata.items():
        if not isinstance(key, str):
            raise RetrieverError(f"{of}metadata keys must be strings, not {key!r}: use {str(key)!r}")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            place, remedy = _unstorable(value) or (None, str(error))
            raise RetrieverError(f"{of}metadata {key!r}{place or ''} cannot be stored: {remedy}") from error


def _unstorable(value: Any, depth: int = 0) -> tuple[str | None, str] | None:
    """Where in a value JSON cannot go on (None: everywhere), and what to use instead."""
    if depth > _MAX_DEPTH:
        return None, "it is nested too deep, or holds itself"
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        wrong = [key for key in value if not isinstance(key, str | int | float | None)]
        if wrong:
            return "", f"its key {wrong[0]!r} is no string: use {str(wrong[0])!r}"
        inner = value.items()
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    elif isinstance(value, float):
        return None if math.isfinite(value) else ("", f"{value} is no finite number: use None, or leave the key out")
    elif isinstance(value, int):
        return None if value.bit_length() < 1024 else ("", "the number has too many digits: use a string")
    elif not isinstance(value, str | None):
        return "", f"JSON has no {type(value).__name__}: use {_instead(value)}"
    for key, part in inner:
        found = _unstorable(part, depth + 1)
        if found is not None:
            place, remedy = found
            return None if place is None else f"[{key!r}]{place}", remedy
    return None


def _instead(value: Any) -> str:
    if hasattr(value, "isoformat"):  # dates and times
        return "value.isoformat()"
    if isinstance(value, bytes | bytearray | memoryview):
        return "a text, as by bytes(value).hex()"
    if hasattr(value, "tolist"):  # numbers and arrays of NumPy, tensors
        return "value.tolist()"
    if isinstance(value, Mapping):
        return "dict(value)"
    if isinstance(value, Iterable):  # sets among them
        return "list(value)"
    return "str(value), or numbers, booleans, None, lists and dicts"


def encode_metadata(metadata: Mapping[str, Any], of: str = "") -> str:
    """Metadata as stored text. Raises as `check_metadata` does."""
    check_metadata(metadata, of)
    return json.dumps({_quoted(key): value for key, value in metadata.items()})


def decode_metadata(stored: str) -> dict[str, Any]:
    """The inverse of `encode_metadata` (tuples come back as lists)."""
    return {unquote(key, errors="surrogatepass"): value for key, value in json.loads(stored).items()}


@dataclass(frozen=True)
class Filter:
    """A compiled filter: an SQL condition on `r.metadata`, never NULL, and its parameters."""

    sql: str
    parameters: tuple[Any, ...]


_MAX_DEPTH = 50
MAX_PARAMETERS = 32_000
"""SQLite's default limit is a little higher; a comparison takes up to three, a list of any length two."""
_ORDER = {"$gt": ">", "$gte": ">=", "$lt": "<", "$lte": "<="}


def compile_filter(condition: Mapping[str, Any]) -> Filter:
    """Compile `{"key": value}` (all must hold), `{"key": {"$gte": 3, ...}}`, `$and`, `$or`, `$not`.

    A missing key counts as None. Values match by type: True is not 1 and "1" is not 1, but 1 is 1.0. `$ne` and `$nin`
    are the exact opposites of `$eq` and `$in`; `$gt` and its kin compare numbers with numbers and strings (by code
    point) with strings and match nothing else. `$contains`: a list holds the value, or a string contains it; `$any` and
    `$all`: it contains any, or all, of several. `$text` and `$itext`: a string contains another, the latter in any
    case. `$empty`: missing, None, "" or [].

    Raises RetrieverError for anything else."""
    try:
        return _compile(condition, 0)
    except ValueError as error:  # Python writes no whole number of thousands of digits, not even into a message
        raise RetrieverError(f"a number of the filter is too large: {error}") from error


def _compile(condition: Any, depth: int) -> Filter:
    if not isinstance(condition, Mapping):
        raise RetrieverError(f"a filter must be a mapping, not {condition!r}")
    if depth > _MAX_DEPTH:
        raise RetrieverError(f"a filter can be nested at most {_MAX_DEPTH} deep")
    parts = []
    for key, value in condition.items():
        if not isinstance(key, str):
            raise RetrieverError(f"filter keys must be strings, not {key!r}")
        if key in ("$and", "$or"):
            parts.append(_compile_group(key, value, depth))
        elif key == "$not":
            inner = _compile(value, depth + 1)
            parts.append(Filter(f"(NOT {inner.sql})", inner.parameters))
        elif key.startswith("$"):
            raise RetrieverError(f"unknown filter operator {key!r}")
        elif isinstance(value, Mapping):
            if not value:
                raise RetrieverError(f"filter for {key!r} has no operator")
            parts += [_compile_operator(key, operator, operand) for operator, operand in value.items()]
        else:
            parts.append(_member(key, value if isinstance(value, list | tuple | set | frozenset) else [value]))
    return _joined(parts, "AND", "1")


def _compile_group(operator: str, clauses: Any, depth: int) -> Filter:
    if isinstance(clauses, str | Mapping) or not isinstance(clauses, Sequence) or not clauses:
        raise RetrieverError(f"{operator} needs a non-empty list of filters, not {clauses!r}")
    parts = [_compile(clause, depth + 1) for clause in clauses]
    return _joined(parts, "AND" if operator == "$and" else "OR", "1")


def _compile_operator(key: str, operator: Any, operand: Any) -> Filter:
    if operator in ("$in", "$nin"):
        if not isinstance(operand, list | tuple | set | frozenset):
            raise RetrieverError(f"{operator} for {key!r} needs a list, not {operand!r}")
        member = _member(key, operand)
    elif operator in ("$eq", "$ne"):
        member = _member(key, [operand])
    elif operator in _ORDER:
        return _ordered(key, operator, operand)
    elif operator in ("$contains", "$any", "$all"):
        return _containing(key, operator, operand)
    elif operator in ("$text", "$itext"):
        return _text_match(key, operator, operand)
    elif operator == "$empty":
        return _empty(key, operand)
    else:
        raise RetrieverError(f"unknown filter operator {operator!r} for {key!r}")
    return Filter(f"(NOT {member.sql})", member.parameters) if operator in ("$ne", "$nin") else member


def _member(key: str, values: Iterable[Any]) -> Filter:
    """The metadata value equals one of `values`."""
    path = f'$."{_quoted(key)}"'
    texts: list[str] = []
    numbers: list[float] = []
    parts: list[Filter] = []
    for value in values:
        if value is None:
            parts.append(Filter("(json_extract(r.metadata, ?) IS NULL)", (path,)))
        elif isinstance(value, bool):
            parts.append(Filter("(json_type(r.metadata, ?) IS ?)", (path, str(value).lower())))
        elif isinstance(value, str):
            texts.append(value)
        else:
            numbers.append(_number(key, value))
    # Operands travel as JSON so that SQLite reads them with the very routine that read the stored values: its decimal
    # conversion is not correctly rounded in every release, and equal numbers must stay equal.
    value_in = "json_extract(r.metadata, ?) IN (SELECT value FROM json_each(?))"
    if texts:
        parts.append(Filter(f"(json_type(r.metadata, ?) IS 'text' AND {value_in})", (path, path, json.dumps(texts))))
    if numbers:
        kinds = "IFNULL(json_type(r.metadata, ?) IN ('integer', 'real'), 0)"
        parts.append(Filter(f"({kinds} AND {value_in})", (path, path, json.dumps(numbers))))
    return _joined(list(dict.fromkeys(parts)), "OR", "0")


def _ordered(key: str, operator: str, operand: Any) -> Filter:
    path = f'$."{_quoted(key)}"'
    kinds = "'text'" if isinstance(operand, str) else "'integer', 'real'"
    if operand is None or isinstance(operand, bool):
        raise RetrieverError(f"{operator} for {key!r} needs a number or a string, not {operand!r}")
    value = json.dumps(operand if isinstance(operand, str) else _number(key, operand))
    test = f"json_extract(r.metadata, ?) {_ORDER[operator]} json_extract(?, '$')"
    return Filter(f"(IFNULL(json_type(r.metadata, ?) IN ({kinds}), 0) AND {test})", (path, path, value))


def _containing(key: str, operator: str, operand: Any) -> Filter:
    values = [operand] if operator == "$contains" else operand
    if not isinstance(values, list | tuple | set | frozenset):
        raise RetrieverError(f"{operator} for {key!r} needs a list, not {operand!r}")
    parts = [_contains(key, value) for value in values]
    return _joined(parts, "AND" if operator == "$all" else "OR", "1" if operator == "$all" else "0")


def _contains(key: str, value: Any) -> Filter:
    """The metadata value is a list with this element, or a string with this part."""
    path = f'$."{_quoted(key)}"'
    element = "EXISTS (SELECT 1 FROM json_each(r.metadata, ?) e WHERE "
    is_list = "json_type(r.metadata, ?) IS 'array' AND "
    if isinstance(value, bool):
        return Filter(f"({is_list}{element}e.type = ?))", (path, path, str(value).lower()))
    if isinstance(value, str):
        in_list = Filter(
            f"({is_list}{element}e.type = 'text' AND e.value = json_extract(?, '$')))", (path, path, json.dumps(value))
        )
        return _joined([in_list, _text_match(key, "$text", value)], "OR", "0")
    number = json.dumps(_number(key, value))
    equal = "e.type IN ('integer', 'real') AND e.value = json_extract(?, '$')"
    return Filter(f"({is_list}{element}{equal}))", (path, path, number))


def _text_match(key: str, operator: str, operand: Any) -> Filter:
    if not isinstance(operand, str):
        raise RetrieverError(f"{operator} for {key!r} needs a string, not {operand!r}")
    path = f'$."{_quoted(key)}"'
    value, part = "json_extract(r.metadata, ?)", "json_extract(?, '$')"
    if operator == "$itext":
        value, part = f"casefold({value})", f"casefold({part})"
    test = f"instr({value}, {part}) > 0"
    return Filter(f"(json_type(r.metadata, ?) IS 'text' AND {test})", (path, path, json.dumps(operand)))


def _empty(key: str, operand: Any) -> Filter:
    if not isinstance(operand, bool):
        raise RetrieverError(f"$empty for {key!r} needs True or False, not {operand!r}")
    path = f'$."{_quoted(key)}"'
    test = "json_type(r.metadata, ?) IS NULL OR json_extract(r.metadata, ?) IS NULL"
    blank = "json_extract(r.metadata, ?) IN ('', '[]') AND json_type(r.metadata, ?) IN ('text', 'array')"
    # the text "[]" is not empty, though its JSON looks like an empty list
    text = "NOT (json_type(r.metadata, ?) IS 'text' AND json_extract(r.metadata, ?) = '[]')"
    sql = f"({test} OR ({blank} AND {text}))"
    return Filter(sql if operand else f"(NOT {sql})", (path,) * 6)


def casefold(value: Any) -> Any:
    """For SQL, whose own lower() knows ASCII only."""
    return value.casefold() if isinstance(value, str) else value


def _number(key: str, value: Any) -> float:
    if isinstance(value, np.integer | np.floating):
        value = value.item()
    if not isinstance(value, int | float) or (isinstance(value, float) and not math.isfinite(value)):
        raise RetrieverError(f"filter for {key!r} needs strings, finite numbers, booleans or None, not {value!r}")
    try:
        float(value)
    except OverflowError as error:
        raise RetrieverError(f"a number of the filter for {key!r} is too large") from error
    return value


def _joined(parts: list[Filter], operator: str, empty: str) -> Filter:
    """Combine conditions as a balanced tree: SQLite limits the depth of expressions, and a chain is as deep as long."""
    if not parts:
        return Filter(empty, ())
    if len(parts) == 1:
        return parts[0]
    left = _joined(parts[: len(parts) // 2], operator, empty)
    right = _joined(parts[len(parts) // 2 :], operator, empty)
    return Filter(f"({left.sql} {operator} {right.sql})", left.parameters + right.parameters)

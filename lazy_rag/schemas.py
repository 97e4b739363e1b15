"""JSON schemas: as text, as grammars can hold them, and where one says what no grammar can."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lazy_rag.errors import ConfigError

# keywords that hold one schema, a list of them, or some by name
_ONE = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_DEFINITIONS = ("$defs", "definitions")
# formats that any text has: whether a file exists is nothing a grammar knows
_ANY_TEXT = frozenset(("binary", "password", "path", "file-path", "directory-path"))

_REMEDIES = {
    "uniqueItems": "leave it out (in a class, a list for a set), and drop what comes twice",
    "Unknown format": "leave the format out, or say it by a pattern",
    "regex": "write the pattern without that",
    "Unimplemented keys": "leave them out",
}

Schema = dict[str, Any]


def schema_text(schema: Any) -> str:
    """A JSON schema as text. Raises ConfigError for what is none."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise ConfigError(f"json_schema is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ConfigError(f"json_schema must be a mapping or its JSON text, got {type(schema).__name__}")
    try:
        return json.dumps(schema, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"json_schema cannot be written as JSON: {error}") from error


def class_schema(schema: Mapping[str, Any]) -> Schema:
    """The schema that a framework makes of a class or a function, for answers in its form.

    Objects have no keys but their own unless the schema says otherwise. That the items of a set differ, which no
    grammar can hold, is left to whoever reads the answer: a set drops what comes twice.
    """

    def own(part: Schema) -> Schema:
        part.pop("uniqueItems", None)
        if part.get("format") == "binary" and "maxLength" in part:  # counted in bytes: as many as characters in ASCII
            part.setdefault("pattern", "^[ -~]*$")
        if "properties" in part and "allOf" not in part:
            part.setdefault("additionalProperties", False)
        return part

    return _changed(dict(schema), own, without="allOf")


def plain_schema(schema: Schema) -> Schema:
    """A schema without what says nothing about a text, but is unknown to grammars."""

    def plain(part: Schema) -> Schema:
        if part.get("format") in _ANY_TEXT:
            del part["format"]
        if part.get("uniqueItems") is False:
            del part["uniqueItems"]
        return part

    return _changed(schema, plain)


def fault(schema: Schema, refused: Callable[[Schema], str | None]) -> str:
    """Which part of a schema is refused, why, and what to do.

    Args:
        refused: why a schema cannot be used; None when it can.
    """
    definitions = {key: schema[key] for key in _DEFINITIONS if isinstance(schema.get(key), dict)}
    # what is at fault itself comes before what refers to something that is: recursive classes refer to themselves
    empty: Schema = {key: {name: {} for name in named} for key, named in definitions.items()}
    place, part, seen = "", schema, {id(schema)}
    while True:
        inner = [(f"{place}{step}", sub) for step, sub in _subschemas(part, schema) if id(sub) not in seen]
        tried = ((known, one) for known in (empty, definitions) for one in inner)
        deeper = next((one for known, one in tried if refused({**known, **one[1]}) is not None), None)
        if deeper is None:
            break
        place, part = deeper
        seen.add(id(part))
    why = (refused({**definitions, **part}) or "").partition("\n")[0]
    remedy = next((f": {text}" for sign, text in _REMEDIES.items() if sign in why), "")
    where = f"at {place.removeprefix('.')!r}: " if place else ""
    return f"{where}{why}{remedy}"


def _subschemas(part: Schema, root: Schema) -> Iterator[tuple[str, Schema]]:
    """The schemas directly inside one, and how to call the step there. A reference leads to what it names."""
    target = part.get("$ref")
    for key in _DEFINITIONS:
        name = target.removeprefix(f"#/{key}/") if isinstance(target, str) else None
        named = root.get(key)
        if isinstance(named, dict) and isinstance(named.get(name), dict):
            yield "", named[name]
    for key in ("properties", "patternProperties", "dependentSchemas"):
        named = part.get(key)
        if isinstance(named, dict):
            yield from ((f".{name}", sub) for name, sub in named.items() if isinstance(sub, dict))
    for key in (*_ONE, *_LISTED):
        value = part.get(key)
        step = "[]" if key in ("items", "prefixItems", "contains") else ""
        yield from ((step, sub) for sub in (value if isinstance(value, list) else [value]) if isinstance(sub, dict))


def _changed(schema: Any, change: Callable[[Schema], Schema], without: str = "") -> Any:
    """A copy with every schema inside it changed, but for those in the keyword `without`."""
    if not isinstance(schema, dict):
        return schema
    copy = dict(schema)
    for key, value in schema.items():
        if key == without:
            continue
        if key in _ONE and isinstance(value, dict):
            copy[key] = _changed(value, change, without)
        elif key in _LISTED and isinstance(value, list):
            copy[key] = [_changed(sub, change, without) for sub in value]
        elif key in _NAMED and isinstance(value, dict):
            copy[key] = {name: _changed(sub, change, without) for name, sub in value.items()}
    return change(copy)

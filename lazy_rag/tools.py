"""Function calling: tools in the prompt, a grammar that forces well-formed calls, and calls read back from the answer.

A template that takes tools describes them and shows how it writes a call; another one gets both in the system text, in
the form most models know (`<tool_call>{"name": ..., "arguments": ...}</tool_call>`).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lazy_rag.errors import ConfigError
from lazy_rag.grammar import WHITESPACE
from lazy_rag.schemas import plain_schema

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_MOST_CALLS = 8


@dataclass(frozen=True)
class ToolCall:
    """A call the model asks for. `id` is ours and random; give it back with the tool's message."""

    name: str
    arguments: dict[str, Any]
    id: str = field(default_factory=lambda: "call_" + secrets.token_hex(12))

    def as_dict(self) -> dict[str, Any]:
        """In OpenAI's form, with the arguments as a mapping, as chat templates take it."""
        return {"type": "function", "id": self.id, "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class CallFormat:
    """How a model writes a call: `begin`, then JSON with "name" and `key`, then `end`."""

    begin: str = "<tool_call>\n"
    key: str = "arguments"
    end: str = "\n</tool_call>"

    @property
    def marker(self) -> str:
        """What tells a call from text at the start of an answer."""
        return self.begin.strip() or "{"

    def write(self, call: ToolCall) -> str:
        body = json.dumps({"name": call.name, self.key: call.arguments}, ensure_ascii=False)
        return f"{self.begin}{body}{self.end}"


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request.

    Args:
        choice: "auto" (text or calls), "required" (calls), "none" (text) or the name of a tool (a call of it).
        parallel: whether an answer may hold several calls.
        answer: JSON schema, as text, of an answer that is no call; None for free text. With a `format` that marks calls
            by nothing else, an answer that the schema lets look like a call of one of the tools is read as one.
    """

    tools: tuple[dict[str, Any], ...]
    choice: str = "auto"
    parallel: bool = True
    format: CallFormat = CallFormat()
    answer: str | None = None

    @classmethod
    def of(cls, tools: Any, choice: Any, parallel: Any) -> ToolUse | None:
        """Checked tools, or None without any. `tools`: mappings in OpenAI's form, or only their "function" part."""
        if not tools:
            if choice not in (None, "auto", "none"):
                raise ConfigError(f"tool_choice={choice!r} needs tools")
            return None
        if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
            raise ConfigError("tools takes a list of mappings with name, description and parameters")
        checked = tuple(_tool(tool) for tool in tools)
        names = [tool["function"]["name"] for tool in checked]
        if len(set(names)) != len(names):
            raise ConfigError(f"two tools have the same name: {', '.join(names)}")
        choice = "auto" if choice is None else choice
        if choice not in ("auto", "required", "none", *names):
            raise ConfigError(f'tool_choice={choice!r} is not "auto", "required", "none" or one of {", ".join(names)}')
        if not isinstance(parallel, bool):
            raise ConfigError(f"parallel_tool_calls={parallel!r} must be True or False")
        return cls(checked, choice, parallel)

    def grammar(self) -> str | None:
        """The Lark grammar of an answer; None when it is free text."""
        if self.choice == "none":
            return None
        tools = [t for t in self.tools if self.choice in ("auto", "required", t["function"]["name"])]
        form = self.format
        bodies = [f"body{i}: %json {json.dumps(self._body(t['function']))}" for i, t in enumerate(tools)]
        several = self.parallel and self.choice in ("auto", "required") and form.begin.strip()
        calls = f"call (NEXT call){{0,{_MOST_CALLS - 1}}}" if several else "call"
        lines = [
            "start: calls | answer" if self.choice == "auto" else "start: calls",
            f"calls: {calls}",
            f"call: {_literal(form.begin)} ({' | '.join(f'body{i}' for i in range(len(tools)))}) {_literal(form.end)}",
            *bodies,
        ]
        if several:
            lines.append(r"NEXT: /\n?/")
        if self.choice == "auto" and self.answer is not None:
            schema = {**plain_schema(json.loads(self.answer)), "x-guidance": {"whitespace_pattern": WHITESPACE}}
            lines.append(f"answer: %json {json.dumps(schema)}")
        elif self.choice == "auto":
            marker = form.marker
            not_a_call = r"~/(?s:\s*" + "".join(f"[{c}]" if c not in "\\]^[-" else "\\" + c for c in marker) + ".*)/"
            lines += ["answer: TEXT", f"TEXT: /(?s:.*)/ & {not_a_call}"]
        return "\n".join(lines) + "\n"

    def _body(self, function: Mapping[str, Any]) -> dict[str, Any]:
        # references start at the root, which is one level further out now: definitions move there, others are rewritten
        parameters = _rooted(plain_schema(function["parameters"]), f"#/properties/{self.format.key}")
        roots = {key: parameters.pop(key) for key in _DEFINITIONS if key in parameters}
        if "properties" in parameters:
            parameters.setdefault("additionalProperties", False)
        return {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, self.format.key: parameters},
            "required": ["name", self.format.key],
            "additionalProperties": False,
            "x-guidance": {"whitespace_pattern": WHITESPACE},
            **roots,
        }

    def describe(self) -> str:
        """What a model is told whose template knows no tools."""
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in self.tools)
        example = f'{self.format.begin}{{"name": <name>, "{self.format.key}": <object>}}{self.format.end}'
        return f"You may call these functions:\n{listed}\nTo call one, answer only with:\n{example}"

    def read(self, text: str) -> tuple[ToolCall, ...]:
        """The calls an answer consists of; none when it is text. A call that was cut off is left out."""
        form, rest = self.format, text.strip()
        names = {tool["function"]["name"] for tool in self.tools}
        calls: list[ToolCall] = []
        decoder = json.JSONDecoder()
        while self.choice != "none" and rest.startswith(form.marker):
            body = rest[len(form.begin.strip()) :].lstrip()
            try:
                value, stop = decoder.raw_decode(body)
                if value["name"] not in names:  # an object that is an answer
                    break
                calls.append(ToolCall(value["name"], value[form.key]))
            except (ValueError, KeyError, TypeError):
                break
            rest = body[stop:].lstrip().removeprefix(form.end.strip()).lstrip()
        return tuple(calls)


_DEFINITIONS = ("$defs", "definitions")


def _rooted(schema: Any, root: str) -> Any:
    """A copy of a schema that stands at `root` of another one, except its definitions."""
    if isinstance(schema, list):
        return [_rooted(item, root) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _rooted(value, root) for key, value in schema.items()}
    pointer = moved.get("$ref")
    if isinstance(pointer, str) and f"{pointer}/".startswith("#/"):
        first = pointer.split("/")[1] if "/" in pointer else ""
        if first not in _DEFINITIONS:
            moved["$ref"] = root + pointer[1:]
    return moved


class CallFilter:
    """Shows the text of a streamed answer, and nothing of it when it turns out to be calls."""

    def __init__(self, use: ToolUse | None) -> None:
        self._use = use
        self._marker = "" if use is None or use.choice == "none" else use.format.marker
        self._held = ""
        self._call = False
        self._text = not self._marker

    def push(self, piece: str) -> str:
        if self._text:
            return piece
        self._held += piece
        if self._call:
            return ""
        start = self._held.lstrip()
        if start.startswith(self._marker):
            self._call = True
            return ""
        if self._marker.startswith(start):
            return ""
        self._text = True
        return self._held

    def finish(self) -> str:
        if self._use is not None and self._use.answer is not None and not self._text:
            # a call without a marker of its own begins as an object does
            return "" if self._use.read(self._held) else self._held
        return "" if self._text or self._call else self._held


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(f"{tool!r} is no tool: it needs a name, a description and parameters (a JSON schema)")
    if not _NAME.fullmatch(function["name"]):
        raise ConfigError(f"{function['name']!r} is no tool name: letters, digits, _ . and - only")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise ConfigError(f"the parameters of tool {function['name']!r} must be a JSON schema of an object")
    described = {"name": function["name"], "description": str(function.get("description") or "")}
    return {"type": "function", "function": {**described, "parameters": {**parameters, "type": "object"}}}


def _literal(text: str) -> str:
    """Nothing for an empty text: Lark refuses empty literals."""
    return json.dumps(text) if text else ""

"""Constrained answers: complete and valid even from random weights, and refused in words when impossible."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import Base64Bytes, BaseModel, Field

from lazy_rag import Runtime, SamplingParams, class_schema
from lazy_rag.errors import ConfigError, IncompleteAnswerError, MissingExtraError
from lazy_rag.grammar import Grammars
from lazy_rag.sampling import Sampler
from lazy_rag.tokens import TextTokenizer
from tests.fixtures import make_runtime
from tests.tiny_tokenizer import tiny_tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "colour": {"enum": ["red", "green", None]},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "number": {"type": "number"}},
            "required": ["street", "number"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "colour", "address"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with make_runtime() as rt:
        yield rt


def check_person(value: Any) -> None:
    assert set(value) == set(PERSON["required"])
    assert isinstance(value["name"], str) and isinstance(value["age"], int)
    assert all(isinstance(tag, str) for tag in value["tags"])
    assert value["colour"] in ("red", "green", None)
    assert isinstance(value["address"]["street"], str) and isinstance(value["address"]["number"], int | float)


def test_200_of_200_objects_are_valid_from_random_weights(runtime: Runtime) -> None:
    properties = {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": PERSON["properties"]["tags"]}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}

    def ask(seed: int) -> Any:
        temperature = (0.0, 1.0, 3.0)[seed % 3]
        sampling = SamplingParams(json_schema=schema, max_tokens=38 + seed % 8, temperature=temperature, seed=seed)
        answer = runtime.generate(f"Describe person {seed}.", sampling=sampling)
        assert answer.finish_reason == "stop"
        return answer.json()

    with ThreadPoolExecutor(20) as pool:
        values = list(pool.map(ask, range(200)))
    assert len(values) == 200
    for value in values:
        assert list(value) == list(properties)
        assert isinstance(value["name"], str) and isinstance(value["age"], int) and isinstance(value["tags"], list)
    hot = [json.dumps(value) for value in values[2::3]]
    assert len(set(hot)) > len(hot) / 2  # the grammar leaves the choice to the model


@pytest.mark.parametrize("max_tokens", [72, 80, 100, 200])
def test_the_budget_is_kept_and_the_object_complete(runtime: Runtime, max_tokens: int) -> None:
    for seed in range(3):
        sampling = SamplingParams(json_schema=json.dumps(PERSON), max_tokens=max_tokens, temperature=1.5, seed=seed)
        answer = runtime.generate("Who?", sampling=sampling)
        assert answer.usage["completion_tokens"] <= max_tokens
        check_person(answer.json())


NUMBERS = {
    "integer first": {"a": {"type": "integer"}, "b": {"type": "string"}},
    "float": {"a": {"type": "number"}, "b": {"type": "boolean"}},
    "bounds": {"a": {"type": "integer", "minimum": 1000, "maximum": 99999999}, "b": {"type": "integer"}},
    "array": {"a": {"type": "array", "items": {"type": "number"}, "minItems": 3}, "b": {"type": "null"}},
    "nested": {
        "a": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        "b": {"enum": [1]},
    },
}
LIKES = {"digits": "0123456789", "digits and points": "0123456789.e-", "letters": "abcdefgh ", "spaces": " \n"}


@pytest.mark.parametrize("likes", LIKES)
@pytest.mark.parametrize("properties", NUMBERS)
def test_a_model_that_never_stops_is_brought_to_an_end(runtime: Runtime, properties: str, likes: str) -> None:
    """With every budget, whatever kind of character it goes on with for ever."""
    fields = {"properties": NUMBERS[properties], "required": ["a", "b"], "additionalProperties": False}
    schema = {"type": "object"} | fields
    grammars = runtime._engine.admission._constraint.__self__  # type: ignore[attr-defined]
    backend = runtime._parts.tokens.content_backend
    wanted = {i for c in LIKES[likes] for i in backend.encode(c, add_special_tokens=False).ids}
    assert wanted
    ends = set(grammars._end_ids)
    for budget in (24, 31, 40, 64, 100):
        sampling = SamplingParams(max_tokens=budget, temperature=0, json_schema=schema).resolve(None)
        try:
            grammars.require(sampling)
        except ConfigError:
            continue
        constraint, taken = grammars.constraint(sampling), []
        generator = torch.Generator().manual_seed(budget)
        while not constraint.finished and len(taken) < budget:
            logits = torch.rand(grammars._vocab, generator=generator)
            logits[list(wanted)] += 10
            token = constraint.take(int(constraint.mask(logits).argmax()))
            taken.append(token)
        text = runtime.tokenizer.decode([token for token in taken if token not in ends])
        value = json.loads(text)
        assert set(value) == {"a", "b"}, text


def test_a_budget_no_answer_fits_is_refused_with_the_needed_number(runtime: Runtime) -> None:
    with pytest.raises(ConfigError, match=r"max_tokens=10 is too small: what the grammar asks for takes \d+ tokens"):
        runtime.generate("Who?", sampling=SamplingParams(json_schema=PERSON, max_tokens=10))


def test_a_prompt_that_leaves_no_room_for_what_the_grammar_asks_is_told_apart() -> None:
    with make_runtime(max_context=128) as small:
        layout = small.layout("word " * 17)
        told = rf"leaves room for {128 - len(layout)} tokens, .* takes \d+ tokens: shorten the prompt"
        with pytest.raises(ConfigError, match=told):
            small.generate(layout, sampling=SamplingParams(json_schema=PERSON, max_tokens=100))


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "array", "items": {"type": "integer"}}, list),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3}, list),
        ({"type": "object"}, dict),
        ({"type": "object", "properties": {}, "additionalProperties": False}, dict),
        ({"type": "string", "minLength": 5}, str),
        ({"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"}, str),
        ({"type": "integer", "minimum": 100}, int),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, bool | None),
        ({"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object", "properties": {
            "left": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}}, "required": ["left"],
            "additionalProperties": False}}}, dict),
    ],
)  # fmt: skip
def test_every_kind_of_schema_is_followed(runtime: Runtime, schema: Any, kind: Any) -> None:
    for seed in range(3):
        sampling = SamplingParams(json_schema=schema, max_tokens=40, temperature=2.0, seed=seed)
        value = runtime.generate("Go.", sampling=sampling).json()
        assert isinstance(value, kind)
        if schema.get("minItems"):
            assert len(value) == 3
        if "pattern" in schema:
            assert re.fullmatch("[0-9]{4}-[0-9]{2}", value)
        if "minLength" in schema:
            assert len(value) >= 5
        if "minimum" in schema:
            assert value >= 100


def test_empty_arrays_stay_possible_and_whitespace_is_bounded(runtime: Runtime) -> None:
    schema = {"type": "array", "items": {"type": "string"}}
    texts = [
        runtime.generate(
            "Go.", sampling=SamplingParams(json_schema=schema, max_tokens=48, temperature=3.0, seed=seed)
        ).text
        for seed in range(15)
    ]
    assert any(json.loads(text) == [] for text in texts)
    assert all(not re.search(r"\s{17}", re.sub(r'"([^"\\]|\\.)*"', '""', text)) for text in texts)


def test_regular_expressions_and_grammars(runtime: Runtime) -> None:
    for seed in range(5):
        sampling = SamplingParams(regex=r"(yes|no), because [a-z ]{3,20}\.", max_tokens=60, temperature=1.0, seed=seed)
        text = runtime.generate("Really?", sampling=sampling).text
        assert re.fullmatch(sampling.regex or "", text)
    grammar = 'start: item ("," item)*\nitem: "x" | "y"\n'
    answer = runtime.generate("List.", sampling=SamplingParams(grammar=grammar, max_tokens=9, temperature=1.0, seed=0))
    assert re.fullmatch("[xy](,[xy])*", answer.text)


def test_a_stream_and_a_batch_with_ordinary_requests_give_the_same(runtime: Runtime) -> None:
    sampling = SamplingParams(json_schema=PERSON, max_tokens=120, temperature=1.0, seed=7)
    alone = runtime.generate("Who?", sampling=sampling)
    plain = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    expected = runtime.generate("A story.", sampling=plain).text
    with ThreadPoolExecutor(4) as pool:
        futures = [
            pool.submit(runtime.generate, q, sampling=s) for q, s in [("Who?", sampling), ("A story.", plain)] * 2
        ]
        texts = [future.result().text for future in futures]
    assert texts == [alone.text, expected] * 2
    assert "".join(runtime.chat("Who?", stream=True, sampling=sampling)) == alone.text


def test_masks_come_before_top_k_and_log_probabilities_stay_the_models_own(runtime: Runtime) -> None:
    sampling = SamplingParams(regex="[0-9]{4}", top_k=1, max_tokens=8, logprobs=True)
    answer = runtime.generate("When?", sampling=sampling)
    assert re.fullmatch("[0-9]{4}", answer.text)
    assert answer.logprobs is not None and len(answer.logprobs) >= 4
    assert all(value < 0 for value in answer.logprobs)


def test_a_cut_answer_raises_a_typed_error_instead_of_half_json(runtime: Runtime) -> None:
    answer = runtime.generate("Who?", sampling=SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    with pytest.raises(IncompleteAnswerError, match=r"cut off at 4 tokens, behind a prompt of \d+. Raise max_tokens"):
        answer.json()
    stopped = SamplingParams(json_schema=PERSON, max_tokens=90, stop='"age"', temperature=0)
    with pytest.raises(IncompleteAnswerError, match="stop strings"):
        runtime.generate("Who?", sampling=stopped).json()


@pytest.mark.parametrize(
    "arguments",
    [
        {"json_schema": "{"},
        {"json_schema": 3},
        {"json_schema": {"x": object()}},
        {"regex": ""},
        {"grammar": 1},
        {"regex": "a", "grammar": "start: /a/"},
        {"regex": "a", "ignore_eos": True},
    ],
)
def test_wrong_parameters_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        SamplingParams(**arguments)


@pytest.mark.parametrize(
    "arguments", [{"json_schema": {"type": "objekt"}}, {"regex": "a("}, {"grammar": "start: nobody"}]
)
def test_grammars_that_cannot_be_compiled_are_refused_before_anything_runs(
    runtime: Runtime, arguments: dict[str, Any]
) -> None:
    before = runtime.stats.requests
    with pytest.raises(ConfigError, match="the grammar cannot be used"):
        runtime.generate("Go.", sampling=SamplingParams(**arguments))
    assert runtime.stats.requests == before
    assert runtime.check() == []


class Leaf(BaseModel):
    raw: Base64Bytes


class Branch(BaseModel):
    name: str
    leaves: list[Leaf]
    more: dict[str, Leaf | int] = {}
    inner: Branch | None = None


class Ring(BaseModel):
    next: Ring | None
    code: str = Field(pattern=r"^a\b")


SET = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
FAULTS: list[tuple[dict[str, Any], str]] = [
    (SET, r"used: Unimplemented keys: \[\"uniqueItems\"\]: leave it out \(in a class, a list for a set\)"),
    ({"type": "object", "properties": {"a.b": {"anyOf": [{"type": "null"}, SET]}}}, r"used: at 'a.b': Unimplemented"),
    ({"type": "array", "items": {"type": "object", "properties": {"x": SET}}}, r"used: at '\[\].x': Unimplemented"),
    ({"type": "object", "additionalProperties": SET}, "used: Unimplemented .*uniqueItems"),
    (Branch.model_json_schema(), r"used: at 'leaves\[\].raw': Unknown format: base64: leave .* or say it by a pattern"),
    (Ring.model_json_schema(), "used: at 'code': .*: write the pattern without that"),
]


@pytest.mark.parametrize(("schema", "told"), FAULTS, ids=range(len(FAULTS)))
def test_what_no_grammar_can_hold_is_told_with_its_place_and_a_remedy(
    runtime: Runtime, schema: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        runtime.generate("Go.", sampling=SamplingParams(json_schema=schema))
    sound = {"name": "sound", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    odd = {"name": "odd", "parameters": {"type": "object", "properties": {"field": schema}}}
    if "$defs" not in schema:  # references start at the root
        with pytest.raises(ConfigError, match=r'used: tool "odd", at \'arguments\.field'):
            runtime.chat("Go.", tools=[sound, odd], tool_choice="required")


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": [], "items": 3},
        {"$defs": [], "properties": {"a": SET}},
        {"$defs": {"x": 3}, "$ref": "#/$defs/x"},
        {"$ref": "#/$defs/nowhere", "items": {"$ref": 4}},
        {"type": "object", "properties": {"name": {"const": "cat"}, "lives": SET}},
    ],
)
def test_malformed_schemas_are_refused_in_words(runtime: Runtime, schema: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"the grammar cannot be used: (?!tool)"):
        runtime.generate("Go.", sampling=SamplingParams(json_schema=schema))
    with pytest.raises(ConfigError, match="the grammar cannot be used"):
        runtime.chat("Go.", tools=[{"name": "f", "parameters": {**schema, "type": "object"}}], tool_choice="f")
    with pytest.raises(ConfigError, match="the grammar cannot be used"):
        runtime.generate("Go.", sampling=SamplingParams(grammar='start: body0\nbody0: %json {"type"}'))


def test_formats_of_any_text_are_no_condition(runtime: Runtime) -> None:
    fields = {name: {"type": "string", "format": name, "maxLength": 9} for name in ("binary", "password", "path")}
    items = {"type": "array", "items": {"anyOf": [*fields.values()]}, "uniqueItems": False, "minItems": 1}
    schema = {"type": "object", "properties": {**fields, "items": items}, "required": [*fields, "items"]}
    before = json.dumps(schema)
    sampling = SamplingParams(json_schema=schema, max_tokens=150, temperature=1.0, seed=0)
    assert set(runtime.generate("Go.", sampling=sampling).json()) >= {*fields, "items"}
    (call,) = runtime.chat(
        "Go.", tools=[{"name": "f", "parameters": schema}], tool_choice="f", sampling=SamplingParams(max_tokens=250)
    ).tool_calls  # type: ignore[union-attr]
    assert set(call.arguments) == {*fields, "items"}
    assert json.dumps(schema) == before


def test_the_schema_of_a_class_is_closed_and_its_sets_are_lists() -> None:
    class Open(BaseModel, extra="allow"):
        a: set[int]

    class Whole(BaseModel):
        uniqueItems: bool  # a field's name is no keyword
        opened: Open
        nested: list[Branch | Open]
        table: dict[str, set[int]]

    given = Whole.model_json_schema()
    before = json.dumps(given)
    made = class_schema(given)
    assert json.dumps(given) == before
    assert made["additionalProperties"] is False and made["properties"]["uniqueItems"]["type"] == "boolean"
    assert made["$defs"]["Open"]["additionalProperties"] is True
    assert made["$defs"]["Branch"]["additionalProperties"] is False
    assert made["properties"]["table"]["additionalProperties"] == {"items": {"type": "integer"}, "type": "array"}
    assert '"uniqueItems": true' not in json.dumps(made)
    parts = {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}
    assert class_schema(parts) == parts  # each part alone would shut out the other


def test_without_llguidance_the_error_names_the_extra(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"lazy-rag\[grammar\]"):
        runtime.generate("Go.", sampling=SamplingParams(regex="a+"))
    assert runtime.generate("Go.", sampling=SamplingParams(max_tokens=2)).usage["completion_tokens"] >= 1


def test_a_step_launched_ahead_does_not_end_the_answer_a_token_early() -> None:
    """On a GPU the next token is drawn before the one before is read back; draws past the end are nobody's."""
    tokens = TextTokenizer(tiny_tokenizer())
    grammars = Grammars(tokens, 384, [2])
    sampling = SamplingParams(regex="aaa", max_tokens=8).resolve()
    sampler = Sampler(sampling, "cpu", constraint=grammars.constraint(sampling))
    logits = torch.randn(384, generator=torch.Generator().manual_seed(0))
    drawn = []
    while not sampler.finished_after(10):
        drawn.append(int(sampler.draw(logits)[0]))
    assert tokens.decode(drawn) == "aaa"
    assert not sampler.finished_after(len(drawn) - 1)
    assert sampler.finished_after(len(drawn))
    sampler.draw(logits)
    assert not sampler.finished_after(len(drawn) - 1)


class _Event:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class _HostTorch:
    """torch as the engine sees it on a GPU, on the host: no pinned memory, events that have always happened."""

    cuda = SimpleNamespace(Event=_Event)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.empty(*args, **kwargs)


def test_answers_are_the_same_when_steps_are_launched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        SamplingParams(json_schema=PERSON, max_tokens=80, temperature=1.5, seed=1),
        SamplingParams(
            json_schema={"type": "array", "items": {"type": "integer"}}, max_tokens=9, temperature=2.0, seed=2
        ),
        SamplingParams(regex="(ab){3,9}", max_tokens=30, temperature=0),
        SamplingParams(max_tokens=20, temperature=0, ignore_eos=True),
    ]
    with make_runtime() as rt:

        def ask(case: SamplingParams) -> tuple[str, str, tuple[int, ...]]:
            answer = rt.generate("Who?", sampling=case)
            return answer.text, answer.finish_reason, answer.token_ids

        expected = [ask(case) for case in cases]
        monkeypatch.setattr("lazy_rag.engine.torch", _HostTorch())
        rt._engine.call(lambda: setattr(rt._engine, "_ahead", True)).result()
        assert [ask(case) for case in cases] == expected
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(ask, cases)) == expected
        assert rt.check() == []


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"regex": r"[0-9]+ km"}, r"[0-9]+ km"),
        ({"regex": r"[0-9]+\.[0-9]+"}, r"[0-9]+\.[0-9]+"),
        ({"regex": r"[a-z]+ [a-z]+"}, r"[a-z]+ [a-z]+"),
        ({"regex": r"(yes|no), because [^\n]+\."}, r"(yes|no), because [^\n]+\."),
        ({"grammar": 'start: item ("," item)* "."\nitem: /[a-z]+/'}, r"[a-z]+(,[a-z]+)*\."),
        ({"grammar": 'start: item+\nitem: "[" /[a-z]{3,5}/ "]"'}, r"(\[[a-z]{3,5}\])+"),
        (
            {"json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 5}},
            r"\[\s*-?\d+(\s*,\s*-?\d+){4,}\s*\]",
        ),
        ({"json_schema": {"type": "string", "pattern": "^[a-z]+ [a-z]+$"}}, r'"[a-z]+ [a-z]+"'),
    ],
    ids=str,
)
def test_runs_are_ended_and_what_is_optional_is_not_cut(runtime: Runtime, given: dict[str, Any], pattern: str) -> None:
    """A run of digits or letters that could go on for ever, and repetitions after what is complete already."""
    for seed in range(6):
        answer = runtime.generate("Who?", sampling=SamplingParams(max_tokens=60, temperature=1.0, seed=seed, **given))
        assert re.fullmatch(pattern, answer.text), answer.text


def test_unusable_grammars_are_refused_in_words(runtime: Runtime) -> None:
    for given in ({"regex": "\ud800"}, {"json_schema": {"const": "\ud800"}}, {"grammar": "start: \ud800"}):
        with pytest.raises(ConfigError):
            runtime.generate("Who?", sampling=SamplingParams(**given))  # type: ignore[arg-type]
    for schema in (True, False, 3):
        with pytest.raises(ConfigError):
            SamplingParams(json_schema=schema)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["generate", "stream", "async", "async stream", "samples", "tools"])
def test_a_grammar_is_compiled_before_its_request_enters_the_engine(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """One that had left the kept ones while its request waited was compiled on the engine's thread."""
    monkeypatch.setattr("lazy_rag.grammar._KEPT", 2)
    with make_runtime() as rt:
        grammars, compiled_by = rt._parts.grammars, []
        monkeypatch.setattr(
            grammars, "_compile", lambda text: compiled_by.append(threading.current_thread()) or compile_(text)
        )
        compile_ = Grammars._compile.__get__(grammars)
        submitted, go_on = threading.Event(), threading.Event()
        submit = rt._engine.submit
        monkeypatch.setattr(rt._engine, "submit", lambda *args, **kwargs: (submit(*args, **kwargs), submitted.set())[0])
        sampling = SamplingParams(regex="[a-c]{3}", max_tokens=8, seed=0, n=3 if how == "samples" else 1)

        async def ask() -> str:
            if how == "async":
                return (await rt.achat("Who?", sampling=sampling)).text
            return "".join([piece async for piece in await rt.achat("Who?", stream=True, sampling=sampling)])

        def answer() -> str:
            if how == "stream":
                return "".join(rt.chat("Who?", stream=True, sampling=sampling))
            if how.startswith("async"):
                return asyncio.run(ask())
            if how == "tools":
                tool = {"name": "f", "parameters": {"properties": {"a": {"enum": ["abc"]}}, "required": ["a"]}}
                calls = rt.chat("Go.", tools=[tool], tool_choice="f", sampling=SamplingParams(max_tokens=99)).tool_calls
                return str(calls[0].arguments["a"])
            return rt.generate("Who?", sampling=sampling).text

        with ThreadPoolExecutor(1) as pool:
            busy = rt._engine.call(go_on.wait)
            asked = pool.submit(answer)
            assert submitted.wait(60)
            for number in range(4):
                grammars.require(SamplingParams(regex=f"x{{{number + 1}}}", max_tokens=9))
            go_on.set()
            assert busy.result(60) and re.fullmatch("[a-c]{3}", asked.result(60))
        assert len(compiled_by) == 5 and rt._engine._thread not in compiled_by
        # nobody holds it any more
        gc.collect()
        assert len(grammars._held) == 2

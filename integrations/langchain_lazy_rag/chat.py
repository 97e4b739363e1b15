"""A LangChain chat model over a runtime: chunks that stand in the messages are served from the cache."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from operator import itemgetter
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call, tool_call_chunk
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import ConfigDict, Field, SecretStr, model_validator

from langchain_lazy_rag.messages import to_messages
from lazy_rag import Answer, LazyRAGError, Message, Runtime, SamplingParams, class_schema

_SAMPLING = ("temperature", "max_tokens", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
_GRAMMARS = ("json_schema", "regex", "grammar")
_FORMAT = "response_format"  # OpenAI's word for json_schema, which `create_agent` uses
_REQUEST = ("anchor", "namespace", "repair")
_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")


class ChatLazyRAG(BaseChatModel):
    """A runtime's model as a LangChain chat model.

    Texts of the runtime's chunks that stand verbatim in a message, whatever chain put them there, come from the cache.
    So do `{"type": "text-plain", "text": ...}` blocks and the documents in a `ToolMessage`'s artifact, also those of
    another store. `usage_metadata["input_token_details"]` counts what was found (`cache_read`: chunks, and live text
    that an earlier request left) and what was computed for the cache (`cache_creation`).

    Args:
        runtime: a live runtime; or give `model`, and one is made (or shared) when it is first needed.
        model: what `Runtime` takes as its model. `runtime_options`: its other arguments.
        temperature, max_tokens, top_k, top_p, min_p, repetition_penalty, seed, stop: see `SamplingParams`; each can be
            given for one call too. Without a temperature the model's own default applies.
        anchor: look for chunks in the messages. `namespace`: whose. `repair`: see `Runtime`.
        timeout: the `deadline` of a request: seconds after which it fails with DeadlineExceededError.
        max_retries, api_key: accepted, as every LangChain model does, and without use: nothing is sent anywhere.

    Tools and structured output are enforced by a grammar: arguments always follow their schema.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid", protected_namespaces=())

    runtime: Runtime | None = Field(default=None, exclude=True, repr=False)
    model: str | None = None
    runtime_options: dict[str, Any] = Field(default_factory=dict, exclude=True, repr=False)
    temperature: float | None = None
    max_tokens: int | None = 256
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | str | None = None
    anchor: bool = True
    namespace: str | None = None
    repair: str | None = None
    streaming: bool = False
    timeout: float | None = None
    max_retries: int | None = None
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)

    @model_validator(mode="after")
    def _name_the_model(self) -> ChatLazyRAG:
        if self.runtime is None and self.model is None:
            raise LazyRAGError('ChatLazyRAG needs runtime=Runtime(...), or model="..."')
        if self.runtime is not None and self.runtime_options:
            raise LazyRAGError("runtime_options are for a runtime that is yet to be made: leave out one of the two")
        if self.model is None and self.runtime is not None:
            object.__setattr__(self, "model", self.runtime.about()["model"])
        return self

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> ChatLazyRAG:
        """A copy shares the runtime."""
        shared = {} if self.runtime is None else {id(self.runtime): self.runtime}
        return super().__deepcopy__({**(memo or {}), **shared})

    def __getstate__(self) -> dict[Any, Any]:
        """Without the runtime: what is unpickled makes or shares one by the model's name."""
        state = super().__getstate__()
        return {**state, "__dict__": {**state["__dict__"], "runtime": None}}

    def get_runtime(self) -> Runtime:
        """The runtime; loads the model on first use."""
        return self.runtime or Runtime.shared(self.model, **self.runtime_options)

    # what LangChain asks of every model

    @property
    def _llm_type(self) -> str:
        return "lazy-rag"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        names = ("model", *_SAMPLING, "stop", *_REQUEST)
        # two live models may have one name, and an answer of one must not come from a cache of the other's
        identity = None if self.runtime is None else self.runtime.identity
        return {**{name: getattr(self, name) for name in names}, "runtime": identity}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        params = super()._get_ls_params(stop=stop, **kwargs)
        own = [self.stop] if isinstance(self.stop, str) else self.stop
        if own and not stop:
            params["ls_stop"] = list(own)
        return params

    def _resolve_model_profile(self) -> ModelProfile | None:
        if self.runtime is None:
            return None
        return ModelProfile(
            max_input_tokens=self.runtime.max_context - 1,
            text_inputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            text_outputs=True,
            tool_calling=True,
            tool_choice=True,
            structured_output=True,
        )

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of the model's own tokenizer, without special tokens."""
        ids: list[int] = self.get_runtime().tokenizer.encode(text, add_special_tokens=False)
        return ids

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Length of the prompt these messages make, with everything the chat template adds."""
        runtime = self.get_runtime()
        turns = to_messages(messages, runtime, self.namespace, anchor=self.anchor)
        described = [_tool(tool) for tool in tools or ()]
        return len(runtime.chat_layout(turns, anchor=self.anchor, namespace=self.namespace, tools=described))

    # answering

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        runtime, turns, options = self._request(messages, stop, kwargs)
        answer: Any = runtime.chat(turns, **options)
        return ChatResult(generations=[ChatGeneration(message=self._ai_message(answer, options))])

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        runtime, turns, options = await asyncio.to_thread(self._request, messages, stop, kwargs)
        answer: Any = await runtime.achat(turns, **options)
        return ChatResult(generations=[ChatGeneration(message=self._ai_message(answer, options))])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        runtime, turns, options = self._request(messages, stop, kwargs)
        stream: Any = runtime.chat(turns, stream=True, **options)
        try:
            for piece in stream:
                chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
                if run_manager is not None:
                    run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
            chunk = self._last_chunk(_complete(stream.answer), options)
            if run_manager is not None:
                run_manager.on_llm_new_token("", chunk=chunk)
            yield chunk
        finally:
            stream.close()

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        runtime, turns, options = await asyncio.to_thread(self._request, messages, stop, kwargs)
        pieces: Any = await runtime.achat(turns, stream=True, **options)
        async with aclosing(pieces) as stream:
            async for piece in stream:
                chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
                if run_manager is not None:
                    await run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
            chunk = self._last_chunk(_complete(stream.answer), options)
            if run_manager is not None:
                await run_manager.on_llm_new_token("", chunk=chunk)
            yield chunk

    def _request(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]
    ) -> tuple[Runtime, list[Message], dict[str, Any]]:
        """The runtime, its messages, and the options of `Runtime.chat`. Raises LazyRAGError for unknown arguments."""
        if kwargs.pop("model", self.model) != self.model:
            raise LazyRAGError(f"this ChatLazyRAG runs {self.model!r}: make another one for another model")
        if _FORMAT in kwargs:
            kwargs["json_schema"] = _schema_of(kwargs.pop(_FORMAT), kwargs.get("json_schema"))
        known = {*_SAMPLING, *_GRAMMARS, *_REQUEST, *_TOOLS}
        unknown = [name for name in kwargs if name not in known]
        if unknown:
            raise LazyRAGError(
                f"ChatLazyRAG knows no argument {unknown[0]!r}: it takes {', '.join(sorted({*known, _FORMAT}))}"
            )
        given = {name: kwargs.get(name, getattr(self, name, None)) for name in (*_SAMPLING, *_GRAMMARS)}
        sampling = SamplingParams(
            **{name: value for name, value in given.items() if value is not None},
            stop=(self.stop if stop is None else stop) or (),  # type: ignore[arg-type]
        )
        options = {name: kwargs.get(name, getattr(self, name)) for name in _REQUEST}
        options |= {name: kwargs[name] for name in _TOOLS if name in kwargs}
        runtime = self.get_runtime()
        turns = to_messages(messages, runtime, options["namespace"], anchor=options["anchor"])
        return runtime, turns, {**options, "sampling": sampling, "deadline": self.timeout}

    # from answers to messages

    def _ai_message(self, answer: Answer, options: dict[str, Any]) -> AIMessage:
        _require_complete(answer, options)
        return AIMessage(
            content=answer.text,
            tool_calls=[tool_call(name=call.name, args=call.arguments, id=call.id) for call in answer.tool_calls],
            usage_metadata=_usage(answer),
            response_metadata=self._response_metadata(answer),
        )

    def _last_chunk(self, answer: Answer, options: dict[str, Any]) -> ChatGenerationChunk:
        """What is known only at the end of a stream: calls, usage and metadata."""
        _require_complete(answer, options)
        calls = [
            tool_call_chunk(name=call.name, args=json.dumps(call.arguments), id=call.id, index=index)
            for index, call in enumerate(answer.tool_calls)
        ]
        message = AIMessageChunk(
            content="",
            tool_call_chunks=calls,
            usage_metadata=_usage(answer),
            response_metadata=self._response_metadata(answer),
            chunk_position="last",
        )
        return ChatGenerationChunk(message=message)

    def _response_metadata(self, answer: Answer) -> dict[str, Any]:
        """`chunks`: for each chunk of the prompt where it was found ("encoded": computed now), offset and tokens."""
        return {
            "model_name": self.model,
            "finish_reason": "tool_calls" if answer.tool_calls else answer.finish_reason,
            "chunks": [
                {
                    "chunk_id": use.chunk_id,
                    "offset": use.offset,
                    "tokens": use.length,
                    "hit": use.hit,
                    "tier": use.tier,
                }
                for use in answer.receipt.chunks
            ],
            "dropped": list(answer.dropped),
        }

    # tools and structured output

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools it may call.

        Args:
            tool_choice: None or "auto" (the model decides), "any", "required" or True (it must call), "none" or False,
                or the name of the tool that it must call.
            strict: without effect; arguments follow their schema always.
            kwargs: further arguments of a call; with `response_format` an answer that calls no tool follows its schema.
        """
        bound: dict[str, Any] = {"tools": [_tool(tool) for tool in tools], **kwargs}
        if tool_choice is not None:
            bound["tool_choice"] = _tool_choice(tool_choice)
        if parallel_tool_calls is not None:
            bound["parallel_tool_calls"] = parallel_tool_calls
        return self.bind(**bound)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: str = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """The model with answers that follow a schema: a pydantic class, a TypedDict, a function (its arguments) or a
        JSON schema. Of all but the last, objects have no keys but their own, unless the class allows them.

        Args:
            include_raw: give a dict of "raw" (the message), "parsed" and "parsing_error".
            method: "json_schema" and "json_mode" (the answer is the object) or "function_calling" (a tool call is;
                LangChain's form of a tool keeps properties alone, and loses classes inside themselves).
            strict: without effect; answers follow their schema always.
        """
        if kwargs:
            raise LazyRAGError(f"with_structured_output knows no argument {next(iter(kwargs))!r}")
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw)
        if method not in ("json_schema", "json_mode"):
            raise LazyRAGError(f"method={method!r} is not json_schema, json_mode or function_calling")
        described = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
        model = self.bind(json_schema=_form(schema), ls_structured_output_format=described)
        parser: Runnable[Any, Any] = JsonOutputParser()
        if isinstance(schema, type) and is_basemodel_subclass(schema):
            parser = PydanticOutputParser(pydantic_object=schema)  # type: ignore[type-var]
        if not include_raw:
            return model | parser
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _require_complete(answer: Answer, options: dict[str, Any]) -> None:
    """Half an object is an error, never an answer."""
    if options["sampling"].json_schema is not None and not answer.tool_calls:
        answer.json()


def _schema_of(form: Any, other: Any) -> Any:
    """The JSON schema of a response format in OpenAI's form. Raises LazyRAGError for what is none."""
    kind = form.get("type") if isinstance(form, Mapping) else None
    inner = form.get("json_schema") if kind == "json_schema" else None
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    known = isinstance(schema, Mapping) if kind == "json_schema" else kind in ("text", "json_object")
    if not known:
        raise LazyRAGError(
            f'response_format={form!r} is not {{"type": "json_schema", "json_schema": {{"schema": ...}}}}, nor of type '
            "json_object or text"
        )
    if other is not None:
        raise LazyRAGError("response_format and json_schema say the same: give one of them")
    if kind == "text":
        return None
    return schema if kind == "json_schema" else {"type": "object"}


def _form(schema: Any) -> dict[str, Any]:
    """The JSON schema of what `with_structured_output` takes. LangChain's own conversion loses what stands beside
    missing properties, and every reference of a schema to itself, so it serves only for the other forms."""
    if isinstance(schema, Mapping):
        described = "function" in schema or "parameters" in schema or "input_schema" in schema
        return convert_to_json_schema(schema) if described else dict(schema)  # type: ignore[arg-type]
    own = getattr(schema, "model_json_schema", None)
    return class_schema(convert_to_json_schema(schema) if own is None else own())


def _tool(tool: Any) -> dict[str, Any]:
    """A tool in OpenAI's form. What was made of a class or function takes no argument but its own."""
    described = convert_to_openai_tool(tool)
    function = described["function"]
    plain = isinstance(tool, Mapping) or isinstance(getattr(tool, "args_schema", None), Mapping)
    if plain or "parameters" not in function:
        return described
    return {**described, "function": {**function, "parameters": class_schema(function["parameters"])}}


def _tool_choice(choice: Any) -> str:
    if isinstance(choice, bool):
        return "required" if choice else "none"
    if isinstance(choice, dict):
        name = choice.get("function", choice).get("name")
        if not isinstance(name, str):
            raise LazyRAGError(f"tool_choice={choice!r} names no tool")
        return name
    return "required" if choice == "any" else str(choice)


def _usage(answer: Answer) -> UsageMetadata:
    receipt = answer.receipt
    return UsageMetadata(
        input_tokens=receipt.prompt_tokens,
        output_tokens=receipt.tokens_generated,
        total_tokens=receipt.prompt_tokens + receipt.tokens_generated,
        input_token_details=InputTokenDetails(
            cache_read=answer.usage["cached_tokens"], cache_creation=receipt.tokens_encoded
        ),
    )


def _complete(answer: Answer | None) -> Answer:
    """Of a stream that was read to its end. Raises LazyRAGError when it was closed before."""
    if answer is None:
        raise LazyRAGError("the stream was closed before its end")
    return answer

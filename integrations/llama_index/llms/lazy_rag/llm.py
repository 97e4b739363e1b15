"""The LLM: LlamaIndex's final messages answered by a runtime, with verbatim chunks served from its cache."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Generator, Sequence
from functools import partial
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import BaseModel, Field, PrivateAttr, ValidationError
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.events.llm import LLMStructuredPredictEndEvent, LLMStructuredPredictStartEvent
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.program.utils import process_streaming_objects
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import NodeWithScore
from llama_index.core.tools import BaseTool
from llama_index.core.types import PydanticProgramMode
from llama_index.llms.lazy_rag.checks import require_runtime
from llama_index.llms.lazy_rag.events import ChunkCacheHitEvent, HintedTexts, install_hints, node_texts
from llama_index.llms.lazy_rag.messages import arguments_of, from_answer, raw_of, to_messages

from lazy_rag import Answer, LazyRAGError, Message, Runtime, SamplingParams, class_schema

dispatcher = get_dispatcher(__name__)

_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "json_schema", "regex", "grammar")
_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls", "system", "namespace", "repair")
# what LlamaIndex itself passes and a chat model has no use for
_IGNORED = ("formatted",)


class LazyRAGLLM(FunctionCallingLLM):
    """A lazy-rag runtime as LlamaIndex's LLM.

    Chunks that stand verbatim in the messages are served from the cache: those added to the runtime, and the nodes of
    any LlamaIndex index, which are remembered when they are used for the first time. Everything else is computed as
    usual. `raw["usage"]` counts tokens, `cached_tokens` among them; `raw["chunks"]` says what was found.

    Every keyword of a call overrides the field of its name, with None the default of `SamplingParams` or of the runtime
    applies; unknown ones are refused.
    """

    model: str | None = Field(default=None, description="Loaded as Runtime.shared(model, embedder=None) without one.")
    max_tokens: int = Field(default=256, gt=0, description="Most tokens of an answer.")
    temperature: float | None = Field(default=None, ge=0, description="None: the model's own default.")
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: list[str] = Field(default_factory=list)
    namespace: str | None = Field(default=None, description="Whose chunks may be used.")
    repair: str | None = Field(default=None, description='"none", "head" or "exact".')

    _runtime: Runtime | None = PrivateAttr(default=None)
    _hints: HintedTexts = PrivateAttr(default_factory=HintedTexts)

    def __init__(self, runtime: Runtime | None = None, **fields: Any) -> None:
        if runtime is None and not fields.get("model"):
            raise LazyRAGError("LazyRAGLLM needs a runtime, or the model to load: LazyRAGLLM(Runtime(...))")
        unknown = fields.keys() - type(self).model_fields.keys()
        if unknown:
            raise LazyRAGError(
                f"LazyRAGLLM has no field {', '.join(map(repr, sorted(unknown)))}: "
                f"it takes {', '.join(sorted(type(self).model_fields))}"
            )
        super().__init__(**fields)
        self._runtime = None if runtime is None else require_runtime(runtime, "LazyRAGLLM")
        install_hints()

    @classmethod
    def class_name(cls) -> str:
        return "LazyRAGLLM"

    @property
    def runtime(self) -> Runtime:
        """The runtime; loaded on first use when only a model was named."""
        # unpickled, a model has not even the attribute
        if getattr(self, "_runtime", None) is None:
            if self.model is None:
                raise LazyRAGError("a copied or unpickled LazyRAGLLM has no runtime: make a new one from the runtime")
            self._runtime = Runtime.shared(self.model, embedder=None)
        assert self._runtime is not None
        return self._runtime

    def __deepcopy__(self, memo: Any = None) -> LazyRAGLLM:
        return self.model_copy()  # of the same runtime

    @property
    def metadata(self) -> LLMMetadata:
        window = self.runtime.max_context
        return LLMMetadata(
            context_window=window,
            num_output=max(1, min(self.max_tokens, window // 4)),
            is_chat_model=True,
            is_function_calling_model=True,
            model_name=self.model or getattr(self.runtime.tokenizer, "name_or_path", "") or "lazy-rag",
            system_role=MessageRole.SYSTEM,
        )

    def to_payload(self) -> dict[str, Any]:
        return {
            "class_name": self.class_name(),
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }

    def remember_nodes(self, nodes: list[NodeWithScore]) -> None:
        """Have the raw texts of nodes found in prompts from now on. Does not wait: the next request remembers them."""
        self._hints.note(node_texts(nodes))

    # the four ways to chat, and to complete a text by them

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        turns, options = self._request(messages, kwargs)
        return self._response(self.runtime.chat(turns, **options))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        turns, options = await asyncio.to_thread(self._request, messages, kwargs)
        return self._response(await self.runtime.achat(turns, **options))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        turns, options = self._request(messages, kwargs)
        pieces: Any = self.runtime.chat(turns, stream=True, **options)

        def generate() -> Generator[ChatResponse, None, None]:
            text = ""
            try:
                for piece in pieces:
                    text += piece
                    yield _partial(text, piece)
                yield self._response(pieces.answer, delta="")
            finally:
                pieces.close()

        return generate()

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        turns, options = await asyncio.to_thread(self._request, messages, kwargs)
        pieces: Any = await self.runtime.achat(turns, stream=True, **options)

        async def generate() -> AsyncGenerator[ChatResponse, None]:
            text = ""
            try:
                async for piece in pieces:
                    text += piece
                    yield _partial(text, piece)
                yield self._response(pieces.answer, delta="")
            finally:
                await pieces.aclose()

        return generate()

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        turns, options = self._request(prompt, kwargs)
        return _completion(self._response(self.runtime.chat(turns, **options)))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        turns, options = await asyncio.to_thread(self._request, prompt, kwargs)
        return _completion(self._response(await self.runtime.achat(turns, **options)))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        turns, options = self._request(prompt, kwargs)
        pieces: Any = self.runtime.chat(turns, stream=True, **options)

        def generate() -> Generator[CompletionResponse, None, None]:
            text = ""
            try:
                for piece in pieces:
                    text += piece
                    yield CompletionResponse(text=text, delta=piece)
                yield _completion(self._response(pieces.answer, delta=""))
            finally:
                pieces.close()

        return generate()

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        turns, options = await asyncio.to_thread(self._request, prompt, kwargs)
        pieces: Any = await self.runtime.achat(turns, stream=True, **options)

        async def generate() -> AsyncGenerator[CompletionResponse, None]:
            text = ""
            try:
                async for piece in pieces:
                    text += piece
                    yield CompletionResponse(text=text, delta=piece)
                yield _completion(self._response(pieces.answer, delta=""))
            finally:
                await pieces.aclose()

        return generate()

    # tools

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        messages = list(chat_history or [])
        if user_msg is not None:
            messages.append(ChatMessage(role="user", content=user_msg) if isinstance(user_msg, str) else user_msg)
        kwargs["tool_choice"] = _choice(kwargs.get("tool_choice"), tool_required) if tools else None
        return {
            "messages": messages,
            "tools": [_described(tool) for tool in tools],
            "parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not calls and error_on_no_tool_call:
            raise LazyRAGError(f"the model called no tool; it answered {response.message.content!r}")
        return [
            ToolSelection(tool_id=call.tool_call_id or "", tool_name=call.tool_name, tool_kwargs=arguments_of(call))
            for call in calls
        ]

    # objects of a pydantic class, by a grammar

    @dispatcher.span
    def structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> BaseModel:
        if self.pydantic_program_mode != PydanticProgramMode.DEFAULT:
            return super().structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
        dispatcher.event(
            LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=prompt_args)
        )
        messages = self._extend_messages(prompt.format_messages(llm=self, **prompt_args))
        response = self.chat(messages, **_structured(output_cls, llm_kwargs))
        return _ended(read_object(output_cls, response))

    @dispatcher.span
    async def astructured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> BaseModel:
        if self.pydantic_program_mode != PydanticProgramMode.DEFAULT:
            return await super().astructured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
        dispatcher.event(
            LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=prompt_args)
        )
        messages = self._extend_messages(prompt.format_messages(llm=self, **prompt_args))
        response = await self.achat(messages, **_structured(output_cls, llm_kwargs))
        return _ended(read_object(output_cls, response))

    @dispatcher.span
    def stream_structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        if self.pydantic_program_mode != PydanticProgramMode.DEFAULT:
            yield from super().stream_structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return
        messages = self._extend_messages(prompt.format_messages(llm=self, **prompt_args))
        current: Any = None
        for response in self.stream_chat(messages, **_structured(output_cls, llm_kwargs)):
            if response.raw is not None:
                yield read_object(output_cls, response)
                return
            current = process_streaming_objects(response, output_cls, cur_objects=current and [current], llm=self)
            yield current

    @dispatcher.span
    async def astream_structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        if self.pydantic_program_mode != PydanticProgramMode.DEFAULT:
            return await super().astream_structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
        messages = self._extend_messages(prompt.format_messages(llm=self, **prompt_args))
        responses = await self.astream_chat(messages, **_structured(output_cls, llm_kwargs))

        async def generate() -> AsyncGenerator[Any, None]:
            current: Any = None
            async for response in responses:
                if response.raw is not None:
                    yield read_object(output_cls, response)
                    return
                current = process_streaming_objects(response, output_cls, cur_objects=current and [current], llm=self)
                yield current

        return generate()

    # helpers

    def _request(
        self, prompt: str | Sequence[ChatMessage], kwargs: dict[str, Any]
    ) -> tuple[list[Message], dict[str, Any]]:
        """Messages and keywords for `Runtime.chat`. May wait for the engine, so async methods call it in a thread."""
        runtime, options = self.runtime, self._options(kwargs)
        self._hints.remember(runtime, self.namespace)
        if isinstance(prompt, str):
            return [Message("user", prompt)], options
        return to_messages(prompt, partial(runtime.remember_parts, namespace=options["namespace"])), options

    def _options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keywords of `Runtime.chat` for a call's own."""
        unknown = kwargs.keys() - {*_SAMPLING, *_OPTIONS, *_IGNORED}
        if unknown:
            raise LazyRAGError(
                f"LazyRAGLLM has no keyword {', '.join(map(repr, sorted(unknown)))}: "
                f"it takes {', '.join((*_SAMPLING, *_OPTIONS))}"
            )
        given = {name: kwargs.get(name, getattr(self, name, None)) for name in _SAMPLING}
        sampling = {name: value for name, value in given.items() if value is not None}
        options = {"namespace": self.namespace, "repair": self.repair}
        options |= {name: kwargs[name] for name in _OPTIONS if name in kwargs}
        return {"anchor": True, "sampling": SamplingParams(**sampling), **options}

    def _response(self, answer: Any, delta: str | None = None) -> ChatResponse:
        assert isinstance(answer, Answer)
        dispatcher.event(ChunkCacheHitEvent.of(answer, self.runtime))
        prefix = self.runtime.prefix
        raw = raw_of(answer, None if prefix is None else prefix.id)
        return ChatResponse(message=from_answer(answer), delta=delta, raw=raw)


def _partial(text: str, delta: str) -> ChatResponse:
    return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=delta)


def _completion(response: ChatResponse) -> CompletionResponse:
    return CompletionResponse(text=response.message.content or "", delta=response.delta, raw=response.raw)


def _choice(choice: Any, required: bool) -> str:
    """A tool choice in our words, from those of other providers."""
    if isinstance(choice, dict):
        choice = choice.get("function", choice).get("name")
    if choice is None:
        return "required" if required else "auto"
    return "required" if choice == "any" else str(choice)


def _described(tool: BaseTool) -> dict[str, Any]:
    described = tool.metadata.to_openai_tool(skip_length_check=True)
    function = described["function"]
    return {**described, "function": {**function, "parameters": class_schema(function["parameters"])}}


def _structured(output_cls: type[BaseModel], llm_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """The keywords of a call whose answer is an object, with its schema in the system text."""
    schema = output_cls.model_json_schema()
    told = f"Answer with JSON of this schema:\n{json.dumps(schema, ensure_ascii=False)}"
    return {"system": told, **(llm_kwargs or {}), **object_options(output_cls)}


def object_options(output_cls: type[BaseModel]) -> dict[str, Any]:
    """The keywords of a call that hold its answer to a class. A stop string could only cut it."""
    return {"json_schema": class_schema(output_cls.model_json_schema()), "stop": []}


def read_object(output_cls: type[BaseModel], response: ChatResponse) -> BaseModel:
    """The object of a finished answer. Raises LazyRAGError, which LlamaIndex's synthesizers do not swallow."""
    text, raw = response.message.content or "", response.raw or {}
    try:
        return output_cls.model_validate_json(text)
    except ValidationError as error:
        advice = "the class has conditions its schema does not say"
        if raw.get("finish_reason") == "length":
            reached = raw["usage"]["completion_tokens"]
            advice = f"it was cut off at {reached} tokens: raise max_tokens, of the LLM or in llm_kwargs"
        raise LazyRAGError(f"the answer is no {output_cls.__name__} ({advice}): {error}") from error


def _ended(value: BaseModel) -> BaseModel:
    dispatcher.event(LLMStructuredPredictEndEvent(output=value))
    return value

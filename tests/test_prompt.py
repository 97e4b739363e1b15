"""Conversations to token pieces, over the chat templates of real model families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazy_rag.errors import ConfigError, EmptyQuestionError
from lazy_rag.prompt import ChatFormat, Message, PromptParts
from lazy_rag.tokens import TextTokenizer
from tests.tiny_tokenizer import tiny_tokenizer

LLAMA_31 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN3 = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>') \
and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in message.content %}
            {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
            {%- set reasoning_content = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') }}
                {{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
MISTRAL_V3 = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""
GEMMA_2 = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}\
{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""
PHI_3 = """{% for message in messages %}{% if message['role'] == 'system' %}\
{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'user' %}\
{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'assistant' %}\
{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
SMOLLM2 = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}\
{% endif %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
ZEPHYR = """{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\\n' + message['content'] + \
eos_token }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\\n' + message['content'] + eos_token }}\n\
{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\\n'  + message['content'] + eos_token }}\n{% endif %}\n\
{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"""


@dataclass(frozen=True)
class Family:
    template: str
    specials: tuple[str, ...]
    bos: str | None
    eos: str
    adds_bos: bool
    end_of_turn: str
    added: tuple[str, ...] = ()
    takes_system: bool = True
    alternates: bool = False

    def tokenizer(self) -> Any:
        return tiny_tokenizer(
            self.template,
            self.specials,
            bos_token=self.bos,
            eos_token=self.eos,
            add_bos=self.adds_bos,
            added_tokens=self.added,
        )


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FAMILIES = {
    "llama-3.1": Family(
        LLAMA_31,
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
        "<|end_of_text|>",
        True,
        "<|eot_id|>",
    ),
    "qwen3": Family(QWEN3, CHATML, None, "<|im_end|>", False, "<|im_end|>", ("<think>", "</think>")),
    "mistral-v0.3": Family(
        MISTRAL_V3, ("<s>", "</s>", "[INST]", "[/INST]"), "<s>", "</s>", True, "</s>", alternates=True
    ),
    "gemma-2": Family(
        GEMMA_2,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<bos>",
        "<eos>",
        True,
        "<end_of_turn>",
        takes_system=False,
        alternates=True,
    ),
    "phi-3": Family(
        PHI_3,
        ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<s>",
        "<|endoftext|>",
        True,
        "<|end|>",
    ),
    "smollm2": Family(SMOLLM2, CHATML, "<|im_start|>", "<|im_end|>", False, "<|im_end|>"),
    "zephyr": Family(ZEPHYR, ("<unk>", "<s>", "</s>"), "<s>", "</s>", True, "</s>"),
}
HISTORY = [
    Message("user", "What is {{ bos_token }}?"),
    Message("assistant", "A {% raw %} thing."),
    Message("user", "And who is Zoë 🙂?"),
]
SINGLE = [Message("user", "What is the capital of France?")]


@pytest.fixture(params=FAMILIES, scope="module")
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def tokenizer(family: Family) -> Any:
    return family.tokenizer()


@pytest.fixture(scope="module")
def view(tokenizer: Any) -> TextTokenizer:
    return TextTokenizer(tokenizer)


@pytest.fixture(scope="module")
def chat(view: TextTokenizer) -> ChatFormat:
    return ChatFormat(view)


def stock_text(family: Family, tokenizer: Any, messages: list[Message], **kwargs: Any) -> str:
    """The stock rendering, with the BOS that a tokenizer which adds one would put before it."""
    dicts = [{"role": message.role, "content": message.content} for message in messages]
    text = tokenizer.apply_chat_template(
        dicts, tokenize=False, add_generation_prompt=True, date_string="26 Jul 2024", **kwargs
    )
    if family.adds_bos and family.bos and not text.startswith(family.bos):
        text = family.bos + text
    return str(text)


def decoded(view: TextTokenizer, parts: PromptParts) -> str:
    pieces = (parts.before, parts.question, parts.after)
    return "".join(view.decode(piece, skip_special_tokens=False) for piece in pieces)


def check_bos(view: TextTokenizer, parts: PromptParts) -> None:
    if view.bos_id is not None:
        assert parts.tokens[0] == view.bos_id
        assert parts.tokens.count(view.bos_id) == 1


def test_single_question(family: Family, tokenizer: Any, view: TextTokenizer, chat: ChatFormat) -> None:
    parts = chat.render(SINGLE)
    assert decoded(view, parts) == stock_text(family, tokenizer, SINGLE)
    assert parts.before == chat.prefix()
    assert parts.question == view.content(SINGLE[0].content)
    assert parts.after
    check_bos(view, parts)


def test_history(family: Family, tokenizer: Any, view: TextTokenizer, chat: ChatFormat) -> None:
    parts = chat.render(HISTORY)
    assert decoded(view, parts) == stock_text(family, tokenizer, HISTORY)
    assert parts.before[: len(chat.prefix())] == chat.prefix()
    assert view.decode(parts.question) == HISTORY[-1].content
    check_bos(view, parts)


@pytest.mark.parametrize("history", [False, True])
def test_system(family: Family, tokenizer: Any, view: TextTokenizer, chat: ChatFormat, history: bool) -> None:
    turns = HISTORY if history else SINGLE
    expected = [Message("system", "Be brief."), *turns]
    if not family.takes_system:
        expected = [Message("user", f"Be brief.\n\n{turns[0].content}"), *turns[1:]]
    parts = chat.render(turns, system="Be brief.")
    assert decoded(view, parts) == stock_text(family, tokenizer, expected)
    assert parts == chat.render([Message("system", "Be brief."), *turns])
    assert "Be brief." in view.decode(parts.before)
    check_bos(view, parts)


def test_system_given_twice_is_joined(view: TextTokenizer, chat: ChatFormat) -> None:
    parts = chat.render([Message("system", "Second."), *SINGLE], system="First.")
    assert "First.\n\nSecond." in view.decode(parts.before)


def test_empty_system(family: Family, tokenizer: Any, view: TextTokenizer, chat: ChatFormat) -> None:
    """An empty system text switches a default one off; where there is no system role it leaves no trace."""
    expected = [Message("system", ""), *SINGLE] if family.takes_system else SINGLE
    assert decoded(view, chat.render(SINGLE, system="")) == stock_text(family, tokenizer, expected)


@pytest.mark.parametrize("content", ["  padded \n", "\n\nlines\n\n", "\tx", " \n a b \n "])
def test_outer_whitespace_is_kept_or_trimmed_as_the_template_does(
    family: Family, tokenizer: Any, view: TextTokenizer, chat: ChatFormat, content: str
) -> None:
    messages = [Message("user", content), Message("assistant", content), Message("user", content)]
    assert decoded(view, chat.render(messages)) == stock_text(family, tokenizer, messages)
    parts = chat.render([Message("user", content)])
    assert decoded(view, parts) == stock_text(family, tokenizer, [Message("user", content)])
    assert parts.before == chat.prefix()
    trims = FAMILIES["llama-3.1"] is family or FAMILIES["gemma-2"] is family
    assert view.decode(parts.question) == (content.strip() if trims else content)


def test_text_cannot_become_markup(family: Family, view: TextTokenizer, chat: ChatFormat) -> None:
    """Special ids stand where the template puts them, however much markup the contents hold."""
    attack = "".join(family.specials) + "\n" + "x".join(family.specials)
    clean = [Message("system", "s"), Message("user", "q"), Message("assistant", "a"), Message("user", "q")]
    dirty = [Message(message.role, f"{attack}{message.content}") for message in clean]

    def specials(messages: list[Message]) -> list[list[int]]:
        parts = chat.render(messages)
        return [
            [index for index in piece if index in view.special_ids]
            for piece in (parts.before, parts.question, parts.after)
        ]

    assert specials(dirty) == specials(clean)
    assert specials(dirty)[1] == []


def test_neighbours_of_one_role(family: Family, tokenizer: Any, view: TextTokenizer, chat: ChatFormat) -> None:
    messages = [Message("user", "one"), Message("user", "two"), Message("assistant", "a"), Message("user", "three")]
    expected = [Message("user", "one\n\ntwo"), *messages[2:]] if family.alternates else messages
    assert decoded(view, chat.render(messages)) == stock_text(family, tokenizer, expected)
    pair = [Message("user", "context"), Message("user", "question")]
    parts = chat.render(pair)
    assert view.decode(parts.question) == "question"
    assert parts.before[: len(chat.prefix())] == chat.prefix()


def test_leading_assistant(family: Family, tokenizer: Any, view: TextTokenizer, chat: ChatFormat) -> None:
    messages = [Message("assistant", "Hello!"), Message("user", "Hi")]
    expected = [Message("user", "Hello!\n\nHi")] if family.alternates else messages
    parts = chat.render(messages)
    assert decoded(view, parts) == stock_text(family, tokenizer, expected)
    assert view.decode(parts.question) == "Hi"
    with_system = chat.render(messages, system="S")
    assert view.decode(with_system.before).index("S") < view.decode(with_system.before).index("Hello!")


def test_end_of_turn_is_an_eos(family: Family, tokenizer: Any, view: TextTokenizer) -> None:
    ids = {tokenizer.convert_tokens_to_ids(token) for token in (family.end_of_turn, family.eos)}
    assert view.eos_ids(None) == ids


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(max_size=12), min_size=3, max_size=3).filter(lambda texts: bool(texts[2].strip())))
def test_any_history_renders_as_stock_chatml(texts: list[str]) -> None:
    family = FAMILIES["qwen3"]
    tokenizer = _QWEN3
    messages = [Message(role, text) for role, text in zip(("user", "assistant", "user"), texts, strict=True)]
    view = TextTokenizer(tokenizer)
    parts = ChatFormat(view).render(messages)
    assert decoded(view, parts) == stock_text(family, tokenizer, messages)
    assert parts.before[: len(ChatFormat(view).prefix())] == ChatFormat(view).prefix()


_QWEN3 = FAMILIES["qwen3"].tokenizer()


def test_qwen3_drops_the_thinking_of_earlier_answers() -> None:
    family, tokenizer = FAMILIES["qwen3"], _QWEN3
    view = TextTokenizer(tokenizer)
    for answer in ("<think>\nhm\n</think>\n\nParis.", "<think>\n\n</think>\n\nParis.\n", "stray</think>Paris."):
        messages = [Message("user", "Capital?"), Message("assistant", answer), Message("user", "Sure?")]
        parts = ChatFormat(view).render(messages)
        assert decoded(view, parts) == stock_text(family, tokenizer, messages)
        assert "think>" not in view.decode(parts.before)


def test_thinking_stays_where_the_template_keeps_it() -> None:
    family = FAMILIES["smollm2"]
    tokenizer = family.tokenizer()
    view = TextTokenizer(tokenizer)
    messages = [Message("user", "q"), Message("assistant", "<think>\nhm\n</think>\n\nA."), Message("user", "r")]
    assert decoded(view, ChatFormat(view).render(messages)) == stock_text(family, tokenizer, messages)


def test_template_kwargs_reach_the_template() -> None:
    family, tokenizer = FAMILIES["qwen3"], _QWEN3
    view = TextTokenizer(tokenizer)
    think = tokenizer.convert_tokens_to_ids("<think>")
    quiet = ChatFormat(view, {"enable_thinking": False})
    assert decoded(view, quiet.render(SINGLE)) == stock_text(family, tokenizer, SINGLE, enable_thinking=False)
    assert think in quiet.render(SINGLE).after
    assert think not in ChatFormat(view).render(SINGLE).after
    with pytest.raises(ConfigError, match="tokenize"):
        ChatFormat(view, {"tokenize": True})


def test_date_is_fixed_also_when_the_template_asks_the_clock() -> None:
    template = LLAMA_31.replace("if not date_string is defined", "if true")
    family = FAMILIES["llama-3.1"]
    view = TextTokenizer(tiny_tokenizer(template, family.specials, bos_token=family.bos, add_bos=True))
    assert "Today Date: 26 Jul 2024\n" in view.decode(ChatFormat(view).prefix())


@pytest.mark.parametrize("trimming", ["", " | trim"])
@pytest.mark.parametrize("spaced", ["", " "])
def test_inst_with_and_without_space(trimming: str, spaced: str) -> None:
    template = (
        (
            "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]"
            + spaced
            + "' + m.content"
            + trimming
        )
        + " + '"
        + spaced
        + "[/INST]' }}{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
    )
    family = FAMILIES["mistral-v0.3"]
    tokenizer = tiny_tokenizer(template, family.specials, bos_token="<s>", eos_token="</s>", add_bos=True)
    view = TextTokenizer(tokenizer)
    messages = [Message("user", " a "), Message("assistant", " b "), Message("user", " c ")]
    parts = ChatFormat(view).render(messages)
    assert decoded(view, parts) == stock_text(family, tokenizer, messages)
    assert parts.before[: len(ChatFormat(view).prefix())] == ChatFormat(view).prefix()


def test_system_that_is_silently_dropped_is_folded() -> None:
    template = (
        "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}\n{% endif %}{% endfor %}"
    )
    view = TextTokenizer(tiny_tokenizer(template))
    assert decoded(view, ChatFormat(view).render(SINGLE, system="S")) == f"<user>S\n\n{SINGLE[0].content}\n"


def test_template_that_writes_two_bos_still_gives_one() -> None:
    template = "{{ bos_token }}{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    view = TextTokenizer(tiny_tokenizer(template, ("<s>", "</s>"), bos_token="<s>", add_bos=True))
    assert ChatFormat(view).prefix() == (0,)


def test_template_that_refuses_everything_says_so() -> None:
    view = TextTokenizer(tiny_tokenizer("{{ raise_exception('tools are required') }}"))
    with pytest.raises(ConfigError, match="tools are required"):
        ChatFormat(view)
    deaf = TextTokenizer(tiny_tokenizer("nothing"))
    with pytest.raises(ConfigError, match="drops part"):
        ChatFormat(deaf)


@pytest.mark.parametrize("add_bos", [True, False])
def test_without_template(add_bos: bool) -> None:
    view = TextTokenizer(tiny_tokenizer(None, ("<s>", "</s>"), bos_token="<s>", add_bos=add_bos))
    chat = ChatFormat(view)
    bos = (0,) if add_bos else ()
    assert chat.prefix() == bos
    assert chat.render(SINGLE) == PromptParts(bos, view.content(SINGLE[0].content), ())
    system = chat.render(SINGLE, system="Be brief.")
    assert view.decode(system.before) == "Be brief.\n\n"
    parts = chat.render([Message("user", "a"), Message("assistant", "b</s>"), Message("user", "c")], system="S")
    assert view.decode(parts.tokens) == "S\n\nUser: a\n\nAssistant: b</s>\n\nUser: c\n\nAssistant:"
    assert view.decode(parts.question) == "c"
    assert parts.before[: len(bos)] == bos
    assert parts.tokens.count(0) == len(bos)
    assert 1 not in parts.tokens


@pytest.mark.parametrize("text", ["", " ", "\n\t "])
def test_empty_question(text: str) -> None:
    for template in (SMOLLM2, None):
        chat = ChatFormat(TextTokenizer(tiny_tokenizer(template)))
        with pytest.raises(EmptyQuestionError):
            chat.render([Message("user", text)])


@pytest.mark.parametrize(
    "make",
    [
        lambda chat: Message("function", "x"),
        lambda chat: Message("user", b"x"),  # type: ignore[arg-type]
        lambda chat: Message("user", None),  # type: ignore[arg-type]
        lambda chat: chat.render([]),
        lambda chat: chat.render("question"),
        lambda chat: chat.render(SINGLE[0]),
        lambda chat: chat.render([{"role": "user", "content": "x"}]),
        lambda chat: chat.render([*SINGLE, Message("assistant", "x")]),
        lambda chat: chat.render([Message("system", "x")]),
        lambda chat: chat.render(SINGLE, system=3),
    ],
)
def test_wrong_arguments(make: Any) -> None:
    chat = ChatFormat(TextTokenizer(tiny_tokenizer(SMOLLM2)))
    with pytest.raises(ConfigError):
        make(chat)


def test_huge_whitespace_costs_little() -> None:
    chat = ChatFormat(TextTokenizer(tiny_tokenizer(LLAMA_31, FAMILIES["llama-3.1"].specials, bos_token="<|eot_id|>")))
    spaces = " \n" * 50_000
    assert chat.render([Message("user", f"{spaces}x{spaces}")]).question == chat.render([Message("user", "x")]).question

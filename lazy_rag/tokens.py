"""Text to token ids and back: what a user or a document says can never become a control token."""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

from lazy_rag.errors import ConfigError, ModelLoadError

# A fixed day for templates that print today's date: a prompt prefix that changes at midnight would miss every cache.
TEMPLATE_DATE = "26 Jul 2024"
_STRFTIME = {
    "%-d": "26",
    "%A": "Friday",
    "%B": "July",
    "%F": "2024-07-26",
    "%H": "00",
    "%I": "12",
    "%M": "00",
    "%S": "00",
    "%T": "00:00:00",
    "%Y": "2024",
    "%a": "Fri",
    "%b": "Jul",
    "%d": "26",
    "%e": "26",
    "%m": "07",
    "%p": "AM",
    "%y": "24",
}
# Private-use characters: no template and no trimming or case filter touches them.
_SENTINEL_USER, _SENTINEL_ASSISTANT = "\ue000u\ue001", "\ue000a\ue001"


def _dated_template(template: str) -> str:
    """`template` with `strftime_now` fixed to `TEMPLATE_DATE`.

    A macro, because recent transformers replace callables among the template arguments by a placeholder string.
    """
    if "strftime_now" not in template:
        return template
    replaces = "".join(f".replace('{directive}', '{value}')" for directive, value in _STRFTIME.items())
    # Exactly one newline follows the macro: `trim_blocks` takes it, and the template still starts at a line start.
    return "{%- macro strftime_now(format) -%}{{ format" + replaces + " }}{%- endmacro %}\n" + template


class TextTokenizer:
    """The token view of a Hugging Face tokenizer, safe to use from many threads.

    It works on private copies taken at construction: the given tokenizer is never changed, and later changes to it
    are not seen. Raises `ModelLoadError` if the tokenizer cannot be copied.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._markup_backend, self._content_backend = self._copies(tokenizer)
        added = tokenizer.added_tokens_decoder
        # Added tokens that are not flagged special (Qwen3's <think>, <tool_call>) are left out on purpose: their vendor
        # tokenises them the same way in user text, decodes them as visible text, and `split_special_tokens` keeps them
        # whole. Treating them otherwise would make our ids differ from the stock tokenizer's.
        self.special_ids: frozenset[int] = frozenset(tokenizer.all_special_ids) | {
            index for index, token in added.items() if token.special
        }
        self._special_texts = sorted(
            {str(tokenizer.convert_ids_to_tokens(index)) for index in self.special_ids}, key=len, reverse=True
        )
        self.bos_id: int | None = self._find_bos()
        self.chat_template: str | None = self._find_template()

    @staticmethod
    def _copies(tokenizer: Any) -> tuple[Any, Any]:
        """Private (markup, content) copies of the Rust tokenizer; (None, None) for a Python tokenizer.

        `split_special_tokens` and truncation are state of the one Rust object that all callers share; two copies that
        are never switched need no lock.
        """
        if not getattr(tokenizer, "is_fast", False):
            return None, None
        copies = []
        for split_special in (False, True):
            try:
                backend = copy.deepcopy(tokenizer.backend_tokenizer)
            except Exception as error:
                raise ModelLoadError(f"the tokenizer {type(tokenizer).__name__} cannot be copied: {error}") from error
            backend.no_truncation()
            backend.no_padding()
            backend.encode_special_tokens = split_special
            copies.append(backend)
        return copies[0], copies[1]

    def _find_bos(self) -> int | None:
        plain = list(self._markup_ids("x"))
        if self._markup_backend is not None:
            full = list(self._markup_backend.encode("x").ids)
        else:
            with self._lock:
                full = list(self._tokenizer("x").input_ids)
        adds_front = len(full) > len(plain) and full[0] in self.special_ids and full[:1] != plain[:1]
        return full[0] if adds_front else None

    def _find_template(self) -> str | None:
        template = getattr(self._tokenizer, "chat_template", None)
        if not template:
            return None
        if isinstance(template, Mapping):
            template = template.get("default")
            if template is None:
                raise ConfigError("the tokenizer has several chat templates and none is named 'default'; set one")
        return str(template)

    @property
    def content_backend(self) -> Any:
        """The private `tokenizers.Tokenizer` that reads special tokens as plain text; None for a Python tokenizer."""
        return self._content_backend

    @property
    def special_texts(self) -> tuple[str, ...]:
        """How the special tokens are written, longest first."""
        return tuple(self._special_texts)

    def content(self, text: str) -> tuple[int, ...]:
        """Token ids of user or document text, on its own: no special token is added, and none can come from `text`.

        The only special id that may appear is the unknown token, for a character the vocabulary cannot spell.
        Raises `ConfigError` if `text` is no string, or if the tokenizer has no other spelling than a special token.
        """
        if not isinstance(text, str):
            raise ConfigError(f"text must be a string, got {type(text).__name__}")
        return tuple(self._spell(_well_formed(text)))

    def template(self, text: str) -> tuple[int, ...]:
        """Token ids of template markup: special tokens are recognised, none is added."""
        return tuple(self._markup_ids(text))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, without the tokenizer's clean-up of spaces, which would alter earlier text in a stream."""
        kept = [int(index) for index in ids if not skip_special_tokens or int(index) not in self.special_ids]
        if self._markup_backend is not None:
            return str(self._markup_backend.decode(kept, skip_special_tokens=False))
        with self._lock:
            return str(self._tokenizer.decode(kept, clean_up_tokenization_spaces=False))

    @cached_property
    def _fingerprint(self) -> bytes:
        if self._markup_backend is not None:
            # Parsed and sorted, so that no hash-map order of the Rust side can reach the digest.
            definition = json.loads(self._markup_backend.to_str())
        else:
            definition = {"class": type(self._tokenizer).__name__, "vocab": self._tokenizer.get_vocab()}
        specials = sorted((index, str(self._tokenizer.convert_ids_to_tokens(index))) for index in self.special_ids)
        payload = json.dumps([definition, specials, self.bos_id], sort_keys=True, ensure_ascii=True)
        return hashlib.blake2b(payload.encode(), digest_size=32).digest()

    def fingerprint(self) -> bytes:
        """32-byte BLAKE2b of the tokenizer's definition, equal in every process for equal definitions."""
        return self._fingerprint

    def render_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat template's text for `messages`, with any date in it fixed to `TEMPLATE_DATE`.

        Raises `ConfigError` without a chat template, or with the template's own words if it refuses the messages.
        """
        if self.chat_template is None:
            raise ConfigError("the tokenizer has no chat template")
        kwargs = {"date_string": TEMPLATE_DATE, **(template_kwargs or {})}
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=_dated_template(self.chat_template),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **kwargs,
            )
        # Templates are foreign code: besides TemplateError they raise TypeError, KeyError and more.
        except Exception as error:
            raise ConfigError(f"the chat template refuses these messages: {type(error).__name__}: {error}") from error
        return str(rendered)

    def eos_ids(self, generation_config: Any) -> frozenset[int]:
        """Every id that ends an answer: the generation config's, the tokenizer's, and the template's end of turn.

        Llama-3 and others end a turn with a token that is not the tokenizer's EOS; missing it lets the model ramble.
        """
        configured = getattr(generation_config, "eos_token_id", None)
        ids = set(_as_ids(configured)) | set(_as_ids(self._tokenizer.eos_token_id))
        end_of_turn = self._end_of_turn()
        if end_of_turn is not None:
            ids.add(end_of_turn)
        return frozenset(ids)

    def _end_of_turn(self) -> int | None:
        if self.chat_template is None:
            return None
        messages = [
            {"role": "user", "content": _SENTINEL_USER},
            {"role": "assistant", "content": _SENTINEL_ASSISTANT},
        ]
        try:
            rendered = self.render_template(messages, add_generation_prompt=False)
        except ConfigError:
            # A template that refuses a finished turn names no end of turn; the two configured sources still hold.
            return None
        _, found, closing = rendered.partition(_SENTINEL_ASSISTANT)
        if not found:
            return None
        return next((index for index in self.template(closing) if index in self.special_ids), None)

    def _markup_ids(self, text: str) -> list[int]:
        text = _well_formed(text)
        if self._markup_backend is not None:
            return list(self._markup_backend.encode(text, add_special_tokens=False).ids)
        with self._lock:
            return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def _content_ids(self, text: str) -> tuple[list[int], list[tuple[int, int]] | None]:
        """(ids, character spans) of `text` tokenised as content; the spans are None for a Python tokenizer."""
        if self._content_backend is not None:
            encoding = self._content_backend.encode(text, add_special_tokens=False)
            return list(encoding.ids), encoding.offsets
        with self._lock:
            ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        return list(ids), None

    def _spell(self, text: str) -> list[int]:
        """Content ids of `text`, cutting it inside whatever still became a special token.

        Vocabularies that hold their special tokens as ordinary pieces (Unigram, WordLevel) ignore the splitting flag.
        """
        ids, spans = self._content_ids(text)
        if self.special_ids.isdisjoint(ids):
            return ids
        cuts: set[int] = set()
        harmless = True
        places: Sequence[tuple[int, int] | None] = spans if spans is not None else [None] * len(ids)
        for index, span in zip(ids, places, strict=True):
            if index in self.special_ids and not self._is_unknown(index, text if span is None else text[slice(*span)]):
                harmless = False
                cuts.update(self._cuts(text, span))
        if harmless:
            return ids
        if len(text) <= 1:
            raise ConfigError(f"the tokenizer can only write {text!r} as a special token; remove it from the text")
        bounds = [0, *sorted(cuts or {len(text) // 2}), len(text)]
        return [index for a, b in pairwise(bounds) for index in self._spell(text[a:b])]

    def _is_unknown(self, index: int, source: str) -> bool:
        """True when `index` only says that the vocabulary cannot spell `source`, which controls nothing."""
        tokenizer = self._tokenizer
        if index != tokenizer.unk_token_id or index in (tokenizer.bos_token_id, tokenizer.eos_token_id):
            return False
        return str(tokenizer.unk_token) not in source

    def _cuts(self, text: str, span: tuple[int, int] | None) -> set[int]:
        """Positions strictly inside `text` that break the special token found at `span`, or found by its text."""
        if span is not None:
            start, end = span
            wanted = {start + (end - start) // 2} if end - start > 1 else {start, end}
            return {cut for cut in wanted if 0 < cut < len(text)}
        wanted = set()
        for special in self._special_texts:
            at = text.find(special)
            while at >= 0 and len(special) > 1:
                wanted.add(at + len(special) // 2)
                at = text.find(special, at + 1)
        return {cut for cut in wanted if 0 < cut < len(text)}


def _as_ids(value: int | Iterable[int] | None) -> list[int]:
    if value is None:
        return []
    return [int(value)] if isinstance(value, int) else [int(index) for index in value]


def _well_formed(text: str) -> str:
    """`text` without lone surrogates, which have no UTF-8 form and which the Rust tokenizer refuses."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text

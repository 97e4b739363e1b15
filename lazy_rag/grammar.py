"""Answers that follow a grammar: a JSON schema, a regular expression or a Lark grammar, by llguidance.

Before every choice the tokens that the grammar does not allow are masked. Near the end of `max_tokens` the choice is
checked against the shortest way to a complete answer, and that way is taken when nothing longer fits: an answer ends
complete, not in the middle of an object.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lazy_rag.errors import ConfigError, EngineError, MissingExtraError
from lazy_rag.schemas import fault, plain_schema
from lazy_rag.tokens import TextTokenizer

if TYPE_CHECKING:
    from lazy_rag.sampling import SamplingParams

# a model that is undecided about layout can spend its whole budget on spaces
WHITESPACE = r"[ \n\t]{1,16}"
_KEPT = 64  # compiled grammars
# the shortest end is looked for again after so many tokens, after every one that may open or close something, and
# whenever it is so near
_CHECK_EVERY, _CHECK_WITHIN = 16, 8
# the schemas of tools' calls in a grammar of `tools.py`, with the names of the tools
_TOOLS = re.compile(r'^body\d+: %json (?=.*?"name": \{"const": ("[^"]*")\})(\{.*\})$', re.MULTILINE)
_STRUCTURE = re.compile(rb'[][{}":,]')


def library() -> Any:
    """llguidance, imported on first use."""
    try:
        import llguidance
    except ImportError as error:
        raise MissingExtraError("tools, json_schema, regex or grammar", "llguidance", "grammar") from error
    return llguidance


def grammar_text(sampling: SamplingParams) -> str | None:
    """The grammar that parameters ask for, as llguidance takes it."""
    if not sampling.constrained:
        return None
    matcher = library().LLMatcher
    try:
        if sampling.json_schema is not None:
            options = {"whitespace_pattern": WHITESPACE}
            schema = plain_schema(json.loads(str(sampling.json_schema)))
            return str(matcher.grammar_from_json_schema(json.dumps(schema), overrides=options))
        if sampling.regex is not None:
            return str(matcher.grammar_from_regex(sampling.regex))
        return str(matcher.grammar_from_lark(sampling.grammar))
    except ValueError as error:  # half a surrogate pair among them
        raise ConfigError(f"the grammar cannot be used: {error}") from error


class Compiled:
    """A grammar compiled for one tokenizer. Whoever holds one keeps it from being compiled again."""

    def __init__(self, prototype: Any) -> None:
        self.prototype = prototype


class Grammars:
    """Compiles grammars for one tokenizer, each once: the last ones are kept, and those that a request holds.
    Thread-safe.

    Args:
        vocab: width of the model's logits.
        end_ids: tokens that end an answer.
    """

    def __init__(self, tokens: TextTokenizer, vocab: int, end_ids: Iterable[int]) -> None:
        self._tokens = tokens
        self._vocab = vocab
        self._end_ids = sorted(index for index in end_ids if index < vocab)
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._closers: dict[str, Any] = {}
        self._kinds: TokenKinds | None = None
        self._compiled: OrderedDict[str, Compiled] = OrderedDict()
        self._held: WeakValueDictionary[str, Compiled] = WeakValueDictionary()

    def require(self, sampling: SamplingParams, room: int | None = None) -> Compiled | None:
        """The compiled grammar, to be held as long as the request is under way: compiling must not hold up the engine.

        Args:
            room: what the prompt leaves of the context, in tokens; `max_tokens` is at most that.

        Raises ConfigError for a grammar that cannot be compiled, or that no answer of `max_tokens` can follow.
        """
        compiled = self._compile_once(sampling)
        if compiled is None:
            return None
        constraint = self._fresh(compiled, sampling)
        if constraint.shortest(sampling.max_tokens) is not None:
            return compiled
        needed = constraint.shortest(4 * sampling.max_tokens + 64)
        tokens = "more tokens" if needed is None else f"{len(needed)} tokens"
        asked = f"what the grammar asks for takes {tokens}"
        if room == sampling.max_tokens:
            raise ConfigError(f"the prompt leaves room for {room} tokens, {asked}: shorten the prompt")
        raise ConfigError(f"max_tokens={sampling.max_tokens} is too small: {asked}")

    def constraint(self, sampling: SamplingParams) -> Constraint | None:
        """A fresh constraint for one answer; None when nothing constrains it."""
        compiled = self._compile_once(sampling)
        return None if compiled is None else self._fresh(compiled, sampling)

    def _fresh(self, compiled: Compiled, sampling: SamplingParams) -> Constraint:
        with self._lock:
            matcher = compiled.prototype.deep_copy()
        assert self._kinds is not None
        return Constraint(matcher, self._tokenizer, self._closers, self._kinds, sampling.max_tokens, self._end_ids)

    def _compile_once(self, sampling: SamplingParams) -> Compiled | None:
        text = grammar_text(sampling)
        if text is None:
            return None
        with self._lock:
            self._prepare()
            compiled = self._held.get(text)
        if compiled is None:  # without the lock: a large schema must not hold up other answers
            compiled = Compiled(self._compile(text))
        with self._lock:
            compiled = self._held.setdefault(text, compiled)  # of two threads the first
            self._compiled[text] = compiled
            self._compiled.move_to_end(text)
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return compiled

    def _prepare(self) -> None:
        """Make the tokenizer's tables, at the first grammar."""
        if self._tokenizer is not None:
            return
        backend = self._tokens.content_backend
        if backend is None:
            raise ConfigError("json_schema, regex and grammar need a fast tokenizer (a tokenizer.json)")
        if not self._end_ids:
            raise ConfigError("json_schema, regex and grammar need a token that ends an answer; the model has none")
        size = max(self._vocab, backend.get_vocab_size(with_added_tokens=True))
        self._tokenizer = library().LLTokenizer(backend.to_str(), n_vocab=size, eos_token=self._end_ids)
        self._kinds = TokenKinds(self._tokenizer, size, self._end_ids)
        singles = {text: self._tokenizer.tokenize_str(text) for text in '}]"0:,\\'}
        self._closers = {text: ids[0] if len(ids) == 1 else None for text, ids in singles.items()}

    def _compile(self, text: str) -> Any:
        llguidance = library()
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(text, self._tokenizer)
        if failed:
            raise ConfigError(f"the grammar cannot be used: {'; '.join(_faults(text)) or messages[0]}")
        return llguidance.LLMatcher(self._tokenizer, text)


def _faults(text: str) -> list[str]:
    """What is wrong with the schemas of a grammar that cannot be compiled."""
    if text.startswith("{"):
        schemas = [("", part["json_schema"]) for part in json.loads(text)["grammars"] if part.get("json_schema")]
    else:
        schemas = [(f"tool {name}, ", json.loads(found)) for name, found in _TOOLS.findall(text)]
    return [f"{of}{fault(schema, _refused)}" for of, schema in schemas if _refused(schema) is not None]


def _refused(schema: dict[str, Any]) -> str | None:
    """Why a schema cannot be used, if it cannot."""
    matcher = library().LLMatcher
    try:
        failed, messages = matcher.validate_grammar_with_warnings(matcher.grammar_from_json_schema(json.dumps(schema)))
    except ValueError as error:  # half a surrogate pair among them
        return str(error)
    return str(messages[0]) if failed else None


class TokenKinds:
    """What the search for an end asks of every token, looked up once: decoding them all again for each token of an
    answer would hold up the engine for seconds."""

    def __init__(self, tokenizer: Any, size: int, end_ids: Iterable[int]) -> None:
        texts = [tokenizer.decode_bytes([token]).decode("utf-8", "replace") for token in range(size)]
        self.lengths = np.array([len(text) for text in texts])
        self.blank = np.array([not text.strip() for text in texts])
        self.kinds = np.array([_KINDS.index(_kind(text)) for text in texts])
        self.ends = np.zeros(size, dtype=bool)
        self.ends[list(end_ids)] = True


class Constraint:
    """Where one answer stands in its grammar. Used by one thread.

    Args:
        closers: the tokens of single characters that end things in JSON.
        budget: most tokens of the answer.
    """

    def __init__(
        self,
        matcher: Any,
        tokenizer: Any,
        closers: dict[str, Any],
        kinds: TokenKinds,
        budget: int,
        end_ids: Iterable[int],
    ) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._closers = closers
        self._kinds = kinds
        self._left = budget
        self._end_ids = frozenset(end_ids)
        self._taken = 0
        self._checked = 0  # length of the shortest end when it was last looked for, and how many tokens ago
        self._since = _CHECK_EVERY

    @property
    def finished(self) -> bool:
        """True when nothing can follow."""
        return bool(self._matcher.is_stopped())

    def finished_after(self, count: int) -> bool:
        """True when nothing can follow the first `count` tokens; more may have been taken by a step launched ahead."""
        return self.finished and self._taken <= count

    def mask(self, logits: Tensor) -> Tensor:
        """float32 [vocab]: the logits with -inf where the grammar allows no token."""
        if self.finished:  # a step launched ahead, which nobody reads
            return logits
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8).to(logits.device)
        self._require_sound()
        shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
        allowed = ((bits[:, None] >> shifts) & 1).flatten()[: logits.shape[-1]].bool()
        masked = torch.full_like(logits, -torch.inf)
        masked[: len(allowed)] = torch.where(allowed, logits[: len(allowed)], -torch.inf)
        return masked

    def take(self, token: int) -> int:
        """Go on with a chosen token, or with another one when only that leads to a complete answer in time."""
        if self.finished:
            return token
        self._left -= 1
        self._taken += 1
        self._since += 1
        after = self._after(self._matcher, [token])
        if token not in self._end_ids and self._must_check(token):
            end = self._shortest(after, self._left)
            self._checked, self._since = (0 if end is None else len(end)), 0
            if end is None:
                way = self._shortest(self._matcher, self._left + 1)
                if way == []:  # complete as it stands: what would go on could not be completed
                    way = self._ending()
                if way:  # else no end is in sight, and another search would hardly find one: not after every token
                    token, after = way[0], self._after(self._matcher, way[:1])
                    self._checked = self._left  # nothing longer than this way fits: every token is looked at
        self._matcher = after
        return token

    def _must_check(self, token: int) -> bool:
        if self._since >= _CHECK_EVERY or self._left <= self._checked + _CHECK_WITHIN:
            return True
        return _STRUCTURE.search(self._tokenizer.decode_bytes([token])) is not None

    def shortest(self, limit: int) -> list[int] | None:
        """Tokens of a short complete answer, at most `limit`, from here; None if none was found."""
        return self._shortest(self._matcher, limit)

    def _ending(self) -> list[int]:
        """A token that ends the answer here."""
        return next(([token] for token in sorted(self._end_ids) if self._matcher.validate_tokens([token]) == 1), [])

    def _after(self, matcher: Any, tokens: list[int]) -> Any:
        after = matcher.deep_copy()
        if not after.consume_tokens(tokens):
            raise EngineError(f"the grammar refused token {tokens} that it had allowed: {after.get_error()}")
        return after

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            raise EngineError(f"the grammar cannot go on: {self._matcher.get_error()}")

    def _shortest(self, matcher: Any, limit: int) -> list[int] | None:
        """A short way to where the grammar is satisfied, or None when none of at most `limit` tokens was found.

        Not always the shortest one: brackets and strings are closed as soon as they may be; where that leads nowhere,
        in a run that could go on for ever, another kind of character is tried.
        """
        way = self._walk(matcher, limit, lambda there, _: self._closing(there))
        return self._walk(matcher, limit, self._changing) if way is None else way

    def _walk(self, matcher: Any, limit: int, choose: Callable[[Any, Sequence[int]], list[int]]) -> list[int] | None:
        matcher = matcher.deep_copy()
        way: list[int] = []
        while not matcher.is_accepting():
            step = matcher.compute_ff_tokens() or choose(matcher, way)
            if not step or len(way) + len(step) > limit or not matcher.consume_tokens(step):
                return None
            way += step
        return way

    def _closing(self, matcher: Any) -> list[int]:
        """One token that brings the answer nearer to its end."""

        def allowed(text: str) -> bool:
            token = self._closers[text]
            return token is not None and matcher.validate_tokens([token]) == 1

        # Only in the middle of a string may a backslash stand; brackets would be part of it there. A zero comes last:
        # it begins a number, but where a comma may stand it would only make one longer.
        for text in '"0,:' if allowed("\\") else '}]":,0':
            if allowed(text):
                return [self._closers[text]]
        tokens = self._allowed(matcher)
        worth = tokens[~self._kinds.blank[tokens]]
        worth = worth if len(worth) else tokens
        return self._accepting(matcher, worth[np.argsort(self._kinds.lengths[worth], kind="stable")][:64].tolist())

    def _changing(self, matcher: Any, way: Sequence[int]) -> list[int]:
        """One token of the kind that `way` has least of: after a run of digits or letters comes what may end it."""
        tokens = self._allowed(matcher)
        tokens = tokens[~self._kinds.ends[tokens]]
        kinds = self._kinds.kinds[tokens]
        seen = np.bincount(self._kinds.kinds[list(way)], minlength=len(_KINDS)) if way else np.zeros(len(_KINDS))
        # from the last key to the first
        order = np.lexsort((self._kinds.lengths[tokens], np.isin(tokens, list(way)), kinds, seen[kinds]))
        return self._accepting(matcher, tokens[order][:96].tolist())

    def _allowed(self, matcher: Any) -> NDArray[np.intp]:
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        return np.flatnonzero(np.unpackbits(bits, bitorder="little")[: len(self._kinds.kinds)])

    def _accepting(self, matcher: Any, tokens: list[int]) -> list[int]:
        """The first of the tokens after which the grammar is satisfied, else the first."""
        for token in tokens:
            after = matcher.deep_copy()
            if after.consume_token(token) and after.is_accepting():
                return [token]
        return tokens[:1]


# of characters; what ends a run comes before what goes on with it
_KINDS = ("other", "space", "digit", "upper", "lower")


def _kind(text: str) -> str:
    """The kind of a text's last character."""
    last = text[-1:]
    if last.isdigit():
        return "digit"
    if last.isspace():
        return "space"
    return ("upper" if last.isupper() else "lower") if last.isalpha() else "other"

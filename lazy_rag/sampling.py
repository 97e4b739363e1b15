"""Choosing the next token, and turning tokens into text as they come."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lazy_rag.arguments import is_finite
from lazy_rag.errors import ConfigError, EngineError
from lazy_rag.grammar import Constraint
from lazy_rag.schemas import schema_text

# Below this temperature the scaled logits overflow float32, and the distribution is one-hot anyway.
_GREEDY_TEMPERATURE = 1e-5
_REPLACEMENT = "\ufffd"


MOST_SAMPLES = 128  # of one request; each is a request of its own to the engine


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. `None` takes the model's own default, see `resolve`.

    max_tokens:         most tokens to generate, at least 1
    temperature:        0 is greedy: the most likely token, the lowest id on ties
    top_k:              keep the k most likely tokens; 0 keeps all, 1 is greedy
    top_p:              keep the smallest set of tokens with at least this probability, in (0, 1]
    min_p:              drop tokens below this share of the most likely token's probability, in [0, 1]
    repetition_penalty: above 1 discourages tokens of the prompt and the answer so far; greater than 0
    seed:               same seed, same draws, whatever else runs in the batch; None draws afresh each time
    stop:               strings that end the answer and are not part of it
    ignore_eos:         keep generating past end-of-text tokens
    n:                  samples of one prompt, at least 1; they share its KV. Sample i draws from seed + i
    logprobs:           report each token's log probability under the unprocessed distribution
    json_schema:        the answer is JSON of this schema (a mapping or its text); see `Answer.json`
    regex:              the answer matches this regular expression
    grammar:            the answer follows this grammar, in llguidance's Lark dialect

    At most one of the last three is given; they need llguidance (the extra `grammar`).

    Raises `ConfigError`, with the value and the allowed range, for anything else.
    """

    max_tokens: int = 256
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    n: int = 1
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, 1, None)
        _check_float("temperature", self.temperature, "at least 0", lambda value: value >= 0)
        _check_int("top_k", self.top_k, 0, None, optional=True)
        _check_float("top_p", self.top_p, "in (0, 1]", lambda value: 0 < value <= 1)
        _check_float("min_p", self.min_p, "in [0, 1]", lambda value: 0 <= value <= 1)
        _check_float("repetition_penalty", self.repetition_penalty, "greater than 0", lambda value: value > 0)
        _check_int("n", self.n, 1, MOST_SAMPLES)
        _check_int("seed", self.seed, 0, 2**63 - 1, optional=True)
        for name in ("ignore_eos", "logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        self._check_grammar()

    def _check_grammar(self) -> None:
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", schema_text(self.json_schema))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"{name} must be a text, got {value!r}")
        given = [name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} cannot both hold: give one of them")
        if given and self.ignore_eos:
            raise ConfigError(f"ignore_eos goes on past the end that {given[0]} sets: leave one of them out")

    @property
    def constrained(self) -> bool:
        """True when the answer has to follow a grammar."""
        return not (self.json_schema is None and self.regex is None and self.grammar is None)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as the tuple it is stored as, whatever form it was given in."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def greedy(self) -> bool:
        """True when the choice is the most likely token. Meaningful on resolved parameters."""
        return self.top_k == 1 or (self.temperature is not None and self.temperature < _GREEDY_TEMPERATURE)

    def resolve(self, generation_config: Any = None) -> SamplingParams:
        """These parameters with every sampling default filled in from the model's generation config.

        With no temperature given, a model whose `do_sample` is not true is greedy. What neither side states is
        neutral: temperature 1, no top-k, top-p 1, min-p 0, penalty 1. Raises `ConfigError` if the config's own value
        is out of range.
        """

        def default(name: str, neutral: float) -> Any:
            value = getattr(generation_config, name, None)
            return neutral if value is None else value

        temperature = self.temperature
        if temperature is None:
            sampled = bool(getattr(generation_config, "do_sample", None))
            temperature = default("temperature", 1.0) if sampled else 0.0
        penalty = self.repetition_penalty
        return replace(
            self,
            temperature=temperature,
            top_k=default("top_k", 0) if self.top_k is None else self.top_k,
            top_p=default("top_p", 1.0) if self.top_p is None else self.top_p,
            min_p=default("min_p", 0.0) if self.min_p is None else self.min_p,
            repetition_penalty=default("repetition_penalty", 1.0) if penalty is None else penalty,
        )


def _check_int(name: str, value: Any, low: int, high: int | None, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    allowed = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):
        raise ConfigError(f"{name} must be {allowed}{' or None' if optional else ''}, got {value!r}")


def _check_float(name: str, value: Any, allowed: str, holds: Callable[[float], bool]) -> None:
    if value is None:
        return
    if not is_finite(value) or not holds(value):
        raise ConfigError(f"{name} must be a finite number {allowed} or None, got {value!r}")


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, (tuple, list)):
        raise ConfigError(f"stop must be a string or a list of strings, got {stop!r}")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ConfigError(f"stop must hold strings that are not empty, got {string!r}")
    return tuple(strings)


class _TokenBuffer:
    """The ids seen so far, int64 [1, capacity] on the device, doubled when full: appending copies one number."""

    def __init__(self, ids: Sequence[int], device: torch.device) -> None:
        self._size = len(ids)
        self._ids = torch.zeros(1, max(64, 2 * len(ids)), dtype=torch.int64, device=device)
        if self._size:
            self._ids[0, : self._size] = torch.as_tensor(ids, dtype=torch.int64, device=device)

    @property
    def ids(self) -> torch.Tensor:
        """int64 [1, n]"""
        return self._ids[:, : self._size]

    def append(self, index: torch.Tensor) -> None:
        """Add one id, int64 [1]."""
        if self._size == self._ids.shape[1]:
            self._ids = torch.cat((self._ids, torch.zeros_like(self._ids)), dim=1)
        self._ids[:, self._size] = index
        self._size += 1


class Sampler:
    """Chooses the tokens of one request.

    `params` must be resolved; `prompt_ids` is asked only where a penalty needs them; `constraint` is its grammar, whose
    mask depends on every token before, so that each `draw` waits for the device. The draws come from this request's
    own generator, so they do not depend on what else runs in the batch.
    """

    def __init__(
        self,
        params: SamplingParams,
        device: torch.device | str,
        prompt_ids: Callable[[], Sequence[int]] = tuple,
        constraint: Constraint | None = None,
    ) -> None:
        device = torch.device(device)
        self._constraint = constraint
        self._logprobs = params.logprobs
        self._greedy = params.greedy
        self._processors = _processors(params)
        self._generator: torch.Generator | None = None
        if not self._greedy:
            self._generator = torch.Generator(device=device)
            if params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(params.seed)
        penalised = params.repetition_penalty not in (None, 1.0)
        self._seen = _TokenBuffer(prompt_ids(), device) if penalised else None

    @property
    def plain(self) -> bool:
        """True when the choice is the most likely token and nothing else is asked for: no `draw` is needed."""
        return self._greedy and not self._processors and not self._logprobs and self._constraint is None

    def finished_after(self, count: int) -> bool:
        """True when the grammar lets nothing follow the first `count` tokens."""
        return self._constraint is not None and self._constraint.finished_after(count)

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose the next token without reading the device: float64 [3] of token, largest logit and log probability
        (under the unprocessed distribution; nan if not asked for). For `read`.

        logits: float [vocab], on the sampler's device; not modified.
        """
        if logits.dim() != 1:
            raise EngineError(f"sampling needs logits of shape [vocab], got {tuple(logits.shape)}")
        logits = logits.float()
        # before top-k and top-p, which might leave nothing that the grammar allows
        scores = logits if self._constraint is None else self._constraint.mask(logits)
        if self._processors:
            history: Any = self._seen.ids if self._seen is not None else logits.new_zeros(1, 0, dtype=torch.int64)
            scores = self._processors(history, scores[None])[0]
        if self._generator is not None:
            scores = self._race(scores)
        index = scores.argmax(dim=-1, keepdim=True)
        if self._constraint is not None:
            index = torch.full_like(index, self._constraint.take(int(index)))
        if self._seen is not None:
            self._seen.append(index)
        # NaN and +inf both win a maximum, so one value tells whether the whole row is sound.
        top = logits.gather(-1, index) if scores is logits else logits.amax(dim=-1, keepdim=True)
        if self._logprobs:
            logprob = torch.log_softmax(logits, dim=-1).gather(-1, index).double()
        else:
            logprob = top.new_full((1,), math.nan, dtype=torch.float64)
        return torch.cat((index.double(), top.double(), logprob))

    def read(self, drawn: Sequence[float]) -> tuple[int, float | None]:
        """The token and, if asked for, its log probability, from what `draw` gave, on the host.

        Raises `EngineError` if the logits held NaN or +inf, or nothing but -inf (which alone masks a token).
        """
        token, peak, logprob = drawn
        if not math.isfinite(peak):
            raise EngineError(f"the model returned unusable logits (their maximum is {peak})")
        return int(token), logprob if self._logprobs else None

    def sample(self, logits: torch.Tensor) -> tuple[int, float | None]:
        """`draw` and `read`."""
        return self.read(self.draw(logits).tolist())

    def _race(self, scores: torch.Tensor) -> torch.Tensor:
        """float32 [vocab] whose argmax is a draw from softmax(scores): probabilities over exponential variates.

        Unlike `torch.multinomial` this never asserts on the device, which would take the whole process down.
        """
        probabilities = torch.softmax(scores, dim=-1)
        times = torch.empty_like(probabilities).exponential_(generator=self._generator)
        # A variate of 0 would make 0 / 0 of a token that top-k or top-p removed.
        return probabilities / times.clamp_min_(torch.finfo(torch.float32).tiny)


def _processors(params: SamplingParams) -> LogitsProcessorList:
    """The processors that `generate` would use, in its order, leaving out those that change nothing."""
    processors = LogitsProcessorList()
    if params.repetition_penalty not in (None, 1.0):
        processors.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty or 1.0)))
    if params.greedy:
        return processors
    if params.temperature not in (None, 1.0):
        processors.append(TemperatureLogitsWarper(float(params.temperature or 1.0)))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p is not None and params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors


class TextStream:
    """Turns tokens into text as they arrive, holding back half characters and beginnings of stop strings.

    decode: ids to text, special tokens already skipped. Only a short window is decoded at each token: the tokens of
    the last step as context (a sentencepiece word shows its space only behind another token) and the pending ones.
    """

    # Pending tokens after which an unfinished character is taken for broken bytes; a character has at most 4.
    _MAX_PENDING = 32

    def __init__(self, decode: Callable[[list[int]], str], stop: tuple[str, ...] = ()) -> None:
        self._decode = decode
        self._stop = stop
        self._longest_stop = max(map(len, stop), default=0)
        self._window: list[int] = []  # context tokens, then pending ones
        self._context = 0  # how many tokens of the window are context
        self._shown = 0  # how many characters of the window's text have left it
        self._held = ""  # may still become a stop string
        self._parts: list[str] = []
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """True once a stop string was found; it and all that follows is never emitted."""
        return self._stopped

    @property
    def text(self) -> str:
        """Everything emitted so far."""
        return "".join(self._parts)

    def push(self, token_id: int) -> str:
        """Add one token; returns the new text that is certain, which may be empty."""
        if self._stopped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        # A decoder shows an unfinished character as replacement characters at the end.
        new = text.rstrip(_REPLACEMENT)[self._shown :]
        self._shown += len(new)
        if not text.endswith(_REPLACEMENT):
            if new or not self._context:
                self._slide()
            else:
                # A token without text behind visible context; keeping a long run of them would cost its square.
                del self._window[self._context :]
        elif len(self._window) - self._context > self._MAX_PENDING:
            new += self._give_up(text)
        return self._emit(new, last=False)

    def finish(self) -> str:
        """The rest of the text, with replacement characters for a character cut off by the end."""
        if self._stopped:
            return ""
        rest = self._decode(self._window)[self._shown :] if self._window else ""
        self._window, self._context, self._shown = [], 0, 0
        return self._emit(rest, last=True)

    def _slide(self) -> None:
        """Make the pending tokens the context of the next ones."""
        context = self._window[self._context :]
        text = self._decode(context)
        # Context without visible text would not keep the space of the next word.
        if text:
            self._window, self._context, self._shown = context, len(context), len(text)

    def _give_up(self, text: str) -> str:
        """Let go of broken bytes at a place where decoding the two sides apart gives the same text."""
        for cut in range(len(self._window) - 1, len(self._window) - 5, -1):
            head = self._decode(self._window[:cut])
            if head + self._decode(self._window[cut:]) == text:
                new = head[self._shown :]
                self._window, self._context, self._shown = self._window[cut:], 0, 0
                return new
        return ""

    def _emit(self, new: str, last: bool) -> str:
        text = self._held + new
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            # The stop string that is complete first, as if the text came one character at a time.
            text = text[: min(found)[1]]
            self._stopped, self._held = True, ""
        elif not last:
            keep = self._possible_stop(text)
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        else:
            self._held = ""
        if text:
            self._parts.append(text)
        return text

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(len(text), self._longest_stop - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0

"""Putting a runtime's parts together: the constructor's arguments become a model, a key space, a pool and an engine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lazy_rag_kernels import IMPLS, KernelError, require

from lazy_rag.arena import HostArena
from lazy_rag.arguments import check_namespace, known_seconds
from lazy_rag.assembly import Assembler
from lazy_rag.cache import ChunkCache
from lazy_rag.chunking import Chunker
from lazy_rag.conversation import Conversations
from lazy_rag.engine import Engine
from lazy_rag.errors import ConfigError, LazyRAGError
from lazy_rag.grammar import Grammars
from lazy_rag.keys import KeySpace, config_fingerprint, weights_fingerprint
from lazy_rag.layout import Chunk
from lazy_rag.model import LanguageModel
from lazy_rag.policy import EvictionPolicy, make_policy
from lazy_rag.pool import PageLayout, PagePool
from lazy_rag.prompt import ChatFormat
from lazy_rag.records import KVRecords
from lazy_rag.tiers import Tiers
from lazy_rag.tokens import TextTokenizer
from lazy_rag.transfers import Transfers

_HOST_CACHE_BYTES = 4 << 30  # most memory taken for pages on a machine without a GPU unless asked for


@dataclass(frozen=True)
class Settings:
    """The constructor's arguments that shape chunks and pages, checked."""

    device: torch.device
    dtype: torch.dtype
    prefix: str
    separator: str
    namespace: str
    max_context: int | None
    cache_bytes: int | None
    host_bytes: int | None
    encode_tokens: int
    page_size: int
    impl: str
    max_queue: int | None
    compile: bool
    ttl: float | None
    quotas: Mapping[str, int]

    @classmethod
    def of(
        cls,
        *,
        device: str | torch.device | None,
        dtype: torch.dtype | str | None,
        impl: str | None,
        **rest: Any,
    ) -> Settings:
        try:
            where = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
        except (RuntimeError, TypeError) as error:
            raise ConfigError(f'device={device!r} is not a device such as "cpu" or "cuda:0"') from error
        on_gpu = where.type == "cuda"
        default = torch.bfloat16 if on_gpu else torch.float32
        kind = default if dtype is None else getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
        if kind not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise ConfigError(f"dtype={dtype!r} is not a floating-point type: use float16, bfloat16 or float32")
        for name in ("encode_tokens", "page_size", "max_context", "cache_bytes", "host_bytes", "max_queue"):
            value = rest[name]
            optional = name in ("max_context", "cache_bytes", "host_bytes", "max_queue")
            if value is None and optional:
                continue
            least = 2 if name == "encode_tokens" else 1  # a step holds a decoding request and something else
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}")
        for name in ("prefix", "separator", "namespace"):
            if not isinstance(rest[name], str):
                raise ConfigError(f"{name}={rest[name]!r} must be a string")
        if rest["host_bytes"] is not None and not on_gpu:
            raise ConfigError(
                "host_bytes is the tier below a GPU's memory; on this device the pages lie in host memory already: "
                "raise cache_bytes instead, and give a store for a tier on disk"
            )
        rest["ttl"] = known_seconds("ttl", rest["ttl"])
        rest["quotas"] = _known_quotas(rest["quotas"])
        if not isinstance(rest["compile"], bool):
            raise ConfigError(f"compile={rest['compile']!r} must be True or False")
        chosen = impl or ("triton" if on_gpu else "reference")
        if chosen not in IMPLS:
            raise ConfigError(f"impl={impl!r} is not one of {', '.join(map(repr, IMPLS))}")
        return cls(device=where, dtype=kind, impl=chosen, **rest)


def _known_quotas(quotas: Any) -> dict[str, int]:
    if quotas is None:
        return {}
    if not isinstance(quotas, Mapping):
        raise ConfigError(f"quotas={quotas!r} must be a mapping of namespaces to bytes")
    for name, size in quotas.items():
        check_namespace(name)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"quotas: {size!r} for namespace {name!r} must be a positive whole number of bytes")
    return dict(quotas)


@dataclass(frozen=True)
class Parts:
    """What a runtime is made of, besides its retriever."""

    model: LanguageModel
    tokens: TextTokenizer
    keys: KeySpace
    prefix_keys: KeySpace  # of encode prefixes
    chunker: Chunker
    assembler: Assembler
    conversations: Conversations
    engine: Engine
    grammars: Grammars
    prefix: Chunk | None
    records: KVRecords | None
    layout: str
    max_context: int


def build(model: Any, tokenizer: Any, settings: Settings, *, policy: str | EvictionPolicy, store: Path | None) -> Parts:
    """Examine the model, key it, size the pool, and make the engine (not yet started)."""
    language_model = LanguageModel(model)
    try:
        return _build(language_model, tokenizer, settings, policy, store)
    except BaseException:
        language_model.release()
        raise


def _build(
    model: LanguageModel, tokenizer: Any, settings: Settings, policy: str | EvictionPolicy, store: Path | None
) -> Parts:
    tokens = TextTokenizer(tokenizer)
    chat = ChatFormat(tokens)
    prefix_ids = _prefix_tokens(settings.prefix, tokens, chat)
    max_context = settings.max_context or model.max_positions
    if max_context > model.max_positions:
        raise ConfigError(f"max_context={max_context} is more than the model's {model.max_positions} positions")
    if len(prefix_ids) >= max_context:
        raise ConfigError(f"the encode prefix has {len(prefix_ids)} tokens, the context only {max_context}")
    try:
        require(settings.impl, model.device)
    except KernelError as error:
        raise ConfigError(str(error)) from error
    layout = PageLayout(model.kv_shapes, settings.page_size)
    fields = key_fields(model, tokens, f"{layout.describe()} {model.dtype}")
    prefix_keys = KeySpace({**fields, "prefix": ""})
    prefix = Chunk(prefix_keys.chunk_id("", prefix_ids), prefix_ids, 0) if prefix_ids else None
    keys = KeySpace({**fields, "prefix": prefix.id if prefix else ""})
    records = None if store is None else KVRecords(store, fields["layout"], keys.id, ttl=settings.ttl)
    count = _cache_bytes(settings) // (layout.elements * model.dtype.itemsize)
    try:
        pool = PagePool(layout, count, dtype=model.dtype, device=model.device)
    except (RuntimeError, OverflowError, TypeError) as error:
        if isinstance(error, LazyRAGError):
            raise
        raise ConfigError(f"cache_bytes: a budget of {count} pages cannot be had from this machine: {error}") from error
    if settings.compile:
        model.compile()
    end_ids = tokens.eos_ids(model.model.generation_config)
    grammars = Grammars(tokens, model.config.vocab_size, end_ids)
    cache = ChunkCache(pool, make_policy(policy), quotas=_page_quotas(settings, pool), ttl=settings.ttl)
    transfers = Transfers(pool)
    arena = None
    if settings.host_bytes is not None:
        arena = HostArena(pool, settings.host_bytes // pool.page_bytes, transfers)
    tiers = Tiers(
        pool, cache.rates, transfers, records=records, arena=arena, clock=lambda: cache.clock(), ttl=settings.ttl
    )
    if tiers.exist:
        cache.on_evict = tiers.keep
    engine = Engine(
        model,
        cache,
        prefix=prefix,
        encode_tokens=settings.encode_tokens,
        impl=settings.impl,
        decode=tokens.decode,
        end_ids=end_ids,
        tiers=tiers,
        max_queue=settings.max_queue,
        constraint=grammars.constraint,
    )
    base = len(prefix_ids)
    return Parts(
        model=model,
        tokens=tokens,
        keys=keys,
        prefix_keys=prefix_keys,
        chunker=Chunker(tokens, keys, separator=settings.separator, base=base, max_tokens=max_context - base),
        assembler=Assembler(tokens, chat, prefix=prefix, page_size=settings.page_size, max_context=max_context),
        conversations=Conversations(tokens, chat, prefix=prefix, page_size=settings.page_size, max_context=max_context),
        engine=engine,
        grammars=grammars,
        prefix=prefix,
        records=records,
        layout=fields["layout"],
        max_context=max_context,
    )


def _prefix_tokens(prefix: str, tokens: TextTokenizer, chat: ChatFormat) -> tuple[int, ...]:
    """The encode prefix: the template's opening, nothing, or a given text (markup allowed: it is the developer's)."""
    if prefix == "none":
        return ()
    if prefix == "shared":
        return chat.prefix()
    ids = tokens.template(prefix)
    if tokens.bos_id is not None and ids[:1] != (tokens.bos_id,):
        ids = (tokens.bos_id, *ids)
    return ids


def key_fields(model: LanguageModel, tokens: TextTokenizer, layout: str) -> dict[str, str]:
    """Everything the KV of a chunk depends on, besides the prefix, the namespace and the tokens (design: keys)."""
    config = model.config.to_dict()
    quantisation = config.pop("quantization_config", None)
    return {
        "weights": weights_fingerprint(model.model),
        "config": config_fingerprint(config),
        "quantisation": str(quantisation),
        "adapter": _adapter_text(model.model),
        "tokenizer": tokens.fingerprint().hex(),
        "rope": model.rope.describe(),
        "layout": layout,
    }


def _adapter_text(model: Any) -> str:
    """The adapters' settings and which of them are active, in a form that no process, path or set order changes.

    Their weights are among the model's.
    """
    configs = getattr(model, "peft_config", None)
    if not configs:
        return ""

    def plain(value: Any) -> Any:
        if isinstance(value, set | frozenset):
            return sorted(map(str, value))
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items() if "path" not in str(key)}
        return value if isinstance(value, int | float | str | bool | list | tuple | None) else str(value)

    settings = {name: plain(config.to_dict()) for name, config in configs.items()}
    return json.dumps([settings, sorted(model.active_adapters())], sort_keys=True, default=str)


def _cache_bytes(settings: Settings) -> int:
    if settings.cache_bytes is not None:
        return settings.cache_bytes
    if settings.device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(settings.device)
        return int(free * 0.8)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(memory // 4, _HOST_CACHE_BYTES)


def _page_quotas(settings: Settings, pool: PagePool) -> dict[str, int]:
    quotas = {name: size // pool.page_bytes for name, size in settings.quotas.items()}
    for name, count in quotas.items():
        if count < 1:
            raise ConfigError(
                f"quotas: {settings.quotas[name]} bytes for namespace {name!r} hold no page, which takes "
                f"{pool.page_bytes}: raise it"
            )
    return quotas

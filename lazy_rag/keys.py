"""Content keys: what a chunk's KV depends on, hashed so that nothing stale can ever be found again.

Every field is tagged and length-prefixed, so no two different sets of fields can give the same bytes (an adapter name
never collides with a namespace). Nothing process-dependent enters: no `hash()`, no object ids, no paths.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NewType

import torch
from torch import Tensor

from lazy_rag.catalog import check_namespace

SCHEMA_VERSION = 1
ChunkId = NewType("ChunkId", str)  # 40 hex digits

_DIGEST_BYTES = 20


class FieldHash:
    """BLAKE2b over tagged, length-prefixed fields."""

    def __init__(self) -> None:
        self._state = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def add(self, tag: str, value: bytes | str) -> FieldHash:
        raw = value.encode() if isinstance(value, str) else value
        for part in (tag.encode(), raw):
            self._state.update(len(part).to_bytes(8, "little"))
            self._state.update(part)
        return self

    def copy(self) -> FieldHash:
        twin = FieldHash()
        twin._state = self._state.copy()
        return twin

    def hex(self) -> str:
        return self._state.hexdigest()


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    packed = array("i", token_ids)
    assert packed.itemsize == 4
    return packed.tobytes()


class KeySpace:
    """Makes the ids of chunks that share a model, a page layout and an encode prefix.

    Args:
        fields: everything besides namespace and token ids that the KV of a chunk depends on.
    """

    def __init__(self, fields: Mapping[str, str]) -> None:
        base = FieldHash().add("schema", str(SCHEMA_VERSION))
        for tag in sorted(fields):
            base.add(tag, fields[tag])
        self._base = base

    @property
    def id(self) -> str:
        """Identity of the whole space; a store made under another one is not compatible."""
        return self._base.hex()

    def chunk_id(self, namespace: str, token_ids: Sequence[int]) -> ChunkId:
        """Raises ConfigError when the namespace is no text."""
        check_namespace(namespace)
        return ChunkId(self._base.copy().add("namespace", namespace).add("tokens", token_bytes(token_ids)).hex())


def checksum(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The raw bytes of a tensor of any dtype, on the host, without copying where it already lies there."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def weights_fingerprint(model: torch.nn.Module) -> str:
    """Content hash of every parameter and persistent buffer (names, shapes, dtypes, bytes), adapters included."""
    state = dict(sorted(model.state_dict().items()))

    def one(name: str) -> str:
        value = state[name]
        return f"{name} {tuple(value.shape)} {value.dtype} {checksum(tensor_bytes(value))}"

    # hashlib releases the interpreter lock on large buffers, so tensors hash in parallel
    with ThreadPoolExecutor() as pool:
        lines = list(pool.map(one, state))
    return FieldHash().add("weights", "\n".join(lines)).hex()


def config_fingerprint(config: Mapping[str, object]) -> str:
    """Hash of a model configuration without the fields that say only where it came from or how it is run."""
    volatile = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"}
    kept = {key: value for key, value in config.items() if key not in volatile and not key.startswith("_attn")}
    return FieldHash().add("config", json.dumps(kept, sort_keys=True, default=str)).hex()

"""Content keys: what a chunk's KV depends on, hashed so that nothing stale can ever be found again.

Every field is tagged and length-prefixed, so no two different sets of fields can give the same bytes (an adapter name
never collides with a namespace). Nothing process-dependent enters: no `hash()`, no object ids, no paths.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import NewType

import torch
from torch import Tensor

from lazy_rag.arguments import check_namespace

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
        self.fields = dict(fields)
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
    """Content hash of every parameter and persistent buffer (names, shapes, dtypes, bytes), adapters included.

    Tensors are digested where they lie, so the weights of a GPU never cross to the host; the result is the same on
    every device.
    """
    state = sorted(model.state_dict().items())
    tables: dict[torch.device, tuple[Tensor, Tensor]] = {}
    digests = []
    for _, value in state:
        if value.device not in tables:
            tables[value.device] = _digest_tables(value.device)
        digests.append(_digest(value.detach(), *tables[value.device]))
    fingerprint = FieldHash()
    for (name, value), sums in zip(state, digests, strict=True):
        fingerprint.add("weight", f"{name} {tuple(value.shape)} {value.dtype} {checksum(tensor_bytes(sums))}")
    return fingerprint.hex()


# words of 8 bytes digested into one pair of sums, and blocks digested at once on a GPU
_BLOCK_WORDS = 1 << 18
_BLOCKS_AT_ONCE = 64


def _mix(words: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele et al., 2014) in place: every bit of a word depends on all of its bits."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        words ^= words >> shift
        words *= factor
    words ^= words >> 31
    return words


def _digest_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Two int64 [_BLOCK_WORDS]: what a word is combined with before it is mixed, by place, and odd factors after."""
    places = torch.arange(1, 2 * _BLOCK_WORDS + 1, device=device) * -0x61C8864680B583EB
    before, after = _mix(places).split(_BLOCK_WORDS)
    return before, after | 1


def _digest(tensor: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Two 64-bit sums per block of a tensor's bytes, int64 [blocks, 2], in integer arithmetic: order of summing, device
    and number of threads do not matter. No secret is kept by it; it tells models apart."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:  # a slice of another tensor need not begin at a word
        raw = raw.clone()
    whole = raw.numel() // (8 * _BLOCK_WORDS)
    last = raw[whole * 8 * _BLOCK_WORDS :]
    tail = torch.zeros(-(-last.numel() // 8) * 8, dtype=torch.uint8, device=tensor.device)
    tail[: last.numel()] = last
    pieces = [tail.view(torch.int64)[None]]
    if whole:
        blocks = raw[: whole * 8 * _BLOCK_WORDS].view(torch.int64).view(whole, _BLOCK_WORDS)
        pieces = [*blocks.split(_BLOCKS_AT_ONCE if tensor.is_cuda else 1), *pieces]
    sums = []
    for piece in pieces:
        length = piece.shape[1]
        mixed = _mix(piece ^ before[:length])
        sums.append(torch.stack([mixed.sum(1), mixed.mul_(after[:length]).sum(1)], dim=1))
    return torch.cat(sums)


def config_fingerprint(config: Mapping[str, object]) -> str:
    """Hash of a model configuration without the fields that say only where it came from or how it is run."""
    volatile = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"}
    kept = {key: value for key, value in config.items() if key not in volatile and not key.startswith("_attn")}
    return FieldHash().add("config", json.dumps(kept, sort_keys=True, default=str)).hex()

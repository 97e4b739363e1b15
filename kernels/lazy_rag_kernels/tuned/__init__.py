"""What was measured to be fast, one small file per GPU: `nvidia_h200.json` for a device named "NVIDIA H200".

A GPU without a file gets `default.json`. Fields:

    tiles           keys of a block, warps and pipeline stages of the partial kernel, by rows of a tile (`tile_shape`)
    cublaslt_rows   [least, most] rows of a step whose matrix products go through cuBLASLt rather than cuBLAS
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any, NamedTuple


class Blocks(NamedTuple):
    keys: int
    warps: int
    stages: int


class Tuning(NamedTuple):
    tiles: dict[str, Blocks]
    cublaslt_rows: range


@cache
def tuning(device_name: str) -> Tuning:
    """Of a device as `torch.cuda.get_device_name` calls it."""
    folder = resources.files(__name__)
    own = folder / f"{device_name.lower().replace(' ', '_')}.json"
    found: dict[str, Any] = json.loads((own if own.is_file() else folder / "default.json").read_text("utf-8"))
    rows = found["cublaslt_rows"]
    return Tuning(
        tiles={name: Blocks(*blocks) for name, blocks in found["tiles"].items()},
        cublaslt_rows=range(rows[0], rows[1] + 1) if rows else range(0),
    )

"""Files of tuned configurations: whole, and a default for GPUs nobody has measured."""

from __future__ import annotations

from importlib import resources

import pytest

pytest.importorskip("triton")

from lazy_rag_kernels.triton_schedule import DeviceLimits, HeadShape, tile_shape
from lazy_rag_kernels.tuned import tuning

FILES = [f.name for f in resources.files("lazy_rag_kernels.tuned").iterdir() if f.name.endswith(".json")]


@pytest.mark.parametrize("name", [file.removesuffix(".json") for file in FILES])
def test_every_file_serves_every_shape(name: str) -> None:
    limits = DeviceLimits(132, 227 << 10, True, name.replace("_", " ").upper())
    for group in (1, 2, 4, 7, 8, 16, 71, 128):
        for dim in (64, 80, 96, 112, 128, 192, 256):
            for itemsize in (2, 4):
                for rows in (1, 2, 16, 64, 512):
                    tile = tile_shape(
                        1, rows, HeadShape(group, 2, dim, dim, itemsize), limits, short_segments=rows == 1
                    )
                    assert tile.rows >= 1 and tile.block_m >= group and tile.num_stages >= 1
    assert tuning(limits.name).tiles.keys() == tuning("no such GPU").tiles.keys()


def test_an_unknown_gpu_gets_the_default_and_a_known_one_its_own() -> None:
    assert "nvidia_h200.json" in FILES
    assert tuning("NVIDIA H200").cublaslt_rows == range(16, 65)
    assert len(tuning("Some GPU 9000").cublaslt_rows) == 0

"""Set-up shared by all tests: Triton's interpreter where there is no GPU, and poisoned uninitialised memory."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

# several workers share the cores; the variable is for processes that tests start
threads = max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
os.environ.setdefault("OMP_NUM_THREADS", str(threads))
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# read when huggingface_hub is imported: no test may wait for a network
os.environ["HF_HUB_OFFLINE"] = "1"
if not torch.cuda.is_available():
    # read when a kernel is decorated, so it must stand before any import of the kernels
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "stress" not in config.getoption("-m"):
        for item in items:
            if item.get_closest_marker("stress"):
                item.add_marker(pytest.mark.skip(reason="takes minutes: make stress"))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture
def poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill uninitialised float tensors with NaN, so that an output nobody wrote fails its test."""

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: object, **kwargs: object) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return call

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))

"""A short run of `tests/churn.py`; `make stress` runs it for minutes."""

from __future__ import annotations

import pytest

from tests.churn import churn


@pytest.mark.parametrize("seed", [1, 2])
def test_every_answer_is_that_of_a_fresh_runtime(seed: int) -> None:
    counts = churn(seed, steps=110)
    assert counts["compared"] > 40
    assert min(counts[name] for name in ("evictions", "text found", "reopen", "delete", "save", "look_after")) > 0

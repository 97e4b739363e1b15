"""Progress bars: `tqdm.auto`, without the warning that it gives on import in a kernel that has no ipywidgets.

In a notebook this module is imported before any library that imports `tqdm.auto` too (`lazy_rag/__init__.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tqdm.auto import tqdm


def progress_bar(total: int, description: str, unit: str, *, disable: bool = False) -> Any:
    """A bar that counts to `total`; close it, or use it as a context manager."""
    return tqdm(total=total, desc=description, unit=unit, disable=disable)


@contextmanager
def loading_bars(shown: bool) -> Iterator[None]:
    """Inside, transformers and libraries over it show their bars of loading weights only if `shown`."""
    from transformers.utils import logging

    if shown or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()

"""Progress bars: `tqdm.auto`, without the warning that it gives on import in a kernel that has no ipywidgets.

In a notebook this module is imported before any library that imports `tqdm.auto` too (`lazy_rag/__init__.py`).
"""

from __future__ import annotations

import warnings
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tqdm.auto import tqdm


def progress_bar(total: int, description: str, unit: str, *, disable: bool = False) -> Any:
    """A bar that counts to `total`; close it, or use it as a context manager."""
    return tqdm(total=total, desc=description, unit=unit, disable=disable)

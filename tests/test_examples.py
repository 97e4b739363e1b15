"""The example notebooks run, and those rendered beside them are of the same cells."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("jupytext")

from tests.notebooks import EXAMPLES, example_files, execute, read_example


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[Path, Future[Any]]]:
    """All of them, two at a time: most of the time goes into starting Python and loading a model."""
    with ThreadPoolExecutor(2) as pool:
        yield {path: pool.submit(run, path) for path in example_files()}


def run(path: Path) -> Any:
    notebook = read_example(path)
    execute(notebook, EXAMPLES)
    return notebook


def require_clean(notebook: Any) -> None:
    """Outputs, and among them no error, warning or progress bar."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]


@pytest.mark.parametrize("path", example_files(), ids=lambda path: path.stem)
def test_example_runs(path: Path, runs: dict[Path, Future[Any]]) -> None:
    require_clean(runs[path].result())


@pytest.mark.parametrize("path", example_files(), ids=lambda path: path.stem)
def test_rendered_example_is_up_to_date(path: Path) -> None:
    """`make notebooks` renders them."""
    import nbformat

    rendered = nbformat.read(path.with_suffix(".ipynb"), 4)
    expected = [(cell.cell_type, cell.source) for cell in read_example(path).cells]
    assert [(cell.cell_type, cell.source) for cell in rendered.cells] == expected
    require_clean(rendered)


def test_no_rendered_example_without_its_source() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == {path.stem for path in example_files()}

"""Running notebooks in a real kernel: for tests, and to render the examples (`make notebooks`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def example_files() -> list[Path]:
    """The examples that are notebooks: those in jupytext's py:percent form."""
    return [path for path in sorted(EXAMPLES.glob("*.py")) if "\n# %%" in path.read_text(encoding="utf-8")]


def read_example(path: Path) -> Any:
    """The notebook of a py:percent file, without outputs. Cell ids are numbers: the same text gives the same file."""
    import jupytext

    notebook = jupytext.read(path, fmt="py:percent")
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return notebook


def execute(notebook: Any, folder: Path = ROOT, *, timeout: int = 120) -> None:
    """Run all cells in a new kernel, which imports this copy of the project; raises what a cell raises."""
    from nbclient import NotebookClient

    paths = [str(ROOT / name) for name in ("", "kernels", "integrations")] + [os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "HF_HUB_OFFLINE": "1"}
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources=resources).execute(env=environment)


def run_cells(cells: Sequence[str]) -> list[list[Any]]:
    """The outputs of each cell, run one after another in one new kernel. An error of a cell is raised, unless the cell
    begins with "# raises"."""
    import nbformat

    notebook = nbformat.v4.new_notebook()
    for cell in cells:
        tags = ["raises-exception"] if cell.startswith("# raises") else []
        notebook.cells.append(nbformat.v4.new_code_cell(cell, metadata={"tags": tags}))
    execute(notebook)
    return [cell.outputs for cell in notebook.cells]


def render(names: Sequence[str] = ()) -> None:
    """Run the examples (of these names, or all) and write the notebooks beside them."""
    import nbformat

    for path in example_files():
        if names and path.stem not in names:
            continue
        print(f"running {path.name} ...", flush=True)
        notebook = read_example(path)
        execute(notebook, EXAMPLES)
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # the times of day at which it ran
        nbformat.write(notebook, path.with_suffix(".ipynb"))


if __name__ == "__main__":
    render(sys.argv[1:])

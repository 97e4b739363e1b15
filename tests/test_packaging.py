"""What is installed and imported: the wheel, the extras, lazy imports, and the folder that must not be `kernels`."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lazy_rag

ROOT = Path(__file__).resolve().parent.parent
SOURCE_FOLDERS = ("lazy_rag", "kernels", "integrations", "examples", "benchmarks")
ADAPTERS = {"langchain_lazy_rag": "integrations/langchain_lazy_rag", "llama_index": "integrations/llama_index"}


def _run(code: str, *, path: Path | None = None) -> str:
    """Run Python code in the repository root, as a user's shell would; its stdout."""
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _sources() -> Iterator[Path]:
    for folder in SOURCE_FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


_LOADED = "import sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"


@pytest.mark.parametrize("module", ["lazy_rag", "lazy_rag.cli", "lazy_rag.retriever"])
def test_importing_the_package_its_command_line_or_its_retriever_loads_no_model_library(module: str) -> None:
    loaded = set(_run(f"import {module}; {_LOADED}").split())
    assert "lazy_rag" in loaded
    assert not loaded & {"torch", "transformers", "sentence_transformers", "faiss", "llama_index"}


def test_importing_the_runtime_loads_no_framework_and_no_faiss() -> None:
    loaded = set(_run(f"import lazy_rag, lazy_rag.notebook, lazy_rag.plots; {_LOADED}").split())
    assert "torch" in loaded
    heavy = ("langchain", "llama_index", "faiss", "IPython", "ipykernel", "matplotlib")
    assert not {name for name in loaded if name.startswith(heavy)}


def test_public_names_resolve() -> None:
    for name in lazy_rag.__all__:
        assert getattr(lazy_rag, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lazy_rag.nothing  # noqa: B018


_TINY_MODEL = """
import importlib.util
import torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM

config = AutoConfig.for_model(
    "llama", vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
)
AutoModelForCausalLM.from_config(config).save_pretrained({folder!r})
model = AutoModelForCausalLM.from_pretrained({folder!r})
assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 32)
spec = importlib.util.find_spec("kernels")
print(None if spec is None else spec.origin)
"""


def test_transformers_works_from_the_repository_root_with_a_package_named_kernels(tmp_path: Path) -> None:
    """The folder kernels/ once held an `__init__.py`, hid the package of that name, and broke `import transformers`."""
    site = tmp_path / "site"
    (site / "kernels").mkdir(parents=True)
    (site / "kernels" / "__init__.py").write_text('__version__ = "0.17.2"\n')
    (site / "kernels-0.17.2.dist-info").mkdir()
    (site / "kernels-0.17.2.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kernels\nVersion: 0.17.2\n"
    )
    origin = _run(_TINY_MODEL.format(folder=str(tmp_path / "model")), path=site).splitlines()[-1]
    assert Path(origin) == site / "kernels" / "__init__.py"


def test_transformers_works_from_the_repository_root_with_what_is_installed(tmp_path: Path) -> None:
    """With the real package where it is installed (`make test` does), else with no such package at all."""
    origin = _run(_TINY_MODEL.format(folder=str(tmp_path / "model"))).splitlines()[-1]
    assert origin == "None" or not Path(origin).is_relative_to(ROOT / "kernels")
    if importlib.util.find_spec("kernels") is not None and _installed("kernels"):
        assert Path(origin).name == "__init__.py"


def _installed(distribution: str) -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False


@pytest.mark.parametrize(
    "folder", ["kernels", "integrations", "integrations/llama_index", "integrations/llama_index/llms"]
)
def test_folders_that_must_not_be_packages(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built offline from a copy: in the repository itself an old build/ would leak into it."""
    work = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in (*SOURCE_FOLDERS, "tests"):
        if not (ROOT / folder).exists():
            continue
        shutil.copytree(ROOT / folder, work / "tree" / folder, ignore=ignored)
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, work / "tree")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(work)]
    done = subprocess.run([*command, str(work / "tree")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(work.glob("*.whl"))


def test_wheel_holds_exactly_the_declared_packages(wheel: Path) -> None:
    files = zipfile.ZipFile(wheel).namelist()
    top_level = {name.partition("/")[0] for name in files if ".dist-info/" not in name}
    adapters = {name for name, folder in ADAPTERS.items() if any((ROOT / folder).rglob("*.py"))}
    assert top_level == {"lazy_rag", "lazy_rag_kernels"} | adapters
    assert {"lazy_rag_kernels/tuned/default.json", "lazy_rag_kernels/tuned/nvidia_h200.json"} <= set(files)
    assert {"lazy_rag/runtime.py", "lazy_rag/cli.py", "lazy_rag_kernels/reference.py"} <= set(files)
    assert "llama_index/__init__.py" not in files
    assert "llama_index/llms/__init__.py" not in files


def test_wheel_declares_licence_command_and_version(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    texts = {
        name.rpartition("/")[2]: archive.read(name).decode() for name in archive.namelist() if "dist-info/" in name
    }
    assert "lazy-rag = lazy_rag.cli:main" in texts["entry_points.txt"]
    assert "Apache License" in texts["LICENSE"]
    assert f"\nVersion: {lazy_rag.__version__}\n" in texts["METADATA"]
    assert "\nLicense-Expression: Apache-2.0\n" in texts["METADATA"]


def test_extras_and_version() -> None:
    project = _pyproject()["project"]
    assert {"cpu", "gpu", "llama-index", "langchain", "langchain-agents", "notebook", "test"} <= set(
        project["optional-dependencies"]
    )
    assert project["version"] == lazy_rag.__version__


def test_constraints_lie_in_the_declared_ranges() -> None:
    packaging = pytest.importorskip("packaging.requirements")
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    assert {"torch", "transformers", "ruff", "mypy", "pytest"} <= set(pins)
    project = _pyproject()["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    ranges = {r.name: r.specifier for r in map(packaging.Requirement, declared)}
    for name, version in pins.items():
        assert ranges[name].contains(version), name
    assert f"torch=={pins['torch']}" in (ROOT / "Makefile").read_text()


def test_pre_commit_runs_the_checks_of_make_lint() -> None:
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    checks = [line.strip().removeprefix("$(bin)/") for line in recipe[1].splitlines()]
    hooks = re.findall(r"entry: \.venv/bin/(.*)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert hooks == checks == ["ruff check .", "ruff format --check .", "mypy"]


def _private_imports(tree: ast.AST) -> Iterator[str]:
    """What code imports of `lazy_rag` beside its public names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("lazy_rag."))
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if node.module.startswith("lazy_rag."):
                yield node.module
            elif node.module == "lazy_rag":
                yield from (alias.name for alias in node.names if alias.name not in lazy_rag.__all__)


def test_adapters_import_public_names_only() -> None:
    files = sorted((ROOT / "integrations").rglob("*.py"))
    found = {
        str(path.relative_to(ROOT)): names
        for path in files
        if (names := list(_private_imports(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert files and found == {}


@pytest.mark.parametrize(
    "code", ["import lazy_rag.keys", "from lazy_rag.errors import LazyRAGError", "from lazy_rag import keys"]
)
def test_the_check_for_private_imports_sees_them(code: str) -> None:
    assert list(_private_imports(ast.parse(code)))


_FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def _unsafe(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        yield from (f"imports {name}" for name in names if name.partition(".")[0] in _FORBIDDEN_MODULES)
        if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_pickle"):
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                yield f"passes {node.arg}={ast.unparse(node.value)}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            yield "calls torch.load"


def test_source_loads_no_pickle_and_runs_no_remote_code() -> None:
    found = {
        str(path.relative_to(ROOT)): problems
        for path in _sources()
        if (problems := list(_unsafe(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from joblib import load", "f(trust_remote_code=True)", "g(allow_pickle=x)", "torch.load(p)"],
)
def test_the_check_for_unsafe_code_sees_it(code: str) -> None:
    assert list(_unsafe(ast.parse(code)))

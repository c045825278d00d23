# Everything runs inside .venv in this checkout, which the first target that needs it makes. Needs python >= 3.11, pip and make.
#   make demo                     the main table on a sample dump
#   make demo PYTHON=python3.12   with another interpreter
#   make demo TORCH_INDEX=URL     PyTorch's index of CPU wheels, where your own index would bring a CUDA build of torch
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev

# The pins hold inside pip's isolated builds too; the second name is the one that newer releases of pip read.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
ifneq ($(TORCH_INDEX),)
export PIP_EXTRA_INDEX_URL := $(TORCH_INDEX)
endif
INSTALL = $(BIN)/python -m pip install --quiet
# One thread a process: the suite runs a process per core, and the same figures come from any number of them.
export OMP_NUM_THREADS ?= 1

.PHONY: help demo install test test-trainers lint bench samples build clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "make: no python >= 3.11 on PATH; name one: make demo PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)" >&2
	@# Debian splits ensurepip off python: then the pip outside fills the environment.
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(VENV)/bin/python install --quiet pip; }

$(STAMP): $(VENV)/bin/python pyproject.toml constraints.txt hatch_build.py $(wildcard analysis/fused/*.[ch])
	@echo "installing rollout-is into $(VENV)" >&2
	@$(INSTALL) -e . || { echo "make: the install failed. If it was torch, pass TORCH_INDEX=URL with the CPU wheel" >&2; \
		echo "  index that the install page of PyTorch shows." >&2; exit 1; }
	@touch $@

$(DEV_STAMP): $(STAMP)
	@echo "installing the test tools into $(VENV)" >&2
	@$(INSTALL) -e '.[dev]'
	@touch $@

install: $(STAMP)  ## make .venv and install rollout-is into it

demo: $(STAMP)  ## the main table on a sample dump: what counting pad segments does
	@$(BIN)/rollout-is analyze sample_dumps/packed_padding

lint: $(DEV_STAMP)  ## ruff, mypy, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint  ## lint and the whole suite, one process a core
	$(BIN)/python -m pytest -n auto

test-trainers: .venv-trainers/.installed  ## a real trainer (TRL) against its own metrics, in an environment of its own
	HF_HUB_OFFLINE=1 .venv-trainers/bin/python -m pytest tests/trainers

.venv-trainers/.installed: $(VENV)/bin/python requirements-trainers.txt pyproject.toml constraints.txt
	@echo "installing the trainers into .venv-trainers" >&2
	@test -x .venv-trainers/bin/python || $(PYTHON) -m venv .venv-trainers
	@.venv-trainers/bin/python -m pip install --quiet -e . pytest pytest-timeout -r requirements-trainers.txt
	@touch $@

bench: $(STAMP)  ## speed and memory as ratios on this machine (some minutes; needs 2 GB of disk)
	@$(BIN)/python benchmarks/bench.py

samples: $(STAMP)  ## make sample_dumps/ again from their seeds
	@$(BIN)/python sample_dumps/make.py

build: $(DEV_STAMP)  ## wheel and sdist into dist/
	@$(INSTALL) build
	@$(BIN)/python -m build --outdir dist .

clean:  ## remove .venv, dist and caches
	rm -rf $(VENV) .venv-trainers dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

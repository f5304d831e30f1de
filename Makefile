# Everything starts here, from nothing but python3 and make. `make` alone lists the commands.
#
#   TORCH_INDEX=URL   where torch comes from; see "Without a GPU" in README.md
#   PYTHON=path       the Python that makes .venv (3.11, 3.12 or 3.13; found by itself if not given)
#   PY=python3        use this Python as it is: no .venv, nothing installed
#   JOBS=2            how many test processes; GPU_JOBS=4 of test-gpu
#   ARGS="..."        passed on to the command: make lab ARGS="--port 9000", make test-gpu ARGS="-k merge"

VENV ?= .venv
JOBS ?= 2
# Kernels are compiled on the CPU, and each process takes some GB of the GPU's memory: a large card has room for more.
GPU_JOBS ?= $(shell n=$$(( $$(getconf _NPROCESSORS_ONLN) / 2 )); echo $$(( n < 1 ? 1 : n > 4 ? 4 : n )))
ARGS ?=

ifdef PY
SETUP := usable
TYPOS := typos
LINT_IMPORTS := lint-imports
else
PY := $(VENV)/bin/python
SETUP := $(VENV)/.pkv-setup
TYPOS := $(VENV)/bin/typos
LINT_IMPORTS := $(VENV)/bin/lint-imports
endif

# Tests run as on a machine without a GPU, so that they prove the same thing everywhere; test-gpu uses the GPU. Each of the
# JOBS processes computes with one thread: of several, all but one would wait in a loop for what is too small to be shared.
ON_CPU := CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1

# What lint reads of Python. A reader's own files, beside the lessons or in the root, are the reader's, and so are
# exercises/; they are made from solutions/, and a test lints them as made.
SOURCES := pkv tests docs/*.py lessons/src lessons/build.py solutions conftest.py

.DEFAULT_GOAL := help
.PHONY: help setup usable lab demo test lint test-all test-nightly test-gpu clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

lab: $(SETUP) ## open JupyterLab at the lessons
	@$(PY) -m pkv lab $(ARGS)

demo: $(SETUP) ## run every stage on one ragged batch and check it
	@$(PY) -m pkv demo $(ARGS)

test: lint ## lint, types, spelling, unit tests, two lessons (CPU, about 7 minutes)
	$(ON_CPU) $(PY) -m pytest -n $(JOBS) --dist worksteal -m "not gpu and not slow and not browser" $(ARGS)

lint: $(SETUP) ## format, lint, types and spelling only
	$(PY) -m ruff format --check $(SOURCES)
	$(PY) -m ruff check $(SOURCES)
	$(PY) -m mypy
	$(LINT_IMPORTS) --no-cache --no-logo
	$(TYPOS) --force-exclude $(SOURCES) README.md CONTRIBUTING.md CHANGELOG.md docs *.toml *.yml Makefile Dockerfile NOTICE .ci .github

test-all: $(SETUP) ## only the slower proofs that `make test` leaves out (15 to 25 minutes)
	$(ON_CPU) $(PY) -m pytest -n $(JOBS) --dist worksteal -m "not gpu and not nightly and (slow or browser)" $(ARGS)

test-nightly: $(SETUP) ## what few commits can break: each configuration compiled, all wrong answers (10 minutes)
	$(ON_CPU) $(PY) -m pytest -n $(JOBS) --dist worksteal -m "nightly and not gpu" $(ARGS)

test-gpu: $(SETUP) ## the tests that need a CUDA GPU (skipped, with a reason, where there is none)
	$(PY) -m pytest -n $(GPU_JOBS) --dist loadgroup -m gpu $(ARGS)

clean: ## remove .venv and everything that was built
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

ifneq ($(SETUP),usable)
setup: $(SETUP) ## make .venv and install into it (every command does this by itself)

$(SETUP): pyproject.toml constraints.txt
	@if [ ! -x $(VENV)/bin/pip ]; then \
	  for candidate in $(PYTHON) python3 python3.13 python3.12 python3.11 none; do \
	    if [ $$candidate = none ]; then \
	      echo 'pkv needs Python 3.11, 3.12 or 3.13 with its venv module, and found none.' >&2; \
	      echo 'Debian or Ubuntu: apt install python3 python3-venv. Then, if need be: make PYTHON=/path/to/python3.12 setup' >&2; \
	      exit 1; \
	    fi; \
	    if $$candidate -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; \
	    then break; fi; \
	  done; \
	  echo "Making $(VENV) with $$($$candidate --version). The first time takes one to two minutes, and the download."; \
	  $$candidate -m venv $(VENV); \
	fi
ifneq ($(TORCH_INDEX),)
	$(PY) -m pip install --quiet --no-deps --constraint constraints.txt --index-url $(TORCH_INDEX) torch
endif
	@extras=lessons,test,dev; \
	if nvidia-smi >/dev/null 2>&1; then extras=$$extras,gpu; fi; \
	set -x; $(PY) -m pip install --quiet --constraint constraints.txt --editable ".[$$extras]"
	@touch $@
else
setup:
	@echo 'PY is set: $(PY) is used as it is.'

usable:
	@$(PY) -c 'import sys; from importlib.util import find_spec as f; sys.exit(not (f("torch") and f("numpy")))' || { \
	  echo '$(PY) cannot run pkv: torch or numpy is missing. Leave out PY=, and make puts all that is needed into .venv.' >&2; \
	  exit 1; }
endif

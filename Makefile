# The same commands on a developer's machine and in CI. `make setup` runs by itself where it is due.

# The first Python that will do; `make setup PYTHON=...` takes another.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3.14 python3; do \
  "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$name"; break; }; \
  done)
VENV := .venv
BIN := $(VENV)/bin
# Newer than what it was made from: the environment is up to date.
STAMP := $(VENV)/.complete
# Clients that are tested with a server, and nothing of ours.
CLIENTS := .venv-clients
CLIENTS_STAMP := $(CLIENTS)/.complete
PYTEST := $(BIN)/python -m pytest
# Two files at a time, in their order: many tests wait, and a test has at most two ranks.
BY_TWO := --numprocesses 2 --dist loadfile --no-loadscope-reorder
# Quick tiers first: a broken core is told within seconds.
TIERS := tests/unit tests/wire tests/cpu tests/cluster

# Not so where its Python is gone, or the folder was moved: what pip wrote holds absolute paths.
HEALTHY = $(BIN)/python -c 'import pip' 2>/dev/null && grep -q "$(CURDIR)/$(VENV)$$" $(VENV)/pyvenv.cfg
ifneq ($(shell $(HEALTHY) && echo yes),yes)
.PHONY: $(STAMP)
endif

.PHONY: help setup demo test check check-full bench-guard gpu-check clients zoo depths nightly format proto hooks clean

help:
	@echo "setup       make $(VENV) and install everything"
	@echo "demo        serve the embedded model on two ranks and stream four prompts"
	@echo "check       lint, format, types, import contracts, generated code"
	@echo "test        unit, wire, samples of cpu and cluster, one end-to-end over Ray; as CI"
	@echo "check-full  all tests that need no GPU"
	@echo "bench-guard fails where the engine has become slower beside its own matrix products"
	@echo "gpu-check   on a machine with a GPU: what it computes, and how fast; PYTHON=... MODEL=folder"
	@echo "clients     LangChain, lm-eval, schemathesis and npm's openai against a real server"
	@echo "zoo         every causal language model of transformers, for README and lockstep models"
	@echo "depths      engines and models at pipeline depths 1 to 3, by deltas and by whole steps"
	@echo "nightly     20,000 random lives of the scheduler, depths, 230 faults under load, a soak, and the benchmarks"
	@echo "format      format the code"
	@echo "proto       make the code of protos/*.proto again"
	@echo "hooks       install the pre-commit hooks"
	@echo "clean       remove the environment and all that tools left"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer: install one, or name it by PYTHON=" >&2; exit 1; }
	$(HEALTHY) || "$(PYTHON)" -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  --constraint constraints.txt --editable '.[demo,gguf,bench,dev]'
	touch $@

demo: $(STAMP)
	@$(BIN)/python -m benchmarks demo

test: $(STAMP)
	$(PYTEST) $(BY_TWO) -m "not full and not nightly and not gpu" $(TIERS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m protos.generate --check

check-full: $(STAMP)
	$(PYTEST) -m "not nightly and not gpu" $(TIERS)

# On a machine that does nothing else; bounds are in benchmarks/guard/bounds.json.
bench-guard: $(STAMP)
	$(BIN)/python -m benchmarks guard

clients: $(STAMP) $(CLIENTS_STAMP)
	$(PYTEST) -m nightly tests/cluster/test_client_programs.py

$(CLIENTS_STAMP): tests/clients/requirements.txt constraints.txt
	$(BIN)/python -m venv --clear $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --requirement tests/clients/requirements.txt
	touch $@

zoo: $(STAMP)
	$(BIN)/python -m workers.gate.zoo --json runtime/model_support.json
	$(BIN)/python -m runtime.model_support README.md

# The lives in tests/unit draw their depth; engines take theirs, and whether ranks get deltas, from
# the environment. check-full runs them at depth 2 with deltas.
ENGINES := tests/wire
MODELS = $(shell grep -lE 'tests\.(tiny_engine|asks|local_ranks)' tests/cpu/*.py)
depths: $(STAMP)
	for depth in 1 3; do \
	  LOCKSTEP_TEST_DEPTH=$$depth $(PYTEST) -m "not nightly" $(ENGINES) || exit 1; \
	done
	for deltas in 0 1; do for depth in 1 2 3; do \
	  LOCKSTEP_TEST_DEPTH=$$depth LOCKSTEP_TEST_DELTAS=$$deltas \
	    $(PYTEST) -m "not nightly" $(MODELS) || exit 1; \
	done; done

nightly: $(STAMP) $(CLIENTS_STAMP) depths
	$(PYTEST) -m nightly $(TIERS)
	$(BIN)/python -m benchmarks soak
	$(BIN)/python -m benchmarks scheduler
	$(BIN)/python -m benchmarks sampler
	$(BIN)/python -m benchmarks overhead
	$(BIN)/python -m benchmarks overload
	$(BIN)/python -m benchmarks pauses
	$(BIN)/python -m benchmarks publish
	$(BIN)/python -m benchmarks simulate --replicas 64 --requests 100000 --rate 400

# Without `make setup`: the Python is one whose torch has CUDA. MODEL names a model's folder.
gpu-check:
	"$(PYTHON)" -m tests.gpu --verbose --json gpu-check.json $(if $(MODEL),--model "$(MODEL)")

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(STAMP)
	$(BIN)/python -m protos.generate

hooks: $(STAMP)
	$(BIN)/pre-commit install

clean:
	rm -rf $(VENV) $(CLIENTS) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache

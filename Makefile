# Everything a person or a CI runs. `make` alone lists the targets.

PYTHON ?= python3
VENV ?= .venv
RANKS ?=
PYTEST_ARGS ?=
# Three files at a time on two cores: tests of several ranks wait a part of their time. A file shares what it has
# computed. Every further worker costs five seconds of a core to collect the tests.
WORKERS ?= 3

# Hundreds of processes import the package in a test run: without its byte code each would compile it again.
export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
# Byte code is written at the first import, of what is imported: all of it would take a minute.
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile -c constraints.txt
# Not in every checkout from the first day, so only those that are there.
CHECKED := $(wildcard src tests examples bench)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help env demo check test test-all test-pure test-long lint format types docs bench-host bench-cpu bench-gpu bench-link bench-simulator \
	bench-checkpoint bench-peers bench-eight-bit bench-low-bit bench-muon bench-offload bench-plan bench-times clean

help: ## List the targets
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Two stamps: the demo needs a few small packages only, the tests need the model libraries as well.
# Each is remade when the project or its pins change.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing fullshard and the demo's packages into $(VENV) ..."
	$(PIP_INSTALL) -e '.[demo]'
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing fullshard and the development packages into $(VENV) ..."
	$(PIP_INSTALL) -e '.[test]'
	@touch $(VENV)/.installed-demo $@

$(VENV)/.installed-bench: $(VENV)/.installed-test
	$(PIP_INSTALL) -e '.[bench]'
	@touch $@

env: $(VENV)/.installed-test ## Make .venv and install the package with all it needs for development

demo: $(VENV)/.installed-demo ## Train a small GPT, sharded over local ranks (RANKS=4 for four)
	$(BIN)/python examples/demo.py $(if $(RANKS),--ranks $(RANKS))

check: env ## Lint, types and the tests that need no ranks: a minute, for daily work
	@$(MAKE) --no-print-directory -j 2 lint types test-pure

test-pure: env
	$(BIN)/python -m pytest -q tests/pure $(PYTEST_ARGS)

# Lint first; types beside the tests, as mypy takes one core.
test: env ## Lint, type check and test: what the CI runs
	@$(MAKE) --no-print-directory -j 2 lint types test-all

test-all: env
	$(BIN)/python -m pytest -m "not long" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-long: env ## The tests that take minutes: campaigns of crashes, damage and fuzzing, and the rest of large tables
	$(BIN)/python -m pytest -m long $(PYTEST_ARGS)

lint: env ## Check the style, change nothing
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)

format: env ## Sort imports, fix what can be fixed, format
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

types: env ## Type check the package, strictly
	$(BIN)/mypy

docs: env ## Build the documentation as a site, into site/
	$(BIN)/mkdocs build --quiet

bench-host: env ## Host time per unit and step, fullshard and FSDP2 side by side
	$(BIN)/python bench/host_time.py

bench-cpu: $(VENV)/.installed-bench ## A step on CPU ranks, fullshard beside DDP, FSDP1, FSDP2 and DeepSpeed (RANKS=4 for four)
	$(BIN)/python bench/cpu.py $(if $(RANKS),--ranks $(RANKS))

bench-gpu: $(VENV)/.installed-bench ## One GPU as one rank of simulated clusters: fullshard, FSDP2 and the limit
	$(BIN)/python bench/gpu.py

bench-link: $(VENV)/.installed-bench ## A step over a slow link between two nodes of two ranks in network namespaces; needs root and iproute2
	$(BIN)/python bench/slow_link.py

bench-simulator: env ## What the simulator predicts beside steps over a real, shaped link; needs root and iproute2
	$(BIN)/python bench/simulator_check.py

bench-eight-bit: env ## What gradients in 8-bit blocks between nodes cost in training; a GPU helps
	$(BIN)/python bench/eight_bit.py

bench-low-bit: env ## What optimizer state in 8-bit blocks costs in training; a GPU helps
	$(BIN)/python bench/low_bit_state.py

bench-muon: env ## Muon's step on one rank of simulated clusters, beside every rank repeating it; a GPU helps
	$(BIN)/python bench/muon.py

bench-offload: env ## Values in host memory: fullshard beside FSDP2's CPUOffloadPolicy; needs a GPU and 128 GiB of host memory
	$(BIN)/python bench/offload.py

bench-times: env ## Predicted step times beside measured ones; needs a GPU
	$(BIN)/python bench/time_check.py

bench-plan: env ## What fullshard plan predicts beside what CUDA allocates; needs a GPU
	$(BIN)/python bench/plan_check.py

bench-peers: env ## Copies in the memory of peers: the time of a step with them and without
	$(BIN)/python bench/peer_copies.py

bench-checkpoint: env ## Saving and loading, fullshard beside torch.distributed.checkpoint and torch.save
	$(BIN)/python bench/checkpoint.py $(if $(RANKS),--ranks $(RANKS))

clean: ## Remove builds, caches and outputs (the environment stays; remove .venv yourself)
	rm -rf build dist site demo-output bench-output .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find $(CHECKED) -name __pycache__ -type d -prune -exec rm -rf {} +

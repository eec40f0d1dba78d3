# Everything is installed into .venv by the first target that needs it; see `make help`.

PYTHON ?= python3
DEMO_SECONDS ?= 40# of training for each scheme; more: lower losses, a longer demo
DEMO_SCHEMES ?= ddp,ddp(wire='bf16'),dear(wire='bf16'),$(DEMO_SPARSE)
DEMO_SPARSE ?= topka2a(0.02, $(DEMO_LOCAL)),exdyna(0.01, $(DEMO_LOCAL))
DEMO_LOCAL ?= schedule='local', warmup=60, wire='e3m0'# as recommended; a warm-up for so few steps
DEMO_OUT ?= out/demo
EXTRAS ?= lab,fast,tune,optimizers,dev# of pyproject.toml; gpu adds Triton (1 GB), to test its kernels
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(8, (os.cpu_count() or 1) + 1))')
LEFT_OUT ?= and not slow# of the tests; nothing, by make test-all
ARGS ?=# for pytest: make test ARGS='-k law'; for make gpu: ARGS='--sections facts'
GPU_MINUTES ?= 8
GPU_OUT ?= out/gpu# a second run goes on with what is missing there

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
READY := $(VENV)/.ready
DOCS := $(VENV)/.docs

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all versions check papers claims gpu docs dist format clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

setup: $(READY) ## install everything into .venv (the other targets do so themselves)

demo: $(READY) ## race schemes to a loss on four emulated hosts at 50 Mb/s (minutes)
	@set -e; \
	if refusal=$$($(BIN)/gradtide lab run --hosts 1 --rate 50mbit -- true 2>&1); then \
	    rate=50mbit; \
	else \
	    rate=none; \
	    echo "Slow links cannot be emulated on this machine:"; \
	    echo "    $$refusal"; \
	    echo "The demo runs on loopback instead, where nothing is slow: it shows that"; \
	    echo "the schemes work, not what they save."; \
	fi; \
	$(BIN)/gradtide race --schemes "$(DEMO_SCHEMES)" --workload gpt-small \
	    --hosts 4 --rate $$rate --seconds $(DEMO_SECONDS) --every 10 --out $(DEMO_OUT)
	@echo
	@echo "  $(DEMO_OUT)/race.png     loss over time, and over bytes"
	@echo "  $(DEMO_OUT)/table.txt    the table above"
	@echo "  $(DEMO_OUT)/record.json  all numbers, with versions, machine and commit"

test: $(READY) ## run the tests, without slow ones and most cases of products
	@set -e; \
	few() { "$$@" || test $$? -eq 5; }; \
	marked() { grep -rl --include='test_*.py' "mark\.$$1" tests; }; \
	few $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal \
	    -m 'not alone and not waits $(LEFT_OUT)' $(ARGS); \
	few $(BIN)/python -m pytest -n 6 --dist worksteal -m 'waits $(LEFT_OUT)' \
	    $$(marked waits) $(ARGS); \
	few $(BIN)/python -m pytest -m 'alone $(LEFT_OUT)' $$(marked alone) $(ARGS)

test-all: ## run all tests, as .ci/run does: also slow ones, and all cases of products
	@$(MAKE) --no-print-directory test LEFT_OUT=

versions: $(READY) ## the main tests with other versions of torch and Python
	@$(BIN)/python benchmarks/versions.py $(ARGS)

check: $(READY) ## formatting, lint, types, layers
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_layers.py

papers: $(READY) ## what papers state beside the virtual clock: record and docs/papers.md
	@$(BIN)/python benchmarks/papers.py $(ARGS)

claims: $(READY) ## make again what is simulated in docs/benchmarks.md; list old records
	@$(BIN)/python benchmarks/claims.py $(ARGS)

# With .venv where it is; a machine with a GPU may have torch, and no network to make it.
gpu: ## prove what can be proved on a GPU, in minutes (benchmarks/README.md, section 35)
	@mkdir -p $(GPU_OUT)
	@PYTHONPATH=src PYTHONUNBUFFERED=1 \
	    $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu \
	    --minutes $(GPU_MINUTES) --out $(GPU_OUT) $(ARGS)

docs: $(DOCS) ## build the documentation into out/site, with every warning an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "  out/site/index.html"

dist: $(READY) ## build wheel and sdist into dist, and test what was built
	@PYTHON=$(BIN)/python .ci/dist

format: $(READY) ## sort imports and format
	@$(BIN)/ruff check --quiet --select I --fix .
	@$(BIN)/ruff format .

clean: ## remove what runs and tools left behind (.venv stays)
	@rm -rf out build dist .pytest_cache .mypy_cache .ruff_cache
	@find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

# torch first and alone: it is by far the largest, and it must be the version of
# constraints.txt before anything that depends on it can ask for another.
$(READY): pyproject.toml constraints.txt
	@if ! test -x $(BIN)/pip; then \
	    $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	        echo "Python 3.11 or newer is needed: install it, or say which one to use:"; \
	        echo "    make PYTHON=/path/to/python3"; \
	        exit 1; \
	    }; \
	    $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	        echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu:"; \
	        echo "    sudo apt-get install python3-venv"; \
	        exit 1; \
	    }; \
	    echo "Making the virtual environment $(VENV)"; \
	    $(PYTHON) -m venv $(VENV) || exit 1; \
	fi
	@echo "Installing torch into $(VENV) (large: once, and some minutes)"
	@$(PIP) install -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	@echo "Installing gradtide and its tools"
	@$(PIP) install -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

# What builds the documentation is not needed for anything else.
$(DOCS): $(READY)
	@echo "Installing what builds the documentation"
	@$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $@

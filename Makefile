# fp8rl. `make demo` and `make test` need Python 3.11 to 3.13 and nothing else set up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The demo's requirements: vLLM for GPUs where there is one, else its build for CPUs.
ROLE ?= $(if $(shell command -v nvidia-smi),gpu,cpu)

.PHONY: help demo test check lint format generate requirements clean
.DEFAULT_GOAL := help

help: ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/.$(ROLE) ## Train a small model on one machine, with real parts; ends with plots
	$(BIN)/fp8rl run deploy/samples/reverse-text.yaml --out runs/reverse-text --fresh

test: $(VENV)/.dev ## Run every test that needs no cluster and no GPU
	$(BIN)/python -m pytest -q -m "not gpu and not e2e"

check: lint test ## All that CI checks

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

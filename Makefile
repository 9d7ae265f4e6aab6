.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types fix bench docs check

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv and install what was tested (quick the second time)

# torch comes first, alone, so that the version pinned here decides which build a machine gets.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo,dev]'
	touch $@

demo: setup ## train the translator untouched and under a budget, side by side
	$(BIN)/torchecho demo $(ARGS)

test: setup ## run the tests (ARGS=tests/ir runs some)
	$(BIN)/python -m pytest $(ARGS)

lint: setup ## check style, format and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup ## check types
	$(BIN)/mypy

fix: setup ## repair what the linters can repair
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## measure against PyTorch's own ways (ARGS="nmt --json FILE")
	$(BIN)/torchecho bench $(ARGS)

docs: setup ## check the links and figures of the docs
	$(BIN)/python -m pytest tests/docs

check: lint types test ## everything that must pass before a change lands

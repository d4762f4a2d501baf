# The targets that people and CI use. `make demo` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
RUN ?= runs/demo
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install check test demo clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) \
		--constraint .ci/constraints.txt --editable '.[dev]'
	touch $@

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(INSTALLED)
	$(BIN)/python -m pytest

demo: $(INSTALLED)
	$(BIN)/kvp-collect --config configs/demo/collect.yaml --out $(RUN)/traces
	$(BIN)/kvp-train --config configs/demo/train.yaml --traces $(RUN)/traces --out $(RUN)/policies
	$(BIN)/kvp-eval --config configs/demo/eval.yaml --policies $(RUN)/policies \
		--traces $(RUN)/traces --out $(RUN)/results
	$(BIN)/kvp-report $(RUN)/results --out $(RUN)/report.html

clean:
	rm -rf runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

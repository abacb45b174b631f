# make run: a first comparison; make test: the test suite. Each makes what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test lint clean

run: $(VENV)/installed
	$(BIN)/gcbench run --task digits --compressor none,terngrad --seed 0,1,2
	$(BIN)/gcbench compare

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest

lint: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $$($(BIN)/python -c \
	  'import tomllib; print(*(r.replace(" ", "") for r in tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dev"]))')
	touch $@

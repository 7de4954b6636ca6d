# Everything from a bare machine with Python 3.10+: each target makes .venv and installs what it needs.
PYTHON ?= python3
SHELL := bash
BIN := .venv/bin
PARALLEL := --numprocesses auto --dist worksteal
# Without cached bytecode, every process would compile holdfast anew.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help demo digits explorer docs test lint soak clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 8

demo: .venv/cli  ## compare six recipes on a small language model; the report is a page
	$(BIN)/holdfast compare --max-updates 30 --limit 50 --out runs/demo

digits: .venv/demo  ## fine-tune with AdamW and with RecAdam, see what each forgets
	$(BIN)/python examples/digits.py

explorer: .venv/cli  ## all results on one page, docs/explorer/index.html
	$(BIN)/python benchmarks/explorer.py

docs: .venv/docs  ## serve the documentation on http://127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

test: lint  ## lint, type-check and run the tests, in about 8 minutes on two cores
	$(BIN)/python -m pytest $(PARALLEL) --durations 15

lint: .venv/dev  ## lint and type-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/_words.py

soak: .venv/dev  ## every test, with the matrices that `make test` samples; commit the log
	set -o pipefail; (git log -1 --format="commit %h"; $(BIN)/python -m pytest $(PARALLEL) --hypothesis-profile soak \
	  -m "soak or not soak" --durations 25 -q -p no:cacheprovider) 2>&1 | tee tests/soak.log

clean:  ## remove the environment and caches
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("holdfast needs Python 3.10 or newer, this is " + sys.version.split()[0] + "; say: make PYTHON=python3.12 ..." if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv .venv

.venv/%: .venv/bin/python pyproject.toml constraints.txt
	@echo "Installing holdfast[$*] into .venv (a few minutes the first time) ..."
	$(PIP) --editable ".[$*]"
	@touch $@

# Every target makes .venv by itself; nothing but python3 (3.11 or newer) is needed beforehand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo test lint format tests slow bench test-network test-newest same-numbers gpu-laws
.PHONY: docs package hooks clean

help:
	@echo "make demo    four methods side by side on real digits, with a report (under a minute)"
	@echo "make test    lint, format check, types, tests"
	@echo "make tests   the tests alone"
	@echo "make slow    the tests that make test leaves out for their length"
	@echo "make test-network  federations of real processes, and every fault (installs nvflare)"
	@echo "make test-newest   the core tests with the newest torch that installs, in .venv-newest"
	@echo "make same-numbers  all methods and options against the recorded results of 0.1.0"
	@echo "make gpu-laws      all methods on a CUDA device against the reference engine, in float64;"
	@echo "             writes docs/gpu-laws.md"
	@echo "make bench   seconds a round: Sartor against a plain loop, every method against FedAvg;"
	@echo "             a page in .bench/report.html, with the history of earlier runs"
	@echo "make docs    the documentation as a site, in site/; a broken link fails"
	@echo "make package the wheel and the source archive, in dist/; the wheel is tried in an empty environment"
	@echo "make lint    ruff, format check and mypy alone"
	@echo "make format  let ruff fix what it can"
	@echo "make hooks   check every commit before it is made (pre-commit)"
	@echo "make clean   remove .venv and caches (run folders stay)"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Sartor needs Python 3.11 or newer; found $$($(PYTHON) --version). Try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[data,dev,figures]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/sartor demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

tests: $(STAMP)
	HYPOTHESIS_PROFILE=ci $(BIN)/python -m pytest -q

test: lint tests

bench: $(STAMP)
	@$(BIN)/python -m bench --json .bench/history $(BENCH)
	@$(BIN)/python -m bench.methods --json .bench/history
	@$(BIN)/python -m bench --history .bench/history --html .bench/report.html

slow: $(STAMP)
	HYPOTHESIS_PROFILE=ci $(BIN)/python -m pytest -q -m "slow and not gpu"

test-network: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[network]'
	$(BIN)/python -m pytest -q -m network -n 0 tests/network

# The newest torch brings gigabytes of GPU packages along, so this has an environment of its own.
# Warnings are no errors here: torch's own deprecations come first to those who try it first.
NEWEST := .venv-newest
test-newest:
	$(PYTHON) -m venv $(NEWEST)
	grep -v '^torch==' constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade torch
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check \
	  -c $(NEWEST)/constraints.txt -e '.[data,dev,figures]'
	$(NEWEST)/bin/python -m pytest -q -W default tests/core tests/engines tests/compose

same-numbers: $(STAMP)
	SARTOR_ACCELERATE=all $(BIN)/python -m bench.same_numbers --against bench/same_numbers-0.1.0.json --jobs 2

gpu-laws:
	$(PYTHON) -m bench.gpu_laws --page docs/gpu-laws.md

hooks: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pre-commit
	$(BIN)/pre-commit install --hook-type pre-commit --hook-type commit-msg

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python -m docs.generate
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -q -j 2 -b html -d build/doctrees docs site
	@echo "Open site/index.html"

package: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build
	rm -rf dist build/try
	$(BIN)/python -m build
	$(PYTHON) -m venv build/try
	build/try/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd / && $(CURDIR)/build/try/bin/sartor demo --out $(CURDIR)/build/try/demo --overwrite
	@build/try/bin/python -m pip list

clean:
	rm -rf $(VENV) $(NEWEST) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

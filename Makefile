# Everything runs in one virtual environment, .venv in this checkout, made when missing.
#
#   make setup    install ktrainer and all that it needs
#   make train    train the quick-start example with two data-parallel processes
#   make test     run the tests, after building Horovod once
#   make test-all the same, with those that repeat others at more sizes, models and engines
#   make lint     formatting, lints, types and import layers
#   make clean    remove what was made, .venv too; needed to change TENSORFLOW
#
# Horovod's wheel is kept in ~/.cache/ktrainer/wheels, for other checkouts too.
#
# Variables: PYTHON (which interpreter makes .venv), TENSORFLOW=cpu|gpu, ARGS (more key=value for
# the example), PYTEST_ARGS (more for pytest), WORKERS (test files that run side by side; most
# tests use one core).

PYTHON ?= python3
TENSORFLOW ?= cpu
ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2

BIN := .venv/bin
INSTALLED := .venv/.installed-$(TENSORFLOW)

.PHONY: setup train test test-all lint clean horovod

setup: $(INSTALLED)

# An existing .venv is used as it is; one without pip (as some tools make them) gets it.
$(INSTALLED): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { \
	  echo "make: cannot make a virtual environment with '$(PYTHON) -m venv .venv'." >&2; \
	  echo "      On Debian and Ubuntu: apt-get install python3-venv; then run make again." >&2; \
	  rm -rf .venv; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip --upgrade
	@echo "make: installing ktrainer with TensorFlow ($(TENSORFLOW)) into .venv"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-script-location \
	  --editable ".[$(TENSORFLOW),examples,horovod,dev]"
	@touch $@

train: setup
	$(BIN)/ktrainer run -n 2 examples/digits.py backend=data_parallel $(ARGS)

horovod: setup
	@$(BIN)/ktrainer horovod build

test: setup horovod
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(PYTEST_ARGS)

test-all: PYTEST_ARGS += -m ""
test-all: test

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	rm -rf .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Everything runs in one virtual environment, .venv in this checkout, made when missing.
#
#   make setup    install ktrainer and all that it needs
#   make train    train the quick-start example with two data-parallel processes
#   make test     run the tests; those that need Horovod are skipped where it is not built
#   make test-all build Horovod once, install PySpark and experiment trackers, then run all tests
#   make test-gpu run the tests that need a GPU; what they see is written to build/gpu
#   make horovod  build Horovod once
#   make test-keras run contracts with the oldest supported Keras
#   make lint     formatting, lints, types and import layers
#   make bench    measure speed beside Keras, Horovod and PyTorch: a table in docs/ and build/bench
#   make docs     build the documentation in build/docs; warnings are errors
#   make clean    remove what was made, .venv too; needed to change TENSORFLOW
#
# Horovod's wheel is kept in ~/.cache/ktrainer/wheels, for other checkouts too.
#
# Variables: PYTHON (which interpreter makes .venv), TENSORFLOW=cpu|gpu, ARGS (more key=value for
# the example), PYTEST_ARGS (more for pytest), WORKERS (test files that run side by side; most
# tests use one core), TORCH (what pip installs as a peer for `make bench`: a wheel of PyTorch's CPU
# build, say; that of PyPI for Linux brings gigabytes of GPU libraries).

PYTHON ?= python3
TENSORFLOW ?= cpu
ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2
TORCH ?= torch

BIN := .venv/bin
INSTALLED := .venv/.installed-$(TENSORFLOW)

.PHONY: setup train test test-all test-gpu test-keras lint bench docs clean horovod spark trackers

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
	  --editable ".[$(TENSORFLOW),examples,horovod,dev,docs]"
	@touch $@

train: setup
	$(BIN)/ktrainer run -n 2 examples/digits.py backend=data_parallel $(ARGS)

horovod: setup
	@$(BIN)/ktrainer horovod build

# Its test is skipped where it cannot be installed.
spark: setup
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[spark]" || \
	  echo "make: PySpark could not be installed" >&2

# The same.
trackers: setup
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[trackers]" || \
	  echo "make: Weights & Biases, MLflow and Trackio could not be installed" >&2

# A file stays on one worker, with the groups of ranks that its tests share. Files come in order of
# names: by their numbers of tests, the last ones would be those of a few long tests.
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

test: setup
	$(PYTEST) $(PYTEST_ARGS)

# The tests for GPUs run with the CPU in the GPU's place, to see that they still work; on a GPU they
# would run side by side here. Their folder is named since its option is unknown otherwise.
test-all: setup horovod spark trackers
	$(PYTEST) -m "" tests/gpu tests --gpu-device=cpu $(PYTEST_ARGS)

# One by one: their ranks share the GPU, and step times are measured.
test-gpu:
	@$(MAKE) setup TENSORFLOW=gpu
	$(BIN)/python -m pytest -m gpu tests/gpu --gpu-device=gpu $(PYTEST_ARGS)

# Beside the newest Keras, which .venv has: the package alone, in a folder that comes first. Left
# out are callbacks of our own, Keras' on several ranks and under strategies, three ranks, PowerSGD.
# KERAS_TESTS chooses among the rest, as pytest's -m does, and KERAS_PATHS the files.
OLDEST_KERAS := 3.14
KERAS_TESTS ?= not horovod
KERAS_PATHS ?= tests/contracts tests/steps
STOCK_CALLBACKS := tests/contracts/test_stock_callbacks.py
BACKENDS := tests/contracts/test_backends.py
test-keras: setup
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
	  --target build/keras-$(OLDEST_KERAS) "keras==$(OLDEST_KERAS).*"
	PYTHONPATH=$(CURDIR)/build/keras-$(OLDEST_KERAS) $(PYTEST) \
	  -m "$(KERAS_TESTS)" $(KERAS_PATHS) tests/runtime/test_symbol_check.py \
	  --ignore tests/contracts/test_callbacks.py --deselect $(STOCK_CALLBACKS)::test_on_ranks \
	  --deselect $(STOCK_CALLBACKS)::test_under --ignore tests/steps/test_powersgd.py \
	  --deselect "$(BACKENDS)::test_models_equal_one_process[3]" $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# PyTorch is only here, beside .venv; without it, its rows are not measured.
build/bench/torch:
	@mkdir -p build/bench
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $@ $(TORCH) || { \
	  rm -rf $@; echo "make: PyTorch could not be installed" >&2; }

# Needs an idle machine.
bench: setup build/bench/torch
	$(BIN)/python benchmarks/speed_table.py build/bench --page docs/concepts/elsewhere.md

# Internal links are checked: a page or heading that is not there is a warning.
docs: setup
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs
	@echo "make: the documentation is in build/docs/index.html"

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	rm -rf .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

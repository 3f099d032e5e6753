# make check   lint, types, unit, shell and end-to-end tests: a few minutes on two cores
# make test    the same and the slow tests; installs what tests need
# make lock    resolve requirements.in and requirements-dev.in again

SHELL := /bin/bash
PY := .venv/bin/python
BATS_VERSION := 1.13.0
SHELL_FILES := $(wildcard *.sh lib/*.sh tests/*.sh tests/shell/*.bash) .ci/run
.DEFAULT_GOAL := help

.PHONY: help env check test lint unit shell e2e bench lock clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

# The environment of the product itself, then the test tools on top; a stamp makes the second call free.
env:
	@bash -c 'source lib/init.sh && unset VIRTUAL_ENV CONDA_PREFIX && { python::find || python::make; }'
	@cmp -s requirements-dev.lock .venv/dev.stamp || { \
	  echo 'installing the test tools'; \
	  $(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip -q || true; \
	  { $(PY) -m pip install -q --disable-pip-version-check -r requirements-dev.lock 2>/dev/null \
	    || python3 -m pip --python $(PY) install -q --disable-pip-version-check -r requirements-dev.lock; } \
	  && cp requirements-dev.lock .venv/dev.stamp; }
	@tests/install_bats.sh $(BATS_VERSION)

lint: env
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/shellcheck -x $(SHELL_FILES)
	.venv/bin/shfmt -i 2 -d $(SHELL_FILES)

unit: env
	$(PY) -m pytest tests/unit -q

shell: env
	$(PY) -m pytest tests/shell -q

e2e: env
	$(PY) -m pytest tests/e2e -q -m 'not slow'

check: lint
	$(PY) -m pytest -q -m 'not slow'

test: lint
	$(PY) -m pytest -q

bench: env
	$(PY) -m benchmarks.startup

lock: env
	$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip -q
	$(PY) -m pip install -q --disable-pip-version-check uv
	$(PY) tests/lock.py

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .tools

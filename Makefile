# make check   lint, types, unit, shell and end-to-end tests: 13 minutes on two cores; JOBS=8 for more tests at a time
# make test    the same and the slow tests; installs what tests need
# make soak    what takes longer than CI should: a hundred random kills
# make slurm   the tests on a private SLURM; skipped where it is not installed
# make extras  install the optional packages: .parquet and .zst data, BPE tokenizers
# make bench   all benchmarks, about three hours
# make peers   install accelerate, Lightning and Hugging Face Trainer into .tools/peers: for benchmarks, and to launch their scripts
# make lock    resolve pyproject.toml into requirements.lock again

SHELL := /bin/bash
PY := .venv/bin/python
PEERS := .tools/peers
JOBS ?= 2
BATS_VERSION := 1.13.0
SHELL_FILES := $(wildcard *.sh lib/*.sh tests/*.sh tests/shell/*.bash) duet .ci/run
PYTEST := $(PY) -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder
.DEFAULT_GOAL := help

.PHONY: help env extras check test soak lint unit shell e2e slurm bench peers lock clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

# Code with the functions of the scripts, in the project's own environment whatever is active.
WITH_LIB := @unset VIRTUAL_ENV CONDA_PREFIX; source lib/init.sh;

# The environment of the product itself, then the optional packages on top.
extras:
	$(WITH_LIB) { python::find || venv::make; } && venv::add extras

# All of it, since tests need the optional packages too, and the test tools.
env: extras
	$(WITH_LIB) venv::add dev
	@tests/install_bats.sh $(BATS_VERSION)

lint: env
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/shellcheck -x $(SHELL_FILES)
	.venv/bin/shfmt -i 2 -d $(SHELL_FILES)
	.venv/bin/codespell

unit: env
	$(PY) -m pytest tests/unit -q

shell: env
	$(PY) -m pytest tests/shell -q

e2e: env
	$(PY) -m pytest tests/e2e -q -m 'not slow'

slurm: env
	$(PY) -m pytest tests/slurm -q

# Files in their own order, so that the short ones come last and no job waits long for the other.
check: lint
	$(PYTEST) -m 'not slow'

test: lint peers
	$(PYTEST) -m 'not soak'

soak: env peers
	$(PY) -m pytest -q -m soak

# Everything that the documentation tells; about three hours on a quiet machine.
bench: env peers
	for name in startup data checkpoints memory peers target ablation gloo supervision faults recovery crashes false_alarms watching inspection epochs; do $(PY) -m benchmarks.$$name || exit; done
	test -d data/blur_video || $(PY) -m training.tasks.make_blur_video
	$(PY) -m benchmarks.video
	$(PY) -m training.cli.scaling.__main__

# Beside .venv, which stays as it is: torch and all else come from there.
peers: env
	$(WITH_LIB) venv::add peers $(PEERS)

lock: env
	$(PY) tests/lock.py

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .tools

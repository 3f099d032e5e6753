# make check   lint, types and fast tests, three at a time (JOBS=8 for more): 8 minutes on two cores
# make test    make check plus one longer test of each mechanism, as in CI; installs what tests need: 20 to 28 minutes on two cores
# make soak    all other tests: the whole fault matrix, a hundred random kills, every way to start: 60 minutes on two cores
# make gpu-path  the GPU's code paths on a null GPU, which computes nothing; installs torch's CUDA build (5 GB) into .tools/cuda
# make gpu     measure the GPUs of this machine, in stages; installs nothing (GPU_FLAGS='--stages=oom --again')
# make slurm   all tests on a private SLURM; skipped where SLURM is not installed
# make extras  install the optional packages: .parquet and .zst data, BPE tokenizers, fp8, videos, LMDB
# make bench   the main CPU benchmarks: about three hours on two idle cores
# make peers   install accelerate, Lightning and Hugging Face Trainer into .tools/peers, for benchmarks and tests of their scripts
# make docs    rewrite the generated tables of the documentation
# make lock    resolve pyproject.toml into requirements.lock

SHELL := /bin/bash
PY := .venv/bin/python
PEERS := .tools/peers
JOBS ?= 3
BATS_VERSION := 1.13.0
SHELL_FILES := $(wildcard *.sh lib/*.sh tests/*.sh tests/shell/*.bash) duet .ci/run
# Files in the given order, short ones last, so that no worker waits long for the other; exception: tests/conftest.py.
# No worker is replaced after a crash or a timeout: with loadfile, pytest-xdist 3.8 would then wait forever.
PYTEST := $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0
.DEFAULT_GOAL := help

.PHONY: help env extras check test soak gpu gpu-path lint unit shell e2e slurm bench peers docs lock clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

# Shell code with the functions of lib/, in the project's own environment whatever is active.
WITH_LIB := @unset VIRTUAL_ENV CONDA_PREFIX; source lib/init.sh;

# The product's environment, then the optional packages.
extras:
	$(WITH_LIB) { python::find || venv::make; } && venv::add extras

# Tests need the optional packages and the test tools too.
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

# A part of `make check`.
unit shell e2e: env
	$(PYTEST) -q -m 'not slow and not soak and not null_gpu and not gpu' tests/$@

slurm: env
	$(PYTEST) -q tests/slurm

check: lint
	$(PYTEST) -q -m 'not slow and not soak and not null_gpu and not gpu'

test: lint peers
	$(PYTEST) -q -m 'not soak and not null_gpu and not gpu'

# One line per test, since it takes long. Both parts run, also if the first fails.
soak: env peers
	status=0; $(PYTEST) -v -m 'soak and not timed' || status=$$?; \
	  $(PY) -m pytest -v -m 'soak and timed' || status=$$?; exit $$status

# Beside .venv, which may have a CPU build. Three equals signs: two would take that one again. Only what is missing is installed.
gpu-path: env
	$(PY) -m uv pip install --quiet --compile-bytecode --target .tools/cuda "torch===$$(sed -n 's/^torch==//p' requirements.lock)"
	$(PY) -m pytest -v tests/null_gpu

# No `env`: a lent machine has no network. Python 3.6 can start it; it looks for one that has a GPU.
gpu:
	@$(or $(wildcard $(PY)),python3) -m benchmarks.gpu $(GPU_FLAGS)

# The main CPU benchmarks. The documentation names the command of every other figure.
# A part of the target benchmark: its full grid takes 30 to 45 hours of a core.
TARGET := --steps=200 --rate=7e-4 --shares=0.25,0.3,0.35,0.4,0.5 --share=0.25 --seeds=1 --precision=bf16
bench: env peers
	for name in startup data checkpoints memory peers ablation gloo supervision faults recovery crashes false_alarms watching inspection epochs; do $(PY) -m benchmarks.$$name || exit; done
	$(PY) -m benchmarks.target $(TARGET)
	test -d data/blur_video || $(PY) examples/make_blur_video.py
	$(PY) -m benchmarks.video
	$(PY) -m training.cli.scaling.__main__

# Beside .venv, which is not changed and provides torch and everything else.
peers: env
	$(WITH_LIB) venv::add peers $(PEERS)

docs: env
	$(PY) docs/tables.py

lock: env
	$(PY) tests/lock.py

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .tools

#!/usr/bin/env bash
# Train on two GPUs with a config file: the simple entry.
#
# Usage:
#   ./train_dual_gpu.sh CONFIG [--key=value …]
#
# Examples:
#   ./train_dual_gpu.sh configs/dual_gpu/quickstart.py               two ranks on any machine, about a minute
#   ./train_dual_gpu.sh configs/dual_gpu/balanced.py --seed=7
#   ./train_dual_gpu.sh configs/dual_gpu/balanced.py --dry_run       show the plan, launch nothing
#   ./train_dual_gpu.sh configs/dual_gpu/balanced.py --check         the same, and measure the memory of a step
#   ./train_dual_gpu.sh configs/dual_gpu/balanced.py --resume=latest
#
# The environment (.venv) is made at the first run.
# shellcheck disable=SC2128,SC3028 # the first element is meant; sh reads this line too, lib/init.sh gives it to bash
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE:-$0}")")/lib/init.sh" || return 2>/dev/null || exit

help::answer "$0" "$@"
python::ensure "$@"
run::plan "$@"
run::start

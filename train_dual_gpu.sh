#!/usr/bin/env bash
# Train on two GPUs with a config file.
#
# Usage:
#   ./train_dual_gpu.sh CONFIG [--key=value …]
#
# Examples:
#   ./train_dual_gpu.sh configs/dual_gpu/quickstart.py          any machine, 1 min
#   ./train_dual_gpu.sh configs/dual_gpu/balanced.py --seed=7
#   ./train_dual_gpu.sh configs/dual_gpu/balanced.py --dry_run  show the plan
#   ./train_dual_gpu.sh configs/dual_gpu/balanced.py --check    check this machine
#   ./train_dual_gpu.sh configs/dual_gpu/balanced.py --resume=latest
#
# The first run creates the environment .venv.
# shellcheck disable=SC2128,SC3028 # the first element is intended; sh parses this line too, then lib/init.sh starts bash
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE:-$0}")")/lib/init.sh" || return 2>/dev/null || exit

help::answer "$0" "$@"
python::ensure "$@"
run::plan "$@"
run::start

#!/usr/bin/env bash
# Train with N processes on this machine.
#
# Usage:
#   ./launch_train.sh N [CONFIG] [--key=value …]
#
# Examples:
#   ./launch_train.sh 1 configs/dual_gpu/quickstart.py     one process: plain python, no process group
#   ./launch_train.sh 4 configs/dual_gpu/quickstart.py
#   ./launch_train.sh 8 configs/dual_gpu/balanced.py --total_batch_size=196608
source "$(dirname -- "$(readlink -f -- "$0")")/lib/init.sh"

help::answer "$0" "$@"
python::ensure "$@"
run::plan "$@"
run::start

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
#
# Exit codes: 0 done, 2 configuration, 3 resources, 4 training failed, 5 hang, 75 stopped with a checkpoint (run again
# with --resume), 130 interrupted.
source "$(dirname -- "$(readlink -f -- "$0")")/lib/init.sh"

help::answer "$0" "$@"
python::ensure "$@"
run::plan "$@"
run::start

#!/usr/bin/env bash
# Train with N processes on this machine, or launch your own script with them.
#
# Usage:
#   ./launch_train.sh N [CONFIG] [--key=value …]
#   ./launch_train.sh N [--key=value …] --script FILE [-- ARGS…]
#
# Examples:
#   ./launch_train.sh 1 configs/dual_gpu/quickstart.py    no process group
#   ./launch_train.sh 4 configs/dual_gpu/quickstart.py --total_batch_size=8192
#   ./launch_train.sh 8 configs/dual_gpu/balanced.py --total_batch_size=196608
#   ./launch_train.sh 2 --script main.py -- --epochs=3    your script, unchanged
#
# Several machines, from one command by ssh, or started on each of them:
#   ./launch_train.sh 2 CONFIG --hosts=a,b
#   ./launch_train.sh 2 CONFIG --nnodes=2 --node_rank=1 --master_addr=10.0.0.1
# shellcheck disable=SC2128,SC3028 # the first element is intended; sh parses this line too, then lib/init.sh starts bash
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE:-$0}")")/lib/init.sh" || return 2>/dev/null || exit

help::answer "$0" "$@"
python::ensure "$@"
run::plan "$@"
run::start

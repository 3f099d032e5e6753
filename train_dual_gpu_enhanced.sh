#!/usr/bin/env bash
# Train on two GPUs, with a resource report before, an analysis of what failed, and restarts after failures of the machine.
#
# Usage:
#   ./train_dual_gpu_enhanced.sh [--config=FILE] [--key=value …]
#
# Examples:
#   ./train_dual_gpu_enhanced.sh --config=configs/dual_gpu/quickstart.py
#   ./train_dual_gpu_enhanced.sh --device_batch_size=16 --total_batch_size=49152 --num_iterations=50 --eval_every=25
#   ./train_dual_gpu_enhanced.sh --resume=latest --retries=5
#
# The same pipeline and the same plan as train_dual_gpu.sh, with more stages.
# shellcheck disable=SC2128,SC3028 # the first element is meant; sh reads this line too, lib/init.sh gives it to bash
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE:-$0}")")/lib/init.sh" || return 2>/dev/null || exit

help::answer "$0" "$@"
python::ensure "$@"
run::plan "$@"
run::report_resources
run::add_stages --analyse
run::start

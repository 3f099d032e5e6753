#!/usr/bin/env bash
# Train on two GPUs like train_dual_gpu.sh, with a resource report at the start,
# an analysis after a failure, and restarts after machine failures.
#
# Usage:
#   ./train_dual_gpu_enhanced.sh [--config=FILE] [--key=value …]
#
# Examples:
#   ./train_dual_gpu_enhanced.sh --config=configs/dual_gpu/quickstart.py
#   ./train_dual_gpu_enhanced.sh --device_batch_size=16 --total_batch_size=49152
#   ./train_dual_gpu_enhanced.sh --resume=latest --retries=5
# shellcheck disable=SC2128,SC3028 # the first element is intended; sh parses this line too, then lib/init.sh starts bash
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE:-$0}")")/lib/init.sh" || return 2>/dev/null || exit

help::answer "$0" "$@"
python::ensure "$@"
run::plan "$@"
run::report_resources
run::add_stages --analyse
run::start

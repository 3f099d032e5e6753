#!/usr/bin/env bash
# Train on SLURM nodes, with automatic resume after time limits and preemption.
#
# Usage:
#   ./submit_job.sh [--nodes=N] [--gres=gpu:N] [--time=T] … CONFIG [--key=value …]
#   sbatch [SBATCH OPTIONS] submit_job.sh CONFIG [--key=value …]
#
#   --ranks_per_node=N   processes per node (default: one per GPU of the job)
#   --nodes=N, --gres=gpu:N, --time=T   of sbatch; any other: --sbatch="--a=b …"
#
# Examples:
#   ./submit_job.sh --nodes=2 --gres=gpu:4 CONFIG --total_batch_size=196608
#   ./submit_job.sh --ranks_per_node=2 --device=cpu configs/dual_gpu/quickstart.py
#
# ./submit_job.sh checks everything, then freezes code and config: docs/slurm.md

#SBATCH --job-name=duet
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:2
#SBATCH --time=24:00:00
#SBATCH --output=logs/%x_%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@120
# shellcheck disable=SC2128,SC3028 # the first element is intended; sh parses this line too, then lib/init.sh starts bash
home=$(dirname -- "$(readlink -f -- "${BASH_SOURCE:-$0}")")
if test "${1-}" != "${1#--frozen=}"; then # from ./submit_job.sh: never another version, nor its default configuration
  home=${1#*=} places=$home
elif test ! -f "$home/lib/slurm.sh"; then # SLURM runs a copy of this file; the job knows its source
  command=$( (env -u SLURM_CLUSTERS scontrol show job "${SLURM_JOB_ID:?}" 2>/dev/null || echo "Command=$0 $*") | sed -n '/^ *Command=/{s///p;q;}')
  home=$(dirname -- "$(readlink -f -- "${command%" $*"}")")
  test -f "$home/lib/slurm.sh" || home=${SLURM_SUBMIT_DIR:-$PWD}
  places="${command%" $*"} or $home"
fi
test -f "$home/lib/slurm.sh" || { printf '[ERROR] the code of the job is not at %s: submit it again from the project\n' "$places" >&2 && exit 2; }
. "$home/lib/init.sh" || return 2>/dev/null || exit
source "$home/lib/slurm.sh" || exit
help::answer "$0" "$@"
slurm::main "$@"

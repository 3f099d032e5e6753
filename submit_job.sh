#!/usr/bin/env bash
# Train on SLURM, on one node or several; go on by itself after the time limit and after preemption.
#
# Usage:
#   ./submit_job.sh [--nodes=N] [--gres=gpu:N] [--time=D-HH:MM:SS] [--partition=P] … CONFIG [--key=value …]
#   sbatch [options of sbatch] submit_job.sh CONFIG [--key=value …]
#
#   --ranks_per_node=N   processes on each node; without it one for each GPU that the job has there
#   --sbatch="--a=b …"   options of sbatch beyond the usual ones, which are understood as they are
#
# Examples:
#   ./submit_job.sh --nodes=2 --gres=gpu:4 configs/dual_gpu/balanced.py --total_batch_size=196608
#   ./submit_job.sh --ranks_per_node=2 --device=cpu configs/dual_gpu/quickstart.py --dry_run
#
# The first form checks everything, and freezes code and configuration, before it submits: docs/slurm.md.

#SBATCH --job-name=duet
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:2
#SBATCH --time=24:00:00
#SBATCH --output=logs/%x_%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@120
# shellcheck disable=SC2128,SC3028 # the first element is meant; sh reads these lines too, lib/init.sh gives them to bash
home=$(dirname -- "$(readlink -f -- "${BASH_SOURCE:-$0}")")
if test ! -f "$home/lib/slurm.sh"; then # SLURM runs a copy of this file; the job knows where that is from
  command=$( (scontrol show job "${SLURM_JOB_ID:?}" 2>/dev/null || echo "Command=$0 $*") | sed -n 's/^ *Command=//p')
  home=$(dirname -- "$(readlink -f -- "${command%" $*"}")")
  test -f "$home/lib/slurm.sh" || home=${SLURM_SUBMIT_DIR:-$PWD}
fi
test -f "$home/lib/slurm.sh" || {
  printf '[ERROR] the project is neither where %s is nor in %s: submit from its folder\n' "${command%" $*"}" "$home" >&2
  exit 2
}
. "$home/lib/init.sh" || return 2>/dev/null || exit
source "$home/lib/slurm.sh" || exit
help::answer "$0" "$@"
slurm::main "$@"

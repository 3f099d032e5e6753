# shellcheck shell=bash
# submit_job.sh on a login node: check, freeze, submit; and at the first start of a job of plain sbatch: freeze.

# Dispatch by the role of this script: job with frozen code, job to freeze, or submission. Usage: slurm::main ARGS…
slurm::main() {
  if [[ -f $DUET_ROOT.json ]]; then # beside frozen code
    # shellcheck source=lib/batch.sh
    source "$DUET_ROOT/lib/batch.sh"
    batch::train
  elif [[ -n ${SLURM_JOB_ID-} && ! $0 -ef $DUET_ROOT/submit_job.sh ]]; then # the copy that SLURM runs
    slurm::freeze "$@"
  else
    slurm::submit "$@"
  fi
}

# On a login node. Prints the job id. Usage: slurm::submit ARGS…
slurm::submit() {
  local answers code job='' line name sbatch status=0
  local -a submission
  slurm::_environment "$@" || return
  code=$(slurm::_ask submit "$@") || return
  if [[ ! -f $code.json ]]; then # --dry_run, or nothing to do
    messages::answer "$code"
    return 0
  fi
  for name in "${!SLURM_@}"; do # of an enclosing allocation: they would limit the job
    [[ $name =~ ^SLURM_(CONF|CONF_SERVER|CLUSTERS|JWT)$ ]] || unset "$name"
  done
  mapfile -d '' -t submission <"$code.argv"
  # What it prints decides: with --wait its status is that of the job, at its end.
  exec {answers}< <(exec "${submission[@]}")
  sbatch=$!
  while IFS= read -r line; do
    if [[ -z $job && $line =~ ^[0-9]+(\;.*)?$ ]]; then # 'number;cluster'
      job=$line
      slurm::_submitted "$code" "$job"
    else
      printf '%s\n' "$line" >&2
    fi
  done <&"$answers"
  wait "$sbatch" || status=$?
  [[ -z $job ]] || return "$status"
  job=$(slurm::_ask withdraw "$code") || return
  if [[ -n $job ]]; then # only the answer was lost
    slurm::_submitted "$code" "$job"
  elif ((status)); then
    messages::error slurm.refused 'sbatch refused the job, see its message above; nothing was submitted (exit %d)' "$EXIT_RESOURCES"
    return "$EXIT_RESOURCES"
  else # --test-only, --version
    messages::info slurm.no_job 'sbatch has submitted no job, see its output above'
  fi
}

# Print the number of the job, and how to watch it. Usage: slurm::_submitted CODE 'number;cluster'
slurm::_submitted() {
  printf '%s\n' "${2%%;*}"
  slurm::_ask submitted "$@"
}

# In a job of plain sbatch: freeze the code at its first start, then run the frozen copy. Usage: slurm::freeze ARGS…
slurm::freeze() {
  local code known=$DUET_ROOT/experiments/.jobs/${SLURM_CLUSTER_NAME-}-$SLURM_JOB_ID
  if [[ -n ${SLURM_RESTART_COUNT-} && -f $known/submit_job.sh ]]; then
    code=$(readlink -f -- "$known")
  else
    slurm::_environment "$@" || return
    code=$(slurm::_ask freeze "$@") || return
    if [[ ! -f $code.json ]]; then # --dry_run
      messages::answer "$code"
      return 0
    fi
    mkdir -p -- "${known%/*}"
    ln -sfn -- "$code" "$known"
  fi
  exec "$code/submit_job.sh"
}

# Sets PYTHON; reports what needs no packages before installing them.
slurm::_environment() {
  python::find || python::install_after training.cli.submit check "$@"
}

slurm::_ask() {
  "$PYTHON" "$DUET_ROOT/lib/run_module.py" training.cli.submit "$@"
}

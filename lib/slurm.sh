# shellcheck shell=bash
# submit_job.sh on a login node (check, freeze, submit) and as the batch script of a job (train, then handle the exit status).

SLURM_STOPPED=0 # 1 once SLURM has sent SIGTERM to the batch script

# Dispatch by the role of this script: job with frozen code, job to freeze, or submission. Usage: slurm::main ARGS…
slurm::main() {
  if [[ -f $DUET_ROOT.json ]]; then # beside frozen code
    slurm::train
  elif [[ -n ${SLURM_JOB_ID-} && ! $0 -ef $DUET_ROOT/submit_job.sh ]]; then # the copy that SLURM runs
    slurm::freeze "$@"
  else
    slurm::submit "$@"
  fi
}

# On a login node. Prints the job id. Usage: slurm::submit ARGS…
slurm::submit() {
  local code job name
  local -a submission
  slurm::_environment "$@" || return
  code=$(slurm::_ask submit "$@") || return
  if [[ ! -f $code.json ]]; then # --dry_run, or nothing to do
    [[ -z $code ]] || printf '%s\n' "$code"
    return 0
  fi
  for name in "${!SLURM_@}"; do # of an enclosing allocation: they would limit the job
    [[ $name == SLURM_CONF ]] || unset "$name"
  done
  mapfile -d '' -t submission <"$code.argv"
  job=$("${submission[@]}") || {
    messages::error slurm.refused 'sbatch refused the job, see its message above; nothing was submitted (exit %d)' "$EXIT_RESOURCES"
    slurm::_ask withdraw "$code"
    return "$EXIT_RESOURCES"
  }
  job=${job%%;*} # 'number;cluster'
  slurm::_ask submitted "$code" "$job"
  printf '%s\n' "$job"
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
      printf '%s\n' "$code"
      return 0
    fi
    mkdir -p -- "${known%/*}"
    ln -sfn -- "$code" "$known"
  fi
  exec "$code/submit_job.sh"
}

# In a job, from frozen code: run the step and handle its end. The exit status is the job's.
slurm::train() {
  local status=0
  local -a step
  [[ -n ${SLURM_JOB_ID-} ]] || {
    messages::error slurm.frozen '%s is the frozen code of a job and runs in jobs only (try: ./submit_job.sh --resume=… in the project)' \
      "$DUET_ROOT"
    return "$EXIT_CONFIG"
  }
  run::export "$DUET_ROOT.env"
  PYTHON=$VIRTUAL_ENV/bin/python
  [[ -x $PYTHON ]] || {
    messages::error slurm.no_environment 'the environment of this job is not on node %s: %s (exit %d)' \
      "${SLURMD_NODENAME-}" "$VIRTUAL_ENV" "$EXIT_RESOURCES"
    return "$EXIT_RESOURCES"
  }
  # SLURM signals the ranks itself; this script waits for them.
  trap 'SLURM_STOPPED=1' TERM
  slurm::_ask begin "$DUET_ROOT" || return
  mapfile -d '' -t step <"$DUET_ROOT.step"
  "${step[@]}" || status=$?
  slurm::_ask end "$DUET_ROOT" "$status" "$SLURM_STOPPED"
}

# Sets PYTHON; reports what needs no packages before installing them.
slurm::_environment() {
  python::find || python::install_after training.cli.submit check "$@"
}

slurm::_ask() {
  "$PYTHON" "$DUET_ROOT/lib/run_module.py" training.cli.submit "$@"
}

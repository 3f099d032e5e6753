# shellcheck shell=bash
# submit_job.sh as the batch script of a job, from frozen code: train, then handle the exit status.

BATCH_SIGNALS=0 # that the batch script has received
BATCH_STOPPED=0 # 1 once one of them was SIGTERM
BATCH_STEP=     # PID of the step

# Run the step and handle its end. The exit status is the job's.
batch::train() {
  local status=0
  local -a step
  [[ -n ${SLURM_JOB_ID-} ]] || {
    messages::error batch.frozen '%s is the frozen code of a job and runs in jobs only (try: ./submit_job.sh --resume=… in the project)' \
      "$DUET_ROOT"
    return "$EXIT_CONFIG"
  }
  unset SLURM_CLUSTERS SLURM_JWT # of the submission: clusters to choose from, a credential that expires
  run::export "$DUET_ROOT.env"
  export -n PYTHON # of this script alone
  [[ -x $PYTHON ]] || {
    messages::error batch.no_environment 'the environment of this job is not on node %s: %s (exit %d)' \
      "${SLURMD_NODENAME-}" "$PYTHON" "$EXIT_RESOURCES"
    return "$EXIT_RESOURCES"
  }
  trap 'BATCH_STOPPED=1 && ((++BATCH_SIGNALS))' TERM # SLURM sends it to the ranks too
  trap 'batch::_pass_on' USR1
  slurm::_ask begin "$DUET_ROOT" || return
  mapfile -d '' -t step <"$DUET_ROOT.step"
  batch::_run "${step[@]}" || status=$?
  slurm::_ask end "$DUET_ROOT" "$status" "$BATCH_STOPPED"
}

# Run the step. Not in the foreground, where bash would handle signals only at its end.
batch::_run() {
  local signals=-1 status
  ((BATCH_SIGNALS == 0)) || return "$EXIT_PREEMPTED" # too early to be passed on
  "$@" <&0 &
  BATCH_STEP=$!
  until ((signals == BATCH_SIGNALS)); do # a signal ends `wait`, not the step
    signals=$BATCH_SIGNALS status=0
    wait "$BATCH_STEP" || status=$?
  done
  return "$status"
}

# SLURM signals the ranks, unless the signal is for the batch script alone (sbatch --signal=B:USR1@120).
batch::_pass_on() {
  ((++BATCH_SIGNALS))
  [[ -z $BATCH_STEP ]] || scancel --signal=USR1 "$SLURM_JOB_ID" || true
}

# shellcheck shell=bash
# Stages of a run after the environment: plan and launch.

RUN_DIR=
RUN_STOP=    # first stop signal since the plan was begun
RUN_PLANNER= # PID while the plan is made

# Make the plan. Sets RUN_DIR, the variables and the command of the run; exits after --dry_run and --check; becomes train.py if this
# process is already a rank, and the launcher of several machines with --hosts.
run::plan() {
  local answer
  [[ -e /proc/self/fd/1 ]] || exec 1>/dev/null # like the others in lib/init.sh
  run::_ask "$@" || {
    local status=$?
    messages::answer "$answer"
    exit "$status"
  }
  [[ -f $answer/launch.argv ]] || run::_die_if_stopped
  case $answer in
  rank) exec "$PYTHON" -u "$DUET_ROOT/train.py" "$@" ;; # another launcher has started the ranks: never nest
  hosts) exec "$PYTHON" "$DUET_ROOT/lib/run_module.py" training.cli.hosts "$DUET_SCRIPT" "$@" ;;
  esac
  if [[ ! -f $answer/launch.argv ]]; then # --dry_run, --check: the plan as text
    messages::answer "$answer"
    exit 0
  fi
  RUN_DIR=$answer
  # NUL-delimited: survives spaces, quotes and newlines.
  mapfile -d '' -t RUN_COMMAND <"$RUN_DIR/launch.argv"
  run::export "$RUN_DIR/launch.env"
  log::open "$DUET_LOG_FILE"
}

# Sets `answer` of the caller to what the plan prints; its exit status. It may wait for other machines: unlike in $(…), stop signals are
# passed on to it, also when they are sent to this shell alone. From here on they do not end this shell: run::start passes the first one
# to the supervisor.
run::_ask() {
  local stream ctrl_c=1 status=0
  [[ $(trap -p INT) != "trap -- '' "* ]] || ctrl_c= # under nohup
  trap 'run::_pass_on TERM' TERM
  trap 'run::_pass_on USR1' USR1
  trap 'run::_pass_on INT' INT # Ctrl-C reaches the plan itself too, which takes both as one (lib/run_module.py)
  exec {stream}< <(DUET_CTRL_C=$ctrl_c exec "$PYTHON" "$DUET_ROOT/lib/run_module.py" training.cli.plan "$DUET_SCRIPT" "$@")
  RUN_PLANNER=$!
  IFS= read -rd '' -u "$stream" answer || true
  exec {stream}<&-
  wait "$RUN_PLANNER" || status=$?
  # a signal ends the wait, but the next one returns the status of the plan
  [[ -z $RUN_STOP ]] || { status=0 && wait "$RUN_PLANNER" || status=$?; }
  RUN_PLANNER=
  answer=${answer%$'\n'}
  return "$status"
}

run::_pass_on() {
  RUN_STOP=${RUN_STOP:-$1}
  [[ -z $RUN_PLANNER ]] || kill -s "$1" "$RUN_PLANNER" 2>/dev/null || true
}

# After a stop signal that came too late for a plan that has written nothing.
run::_die_if_stopped() {
  [[ -n $RUN_STOP ]] || return 0
  trap - TERM USR1 INT
  kill -s "$RUN_STOP" "$$"
  exit $((128 + $(kill -l "$RUN_STOP"))) # the first process of a container: without a trap it ignores the signal
}

# Export the NUL-delimited variables in FILE, untraced, since values may be secrets. Usage: run::export FILE
run::export() {
  local -
  set +x
  local -a variables
  mapfile -d '' -t variables <"$1"
  ((${#variables[@]} == 0)) || export "${variables[@]}" # without a name it would print every variable
}

# The resource report of the enhanced script.
run::report_resources() {
  "$PYTHON" "$DUET_ROOT/lib/run_module.py" training.cli.resources "$RUN_DIR" || [[ -n $RUN_STOP ]]
}

# Add stages to the supervisor: --analyse.
run::add_stages() {
  RUN_COMMAND+=("$@")
}

# Replace this process by the supervisor: signals reach it directly and its exit status is the script's. Until it handles them, stop
# signals are blocked if this `env` can do that (coreutils 8.31).
run::start() {
  local -a hold=(env --block-signal={INT,TERM,USR1})
  # env takes a program whose path has = for a variable
  if [[ ${RUN_COMMAND[0]} == *=* ]] || ! "${hold[@]}" true 2>/dev/null; then hold=(); fi
  trap - TERM USR1 INT
  [[ -z $RUN_STOP ]] || run::add_stages "--stopped=$RUN_STOP"
  exec "${hold[@]}" "${RUN_COMMAND[@]}"
}

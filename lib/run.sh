# shellcheck shell=bash
# Stages of a run after the environment: plan and launch.

RUN_DIR=

# Make the plan. Sets RUN_DIR, the variables and the command of the run; exits after --dry_run and --check; becomes train.py if this
# process is already a rank, and the launcher of several machines with --hosts.
run::plan() {
  local answer
  # a closed descriptor would become that of the next file that is opened
  [[ -e /proc/self/fd/0 ]] || exec 0</dev/null
  [[ -e /proc/self/fd/1 ]] || exec 1>/dev/null
  [[ -e /proc/self/fd/2 ]] || exec 2>/dev/null
  run::_ask "$@" || {
    local status=$?
    [[ -z $answer ]] || printf '%s\n' "$answer"
    exit "$status"
  }
  case $answer in
  rank) exec "$PYTHON" -u "$DUET_ROOT/train.py" "$@" ;; # another launcher has started the ranks: never nest
  hosts) exec "$PYTHON" "$DUET_ROOT/lib/run_module.py" training.cli.hosts "$DUET_SCRIPT" "$@" ;;
  esac
  if [[ ! -f $answer/launch.argv ]]; then # --dry_run, --check: the plan as text
    [[ -z $answer ]] || printf '%s\n' "$answer"
    exit 0
  fi
  RUN_DIR=$answer
  # NUL-delimited: survives spaces, quotes and newlines.
  mapfile -d '' -t RUN_COMMAND <"$RUN_DIR/launch.argv"
  run::export "$RUN_DIR/launch.env"
  log::open "$DUET_LOG_FILE"
}

# Sets `answer` of the caller to what the plan prints; its exit status. It may wait for other machines: unlike in $(…), TERM and USR1 are
# passed on to it, also when they are sent to this shell alone.
run::_ask() {
  local stream planner ctrl_c=1 status=0
  [[ $(trap -p INT) != "trap -- '' "* ]] || ctrl_c= # under nohup
  exec {stream}< <(DUET_CTRL_C=$ctrl_c exec "$PYTHON" "$DUET_ROOT/lib/run_module.py" training.cli.plan "$DUET_SCRIPT" "$@")
  planner=$!
  trap 'kill -s TERM "$planner" 2>/dev/null || true' TERM
  trap 'kill -s USR1 "$planner" 2>/dev/null || true' USR1
  trap : INT # Ctrl-C reaches the plan itself
  IFS= read -rd '' -u "$stream" answer || true
  exec {stream}<&-
  wait "$planner" || status=$?
  trap - TERM USR1 INT
  answer=${answer%$'\n'}
  return "$status"
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
  "$PYTHON" "$DUET_ROOT/lib/run_module.py" training.cli.resources "$RUN_DIR"
}

# Add stages to the supervisor: --analyse.
run::add_stages() {
  RUN_COMMAND+=("$@")
}

# Replace this process by the supervisor: signals reach it directly and its exit status is the script's.
run::start() {
  exec "${RUN_COMMAND[@]}"
}

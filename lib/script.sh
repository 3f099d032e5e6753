# shellcheck shell=bash
# The Python that launches a user's script.

# Whether the arguments launch a user's script.
script::is_launched() {
  local word
  for word in "$@"; do
    case $word in
    --) return 1 ;;
    --script | --script=*) return 0 ;;
    esac
  done
  return 1
}

# Sets PYTHON to the user's own Python if it has torch but lacks packages of Duet: the launcher of a script needs only the standard
# library. Without an active environment that is the Python on PATH, as in containers. Usage: script::find_python ARGS…
script::find_python() {
  local active any
  script::is_launched "$@" && [[ -z ${DUET_PYTHON-}${TORCH_LOCAL_PATH:-} ]] || return
  python::active
  active=$DUET_ACTIVE
  if [[ -x $active/bin/python ]]; then
    any=$active/bin/python
    if "$any" "$DUET_ROOT/lib/environment.py" missing "$active" &>/dev/null; then return 1; fi # complete: found as usual
  else
    any=$(python::base) || return
  fi
  "$any" -c 'import importlib.util, sys
sys.exit(sys.version_info < (3, 10) or importlib.util.find_spec("torch") is None)' 2>/dev/null || return
  if venv::is_current; then return 1; fi # it has more: stacks of hung ranks, charts
  # shellcheck disable=SC2034 # used by the other parts
  PYTHON=$any
}

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

# Sets PYTHON for the launcher of a script, which needs only the standard library: a complete environment, which has more (stacks of hung
# ranks, charts), else the script's own Python, or another one if that is older than 3.10. Fails if the script has none: then .venv is
# created. Usage: script::find_python ARGS…
script::find_python() {
  local own
  script::is_launched "$@" && [[ -z ${DUET_PYTHON-}${TORCH_LOCAL_PATH:-} ]] || return
  python::active
  if [[ $DUET_ACTIVE -ef $DUET_ROOT/.venv ]]; then return 1; fi
  own=${DUET_ACTIVE:+$DUET_ACTIVE/bin/python}
  if [[ -x $own ]] && "$own" "$DUET_ROOT/lib/environment.py" missing "$DUET_ACTIVE" &>/dev/null; then
    PYTHON=$own
  elif venv::is_current; then
    PYTHON=$DUET_ROOT/.venv/bin/python
  elif [[ -x $own ]] || own=$(script::_on_path); then
    "$own" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || own=$(python::base) || exit
    # shellcheck disable=SC2034 # used by the other parts
    PYTHON=$own
  else
    return 1
  fi
}

# The Python on PATH that has torch, as in containers.
script::_on_path() {
  local found
  for found in "$(type -P python)" "$(type -P python3)" "$(REFUSED_TO='' python::base 2>/dev/null)"; do
    "$found" -c 'import sys; sys.path.pop(0)
from importlib.util import find_spec; sys.exit(find_spec("torch") is None)' &>/dev/null || continue
    printf '%s' "$found"
    return
  done
  return 1
}

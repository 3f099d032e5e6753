# shellcheck shell=bash
# Finds or makes the Python environment. Sets PYTHON to an interpreter that has everything of requirements.lock.
#
#   1. TORCH_LOCAL_PATH=DIR  an own build of PyTorch (DIR/torch): all else from .venv
#   2. an active environment (venv or conda) that has torch >= 2.9 and the other packages: used as it is
#   3. .venv in the project: made and filled at the first run, recognised by a stamp at later ones

PYTHON=

# Any Python that can run the standard-library parts (help, checking the command line).
python::any() {
  if [[ -x $DUET_ROOT/.venv/bin/python ]]; then
    printf '%s' "$DUET_ROOT/.venv/bin/python"
  else
    command -v python3 || command -v python
  fi
}

# A Python >= 3.10 to make .venv from.
python::base() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11 python3.10 python3.14 python; do
    candidate=$(command -v "$candidate") || continue
    "$candidate" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || continue
    printf '%s' "$candidate"
    return 0
  done
  log::error "no Python 3.10 or newer found on PATH (try: apt-get install python3 python3-venv)"
  return "$EXIT_RESOURCES"
}

# Sets PYTHON. Usage: python::ensure ARGS… of the script
python::ensure() {
  local base
  python::find && return
  # A typing error is answered now, not after the installation.
  base=$(python::base) || return
  "$base" -m training.request "$DUET_SCRIPT" "$@" || return
  python::make
}

# Sets PYTHON, or fails when the environment has to be made first.
python::find() {
  local active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}} missing
  if [[ -n ${TORCH_LOCAL_PATH:-} ]]; then
    python::_use_local_torch || exit
  elif [[ -n $active && $active != "$DUET_ROOT/.venv" && -x $active/bin/python ]]; then
    if missing=$("$active/bin/python" -I "$DUET_ROOT/lib/environment.py" missing); then
      PYTHON=$active/bin/python
      return 0
    fi
    log::info "the active environment $active is not used: $missing"
  fi
  PYTHON=$DUET_ROOT/.venv/bin/python
  [[ -x $PYTHON && $(cat "$DUET_ROOT/.venv/duet.stamp" 2>/dev/null) == "$(python::_stamp)" ]]
}

python::_use_local_torch() {
  local torch=$TORCH_LOCAL_PATH/torch
  if [[ ! -f $torch/__init__.py ]]; then
    log::error "TORCH_LOCAL_PATH is '$TORCH_LOCAL_PATH' (environment): there is no torch/__init__.py below it"
    return "$EXIT_RESOURCES"
  fi
  export PYTHONPATH="$TORCH_LOCAL_PATH:$PYTHONPATH" LD_LIBRARY_PATH="$torch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
  log::info "PyTorch from TORCH_LOCAL_PATH=$TORCH_LOCAL_PATH (PYTHONPATH, LD_LIBRARY_PATH)"
}

# What .venv must have been made from: the lock file, and whether torch came with it.
python::_stamp() {
  printf '%s torch=%s' "$(cksum <"$DUET_ROOT/requirements.lock")" "${TORCH_LOCAL_PATH:+local}"
}

python::make() {
  local base stamp
  base=$(python::base) || return
  stamp=$(python::_stamp)
  log::info "first run: making the environment .venv with $base (once, some minutes with a slow network)"
  "$base" "$DUET_ROOT/lib/environment.py" make "$DUET_ROOT" "$stamp" || return "$EXIT_RESOURCES"
  log::success "environment ready: $DUET_ROOT/.venv"
}

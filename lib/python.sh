# shellcheck shell=bash
# Finds or makes the Python environment. Sets PYTHON to an interpreter that has everything of requirements.lock.
#
#   1. TORCH_LOCAL_PATH=DIR  an own build of PyTorch (DIR/torch): all else from .venv
#   2. an active environment (venv or conda) that has torch and the other packages: used as it is
#   3. .venv in the project: made and filled at the first run, recognised by a stamp at later ones

PYTHON=

# Any Python that can run the standard-library parts (help, checking the command line, the monitor), the quickest to start.
python::any() {
  if [[ -x $DUET_ROOT/.venv/bin/python ]]; then
    printf '%s' "$DUET_ROOT/.venv/bin/python"
  else
    python::base quick
  fi
}

# A Python >= 3.10 to make .venv from: the user's own choice, so in the order of PATH. `quick`: one that starts quickly.
python::base() {
  local how=${1:-} found candidate
  local -a candidates shims=()
  found=$(type -aP python3 python3.13 python3.12 python3.11 python3.10 python3.14 python) || true
  mapfile -t candidates <<<"$found"
  if [[ $how == quick ]]; then # a shim of a version manager starts a shell and a search: 50 ms more
    for candidate in "${!candidates[@]}"; do
      [[ ${candidates[candidate]} == */shims/* ]] || continue
      shims+=("${candidates[candidate]}")
      unset "candidates[candidate]"
    done
  fi
  for candidate in "${candidates[@]}" "${shims[@]}"; do
    "$candidate" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || continue
    printf '%s' "$candidate"
    return 0
  done
  log::error "no Python 3.10 or newer found on PATH (try: apt-get install python3 python3-venv)"
  return "$EXIT_RESOURCES"
}

# Sets PYTHON. Usage: python::ensure ARGS… of the script
python::ensure() {
  local any
  python::find && return
  # A typing error is answered now, not after the installation.
  any=$(python::any) || return
  "$any" "$DUET_ROOT/lib/run_module.py" training.request "$DUET_SCRIPT" "$@" || return
  python::make
}

# Sets PYTHON, or fails when the environment has to be made first.
python::find() {
  local active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}} lacking stamp='' real
  if [[ -n ${TORCH_LOCAL_PATH:-} ]]; then
    python::_use_local_torch || exit
  elif [[ -x $active/bin/python && ! $active -ef $DUET_ROOT/.venv ]]; then
    if lacking=$("$active/bin/python" "$DUET_ROOT/lib/environment.py" missing 2>/dev/null); then
      PYTHON=$active/bin/python
      return 0
    fi
    log::info "the active environment $active is not used: ${lacking:-its Python does not run or is too old}"
  fi
  PYTHON=$DUET_ROOT/.venv/bin/python
  [[ -x $PYTHON && -f $DUET_ROOT/.venv/duet.stamp ]] || return
  IFS= read -r stamp <"$DUET_ROOT/.venv/duet.stamp" || true # the file has no last newline
  # With a torch of the user, a .venv that has another one serves as well: his comes first on the path.
  [[ $stamp == "$(python::_stamp)" || $stamp == "$(TORCH_LOCAL_PATH='' python::_stamp)" ]] || return
  # /usr/bin/python3 may have become another Python since (upgrade of the system): its packages are not there.
  real=$(readlink -f -- "$PYTHON")
  [[ ${real##*/} != python3.* || -d $DUET_ROOT/.venv/lib/${real##*/} ]]
}

python::_use_local_torch() {
  local any problem
  any=$(python::any) || return
  problem=$("$any" -I -S "$DUET_ROOT/lib/environment.py" local "$TORCH_LOCAL_PATH") || {
    log::error "TORCH_LOCAL_PATH is '$TORCH_LOCAL_PATH' (environment): ${problem:-it can not be checked}"
    return "$EXIT_RESOURCES"
  }
  TORCH_LOCAL_PATH=$(CDPATH='' cd -- "$TORCH_LOCAL_PATH" && pwd) # a relative path would mean something else in another folder
  export PYTHONPATH="$TORCH_LOCAL_PATH${PYTHONPATH:+:$PYTHONPATH}" LD_LIBRARY_PATH="$TORCH_LOCAL_PATH/torch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
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
  log::info "making the environment .venv with $base (once, some minutes with a slow network)"
  # Nothing on the user's own PYTHONPATH counts as installed: it may be gone at the next run.
  PYTHONPATH='' "$base" "$DUET_ROOT/lib/environment.py" make "$DUET_ROOT" "$stamp" || return
  log::success "environment ready: $DUET_ROOT/.venv"
}

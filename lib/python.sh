# shellcheck shell=bash
# Finds the Python environment. Sets PYTHON to an interpreter that has the packages.
#
#   0. DUET_PYTHON           Duet is an installed package: its Python (lib/site/_duet.py)
#   1. TORCH_LOCAL_PATH=DIR  a local build of PyTorch (DIR/torch); everything else from .venv
#   2. an active environment (venv or conda) with torch and the other required packages: used as it is
#   3. .venv in the project: created by the first run (lib/venv.sh), reused by later ones

# shellcheck disable=SC2034 # used by the other parts
PYTHON=
NEWEST_MINOR=14 # Python 3.14: the last with wheels of the torch in requirements.lock

# The fastest Python that can run the standard-library parts: help, checks of the command line, the monitor.
python::any() {
  if [[ -n ${DUET_PYTHON-} ]]; then
    printf '%s' "$DUET_PYTHON"
  elif venv::is_whole; then
    printf '%s' "$DUET_ROOT/.venv/bin/python"
  else
    python::base quick
  fi
}

# The first Python >= 3.10 on PATH to create .venv from: the locked torch has wheels for it, or it has one. `quick`: for other tasks.
python::base() {
  local how=${1:-} found candidate candidates=() shims=() minor newer=''
  found=$(type -aP python3 python3.13 python3.12 python3.11 python3.10 python3.14 python) || true
  mapfile -t candidates <<<"$found"
  if [[ $how == quick ]]; then # shims of version managers take 50 ms longer
    for candidate in "${!candidates[@]}"; do
      [[ ${candidates[candidate]} == */shims/* ]] || continue
      shims+=("${candidates[candidate]}")
      unset "candidates[candidate]"
    done
  fi
  for candidate in "${candidates[@]}" "${shims[@]}"; do
    minor=$("$candidate" -I -S -c 'import sys; print(sys.version_info[1]); sys.exit(sys.version_info < (3, 10))' 2>/dev/null) || continue
    if [[ $how == quick || $minor -le $NEWEST_MINOR ]] || torch_local::has_torch "$candidate"; then
      printf '%s' "$candidate"
      return 0
    fi
    newer=3.$minor
  done
  [[ -z $newer ]] || messages::refuse python.too_new \
    'Python 3.10 to 3.%d is required on PATH to create .venv, found %s (try: apt-get install python3.13 python3.13-venv; without root: install uv, then uv python install 3.13)' "$NEWEST_MINOR" "$newer" || return
  messages::refuse python.missing 'no Python 3.10 or newer found on PATH (try: apt-get install python3 python3-venv; without root: install uv, then uv python install 3.13)'
}

# Sets PYTHON; exits if the command can be answered without the packages. Usage: python::ensure ARGS… of the script
python::ensure() {
  script::find_python "$@" || python::find || python::install_after training.cli.plan --before-install "$DUET_SCRIPT" "$@"
}

# Run the part of a module that works with any Python (invalid arguments, missing GPUs, a dry run); install the environment only
# if it prints nothing. Usage: python::install_after MODULE ARGS…
python::install_after() {
  local any answer status=0
  any=$(python::any) || exit
  answer=$("$any" "$DUET_ROOT/lib/run_module.py" "$@") || status=$?
  messages::answer "$answer"
  [[ $status == 0 && -z $answer ]] || exit "$status"
  venv::make || exit
}

# Sets DUET_ACTIVE, also for the plan of a user script (training/plan/script_program.py): the folder of the active environment, of a
# venv and a conda environment the one whose `python` comes first on PATH.
python::active() {
  export DUET_ACTIVE=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
  if [[ -n ${CONDA_PREFIX:-} && $(type -P python) == "$CONDA_PREFIX/bin/python" ]]; then DUET_ACTIVE=$CONDA_PREFIX; fi
}

# Sets PYTHON; fails if the environment has to be created first; exits if the active one has torch but lacks other packages.
python::find() {
  local active lacking status=0
  python::active
  active=$DUET_ACTIVE
  PYTHON=${DUET_PYTHON:-$DUET_ROOT/.venv/bin/python}
  [[ -z ${TORCH_LOCAL_PATH:-} ]] || torch_local::use || exit
  if [[ -n ${DUET_PYTHON-} ]]; then
    lacking=$("$PYTHON" "$DUET_ROOT/lib/environment.py" missing) && return
    messages::refuse python.installed_lacks 'the environment of the installed Duet (%s) lacks: %s' "$PYTHON" "${lacking:-Python}" || exit
  elif [[ -z ${TORCH_LOCAL_PATH:-} && -n $active && -x $active/bin/python && ! $active -ef $DUET_ROOT/.venv ]]; then
    lacking=$("$active/bin/python" "$DUET_ROOT/lib/environment.py" missing "$active" 2>/dev/null) || status=$?
    case $status in
    0)
      PYTHON=$active/bin/python
      return 0
      ;;
    "$EXIT_RESOURCES") # it has torch: do not install a second one
      venv::is_current || messages::refuse python.active_lacks \
        'the active environment %s has torch but lacks required packages: %s' "$active" "$lacking" || exit
      if venv::has_other_torch "$active" "$lacking"; then return 0; fi
      ;;
    esac
    lacking=${lacking%%$'\n'*}
    messages::text python.broken_or_old 'its Python does not run or is too old'
    messages::info python.active_unused 'the active environment %s is not used: %s' "$active" "${lacking:-$MESSAGE}"
  fi
  venv::is_current
}

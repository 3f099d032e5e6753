# shellcheck shell=bash
# TORCH_LOCAL_PATH: a torch that the user has built.

torch_local::use() {
  local any problem
  any=$(python::any) || return
  problem=$("$any" -I -S "$DUET_ROOT/lib/environment.py" local "$TORCH_LOCAL_PATH") || {
    messages::refuse torch_local.unusable "TORCH_LOCAL_PATH is '%s' (environment): %s" "$TORCH_LOCAL_PATH" "${problem:-?}"
    return
  }
  torch_local::put_first
  messages::info torch_local.used 'PyTorch from TORCH_LOCAL_PATH=%s (PYTHONPATH, LD_LIBRARY_PATH)' "$TORCH_LOCAL_PATH"
}

# Without a check: a command that imports no torch works also with a wrong folder. Once: a command may start another script of Duet.
torch_local::put_first() {
  [[ -d ${TORCH_LOCAL_PATH:-} ]] || return 0
  TORCH_LOCAL_PATH=$(CDPATH='' builtin cd -- "$TORCH_LOCAL_PATH" >/dev/null && builtin pwd) # ranks may run in another folder
  local lib=$TORCH_LOCAL_PATH/torch/lib
  [[ ${PYTHONPATH-}: == "$TORCH_LOCAL_PATH":* ]] || export PYTHONPATH="$TORCH_LOCAL_PATH${PYTHONPATH:+:$PYTHONPATH}"
  [[ ${LD_LIBRARY_PATH-}: == "$lib":* ]] || export LD_LIBRARY_PATH="$lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
}

# Whether .venv needs no torch from the lock file with this Python.
torch_local::has_torch() {
  [[ -n ${TORCH_LOCAL_PATH:-} ]] || "$1" -I -c 'import sys; from importlib.util import find_spec; sys.exit(not find_spec("torch"))' 2>/dev/null
}

#!/usr/bin/env bats
# TORCH_LOCAL_PATH: a torch that the user has built.

load helper

setup() { project::supervised; }

# A folder with an 'own build' of PyTorch. Usage: local_torch VERSION EXTENSION
local_torch() {
  LOCAL="$BATS_TEST_TMPDIR/my build"
  rm -rf "$LOCAL"
  mkdir -p "$LOCAL/torch/lib"
  touch "$LOCAL/torch/__init__.py" "$LOCAL/torch/$2"
  echo "__version__ = '$1'" >"$LOCAL/torch/version.py"
}

# Check that TORCH_LOCAL_PATH is refused for this reason. Usage: local_is_refused PATH REASON
local_is_refused() {
  TORCH_LOCAL_PATH=$1 plan
  # shellcheck disable=SC2031 # `run` sets them in this shell
  is "$status:$output:$(without_times "$stderr")" "3::[ERROR] TORCH_LOCAL_PATH is '$1' (environment): $2"
}

@test "TORCH_LOCAL_PATH that is not a build of PyTorch: exit 3 and the reason" {
  local_is_refused '/no where' 'it contains no torch/__init__.py'
  mkdir "$BATS_TEST_TMPDIR/empty"
  local_is_refused "$BATS_TEST_TMPDIR/empty" 'it contains no torch/__init__.py'
  local_torch 2.13.0 other.so
  local_is_refused "$LOCAL" 'torch has not been built'
  local_torch 2.13.0 _C.cpython-27-x86_64-linux-gnu.so
  local_is_refused "$LOCAL" "torch was not built for Python $("$REAL_PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])'): _C.cpython-27-x86_64-linux-gnu.so"
  local_torch 2.8.1 _C.so
  local_is_refused "$LOCAL" 'torch 2.8 is too old, 2.9 or newer is required'
}

# bats test_tags=slow
@test "TORCH_LOCAL_PATH: the run finds it first, by PYTHONPATH and LD_LIBRARY_PATH, also by a relative path" {
  local_torch 2.13.0+mine _C.so
  rm -f training/cli/__pycache__/supervise.*
  cat >training/cli/supervise.py <<'EOF'
import os
print(os.environ["PYTHONPATH"], os.environ["LD_LIBRARY_PATH"], sep="\n")
EOF
  for given in "$LOCAL" "../../my build" "$LOCAL/"; do
    TORCH_LOCAL_PATH=$given PYTHONPATH=/mine LD_LIBRARY_PATH=/libs run --separate-stderr ./train_dual_gpu.sh "$QUICKSTART" --device=cpu
    is "$status" 0
    is "${lines[0]}" "$LOCAL:/mine"
    is "${lines[1]}" "$LOCAL/torch/lib:/libs"
    has "$stderr" "PyTorch from TORCH_LOCAL_PATH=$LOCAL (PYTHONPATH, LD_LIBRARY_PATH)"
  done
}

@test "TORCH_LOCAL_PATH: commands of ./duet find it first too, and those without torch need none" {
  local_torch 2.13.0+mine _C.so
  rm -f training/cli/__pycache__/sample.*
  cat >training/cli/sample.py <<'EOF'
import os
print(os.environ.get("PYTHONPATH"), os.environ.get("LD_LIBRARY_PATH"), sep="\n")
EOF
  TORCH_LOCAL_PATH="../../my build" PYTHONPATH=/mine LD_LIBRARY_PATH=/libs run --separate-stderr ./duet sample
  is "$status:$stderr" '0:'
  is "${lines[0]}" "$LOCAL:/mine"
  is "${lines[1]}" "$LOCAL/torch/lib:/libs"
  # in a script that another one has started
  TORCH_LOCAL_PATH="$LOCAL" PYTHONPATH="$LOCAL:/mine" LD_LIBRARY_PATH="$LOCAL/torch/lib" run --separate-stderr ./duet sample
  is "${lines[*]}" "$LOCAL:/mine $LOCAL/torch/lib"
  TORCH_LOCAL_PATH='/no where' PYTHONPATH=/mine run --separate-stderr ./duet sample
  is "$status:${lines[0]}" '0:/mine'
}

# bats test_tags=slow
@test "TORCH_LOCAL_PATH: .venv is created without torch, and again for a run without it" {
  rm -r .venv
  quick_installer
  local_torch 2.13.0 _C.so
  TORCH_LOCAL_PATH=$LOCAL plan
  planned_after_making 1
  has "$(cat .venv/duet.stamp)" ' torch=local'
  TORCH_LOCAL_PATH=$LOCAL plan
  planned_after_making 1
  plan
  planned_after_making 2
  has_not "$(cat .venv/duet.stamp)" local
  # A .venv with its own torch will do: the user's comes first.
  TORCH_LOCAL_PATH=$LOCAL plan
  planned_after_making 2
}

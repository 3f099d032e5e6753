# shellcheck shell=bash
# Helpers of the .bats files: a copy of the project in a path with a space and a quote, and stubbed tools.

bats_require_minimum_version 1.5.0
ROOT=$(CDPATH='' cd -P -- "$BATS_TEST_DIRNAME/../.." && pwd)
REAL_PYTHON=$ROOT/.venv/bin/python          # has everything of the lock files
QUOTED_PYTHON=$(printf '%q' "$REAL_PYTHON") # for the code of a stub
SCRIPTS=(train_dual_gpu.sh train_dual_gpu_enhanced.sh launch_train.sh submit_job.sh)
QUICKSTART=configs/dual_gpu/quickstart.py
export ROOT REAL_PYTHON QUOTED_PYTHON SCRIPTS QUICKSTART

# Settings of the developer must not affect the tests.
unset VIRTUAL_ENV CONDA_PREFIX TORCH_LOCAL_PATH PYTHONPATH NO_COLOR CDPATH "${!DUET_@}"
export DUET_LANG=en

# A copy of what the scripts need, with a ready environment; PROJECT is its folder.
project::copy() {
  PROJECT="$BATS_TEST_TMPDIR/a user's folder/du et"
  mkdir -p "$PROJECT"
  project::_files | tar -C "$ROOT" --null -T - -cf - | tar -C "$PROJECT" -xf -
  cd "$PROJECT" || return
  project::environment
}

# Files that are tracked or not ignored, NUL-delimited, without deleted ones.
project::_files() {
  local name unneeded=(':!tests' ':!benchmarks' ':!docs')
  git -C "$ROOT" ls-files -z --cached --others --exclude-standard -- "${unneeded[@]}" | while IFS= read -r -d '' name; do
    if [[ -f $ROOT/$name ]]; then printf '%s\0' "$name"; fi
  done
}

# A .venv that looks complete to the scripts. A wrapper instead of a link, so that tests cannot change the real one.
project::environment() {
  mkdir -p .venv/bin
  executable .venv/bin/python <<<"exec $QUOTED_PYTHON \"\$@\""
  in_shell 'venv::_stamp' >.venv/duet.stamp
}

# Every file in the project except compiled Python files, to check that nothing is left.
project::listing() {
  find . -name __pycache__ -prune -o -print | sort
}

# Run shell code with the project's library loaded. Usage: in_shell CODE ARGS…
in_shell() {
  local code=$1
  shift
  bash -c 'source lib/init.sh; eval "$0"' "$code" "$@"
}

# Make FILE a shell script with the code on standard input. Usage: executable FILE
executable() {
  {
    echo '#!/bin/sh'
    cat
  } >"$1"
  chmod +x "$1"
}

# Put a tool first on PATH. Usage: stub NAME <<<CODE
stub() {
  mkdir -p "$BATS_TEST_TMPDIR/stubs"
  executable "$BATS_TEST_TMPDIR/stubs/$1"
  [[ :$PATH: == *:$BATS_TEST_TMPDIR/stubs:* ]] || PATH=$BATS_TEST_TMPDIR/stubs:$PATH
}

# A copy whose supervisor only says that it was started. MADE: a file with a line for each creation of .venv.
project::supervised() {
  project::copy
  MADE=$BATS_TEST_TMPDIR/made
  touch "$MADE"
  echo 'print("supervised")' >training/cli/supervise.py
}

# A python3 on PATH that 'installs' at once: records it in MADE and writes what lib/environment.py would.
quick_installer() {
  executable "$BATS_TEST_TMPDIR/made python" <<<"exec $QUOTED_PYTHON \"\$@\""
  stub python3 <<EOF
case \$1:\$2 in
*/environment.py:make)
  echo "\$3" >>'$MADE'
  rm -rf .venv # never write through a link in it
  mkdir -p .venv/bin
  cp '$BATS_TEST_TMPDIR/made python' .venv/bin/python
  printf '%s' "\$4" >.venv/duet.stamp
  exit "\${INSTALLER_STATUS:-0}" ;;
esac
exec $QUOTED_PYTHON "\$@"
EOF
}

plan() {
  run --separate-stderr ./train_dual_gpu.sh "$QUICKSTART" --device=cpu "$@"
}

# Check how often the environment was created, and that the supervisor was started with the plan.
# shellcheck disable=SC2154 # `run` sets status and output
planned_after_making() {
  is "$status" 0
  has "$output" supervised
  is "$(wc -l <"$MADE" | tr -d ' ')" "$1"
}

# A machine that has nothing but the basic tools and the stubs: no Python of any version. Sets BARE, a value for PATH.
bare_machine() {
  local tool
  mkdir -p "$BATS_TEST_TMPDIR/bare" "$BATS_TEST_TMPDIR/stubs"
  for tool in bash env sh cat cksum dirname basename readlink mkdir rm cp; do
    ln -s "$(command -v "$tool")" "$BATS_TEST_TMPDIR/bare/$tool"
  done
  # shellcheck disable=SC2034 # for the test
  BARE=$BATS_TEST_TMPDIR/stubs:$BATS_TEST_TMPDIR/bare
}

# Whether a text is the JSON object with which training.cli.doctor refuses a command. Usage: is_refusal JSON STATUS CODE TEXT [ALLOWED FIX]
is_refusal() {
  PYTHONPATH=$ROOT "$REAL_PYTHON" - "$@" <<'END'
import json, sys
from training.cli import doctor
from training.core.errors import Exit, Problem, UserError
found, status, code, text, *more = sys.argv[1:]
error = UserError(Problem(code, text, "".join(more[:1]), more[1:]), Exit(int(status)))
assert json.loads(found) == json.loads(doctor.refused(error)), found
END
}

# `output` and `stderr` without the time of each message.
without_times() {
  sed -E 's/^(\[[A-Z]+\]) [0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2} /\1 /' <<<"$1"
}

# Assertions that print the difference. Usage: is ACTUAL EXPECTED; has TEXT PART; has_not TEXT PART
is() {
  [[ $1 == "$2" ]] || {
    printf 'expected: %s\n  actual: %s\n' "$2" "$1"
    return 1
  }
}

has() {
  [[ $1 == *"$2"* ]] || {
    printf 'missing: %s\n in: %s\n' "$2" "$1"
    return 1
  }
}

has_not() {
  [[ $1 != *"$2"* ]] || {
    printf 'not wanted: %s\n in: %s\n' "$2" "$1"
    return 1
  }
}

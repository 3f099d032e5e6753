#!/usr/bin/env bats
# lib/python.sh: which Python is used, and when .venv is created. The installation itself: test_environment*.py.

load helper

setup() { project::supervised; }

# An active environment whose Python answers `environment.py missing` with TEXT and STATUS, and `torch` with TORCH or that of the tests.
# Usage: active DIR STATUS TEXT [TORCH]
active() {
  mkdir -p "$1/bin"
  executable "$1/bin/python" <<EOF
case \$1:\$2${4-} in */environment.py:missing*) echo '$3'; exit $2 ;; */environment.py:torch?*) echo '${4-}'; exit ;; esac
echo "\$* (\$DUET_ACTIVE)" >>'$1/used'
exec $QUOTED_PYTHON "\$@"
EOF
}

@test "a ready .venv is used as it is, and no other Python is started" {
  stub python3 <<<'echo called >&2; exit 1'
  plan
  planned_after_making 0
  is "$stderr" ''
}

@test "at the limit of processes a ready .venv is kept, and none is made" {
  quick_installer
  stub cksum <<<'exit 254' # as a shell that cannot fork
  plan
  planned_after_making 0
  is "$stderr" ''
  rm .venv/duet.stamp
  plan
  is "$status" 3
  has "$stderr" '[ERROR] '
  is "$(<"$MADE")" ''
}

@test "no .venv: it is created, and the run continues" {
  rm -r .venv
  quick_installer
  plan
  planned_after_making 1
  is "$(cat "$MADE")" "$PROJECT"
  has "$stderr" '[INFO] '
  has "$stderr" "creating the environment .venv with $BATS_TEST_TMPDIR/stubs/python3"
  plan
  planned_after_making 1
  is "$stderr" ''
}

# bats test_tags=slow
@test "a .venv without stamp (interrupted), with another lock file, of a removed Python: created again" {
  quick_installer
  rm .venv/duet.stamp
  plan
  planned_after_making 1
  echo 'new-peer==1.0' >>requirements.lock # of a later section: not in .venv
  plan
  planned_after_making 1
  sed -i 's/^tqdm==.*/tqdm==1.0/' requirements.lock
  plan
  planned_after_making 2
  ln -sf /nowhere/python3.11 .venv/bin/python
  plan
  planned_after_making 3
  # The link now points to another Python without packages.
  ln -sf "$(readlink -f "$REAL_PYTHON")" .venv/bin/python
  plan
  planned_after_making 4
}

@test "a .venv whose Python this user may not reach is not created again" {
  local closed="$BATS_TEST_TMPDIR/closed folder" user=()
  mkdir "$closed"
  mv .venv/bin/python "$closed/python3"
  ln -s "$closed/python3" .venv/bin/python
  chmod 600 "$closed"
  chmod a+rx "$BATS_RUN_TMPDIR" "$BATS_TEST_TMPDIR"
  ((EUID)) || user=(setpriv --reuid=65534 --clear-groups)
  "${user[@]}" test -x "$BATS_TEST_TMPDIR" || skip 'another user cannot enter TMPDIR'
  run --separate-stderr "${user[@]}" bash -c 'source lib/init.sh; venv::is_current || venv::make'
  chmod 700 "$closed" # bats deletes it
  is "$status" 3
  has "$stderr" "cannot be used by this user"
  has "$stderr" "no permission for $closed (try: chmod a+x ${closed// /\\ };"
  has_not "$stderr" 'creating'
}

@test "a dry run and missing GPUs are reported before the installation" {
  rm -r .venv
  quick_installer
  for script in ./train_dual_gpu.sh './launch_train.sh 2'; do
    # shellcheck disable=SC2086 # two words
    run --separate-stderr env PATH="$BATS_TEST_TMPDIR/stubs:$PATH" $script "$QUICKSTART" --device=cpu --dry_run
    is "$status:$stderr" '0:'
    has "$output" 'Plan (dry run'
    has "$output" 'note: the first start creates the environment .venv'
  done
  CUDA_VISIBLE_DEVICES='' run --separate-stderr ./train_dual_gpu.sh configs/dual_gpu/balanced.py --device=cuda
  is "$status:$output" '3:'
  has "$stderr" '2 GPUs are needed, 0 visible'
  run --separate-stderr ./submit_job.sh --ranks_per_node=2 --device=cpu "$QUICKSTART" --dry_run
  is "$status" 0
  has "$output" 'Submission (dry run'
  is "$(cat "$MADE")" ''
  [[ ! -e .venv ]]
}

# bats test_tags=slow
@test "a damaged .venv is created again: a file of its list is missing or empty" {
  quick_installer
  mkdir .venv/package
  printf 'package/__init__.py\n' >.venv/duet.files
  echo 1 >.venv/package/__init__.py
  plan
  planned_after_making 0
  : >.venv/package/__init__.py
  plan
  planned_after_making 1
  has "$stderr" 'again: it is damaged or was made from another requirements.lock'
  plan
  planned_after_making 1
}

@test "an active environment with torch that lacks small packages: exit 3 and the command, no second torch" {
  rm -r .venv
  quick_installer
  active "$BATS_TEST_TMPDIR/theirs" 3 $'no psutil, no tqdm\n    try:     pip install psutil tqdm'
  VIRTUAL_ENV=$BATS_TEST_TMPDIR/theirs plan
  is "$status:$output" '3:'
  has "$stderr" "[ERROR] "
  has "$stderr" "the active environment $BATS_TEST_TMPDIR/theirs has torch but lacks required packages: no psutil, no tqdm"
  is "${stderr_lines[1]}" '    try:     pip install psutil tqdm'
  VIRTUAL_ENV=$BATS_TEST_TMPDIR/theirs plan --check --json
  is_refusal "$output" 3 python.active_lacks "the active environment $BATS_TEST_TMPDIR/theirs has torch but lacks required packages: no psutil, no tqdm"$'\n    try:     pip install psutil tqdm'
  [[ ! -e .venv ]]
  project::environment # with a finished .venv nothing has to be built
  VIRTUAL_ENV=$BATS_TEST_TMPDIR/theirs plan
  planned_after_making 0
  is "$(without_times "$stderr")" "[INFO] the active environment $BATS_TEST_TMPDIR/theirs is not used: no psutil, no tqdm"
}

@test "an active environment that lacks small packages, and another torch in .venv: a warning with both and the command" {
  active "$BATS_TEST_TMPDIR/theirs" 3 $'no psutil\n    try:     pip install psutil\n    or:      deactivate' 2.9.1+cu128
  VIRTUAL_ENV=$BATS_TEST_TMPDIR/theirs plan
  planned_after_making 0
  own=$("$REAL_PYTHON" -c 'import torch; print(torch.__version__)')
  is "$(without_times "${stderr_lines[0]}")" \
    "[WARNING] the active environment $BATS_TEST_TMPDIR/theirs with torch 2.9.1+cu128 is not used, but .venv with torch $own: no psutil"
  is "${stderr_lines[1]}:${#stderr_lines[@]}" '    try:     pip install psutil:2'
}

@test "a typo is reported before the installation" {
  rm -r .venv
  quick_installer
  for words in '--depht=3' '--seed= --depth=0' 'nowhere.py'; do
    # shellcheck disable=SC2086 # several words
    run --separate-stderr ./launch_train.sh 2 $words
    is "$status" 2
    is "$(cat "$MADE")" ''
    [[ ! -e .venv ]]
  done
}

@test "an installation that fails or is interrupted: its exit status, and no plan" {
  rm -r .venv
  quick_installer
  for code in 3 130; do
    rm -rf .venv
    INSTALLER_STATUS=$code plan
    is "$status" "$code"
    is "$output" ''
    has_not "$stderr" 'environment ready'
  done
  rm -rf .venv
  INSTALLER_STATUS=3 plan --check --json
  is_refusal "$output" 3 environment.not_created 'the environment .venv could not be created'
}

@test "no Python 3.10 or newer: exit 3 and what to install, with --check --json as an object" {
  rm -r .venv
  bare_machine
  for old in python3 python; do stub "$old" <<<'exit 1'; done
  for words in '--check --json' '--json=true --check=True'; do
    # shellcheck disable=SC2086 # several words
    run --separate-stderr env PATH="$BARE" ./train_dual_gpu.sh "$QUICKSTART" $words
    is "$status" 3
    is_refusal "$output" 3 python.missing \
      'no Python 3.10 or newer found on PATH (try: apt-get install python3 python3-venv; without root: install uv, then uv python install 3.13)'
  done
  run --separate-stderr env PATH="$BARE" ./train_dual_gpu.sh "$QUICKSTART" --script main.py -- --check --json
  is "$output" ''
  run --separate-stderr env PATH="$BARE" ./train_dual_gpu.sh "$QUICKSTART"
  is "$status" 3
  is "$output" ''
  is "$(without_times "$stderr")" \
    '[ERROR] no Python 3.10 or newer found on PATH (try: apt-get install python3 python3-venv; without root: install uv, then uv python install 3.13)'
  [[ ! -e .venv ]]
}

# bats test_tags=slow
@test "an old python3 first on PATH: a newer one by another name, or further back on PATH, is found" {
  rm -r .venv
  bare_machine
  quick_installer
  mkdir "$BATS_TEST_TMPDIR/old"
  executable "$BATS_TEST_TMPDIR/old/python3" <<<'exit 1'
  run --separate-stderr env PATH="$BATS_TEST_TMPDIR/old:$BARE" ./train_dual_gpu.sh "$QUICKSTART" --device=cpu
  planned_after_making 1
  rm -r .venv
  mv "$BATS_TEST_TMPDIR/stubs/python3" "$BATS_TEST_TMPDIR/stubs/python3.12"
  run --separate-stderr env PATH="$BATS_TEST_TMPDIR/old:$BARE" ./train_dual_gpu.sh "$QUICKSTART" --device=cpu
  planned_after_making 2
}

# A Python with another version number. Usage: version NAME MINOR
version() {
  stub "$1" <<EOF
case "\$4" in *version_info*) echo $2; exit 0 ;; esac
case "\$*" in *find_spec*) exit "\${WITHOUT_TORCH-1}" ;; esac
exit 3
EOF
}

@test "a Python for which torch has no wheels does not create .venv, unless it has a torch" {
  rm -r .venv
  bare_machine
  version python3 15
  run --separate-stderr env PATH="$BARE" bash -c 'source lib/init.sh; python::base || echo "exit $?"'
  is "$output" 'exit 3'
  has "$stderr" 'Python 3.10 to 3.14 is required on PATH to create .venv, found 3.15'
  for variable in WITHOUT_TORCH=0 TORCH_LOCAL_PATH=/mine; do
    run --separate-stderr env PATH="$BARE" "$variable" bash -c 'source lib/init.sh; python::base'
    is "$output" "$BATS_TEST_TMPDIR/stubs/python3"
  done
  run --separate-stderr env PATH="$BARE" bash -c 'source lib/init.sh; python::base quick'
  is "$output" "$BATS_TEST_TMPDIR/stubs/python3"
  version python3.13 13
  run --separate-stderr env PATH="$BARE" bash -c 'source lib/init.sh; python::base'
  is "$output" "$BATS_TEST_TMPDIR/stubs/python3.13"
}

@test "help does not wait for a version manager's shim when there is another Python" {
  rm -r .venv
  bare_machine
  mkdir "$BATS_TEST_TMPDIR/shims"
  executable "$BATS_TEST_TMPDIR/shims/python3" <<<"echo called >&2; exec $QUOTED_PYTHON \"\$@\""
  run --separate-stderr env PATH="$BATS_TEST_TMPDIR/shims:$BARE" ./train_dual_gpu.sh --help
  is "$status" 0
  has "$stderr" called
  stub python3 <<<"exec $QUOTED_PYTHON \"\$@\""
  run --separate-stderr env PATH="$BATS_TEST_TMPDIR/shims:$BARE" ./train_dual_gpu.sh --help
  is "$status" 0
  is "$stderr" ''
}

@test "a complete active environment is used as it is, nothing is created" {
  rm -r .venv
  quick_installer
  active "$BATS_TEST_TMPDIR/their env" 0 ''
  for name in VIRTUAL_ENV CONDA_PREFIX; do
    rm -f "$BATS_TEST_TMPDIR/their env/used"
    run --separate-stderr env "$name=$BATS_TEST_TMPDIR/their env" ./train_dual_gpu.sh "$QUICKSTART" --device=cpu
    planned_after_making 0
    is "$stderr" ''
    has "$(cat "$BATS_TEST_TMPDIR/their env/used")" 'training.cli.plan train_dual_gpu.sh'
    [[ ! -e .venv ]]
  done
}

@test "commands that need torch use the active environment too, if it is complete" {
  echo 'print("sampled")' | tee training/cli/sample.py >training/cli/runs.py
  rm -f training/cli/__pycache__/{sample,runs}.*
  active "$BATS_TEST_TMPDIR/theirs" 0 ''
  active "$BATS_TEST_TMPDIR/poor" 1 'no torch'
  for case in theirs:sample:yes theirs:runs:no poor:sample:no; do
    IFS=: read -r env command used <<<"$case"
    rm -f "$BATS_TEST_TMPDIR/$env/used"
    VIRTUAL_ENV=$BATS_TEST_TMPDIR/$env run --separate-stderr ./duet "$command"
    is "$status:$output:$stderr" '0:sampled:'
    [[ $([[ -e $BATS_TEST_TMPDIR/$env/used ]] && echo yes || echo no) == "$used" ]]
  done
}

@test "sweep and scaling, which start trainings, create .venv, and their help does not" {
  quick_installer
  for command in sweep scaling; do
    echo 'print("planned")' >"training/cli/$command/__main__.py"
    rm -rf .venv "training/cli/$command/__pycache__"
    : >"$MADE"
    for case in --help:0 --json:1; do
      run --separate-stderr ./duet "$command" "${case%:*}"
      is "$status:$output" 0:planned
      is "$(wc -l <"$MADE" | tr -d ' ')" "${case#*:}"
    done
  done
}

@test "of a venv and a conda environment, the one that was activated last is used" {
  rm -r .venv
  quick_installer
  for name in venv conda; do active "$BATS_TEST_TMPDIR/$name" 0 ''; done
  for name in venv conda; do
    rm -f "$BATS_TEST_TMPDIR"/*/used
    run --separate-stderr env VIRTUAL_ENV="$BATS_TEST_TMPDIR/venv" CONDA_PREFIX="$BATS_TEST_TMPDIR/conda" \
      PATH="$BATS_TEST_TMPDIR/$name/bin:$PATH" ./train_dual_gpu.sh "$QUICKSTART" --device=cpu
    planned_after_making 0
    has "$(cat "$BATS_TEST_TMPDIR/$name/used")" "training.cli.plan train_dual_gpu.sh $QUICKSTART --device=cpu ($BATS_TEST_TMPDIR/$name)"
    [[ $(find "$BATS_TEST_TMPDIR" -maxdepth 2 -name used | wc -l) == 1 ]]
  done
}

@test "an active environment that lacks a package: reported, .venv is used" {
  active "$BATS_TEST_TMPDIR/poor" 1 'no torch (2.9 or newer is required), no tqdm'
  VIRTUAL_ENV=$BATS_TEST_TMPDIR/poor plan
  planned_after_making 0
  is "$(without_times "$stderr")" \
    "[INFO] the active environment $BATS_TEST_TMPDIR/poor is not used: no torch (2.9 or newer is required), no tqdm"
  [[ ! -e $BATS_TEST_TMPDIR/poor/used ]]
}

@test "an active environment whose Python does not run: reported, .venv is used" {
  mkdir -p "$BATS_TEST_TMPDIR/broken/bin"
  executable "$BATS_TEST_TMPDIR/broken/bin/python" <<<'echo Traceback >&2; exit 1'
  CONDA_PREFIX=$BATS_TEST_TMPDIR/broken plan
  planned_after_making 0
  is "$(without_times "$stderr")" \
    "[INFO] the active environment $BATS_TEST_TMPDIR/broken is not used: its Python does not run or is too old"
}

@test "an active environment with Python 3.9: scripts run in it, .venv or else another Python launches them" {
  active "$BATS_TEST_TMPDIR/old" 1 'Python 3.9 (3.10 or newer is required)'
  sed -i '2i case $2 in *version_info*) exit 1 ;; esac' "$BATS_TEST_TMPDIR/old/bin/python"
  touch main.py
  for there in .venv none; do
    VIRTUAL_ENV=$BATS_TEST_TMPDIR/old run --separate-stderr ./launch_train.sh 2 --device=cpu --script main.py
    planned_after_making 0
    has "$(cat experiments/*/plan.json)" "$BATS_TEST_TMPDIR/old/bin/python"
    rm -r experiments
    has_not "$stderr" 'not used'
    [[ ! -e $BATS_TEST_TMPDIR/old/used ]] # no module of the launcher
    if [[ $there == .venv ]]; then rm -r .venv; fi
    quick_installer
  done
  [[ ! -e .venv ]]
}

# shellcheck disable=SC2030 # `run` sets status, output and stderr in this shell
# bats test_tags=slow
@test "an active environment that is .venv itself by any path, or was removed: no message" {
  ln -s "$PROJECT" "$BATS_TEST_TMPDIR/link"
  for there in "$PROJECT/.venv" "$BATS_TEST_TMPDIR/link/.venv" "$PROJECT/lib/../.venv" /nowhere; do
    VIRTUAL_ENV=$there plan
    planned_after_making 0
    is "$stderr" ''
  done
}

@test "PYTHONSAFEPATH: what comes first on PYTHONPATH stays" {
  rm -f training/cli/__pycache__/sample.*
  echo 'import sys; print(sys.path[:2])' >training/cli/sample.py
  for safe in '' 1; do
    PYTHONSAFEPATH=$safe PYTHONPATH=/mine run --separate-stderr ./duet sample
    is "$status:$output" "0:$("$REAL_PYTHON" -c 'import sys; print([sys.argv[1], "/mine"])' "$PROJECT")"
  done
}

#!/usr/bin/env bats
# --help: the header comment of the script and the option list; nothing needs to be installed for it.

load helper

setup() {
  project::copy
  before=$(project::listing)
}

teardown() {
  is "$(project::listing)" "$before"
}

# The header comment of a script, as help shows it.
header() {
  sed -n '2,${/^#/!q; /^# shellcheck /d; s/^# \{0,1\}//; p;}' "$1"
}

# Check the output of `run --separate-stderr` for the help of a script with training options.
is_help_of() {
  is "$status" 0
  is "$stderr" ''
  is "${output:0:$(header "$1" | wc -m)}" "$(header "$1")"$'\n'
  has "$output" '  --depth=int '
  has "$output" '  --dry_run '
  has "$output" 'Exit codes:'
}

@test "--help and -h print the header comment and the option list" {
  for script in "${SCRIPTS[@]}"; do
    for flag in --help -h; do
      run --separate-stderr "./$script" "$flag"
      is_help_of "$script"
      has "$output" 'Usage:'
      has "$output" 'Examples:'
    done
  done
}

@test "--help of the monitor prints its own options and none of training" {
  [[ -f monitor_training.sh ]] || skip 'no monitor'
  for flag in --help -h; do
    run --separate-stderr ./monitor_training.sh "$flag"
    is "$status" 0
    is "$stderr" ''
    is "$output" "$(header monitor_training.sh)"
  done
}

@test "--help works without .venv and does not create it" {
  rm -r .venv
  before=$(project::listing)
  for script in "${SCRIPTS[@]}"; do
    run --separate-stderr "./$script" --help
    is_help_of "$script"
  done
}

@test "--help works from another folder and imports nothing from there" {
  mkdir "$BATS_TEST_TMPDIR/elsewhere"
  cd "$BATS_TEST_TMPDIR/elsewhere"
  mkdir training
  echo 'raise SystemExit("taken from the current folder")' | tee training/__init__.py re.py random.py >/dev/null
  quoted=$("$REAL_PYTHON" -I -c 'import shlex, sys; print(shlex.quote(sys.argv[1]))' "$PROJECT/")
  for script in "${SCRIPTS[@]}"; do
    run --separate-stderr "$PROJECT/$script" --help
    has "$output" "${quoted%\'}$script' "
    for name in "${SCRIPTS[@]}" monitor_training.sh duet; do
      output=${output//"${quoted%\'}$name'"/./$name}
    done
    is_help_of "$PROJECT/$script"
  done
  cd "$PROJECT"
}

@test "--help works through symbolic links and from PATH" {
  ln -s "$PROJECT/train_dual_gpu.sh" "$BATS_TEST_TMPDIR/train dual"
  ln -s 'train dual' "$BATS_TEST_TMPDIR/again"
  run --separate-stderr "$BATS_TEST_TMPDIR/again" --help
  is_help_of train_dual_gpu.sh
  PATH=$PROJECT:$PATH run --separate-stderr train_dual_gpu.sh --help
  is_help_of train_dual_gpu.sh
  run --separate-stderr bash train_dual_gpu.sh --help
  is_help_of train_dual_gpu.sh
}

@test "--help wins over everything else on the command line" {
  run --separate-stderr ./train_dual_gpu.sh nowhere.py --depht=3 --help --dry_run
  is_help_of train_dual_gpu.sh
}

@test "--help behind -- belongs to another program" {
  # shellcheck disable=SC2016 # for the shell that runs it
  run in_shell 'help::answer train_dual_gpu.sh "$@"; echo "continued"' 2 --script main.py -- --help -h
  is "$status" 0
  is "$output" 'continued'
}

@test "--help into a pipe that is closed early prints nothing on standard error" {
  # PIPESTATUS of the script may be 0 or 141 (SIGPIPE): depending on timing.
  errors=$({ ./train_dual_gpu.sh --help | true; } 2>&1)
  is "$errors" ''
}

@test "--help without any Python prints the header, then what is missing" {
  rm -r .venv
  before=$(project::listing)
  bare_machine
  run --separate-stderr env PATH="$BARE" ./train_dual_gpu.sh --help
  is "$status" 3
  is "$output" "$(header train_dual_gpu.sh)"
  is "$(without_times "$stderr")" \
    '[ERROR] no Python 3.10 or newer found on PATH (try: apt-get install python3 python3-venv; without root: install uv, then uv python install 3.13)'
}

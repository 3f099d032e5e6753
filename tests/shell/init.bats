#!/usr/bin/env bats
# lib/init.sh: the shell it needs, and the folder it finds.

load helper

setup() {
  project::copy
}

# Make lib/init.sh see another bash version: BASH_VERSINFO is read-only.
bash_is() {
  sed -i "s/BASH_VERSINFO\[0\]/$1/; s/BASH_VERSINFO\[1\]/$2/" lib/init.sh
  has_not "$(cat lib/init.sh)" BASH_VERSINFO
}

@test "a bash older than 4.4 is refused with a message" {
  for version in '3 2' '4 3'; do
    cp "$ROOT/lib/init.sh" lib/init.sh
    # shellcheck disable=SC2086 # two words
    bash_is $version
    run --separate-stderr ./train_dual_gpu.sh --help
    is "$status" 3
    is "$output" ''
    has "$stderr" '[ERROR] bash '
    has "$stderr" 'is too old: 4.4 or newer is required'
  done
}

@test "a system without /proc is refused, before an old bash" {
  bash_is 3 2
  sed -i 's:/proc/self/fd:/nowhere:' lib/init.sh
  run --separate-stderr ./train_dual_gpu.sh --help
  is "$status:$output" '3:'
  is "${#stderr_lines[@]}" 1
  has "$stderr" '[ERROR] '
  has "$stderr" "$OSTYPE"
}

@test "bash 4.4 and newer are accepted" {
  for version in '4 4' '5 0' '5 3'; do
    cp "$ROOT/lib/init.sh" lib/init.sh
    # shellcheck disable=SC2086 # two words
    bash_is $version
    run ./train_dual_gpu.sh --help
    is "$status" 0
  done
}

@test "a shell that may open too few files is refused with the command that raises the limit" {
  run --separate-stderr bash -c 'ulimit -n 8; exec ./launch_train.sh 1 --check --json'
  is "$status:$output" '3:'
  is "${#stderr_lines[@]}" 1
  has "$stderr" '[ERROR] '
  has "$stderr" '8 files (ulimit -n)'
  has "$stderr" '4096)'
  run --separate-stderr bash -c 'ulimit -n 16; exec ./train_dual_gpu.sh --help'
  is "$status:$stderr" '0:'
}

@test "the check precedes anything unknown to an old bash" {
  before=$(sed '/^if ((BASH_VERSINFO/,$d' lib/init.sh)
  sh -n <<<"$before" # other shells read it too
  banned=$(grep -nE 'shopt|local|declare|mapfile|printf -v|%\(' <<<"$before") || true
  is "$banned" ''
}

@test "sh SCRIPT, a bash in POSIX mode, and the script by its name on PATH: the script runs in bash" {
  for file in "${SCRIPTS[@]}" monitor_training.sh; do
    run --separate-stderr sh "$file" --help
    is "$status:$stderr" '0:'
    is "${lines[0]}" "$(sed -n '2s/^# //p' "$file")"
  done
  cd ..
  POSIXLY_CORRECT=1 run --separate-stderr sh "$PROJECT/train_dual_gpu.sh" nowhere.py
  is "$status" 2
  has "$stderr" 'config nowhere.py does not exist'
  has_not "$stderr" 'not found'
  ln -s "$(command -v bash)" "$BATS_TEST_TMPDIR/sh"
  run --separate-stderr "$BATS_TEST_TMPDIR/sh" "$PROJECT/train_dual_gpu.sh" nowhere.py
  is "$status" 2
  has_not "$stderr" 'not found'
}

@test "a sourced script: one message, and the user's shell is unchanged" {
  for file in "${SCRIPTS[@]}" monitor_training.sh; do
    # shellcheck disable=SC2016
    run --separate-stderr bash -c 'before=$(set +o; shopt; trap); source "$1" x; code=$?
      [[ $before == "$(set +o; shopt; trap)" ]] && echo "unchanged $code"' bash "$PROJECT/$file"
    is "$status:$output" '0:unchanged 2'
    is "${stderr_lines[0]}" '[ERROR] this script must be run, not sourced'
    is "${stderr_lines[1]}" "    try:     bash $PROJECT/$file …"
    is "${#stderr_lines[@]}" 2
  done
}

@test "a script without lib/ exits at once with status 2 and names the missing file, in bash and sh" {
  rm lib/init.sh
  for shell in bash sh; do
    for file in "${SCRIPTS[@]}" monitor_training.sh duet; do
      run --separate-stderr "$shell" "./$file" --help
      is "$file $status:$output:${#stderr_lines[@]}" "$file 2::1"
      has "$stderr" lib/init.sh
    done
  done
}

@test "DUET_DEBUG=1 shows every command with file, line and function on standard error, no values of the environment" {
  DUET_DEBUG=1 SECRET_TOKEN=hush run --separate-stderr ./train_dual_gpu.sh nowhere.py
  is "$status:$output" 2:
  [[ $stderr =~ \+\ lib/python\.sh:[0-9]+\ python::find\ +.*\[\[ ]] || is "$stderr" 'a trace'
  has "$stderr" 'config nowhere.py does not exist'
  has_not "$stderr" hush
  DUET_DEBUG=0 run --separate-stderr ./train_dual_gpu.sh nowhere.py
  has_not "$stderr" '+ lib/'
}

@test "variables of the run are exported without being shown, also when there are none" {
  mkdir run
  printf '%s\0' true >run/launch.argv
  executable answer <<<'echo "$PWD/run"'
  for variables in '' 'WANDB_API_KEY=hush'; do
    printf '%s' "${variables:+$variables$'\1'}" | tr '\1' '\0' >run/launch.env
    # shellcheck disable=SC2016
    run --separate-stderr env DUET_DEBUG=1 DUET_LOG_FILE="$PWD/log" OTHER_TOKEN=hush bash -c 'source lib/init.sh
      PYTHON=./answer; run::plan; set +x; printf "%s" "${WANDB_API_KEY-none}"'
    is "$status" 0
    is "$output" "$([[ -z $variables ]] && echo none || echo hush)"
    has_not "$stderr" hush
  done
}

@test "DUET_ROOT is the real folder, however the script was called" {
  ln -s "$PROJECT" "$BATS_TEST_TMPDIR/link"
  cd "$BATS_TEST_TMPDIR/link"
  is "$(in_shell 'printenv DUET_ROOT')" "$PROJECT"
  is "$(CDPATH=/tmp in_shell 'printenv DUET_ROOT')" "$PROJECT"
  cd /
  is "$(bash -c 'source "$0/lib/init.sh"; printenv DUET_ROOT' "$BATS_TEST_TMPDIR/link")" "$PROJECT"
}

@test "--lang before -- sets DUET_LANG for each command; another language is refused" {
  for words in '--lang=zh nowhere.py' 'nowhere.py --lang zh'; do
    # shellcheck disable=SC2086 # words
    run --separate-stderr ./train_dual_gpu.sh $words
    is "$status" 2
    has "$stderr" '个问题'
  done
  run --separate-stderr ./train_dual_gpu.sh nowhere.py -- --lang=zh
  is "$status" 2
  has_not "$stderr" '个问题'
  for words in --lang=fr --lang; do
    run --separate-stderr ./train_dual_gpu.sh "$words"
    is "$status:$output" '2:'
    has "$stderr" 'allowed: en or zh'
  done
  run --separate-stderr ./train_dual_gpu.sh --lang='a "b"\' --check --json
  is "$status" 2
  is_refusal "$output" 2 lang.value "--lang is 'a \"b\"\\'" 'en or zh' --lang=zh
}

@test "--lang after the program of duet run and duet watch belongs to the program" {
  for words in 'run -n 1 --dry_run nowhere.py --lang=zh' 'watch nowhere --lang zh' 'launch -n 1 nowhere.py --lang=fr'; do
    # shellcheck disable=SC2086 # words
    run --separate-stderr ./duet $words
    is "$status" 2
    has_not "$stderr" '个问题'
    has_not "$stderr" 'allowed: en or zh'
  done
  for words in '--lang=zh run nowhere.py' 'run --lang zh -n 1 nowhere.py' 'watch --lang=zh nowhere'; do
    # shellcheck disable=SC2086 # words
    run --separate-stderr ./duet $words
    is "$status" 2
    has "$stderr" '个问题'
  done
  run --separate-stderr ./duet run --lang=fr nowhere.py
  is "$status" 2
  has "$stderr" 'allowed: en or zh'
}

@test "a user's function cd that prints does not move the project" {
  cd() { builtin cd "$@" && echo "now in $PWD"; }
  export -f cd
  for file in "${SCRIPTS[@]}" monitor_training.sh; do
    run --separate-stderr "./$file" --help
    is "$status:$stderr" '0:'
    is "${lines[0]}" "$(sed -n '2s/^# //p' "$file")"
  done
  run --separate-stderr ./duet --version
  is "$status:$stderr" '0:'
}

#!/usr/bin/env bats
# lib/init.sh: the shell it needs, and the folder it finds.

load helper

setup() {
  project::copy
}

# Let lib/init.sh believe in another bash: BASH_VERSINFO itself can not be changed.
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
    has "$stderr" 'is too old: 4.4 or newer is needed'
  done
}

@test "bash 4.4 and newer are taken" {
  for version in '4 4' '5 0' '5 3'; do
    cp "$ROOT/lib/init.sh" lib/init.sh
    # shellcheck disable=SC2086 # two words
    bash_is $version
    run ./train_dual_gpu.sh --help
    is "$status" 0
  done
}

@test "the check stands before anything that an old bash does not know" {
  before=$(sed '/^if ((BASH_VERSINFO/,$d' lib/init.sh | grep -vE '^(#|$)') || true
  is "$before" ''
}

@test "DUET_ROOT is the real folder, however the script was called" {
  ln -s "$PROJECT" "$BATS_TEST_TMPDIR/link"
  cd "$BATS_TEST_TMPDIR/link"
  is "$(in_shell 'printenv DUET_ROOT')" "$PROJECT"
  is "$(CDPATH=/tmp in_shell 'printenv DUET_ROOT')" "$PROJECT"
  cd /
  is "$(bash -c 'source "$0/lib/init.sh"; printenv DUET_ROOT' "$BATS_TEST_TMPDIR/link")" "$PROJECT"
}

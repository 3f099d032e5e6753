#!/usr/bin/env bats
# Errors of the command line and the config are reported before anything starts: exit 2, no files left.

load helper

setup() {
  project::copy
  before=$(project::listing)
}

teardown() {
  is "$(project::listing)" "$before"
}

# Check the whole answer: exit 2, nothing on standard output, these messages. Usage: refused LINE…
refused() {
  is "$status" 2
  is "$output" ''
  is "$(without_times "$stderr")" "$(printf '%s\n' "$@")"
}

@test "an unknown flag: the nearest one" {
  for start in "./train_dual_gpu.sh $QUICKSTART" "./train_dual_gpu_enhanced.sh --config=$QUICKSTART" "./launch_train.sh 2 $QUICKSTART"; do
    read -ra words <<<"$start"
    run --separate-stderr "${words[@]}" --depht=3
    refused '[ERROR] --depht is not a known flag' \
      "    try:     ${start} --depth=3" \
      '[ERROR] 1 problem; nothing was launched (exit 2)'
  done
}

@test "an unknown flag like no other" {
  run --separate-stderr ./train_dual_gpu.sh "$QUICKSTART" --zzz
  refused '[ERROR] --zzz is not a known flag' \
    '    try:     ./train_dual_gpu.sh --help' \
    '[ERROR] 1 problem; nothing was launched (exit 2)'
}

@test "all problems are reported at once" {
  run --separate-stderr ./train_dual_gpu.sh nowhere.py --depht=3 --seed=many -x
  is "$status" 2
  has "$stderr" 'config nowhere.py does not exist'
  has "$stderr" '--depht is not a known flag'
  has "$stderr" "seed is 'many' (from --seed on the command line)"
  has "$stderr" '-x is not a known flag'
  has "$stderr" '4 problems; nothing was launched (exit 2)'
}

@test "no config" {
  run --separate-stderr ./train_dual_gpu.sh
  refused '[ERROR] no config given' \
    '    allowed: a config file; ready ones: aggressive, balanced, conservative, quickstart' \
    "    try:     ./train_dual_gpu.sh $QUICKSTART" \
    '[ERROR] 1 problem; nothing was launched (exit 2)'
}

@test "a config that does not exist, is a folder or another kind of file" {
  run --separate-stderr ./train_dual_gpu.sh nowhere.py
  is "$status" 2
  has "$stderr" 'config nowhere.py does not exist'
  has "$stderr" "$QUICKSTART"
  run --separate-stderr ./train_dual_gpu.sh configs
  is "$status" 2
  has "$stderr" 'config configs is a directory'
  run --separate-stderr ./train_dual_gpu.sh Makefile
  is "$status" 2
  has "$stderr" 'config Makefile is neither .py nor .json'
}

@test "a config with a syntax error: file and line" {
  bad="$BATS_TEST_TMPDIR/it's bad.py"
  printf 'depth = 4\nseed = = 3\n' >"$bad"
  run --separate-stderr ./train_dual_gpu.sh "$bad"
  refused "[ERROR] $bad:2: invalid syntax: 'seed = = 3'" \
    '    allowed: Python assignments such as depth = 12' \
    '[ERROR] 1 problem; nothing was launched (exit 2)'
}

@test "a config with a statement other than an assignment: file and line, and it is not executed" {
  bad=$BATS_TEST_TMPDIR/bad.py
  printf 'depth = 4\nopen("%s/executed", "w")\n' "$BATS_TEST_TMPDIR" >"$bad"
  run --separate-stderr ./train_dual_gpu.sh "$bad"
  is "$status" 2
  has "$stderr" "$bad:2: not a plain assignment"
  [[ ! -e $BATS_TEST_TMPDIR/executed ]]
}

@test "launch_train.sh without a number of processes, or with a wrong one" {
  for number in 0 two -1 2.5 1025 ''; do
    run --separate-stderr ./launch_train.sh "$number" "$QUICKSTART"
    is "$status" 2
    is "$output" ''
    has "$stderr" 'nothing was launched (exit 2)'
  done
  run --separate-stderr ./launch_train.sh 0 "$QUICKSTART"
  refused "[ERROR] the number of processes is '0' (first argument)" \
    '    allowed: a whole number from 1 to 1024' \
    "    try:     ./launch_train.sh 2 $QUICKSTART" \
    '[ERROR] 1 problem; nothing was launched (exit 2)'
  run --separate-stderr ./launch_train.sh
  has "$stderr" 'the number of processes is missing'
}

@test "one argument too many" {
  run --separate-stderr ./train_dual_gpu.sh "$QUICKSTART" 'configs/dual_gpu/balanced.py'
  is "$status" 2
  has "$stderr" "'configs/dual_gpu/balanced.py' is one argument too many"
}

@test "spaces, quotes, newlines, stars, dollars and backslashes are preserved" {
  for value in "a b'c.txt" 'a "b".txt' '*' "\$HOME \`id\`" 'back\slash' 'über – 数据'; do
    run --separate-stderr ./train_dual_gpu.sh "$QUICKSTART" --data="$value"
    is "$status" 2
    # repr of the received value
    has "$stderr" "data is $("$REAL_PYTHON" -c 'import sys; print(repr(sys.argv[1]))' "$value") (from --data on the command line)"
  done
  run --separate-stderr ./train_dual_gpu.sh "$QUICKSTART" --data=$'two\nlines'
  has "$stderr" "data is 'two\\nlines' (from --data on the command line)"
}

@test "a DUET_ variable that is not a field" {
  DUET_DEPHT=3 run --separate-stderr ./train_dual_gpu.sh "$QUICKSTART"
  is "$status" 2
  has "$stderr" 'DUET_DEPHT is set in the environment but matches no field'
  has "$stderr" 'DUET_DEPTH'
}

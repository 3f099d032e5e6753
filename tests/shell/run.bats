#!/usr/bin/env bats
# From the plan to the supervisor: arguments, variables, exit status, and the files of a dry run.

load helper

setup() {
  project::copy
}

# Replace the supervisor by a Python program.
supervisor() {
  rm -f training/cli/__pycache__/supervise.* # Python takes one of the same size and second for the same file
  cat >training/cli/supervise.py
}

# A supervisor that writes its arguments and environment, NUL-delimited, to argv and environ.
recording_supervisor() {
  supervisor <<'EOF'
import os, pathlib, sys
there = pathlib.Path(os.environ["RECORD"])
there.joinpath("argv").write_bytes(b"".join(os.fsencode(a) + b"\0" for a in sys.argv[1:]))
there.joinpath("environ").write_bytes(b"".join(os.fsencode(f"{k}={v}") + b"\0" for k, v in os.environ.items()))
there.joinpath("pid").write_text(str(os.getpid()))
EOF
  export RECORD=$BATS_TEST_TMPDIR
}

# The value of a variable in the recorded environment, whatever characters it has.
recorded() {
  local entry
  local -a entries
  mapfile -d '' -t entries <"$RECORD/environ"
  for entry in "${entries[@]}"; do
    if [[ $entry == "$1="* ]]; then
      printf '%s' "${entry#*=}"
      return
    fi
  done
  return 1
}

@test "--dry_run prints only the plan, on standard output, and writes nothing" {
  before=$(project::listing)
  for start in "./train_dual_gpu.sh $QUICKSTART" "./train_dual_gpu_enhanced.sh --config=$QUICKSTART" "./launch_train.sh 2 $QUICKSTART"; do
    read -ra words <<<"$start"
    run --separate-stderr "${words[@]}" --device=cpu --dry_run
    is "$status" 0
    is "$stderr" ''
    is "${lines[0]}" 'Plan (dry run: nothing was launched or written)'
    has "$output" '  2 ranks by spawn:'
    has "$output" 'Configuration'
    has "$output" 'device                  '
    has "$output" 'OMP_NUM_THREADS='
    is "$(project::listing)" "$before"
  done
}

@test "a dry run with a missing resource: the plan on standard output, exit 3" {
  before=$(project::listing)
  run --separate-stderr ./train_dual_gpu.sh "$QUICKSTART" --device=cpu --out_dir=/proc/nowhere --dry_run
  is "$status" 3
  has "$output" 'Plan (dry run'
  has "$output" 'try: --out_dir=/another/folder'
  is "$(project::listing)" "$before"
}

@test "a missing resource: exit 3, no files left" {
  before=$(project::listing)
  run --separate-stderr ./train_dual_gpu.sh "$QUICKSTART" --device=cpu --out_dir=/proc/nowhere
  is "$status" 3
  is "$output" ''
  has "$stderr" 'nothing was launched (exit 3)'
  is "$(project::listing)" "$before"
}

# bats test_tags=slow
@test "the exit status of the supervisor is the script's" {
  supervisor <<<'raise SystemExit(7)'
  for start in "./train_dual_gpu.sh $QUICKSTART" "./train_dual_gpu_enhanced.sh --config=$QUICKSTART" "./launch_train.sh 1 $QUICKSTART"; do
    read -ra words <<<"$start"
    run "${words[@]}" --device=cpu
    is "$status" 7
  done
  for code in 0 4 75; do
    supervisor <<<"raise SystemExit($code)"
    run ./train_dual_gpu.sh "$QUICKSTART" --device=cpu
    is "$status" "$code"
  done
}

@test "a supervisor killed by a signal: the script too" {
  supervisor <<<'import os, signal; os.kill(os.getpid(), signal.SIGKILL)'
  run ./train_dual_gpu.sh "$QUICKSTART" --device=cpu
  is "$status" 137
}

@test "the script becomes the supervisor: the same process" {
  recording_supervisor
  ./train_dual_gpu.sh "$QUICKSTART" --device=cpu &
  wait "$!"
  is "$(cat "$RECORD/pid")" "$!"
}

@test "arguments and variables reach the supervisor unchanged: spaces, quotes, newlines" {
  recording_supervisor
  odd=$BATS_TEST_TMPDIR/$'two\nlines, a \'quote\', a "double" one, a \\ and a $HOME'
  run --separate-stderr ./train_dual_gpu.sh "$QUICKSTART" --device=cpu --out_dir="$odd/runs" --log_dir="$odd/logs" --run_name=odd
  is "$status" 0
  mapfile -d '' -t argv <"$RECORD/argv"
  is "${#argv[@]}" 1
  is "${argv[0]}" "$odd/runs/odd"
  is "$(recorded DUET_RUN_DIR)" "$odd/runs/odd"
  has "$(recorded DUET_LOG_FILE)" "$odd/logs/train_dual_gpu_"
  is "$(recorded PYTHONUNBUFFERED)" 1
  # The files themselves: one NUL after each word, and nothing else.
  is "$(tr -cd '\0' <"$odd/runs/odd/launch.argv" | wc -c | tr -d ' ')" 4
  is "$(tail -c 1 "$odd/runs/odd/launch.env" | od -An -tx1 | tr -d ' ')" 00
}

@test "a run folder that the encoding of the output lacks" {
  recording_supervisor
  for name in josé $'b\xff'; do
    PYTHONIOENCODING=ascii run ./train_dual_gpu.sh "$QUICKSTART" --device=cpu --out_dir="$BATS_TEST_TMPDIR/$name" --run_name=odd
    is "$status" 0
    is "$(recorded DUET_RUN_DIR)" "$BATS_TEST_TMPDIR/$name/odd"
  done
}

@test "the folder of a plan that has disappeared is an error" {
  executable python <<<'echo /nowhere'
  run --separate-stderr in_shell 'PYTHON=./python; run::plan'
  is "$status:$output" 3:
  has "$stderr" /nowhere
}

@test "the user's own variables are not touched" {
  recording_supervisor
  OMP_NUM_THREADS=3 MINE=$'a\n b' PYTHONPATH=/mine run ./train_dual_gpu.sh "$QUICKSTART" --device=cpu
  is "$status" 0
  is "$(recorded OMP_NUM_THREADS)" 3
  is "$(recorded MINE)" $'a\n b'
  is "$(recorded PYTHONPATH)" "/mine"
}

@test "the enhanced script has more stages: the resource report, --analyse" {
  recording_supervisor
  run --separate-stderr ./train_dual_gpu_enhanced.sh --config="$QUICKSTART" --device=cpu --run_name=more
  is "$status" 0
  mapfile -d '' -t argv <"$RECORD/argv"
  is "${argv[*]}" "$PROJECT/experiments/more --analyse"
  has "$stderr" 'resource check'
  has "$(cat logs/train_dual_gpu_enhanced_*.log)" 'resource check'
}

@test "started in another folder: runs are in the project, the user's paths are relative to that folder" {
  recording_supervisor
  mkdir "$BATS_TEST_TMPDIR/elsewhere"
  cd "$BATS_TEST_TMPDIR/elsewhere"
  mkdir training
  echo 'raise SystemExit("taken from the current folder")' | tee training/__init__.py training/plan.py random.py >/dev/null
  echo "words of the user, $(printf '%01000d' 7)" >"my text.txt"
  run "$PROJECT/train_dual_gpu.sh" "$PROJECT/$QUICKSTART" --device=cpu --data='my text.txt' --run_name=here
  is "$status" 0
  is "$(recorded DUET_RUN_DIR)" "$PROJECT/experiments/here"
  is "$(ls)" $'my text.txt\nrandom.py\ntraining'
}

@test "through a symbolic link with another name" {
  recording_supervisor
  ln -s "$PROJECT/train_dual_gpu.sh" "$BATS_TEST_TMPDIR/train"
  run "$BATS_TEST_TMPDIR/train" "$QUICKSTART" --device=cpu
  is "$status" 0
  has "$(recorded DUET_LOG_FILE)" "$PROJECT/logs/train_dual_gpu_"
}

@test "messages of the shell before the plan are in the log file too" {
  recording_supervisor
  mkdir -p "$BATS_TEST_TMPDIR/active/bin"
  executable "$BATS_TEST_TMPDIR/active/bin/python" <<<'echo no torch; exit 1'
  VIRTUAL_ENV=$BATS_TEST_TMPDIR/active run --separate-stderr ./train_dual_gpu.sh "$QUICKSTART" --device=cpu
  is "$status" 0
  is "$(without_times "${stderr_lines[0]}")" "[INFO] the active environment $BATS_TEST_TMPDIR/active is not used: no torch"
  is "$(head -n 1 logs/train_dual_gpu_*.log)" "${stderr_lines[0]}"
}

@test "a plan without variables: nothing of the environment is printed" {
  mkdir run
  printf 'true\0' >run/launch.argv
  : >run/launch.env
  executable python <<<'echo run'
  SECRET=hidden run in_shell 'PYTHON=./python; DUET_LOG_FILE=log; run::plan x; echo "to ${RUN_COMMAND[0]}"'
  is "$status:$output" '0:to true'
}

@test "an exported or readonly TMOUT does not end the wait for the plan" {
  mkdir run
  printf 'true\0' >run/launch.argv
  : >run/launch.env
  executable python <<<'sleep 1.3; echo run'
  echo 'readonly TMOUT=1' >hardened
  for variable in TMOUT=1 BASH_ENV=./hardened; do
    run env "$variable" DUET_LOG_FILE=log bash -c 'source lib/init.sh; PYTHON=./python; run::plan; echo "${RUN_COMMAND[0]}"'
    is "$status:$output" 0:true
  done
}

@test "a stop request to the script alone reaches the plan, which may wait for other machines" {
  executable python <<<'trap "exit 75" TERM USR1; : >waits; while :; do sleep 0.05; done'
  for signal in TERM USR1; do
    rm -f waits
    bash -c 'source lib/init.sh; PYTHON=./python; run::plan' &
    until [[ -e waits ]]; do sleep 0.05; done
    kill -s "$signal" "$!"
    status=0
    wait "$!" || status=$?
    is "$status" 75
  done
}

@test "Ctrl-C reaches the plan once, whether the script, the plan or both get it" {
  cat >training/cli/plan.py <<'END'
import os, pathlib, sys, time
try:
    pathlib.Path("new").write_text(str(os.getpid()))
    os.replace("new", "waits")
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)  # tidies up
    sys.exit(75)
END
  for targets in script plan both; do
    rm -f waits
    # a job in the background would ignore it
    env --default-signal=INT bash -c 'source lib/init.sh; PYTHON=.venv/bin/python; run::plan' &
    until [[ -e waits ]]; do sleep 0.05; done
    [[ $targets == script ]] || kill -s INT "$(<waits)"
    [[ $targets == plan ]] || kill -s INT "$!"
    status=0
    wait "$!" || status=$?
    is "$targets $status" "$targets 75"
  done
}

@test "a stop request that the plan has missed reaches the supervisor, which begins with stop signals blocked" {
  mkdir run
  code='import signal, sys; print(sys.argv[1], *sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))'
  printf '%s\0' "$REAL_PYTHON" -c "$code" >run/launch.argv
  : >run/launch.env
  executable python <<<'trap "" TERM; kill -s TERM "$PPID"; sleep 0.2; echo run'
  DUET_LOG_FILE=log run in_shell 'PYTHON=./python; run::plan; run::start'
  is "$status:$output" '0:--stopped=TERM 2 10 15'
}

@test "a program whose path has = is started" {
  mkdir run a=b
  ln -s "$REAL_PYTHON" a=b/python
  printf '%s\0' "$PWD/a=b/python" -c 'print("supervisor")' >run/launch.argv
  : >run/launch.env
  executable python <<<'echo run'
  DUET_LOG_FILE=log run in_shell 'PYTHON=./python; run::plan; run::start'
  is "$status:$output" 0:supervisor
}

@test "a stop request that the plan has missed ends a script that has nothing to start" {
  executable python <<<'trap "" TERM; kill -s TERM "$PPID"; sleep 0.2; echo "plan"'
  run in_shell 'PYTHON=./python; run::plan'
  is "$status:$output" 143:
}

@test "a stop request that the plan has missed ends a script that is the first process of a container" {
  unshare --pid --fork true || skip 'no private PID namespace here'
  executable python <<<'trap "" TERM; kill -s TERM "$PPID"; sleep 0.2; echo "plan"'
  run unshare --pid --fork bash -c 'source lib/init.sh; PYTHON=./python; run::plan'
  is "$status:$output" 143:
}

@test "a job without variables: nothing of the environment is printed" {
  : >"$PROJECT.env"
  # shellcheck disable=SC2016
  SECRET=hidden SLURM_JOB_ID=1 PYTHON=/nowhere/bin/python run in_shell 'source lib/batch.sh; batch::train'
  is "$status" 3
  has_not "$output" hidden
}

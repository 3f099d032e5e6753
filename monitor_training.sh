#!/usr/bin/env bash
# Watch a training run: progress, loss, ranks, GPUs, system, what needs attention. Only reads; the run does not notice.
#
# Usage:
#   ./monitor_training.sh [--log=FILE | --run=DIR | --all] [--interval=3] [--once | --json | --follow-exit] [--prometheus=PORT] [--ascii]
#
#   --log=FILE          a log: of our launchers (the run that it belongs to), or of any other training
#   --run=DIR           a run directory, or its name in experiments/; without --log and --run: the newest run
#   --all               all runs side by side; Return opens the marked one
#   --interval=S        seconds between two looks, 0.2 to 3600 (default 3)
#   --once              one full screen as plain text, then end
#   --json              one JSON object, then end: units in the keys, null for unknown
#   --follow-exit       end with the run, and with its exit code
#   --prometheus=PORT   answer a Prometheus server at 127.0.0.1:PORT/metrics too
#   --ascii             no characters beyond ASCII (chosen by itself where the output is not UTF-8)
#
# Keys: q quit, p pause, l log, a diagnose, g GPU details, + and - interval, ? help
#
# Examples:
#   ./monitor_training.sh                                     live; q or Ctrl-C leaves, the run goes on
#   ./monitor_training.sh --log=../nanochat/train.log         torchtitan, nanochat, Lightning, Hugging Face, tqdm … are understood
#   ./monitor_training.sh --interval=30 >> watch.txt          not a terminal: one line per look, until the run has ended
#   ./monitor_training.sh --follow-exit && ./next_experiment.sh
#   ./monitor_training.sh --json | jq .progress.eta_s
#
# NO_COLOR is respected. Exit codes: 0 shown, 2 command line, no such run or log, 3 the port is taken, 130 left by Ctrl-C;
# with --follow-exit those of the run.
# shellcheck disable=SC2128,SC3028 # the first element is meant; sh reads this line too, lib/init.sh gives it to bash
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE:-$0}")")/lib/init.sh" || return 2>/dev/null || exit

HELP_OPTIONS=0 help::answer "$0" "$@"
# Any Python does, nothing is installed for looking: what it lacks (psutil, NVML) is shown as unknown.
PY=$(python::any) || exit
exec "$PY" "$DUET_ROOT/lib/run_module.py" training.cli.monitor "$@"

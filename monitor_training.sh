#!/usr/bin/env bash
# Watch a training run: progress, loss, ranks, GPUs, system, warnings. Only reads; the run does not notice.
#
# Usage:
#   ./monitor_training.sh [--log=FILE | --run=DIR] [--interval=3] [--once] [--json] [--ascii]
#
#   --log=FILE      the run that this log belongs to (logs/<script>_<time>.log)
#   --run=DIR       a run directory, or its name in experiments/; without --log and --run: the newest run
#   --interval=S    seconds between two looks, 0.2 to 3600 (default 3)
#   --once          one full screen as plain text, then end
#   --json          one JSON object, then end: units in the keys, null for unknown
#   --ascii         no characters beyond ASCII (chosen by itself where the output is not UTF-8)
#
# Examples:
#   ./monitor_training.sh                                   live; q or Ctrl-C leaves, the run goes on
#   ./monitor_training.sh --interval=30 >> watch.txt        not a terminal: one line per look
#   ./monitor_training.sh --json | jq .progress.eta_s
#
# It ends by itself when the run has ended. NO_COLOR is respected. Exit codes: 0 shown, 2 command line, no such run or log,
# 130 left by Ctrl-C.
source "$(dirname -- "$(readlink -f -- "$0")")/lib/init.sh"

HELP_OPTIONS=0 help::answer "$0" "$@"
# Any Python does, nothing is installed for looking: what it lacks (psutil, NVML) is shown as unknown.
PY=$(python::any) || exit
exec "$PY" "$DUET_ROOT/lib/run_module.py" training.monitor "$@"

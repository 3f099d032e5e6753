#!/usr/bin/env bash
# Watch a training run: progress, loss, ranks, GPUs, system, alerts. Read-only.
#
# Usage:
#   ./monitor_training.sh [--run=DIR | --log=FILE | --all] [OPTION…]
#
#   --run=DIR           a run directory, its name in experiments/, a file of
#                       ./duet archive, or latest (default)
#   --log=FILE          a log of Duet (shows its run) or of any other training
#   --all               the newest 100 runs, and older active ones, side by side;
#                       Return opens the selected one
#   --interval=S        seconds between refreshes, 0.2 to 3600 (default 3)
#   --once              print one full screen as plain text and exit
#   --json              print one JSON object and exit: units in the keys, null
#                       for unknown
#   --follow-exit       exit when the run does, with its exit code
#   --prometheus=PORT   also serve metrics at 127.0.0.1:PORT/metrics
#   --ascii             ASCII only; automatic where the output is not UTF-8
#
# Keys: q quit, p pause, l log, a diagnose, g GPU details, + - interval, ? help
#
# Examples:
#   ./monitor_training.sh                             live; q or Ctrl-C exits
#   ./monitor_training.sh --log=train.log             nanochat, torchtitan, …
#   ./monitor_training.sh --interval=30 >> watch.txt  one line per refresh
#   ./monitor_training.sh --follow-exit && ./next_experiment.sh
#   ./monitor_training.sh --json | jq .progress.eta_s
#
# NO_COLOR is respected. Exit codes: 0 shown; 2 invalid option, run or log; 3 port
# in use; 130 Ctrl-C; with --follow-exit that of the run.
# shellcheck disable=SC2128,SC3028 # the first element is intended; sh parses this line too, then lib/init.sh starts bash
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE:-$0}")")/lib/init.sh" || return 2>/dev/null || exit

HELP_OPTIONS=0 help::answer "$0" "$@"
# Any Python will do, nothing is installed: what needs a missing package (psutil, NVML) is shown as unknown.
PY=$(python::any) || exit
exec "$PY" "$DUET_ROOT/lib/run_module.py" training.cli.monitor "$@"

# shellcheck shell=bash
# Sourced first by every script: strict mode, the project folder, the other parts.
# Usage: . "$root/lib/init.sh" || return 2>/dev/null || exit

# Shells other than bash read up to here: `sh train_dual_gpu.sh` and `zsh train_dual_gpu.sh` continue in bash.
if test -z "${BASH_VERSION-}"; then
  case ${ZSH_EVAL_CONTEXT-} in
  *file:file*) ;; # sourced by zsh
  *) exec bash "${ZSH_ARGZERO-$0}" "$@" ;;
  esac
fi
# A sourced script must neither change the options of the user's shell nor exit it.
if test "${ZSH_EVAL_CONTEXT-}" || [[ -n ${BASH_SOURCE[1]-} && ${BASH_SOURCE[1]} != "$0" ]]; then
  printf '[ERROR] this script must be run, not sourced\n    try:     bash %s …\n' "${BASH_SOURCE[1]-SCRIPT}" >&2
  return 2
fi
set +o posix # `sh` may be a bash
if test ! -d /proc/self/fd; then
  printf '[ERROR] Duet requires Linux with /proc, this system is %s\n' "$OSTYPE" >&2
  exit 3
fi
if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
  printf '[ERROR] bash %s (%s) is too old: 4.4 or newer is required\n' "$BASH_VERSION" "$BASH" >&2
  exit 3
fi
set -euo pipefail
# A limit for each `read`, of a server's login shells. It may be readonly (BASH_ENV, `bash -l`).
unset TMOUT 2>/dev/null || read() { builtin read -rt 99999999 "$@"; }
shopt -s inherit_errexit
if [[ ${DUET_DEBUG-} == 1 ]]; then # trace the shell; run::export hides values that may be secrets
  PS4='+ ${BASH_SOURCE:+${BASH_SOURCE[0]#"${DUET_ROOT-}/"}:$LINENO }${FUNCNAME[0]-} '
  set -x
fi

# A closed descriptor would become that of the next file that is opened. A closed output is reported (training/host/program.py).
[[ -e /proc/self/fd/0 ]] || exec 0</dev/null
[[ -e /proc/self/fd/2 ]] || exec 2>/dev/null

# A user's function or CDPATH may make cd print.
DUET_ROOT=$(CDPATH='' builtin cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null && builtin pwd)
DUET_SCRIPT=${DUET_COMMAND:-$(basename -- "$(readlink -f -- "$0")")} # `duet run` becomes launch_train.sh
unset DUET_COMMAND
export DUET_ROOT DUET_SCRIPT
# For suggested commands (training/core/project.py): the script as the user has started it. Empty in the project and in a job's
# frozen code; `duet run`, which starts launch_train.sh, remains `duet`.
if [[ . -ef $DUET_ROOT || -f $DUET_ROOT.json ]]; then DUET_STARTED_AS=; else DUET_STARTED_AS=${DUET_STARTED_AS:-$0}; fi
export DUET_STARTED_AS

# Exit codes of the shell part; the full list is class Exit in training/core/errors.py.
# shellcheck disable=SC2034 # used by the parts below
readonly EXIT_CONFIG=2 EXIT_RESOURCES=3 EXIT_PREEMPTED=75

# shellcheck source=lib/log.sh
source "$DUET_ROOT/lib/log.sh"
# shellcheck source=lib/messages.sh
source "$DUET_ROOT/lib/messages.sh"
# shellcheck source=lib/limits.sh
source "$DUET_ROOT/lib/limits.sh"
limits::check_files || exit
messages::expect_json "$@"

# shellcheck source=lib/language.sh
source "$DUET_ROOT/lib/language.sh"
# shellcheck source=lib/help.sh
source "$DUET_ROOT/lib/help.sh"
# shellcheck source=lib/python.sh
source "$DUET_ROOT/lib/python.sh"
# shellcheck source=lib/torch_local.sh
source "$DUET_ROOT/lib/torch_local.sh"
# shellcheck source=lib/script.sh
source "$DUET_ROOT/lib/script.sh"
# shellcheck source=lib/venv.sh
source "$DUET_ROOT/lib/venv.sh"
# shellcheck source=lib/run.sh
source "$DUET_ROOT/lib/run.sh"

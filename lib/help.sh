# shellcheck shell=bash
# `--help` anywhere among the arguments prints the script's header comment and the option list of the configuration schema.

# Print help and exit if requested. Usage: help::answer "$0" "$@"; HELP_OPTIONS=0 omits the training options.
help::answer() {
  local script=$1 arg any
  shift
  for arg in "$@"; do
    case $arg in
    --) return 0 ;;
    -h | --help)
      if [[ -n ${DUET_PYTHON-}$DUET_STARTED_AS ]]; then # `duet launch` or /path/launch_train.sh, not ./launch_train.sh
        any=$(python::any) || exit
        help::print "$script" | "$any" -I -S -c 'import sys; sys.path.insert(0, sys.argv[1])
from training.core.project import typed; sys.stdout.write(typed(sys.stdin.read()))' "$DUET_ROOT"
      else
        help::print "$script"
      fi
      exit
      ;;
    esac
  done
}

help::print() {
  local script=$1 line any
  {
    read -r line # the interpreter line
    while IFS= read -r line && [[ $line == '#'* ]]; do
      line=${line#'#'}
      [[ $line == ' shellcheck '* ]] || printf '%s\n' "${line# }"
    done
  } <"$script"
  [[ ${HELP_OPTIONS-} != 0 ]] || return 0
  any=$(python::any) || return
  # -I -S: loads no packages, so help is fast. Default SIGPIPE: `--help | head` is not an error.
  # UTF-8 in any locale, as the lines above.
  "$any" -I -S -c 'import signal, sys; signal.signal(signal.SIGPIPE, signal.SIG_DFL); sys.path.insert(0, sys.argv[1])
sys.stdout.reconfigure(encoding="utf-8")
import training.cli.option_list as o; print("\n".join(o.of_script(sys.argv[2])))' "$DUET_ROOT" "$script"
}

# shellcheck shell=bash
# Messages of the shell part in the user's language, chosen as in training/core/messages.py. Each call has the English text.

MESSAGE=
declare -gA MESSAGES_ZH=() # lib/messages_zh.sh, read with the first Chinese message

# Set MESSAGE. FORMAT is the English one, for printf; both languages take the same ARGS in the same order. Usage: messages::text ID FORMAT ARGS…
messages::text() {
  local id=$1 format=$2
  shift 2
  case ${DUET_LANG:-locale:${LC_ALL:-${LC_MESSAGES:-${LANG-}}}} in
  locale:*.[!uU]*) ;; # an encoding other than UTF-8
  [zZ][hH]* | locale:[zZ][hH]*)
    # shellcheck source=lib/messages_zh.sh
    ((${#MESSAGES_ZH[@]})) || source "$DUET_ROOT/lib/messages_zh.sh"
    format=${MESSAGES_ZH[$id]}
    ;;
  esac
  # shellcheck disable=SC2059 # the format is a message
  printf -v MESSAGE -- "$format" "$@"
}

# Log a message. Usage: messages::error ID FORMAT ARGS…
messages::info() { messages::text "$@" && log::info "$MESSAGE"; }
messages::error() { messages::text "$@" && log::error "$MESSAGE"; }

# Print what a part in Python has answered; exits where that fails, as on a full disk. Usage: messages::answer TEXT
messages::answer() {
  local why status=0
  [[ -n $1 ]] || return 0
  { why=$(printf '%s\n' "$1" 2>&1 >&3) || status=$?; } 3>&1
  ((status)) || return 0
  [[ -n $why ]] || exit "$status" # SIGPIPE: quiet under `… | head`
  messages::error answer.unwritten 'cannot write to standard output: %s' "${why##*: }"
  exit "$EXIT_RESOURCES"
}

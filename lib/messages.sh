# shellcheck shell=bash
# Messages of the shell part in the user's language, chosen as in training/core/messages.py. Each call has the English text.

MESSAGE=
REFUSED_TO=                # descriptor for the JSON object of a refused command; empty: none is asked for
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
messages::warn() { messages::text "$@" && log::warn "$MESSAGE"; }
messages::error() { messages::text "$@" && log::error "$MESSAGE"; }

# For an error before any Python has started: log it, and answer `--check --json` with it. Usage: messages::refuse ID FORMAT ARGS…
messages::refuse() {
  messages::error "$@"
  messages::refuse_as_json "$1" "$EXIT_RESOURCES" "$MESSAGE"
  return "$EXIT_RESOURCES"
}

# Set REFUSED_TO if ARGS ask for an answer as JSON: a copy of standard output, which $(…) replaces. Usage: messages::expect_json ARGS…
messages::expect_json() {
  local word check='' json=''
  for word in "$@"; do
    case $DUET_SCRIPT:${word,,} in
    *:-- | *:-h | *:--help | duet:run | duet:watch) break ;; # the words of another program may follow
    *:--check | *:--check=true) check=1 ;;
    *:--json | *:--json=true) json=1 ;;
    esac
  done
  [[ -z $check || -z $json || ! -e /proc/self/fd/1 ]] || exec {REFUSED_TO}>&1
}

# Print the object of training.cli.doctor.refused with one problem, if it is asked for. Usage: messages::refuse_as_json CODE STATUS TEXT [ALLOWED FIX]
messages::refuse_as_json() {
  local code=$1 status=$2 value
  local -a values=()
  [[ -n $REFUSED_TO ]] || return 0
  for value in "$3" "${4-}" "${5-}"; do
    value=${value//\\/\\\\}
    value=${value//\"/\\\"}
    value=${value//$'\n'/\\n}
    value=${value//[[:cntrl:]]/ }
    values+=("\"$value\"")
  done
  [[ -n ${4-} ]] || values[1]=null
  [[ -n ${5-} ]] || values[2]=
  printf '{"schema_version": 1, "status": "error", "exit_code": %d, "problems": [{"code": "%s", "field": null, "text": %s, "allowed": %s, "fixes": [%s]}], "checks": [], "versions": null, "plan": null, "memory": null, "checking_s": null}\n' \
    "$status" "$code" "${values[@]}" >&"$REFUSED_TO"
}

# Print what a part in Python has answered; exits where that fails, as on a full disk. A path is that of a folder without the files that
# the caller needs. Usage: messages::answer TEXT
messages::answer() {
  local why status=0
  [[ -n $1 ]] || return 0
  if [[ $1 == /* ]]; then
    messages::error answer.no_folder 'the folder %s has disappeared; nothing was started' "$1"
    exit "$EXIT_RESOURCES"
  fi
  { why=$(printf '%s\n' "$1" 2>&1 >&3) || status=$?; } 3>&1
  ((status)) || return 0
  [[ -n $why ]] || exit "$status" # SIGPIPE: quiet under `… | head`
  messages::error answer.unwritten 'cannot write to standard output: %s' "${why##*: }"
  exit "$EXIT_RESOURCES"
}

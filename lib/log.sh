# shellcheck shell=bash
# Log messages of the shell, in the format of training/core/log.py: [INFO] 2024-10-21 16:00:00 message

LOG_LINES=() # printed so far; log::open writes them to the log file once the plan names it

log::_print() {
  local level=$1 colour=$2 message=$3 stamp
  printf -v stamp '%(%Y-%m-%d %H:%M:%S)T' -1
  LOG_LINES+=("[$level] $stamp $message")
  if [[ -t 2 && -z ${NO_COLOR:-} && ${TERM:-dumb} != dumb ]]; then
    printf '\e[%sm[%s]\e[0m %s %s\n' "$colour" "$level" "$stamp" "$message" >&2
  else
    printf '[%s] %s %s\n' "$level" "$stamp" "$message" >&2
  fi
}

log::info() { log::_print INFO 34 "$1"; }
log::warn() { log::_print WARNING 33 "$1"; }
log::error() { log::_print ERROR 31 "$1"; }

# Write the messages so far to FILE; from here on Python writes there.
log::open() {
  local file=$1
  ((${#LOG_LINES[@]} == 0)) || printf '%s\n' "${LOG_LINES[@]}" >>"$file"
}

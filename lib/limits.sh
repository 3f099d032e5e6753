# shellcheck shell=bash
# Limits of this shell (ulimit) that leave no room for a launch.

# bash takes descriptors from 10 on for scripts and {VARIABLE} redirections
readonly LIMITS_FILES=16

# Refuse a shell that may open too few files. Reads the limit without $(ulimit -n), which would need a pipe.
limits::check_files() {
  local words=() fix='ulimit -n 4096'
  [[ -r /proc/self/limits ]] || return 0
  while read -ra words; do
    [[ ${words[*]:0:3} != 'Max open files' ]] || break
  done </proc/self/limits
  [[ ${words[3]-unlimited} != unlimited ]] && ((words[3] < LIMITS_FILES)) || return 0
  # only root may raise the hard limit
  [[ $EUID == 0 || ${words[4]} == unlimited ]] || ((words[4] >= 4096)) || fix='sudo prlimit --pid $$ --nofile=4096'
  messages::refuse limit.files 'this shell may open %d files (ulimit -n), at least %d are needed (try: %s)' "${words[3]}" "$LIMITS_FILES" "$fix"
}

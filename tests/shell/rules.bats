#!/usr/bin/env bats
# Rules for every shell file: the scripts, what they load, and the helpers of the tests.

load helper

setup() {
  cd "$ROOT" || return
  local name
  ENTRIES=() # the programs at the top level
  for name in *.sh; do ENTRIES+=("$name"); done
  ALONE=(.ci/run tests/*.sh) # these load nothing
  SHELL_FILES=("${ENTRIES[@]}" lib/*.sh "${ALONE[@]}")
}

# Forbidden in shell files of the product, as extended regular expressions.
START='(^|[;&|({[:space:]])' # a command may begin here
RUNS_TEXT="$START(eval|which)[[:space:]]"
SOURCES_A_PIPE='(source|\.)[[:space:]]+<\('
TEE='\|&?[[:space:]]*tee([[:space:]]|$)'
ASSIGNS_LATE='(local|declare|readonly|export|typeset)[[:space:]]([^#]*[[:space:]])?[A-Za-z_]+="?(\$\(|`)'
READS_A_PIPE='(^|[^}])<[[:space:]]+<\(' # but with exec {stream}< <(…) the status can be waited for
ECHO_E='echo[[:space:]]+-[nE]*e'
BACKQUOTE='`'
ONE_BRACKET='(^|[;&|[:space:]])\[[[:space:]]'
KILLS_BY_NAME="$START(killall|pkill)([[:space:]]|\$)"
NUMBER_AS_DEFAULT='\$\{[A-Za-z_0-9]+:?[-=][0-9]'

# Print the lines of the shell files (comments left out) that match; true when there are none. Usage: banned REGEX
banned() {
  local file found
  for file in "${SHELL_FILES[@]}"; do
    found=$(sed -E 's/(^|[[:space:]])#.*//' "$file" | grep -nE -e "$1") || continue
    printf '%s: %s\n' "$file" "$found"
    return 1
  done
}

@test "scripts are lists of stages: 40 lines or less" {
  for file in "${ENTRIES[@]}"; do
    is "$file: $(($(wc -l <"$file") <= 40))" "$file: 1"
  done
}

@test "library files are 100 lines or less" {
  for file in lib/*.sh; do
    is "$file: $(($(wc -l <"$file") <= 100))" "$file: 1"
  done
}

@test "scripts are executable, start with bash, a purpose, a usage and examples" {
  for file in "${ENTRIES[@]}"; do
    [[ -x $file ]] || is "$file" 'an executable file'
    is "$(head -n 1 "$file")" '#!/usr/bin/env bash'
    has "$(sed -n '2p' "$file")" '# '
    has "$(cat "$file")" $'\n# Usage:\n'
    has "$(cat "$file")" $'\n# Examples:\n'
  done
}

@test "the first command of each script loads lib/init.sh, from wherever it is called, and nothing continues without it" {
  for file in "${ENTRIES[@]}"; do
    # shellcheck disable=SC2016 # this text is in the file
    loads='. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE:-$0}")")/lib/init.sh" || return 2>/dev/null || exit'
    if [[ $file == submit_job.sh ]]; then # SLURM runs a copy of it: it finds the project in its own way
      # shellcheck disable=SC2016
      has "$(cat "$file")" $'\n. "$home/lib/init.sh" || return 2>/dev/null || exit\nsource "$home/lib/slurm.sh" || exit\n'
    else
      is "$(grep -vE '^(#|$)' "$file" | head -n 1)" "$loads"
    fi
  done
}

@test "lib/init.sh turns the strict mode on" {
  run bash -c 'source lib/init.sh; set -o; shopt'
  is "$status" 0
  for option in errexit nounset pipefail inherit_errexit; do
    [[ $output =~ (^|$'\n')${option}[[:space:]]+on ]] || is "$option off" "$option on"
  done
}

@test "the files that do not load lib/init.sh turn the strict mode on themselves" {
  for file in "${ALONE[@]}"; do
    is "$file: $(grep -vE '^(#|$)' "$file" | head -n 1)" "$file: set -euo pipefail"
  done
}

@test "no eval, which, source <(…): what they run cannot be reviewed" {
  banned "$RUNS_TEXT"
  banned "$SOURCES_A_PIPE"
}

@test "no command whose failure is swallowed: | tee, local x=\$(…), < <(…)" {
  banned "$TEE"
  banned "$ASSIGNS_LATE"
  banned "$READS_A_PIPE"
}

@test "no echo -e, no backquotes, no test with one bracket" {
  banned "$ECHO_E"
  banned "$BACKQUOTE"
  banned "$ONE_BRACKET"
}

@test "no killall, no pkill: they hit other processes" {
  banned "$KILLS_BY_NAME"
}

@test "no training value in the shell: defaults live in training/config/schema.py" {
  banned "$NUMBER_AS_DEFAULT"
}

# Each line: a rule, and a command that it must find.
@test "the rules find what they forbid" {
  SHELL_FILES=("$BATS_TEST_TMPDIR/bad.sh")
  while read -r rule line; do
    printf '  %s # a comment\n' "$line" >"${SHELL_FILES[0]}"
    run banned "${!rule}"
    is "$status: $line" "1: $line"
  done <<'EOF'
RUNS_TEXT eval "$(cmd)"
RUNS_TEXT x=$(which python)
SOURCES_A_PIPE source <(cmd)
TEE torchrun x | tee log
TEE torchrun x |& tee log
ASSIGNS_LATE local x=$(cmd)
ASSIGNS_LATE local a b=$(cmd)
ASSIGNS_LATE export x="$(cmd)"
READS_A_PIPE mapfile -t x < <(cmd)
ECHO_E echo -e "x"
ECHO_E echo -ne "x"
BACKQUOTE x=`cmd`
ONE_BRACKET if [ -f x ]; then
KILLS_BY_NAME killall python
KILLS_BY_NAME (pkill -f train)
NUMBER_AS_DEFAULT n=${BATCH:-8}
NUMBER_AS_DEFAULT n=${BATCH-8}
EOF
}

@test "the rules leave comments and harmless commands alone" {
  SHELL_FILES=("$BATS_TEST_TMPDIR/good.sh")
  cat >"${SHELL_FILES[0]}" <<'EOF'
x=$(cmd) # never local x=$(cmd), eval or | tee
  # killall python
[[ -f $x ]] || printf '%s' "${x:-none}" >&2
local x=1 y
mapfile -d '' -t argv <"$file"
exec {stream}< <(cmd)
((n > 1)) && evaluate=1
EOF
  for rule in RUNS_TEXT SOURCES_A_PIPE TEE ASSIGNS_LATE READS_A_PIPE ECHO_E BACKQUOTE ONE_BRACKET KILLS_BY_NAME NUMBER_AS_DEFAULT; do
    banned "${!rule}"
  done
}

@test "every function of lib/ is named after its file: module::verb" {
  for file in lib/*.sh; do
    names=$(grep -oE '^[a-z_:]+\(\)' "$file") || continue # a file may have none
    for name in $names; do
      is "${name%%::*} in $file" "$(basename "$file" .sh) in $file"
    done
  done
}

@test "files have the line ends of Unix in a clone by Git for Windows" {
  git ls-files -z -- duet '*.sh' '*.py' | git -c core.autocrlf=true checkout-index -z --stdin --prefix="$BATS_TEST_TMPDIR/clone/"
  [[ -x $BATS_TEST_TMPDIR/clone/duet ]]
  run grep -rl $'\r' "$BATS_TEST_TMPDIR/clone"
  is "$status:$output" '1:'
}

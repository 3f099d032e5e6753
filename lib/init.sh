# shellcheck shell=bash
# Sourced first by every script: strict mode, the project's folder, the other parts. Usage: source "$root/lib/init.sh"

if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
  printf '[ERROR] bash %s is too old: 4.4 or newer is needed (this one: %s)\n' "$BASH_VERSION" "$BASH" >&2
  exit 3
fi
set -euo pipefail
shopt -s inherit_errexit

DUET_ROOT=$(cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
DUET_SCRIPT=$(basename -- "$(readlink -f -- "$0")")
export DUET_ROOT DUET_SCRIPT

# Exit codes that the shell itself gives; the whole list is class Exit in training/errors.py.
# shellcheck disable=SC2034 # used by the parts below
readonly EXIT_CONFIG=2 EXIT_RESOURCES=3

# shellcheck source=lib/log.sh
source "$DUET_ROOT/lib/log.sh"
# shellcheck source=lib/help.sh
source "$DUET_ROOT/lib/help.sh"
# shellcheck source=lib/python.sh
source "$DUET_ROOT/lib/python.sh"
# shellcheck source=lib/run.sh
source "$DUET_ROOT/lib/run.sh"

#!/usr/bin/env bash
# Make the shell test runner available as .tools/bats (not in git). Quick when it is there already.
#
# Usage:
#   tests/install_bats.sh VERSION      VERSION is what npm installs; an installed bats >= 1.5 is taken as it is
set -euo pipefail

version=${1:?usage: tests/install_bats.sh VERSION}
CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
[[ -x .tools/bats ]] && exit

# Link the bats on PATH when it is new enough.
link_installed() {
  local found version number
  found=$(command -v bats) || return
  version=$("$found" --version) || return
  number=${version##* } # "Bats 1.8.2"
  local -a part
  IFS=. read -ra part <<<"$number"
  ((part[0] * 100 + part[1] >= 105)) || return
  ln -sfn -- "$found" .tools/bats
}

mkdir -p .tools
link_installed && exit

echo "installing bats $version, the shell test runner" >&2
if command -v npm >/dev/null && npm install --no-save --silent --prefix .tools "bats@$version" >&2; then
  ln -sfn node_modules/bats/bin/bats .tools/bats
elif ((EUID == 0)) && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq bats >&2 && link_installed; then
  : # link_installed made the link
else
  echo "bats >= 1.5 is missing and could not be installed by npm or apt-get (as root):" >&2
  echo "install it (apt-get install bats, brew install bats-core, npm install -g bats) and run this again" >&2
  exit 3
fi

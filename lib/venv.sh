# shellcheck shell=bash
# The project's environment .venv: state and installation.

# Whether it was completed and every file in its duet.files still exists (older versions have no such list).
venv::is_whole() {
  local file real
  local -a files=()
  [[ -x $DUET_ROOT/.venv/bin/python && -f $DUET_ROOT/.venv/duet.stamp ]] || return
  # After a system upgrade /usr/bin/python3 may be another version, for which the packages are not installed.
  real=$(readlink -f -- "$DUET_ROOT/.venv/bin/python")
  [[ ${real##*/} != python3.* || -d $DUET_ROOT/.venv/lib/${real##*/} ]] || return
  [[ ! -f $DUET_ROOT/.venv/duet.files ]] || mapfile -t files <"$DUET_ROOT/.venv/duet.files"
  for file in "${files[@]}"; do
    [[ -s $DUET_ROOT/.venv/$file ]] || return
  done
}

# Whether it is complete and was made from this requirements.lock.
venv::is_current() { venv::_is_of_this_lock && venv::is_whole; }

venv::_is_of_this_lock() {
  local stamp='' now=''
  [[ -f $DUET_ROOT/.venv/duet.stamp ]] || return
  IFS= read -r stamp <"$DUET_ROOT/.venv/duet.stamp" || true # the file has no last newline
  now=$(venv::_stamp) || now=
  # With TORCH_LOCAL_PATH a .venv that contains torch will do too: the local torch comes first on the path. At the limit of processes the
  # stamp is unknown; the environment is then kept.
  [[ -z $now || $stamp == "$now" || $stamp == "$(TORCH_LOCAL_PATH='' venv::_stamp)" ]]
}

# Set CLOSED to the file or folder that keeps this user from the Python of .venv, as /root does in an image. Fails without one: the Python is
# gone, or usable.
venv::_closed() {
  CLOSED=$(readlink -m -- "$DUET_ROOT/.venv/bin/python") && [[ ! -x $CLOSED ]] || return
  while [[ ! -e $CLOSED ]]; do CLOSED=$(dirname -- "$CLOSED"); done
  [[ ! -x $CLOSED ]]
}

# Whether it has another torch than the active environment that it replaces, which is a warning. Usage: venv::has_other_torch ACTIVE LACKING
venv::has_other_torch() {
  local own theirs
  local -a lacking
  theirs=$("$1/bin/python" "$DUET_ROOT/lib/environment.py" torch 2>/dev/null) || return
  own=$("$DUET_ROOT/.venv/bin/python" "$DUET_ROOT/lib/environment.py" torch) || return
  [[ $own != "$theirs" ]] || return
  mapfile -t lacking <<<"$2"
  messages::warn python.other_torch 'the active environment %s with torch %s is not used, but .venv with torch %s: %s' \
    "$1" "$theirs" "$own" "${lacking[0]}"$'\n'"${lacking[1]}" # the command
}

# Identifies what .venv is made from: a checksum of the first section of the lock file, and whether torch is local.
venv::_stamp() {
  local lock='' sum
  [[ ! -r $DUET_ROOT/requirements.lock ]] || lock=$(<"$DUET_ROOT/requirements.lock") || return
  sum=$(cksum <<<"${lock%%$'\n# ['*}") || return
  printf '%s torch=%s' "$sum" "${TORCH_LOCAL_PATH:+local}"
}

venv::make() {
  local base stamp status=0
  if venv::_is_of_this_lock && venv::_closed; then
    messages::refuse environment.closed 'the Python of the environment .venv cannot be used by this user (%s): no permission for %s (try: chmod a+x %s; for an image: UV_PYTHON_INSTALL_DIR=/opt/python)' \
      "$(id -un 2>/dev/null || id -u)" "$CLOSED" "$(printf '%q' "$CLOSED")" || return
  fi
  base=$(python::base) || return
  stamp=$(venv::_stamp) || messages::refuse environment.not_created 'the environment .venv could not be created' || return
  if [[ -f $DUET_ROOT/.venv/duet.stamp ]]; then
    messages::info environment.recreating \
      'creating the environment .venv with %s again: it is damaged or was made from another requirements.lock (once)' "$base"
  else
    messages::info environment.creating 'creating the environment .venv with %s (once)' "$base"
  fi
  # Packages on the user's PYTHONPATH do not count as installed: they may be missing at the next run.
  PYTHONPATH='' "$base" "$DUET_ROOT/lib/environment.py" make "$DUET_ROOT" "$stamp" || status=$?
  if ((status == EXIT_RESOURCES)); then # it has logged why
    messages::text environment.not_created 'the environment .venv could not be created'
    messages::refuse_as_json environment.not_created "$status" "$MESSAGE"
  fi
  return "$status"
}

# Install another section of requirements.lock into .venv, or the part that .venv lacks into FOLDER. Usage: venv::add SECTION [FOLDER]
venv::add() {
  local base
  base=$(python::base) || return
  PYTHONPATH='' "$base" "$DUET_ROOT/lib/environment.py" add "$DUET_ROOT" "$@"
}

# shellcheck shell=bash
# The project's own environment .venv: is it there, whole and of this requirements.lock? And making it.

# Was it made to its end, and is everything still there that its duet.files lists? (one of an older version has no list)
venv::is_whole() {
  local file real
  local -a files=()
  [[ -x $DUET_ROOT/.venv/bin/python && -f $DUET_ROOT/.venv/duet.stamp ]] || return
  # /usr/bin/python3 may have become another Python since (upgrade of the system): its packages are not there.
  real=$(readlink -f -- "$DUET_ROOT/.venv/bin/python")
  [[ ${real##*/} != python3.* || -d $DUET_ROOT/.venv/lib/${real##*/} ]] || return
  [[ ! -f $DUET_ROOT/.venv/duet.files ]] || mapfile -t files <"$DUET_ROOT/.venv/duet.files"
  for file in "${files[@]}"; do
    [[ -s $DUET_ROOT/.venv/$file ]] || return
  done
}

# The same, and made from this requirements.lock.
venv::is_current() {
  local stamp=''
  [[ -f $DUET_ROOT/.venv/duet.stamp ]] || return
  IFS= read -r stamp <"$DUET_ROOT/.venv/duet.stamp" || true # the file has no last newline
  # With a torch of the user, a .venv that has another one serves as well: his comes first on the path.
  [[ $stamp == "$(venv::_stamp)" || $stamp == "$(TORCH_LOCAL_PATH='' venv::_stamp)" ]] || return
  venv::is_whole
}

# What .venv must have been made from: the first part of the lock file, and whether torch came with it.
venv::_stamp() {
  local lock=''
  [[ ! -r $DUET_ROOT/requirements.lock ]] || lock=$(<"$DUET_ROOT/requirements.lock")
  printf '%s torch=%s' "$(cksum <<<"${lock%%$'\n# ['*}")" "${TORCH_LOCAL_PATH:+local}"
}

venv::make() {
  local base stamp why=''
  base=$(python::base) || return
  stamp=$(venv::_stamp)
  if [[ -f $DUET_ROOT/.venv/duet.stamp ]]; then
    why=' again, since it is damaged or made from another requirements.lock'
  fi
  log::info "making the environment .venv with $base$why (once)"
  # Nothing on the user's own PYTHONPATH counts as installed: it may be gone at the next run.
  PYTHONPATH='' "$base" "$DUET_ROOT/lib/environment.py" make "$DUET_ROOT" "$stamp"
}

# Install a later section of requirements.lock into .venv, or what .venv lacks of it into FOLDER. Usage: venv::add SECTION [FOLDER]
venv::add() {
  local base
  base=$(python::base) || return
  PYTHONPATH='' "$base" "$DUET_ROOT/lib/environment.py" add "$DUET_ROOT" "$@"
}

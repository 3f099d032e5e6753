# shellcheck shell=bash
# `--lang=zh` before `--` sets the language of every message (training/core/messages.py), for each command alike. This removes it from the
# arguments of the file that sources this one. Only Python knows where the program's own arguments begin (training/cli/run_words.py).

DUET_WORDS=()
while (($#)) && [[ $1 != -- ]]; do
  case $1 in
  --lang | --lang=*)
    if [[ $1 == --lang=* ]]; then set -- --lang "${1#*=}" "${@:2}"; fi
    case ${2-} in
    en | zh) export DUET_LANG=$2 ;;
    *)
      printf "[ERROR] --lang is '%s'\n    allowed: en or zh\n    try:     --lang=zh\n" "${2-}" >&2
      messages::refuse_as_json lang.value "$EXIT_CONFIG" "--lang is '${2-}'" 'en or zh' --lang=zh
      exit "$EXIT_CONFIG"
      ;;
    esac
    shift
    ;;
  *)
    DUET_WORDS+=("$1")
    case $DUET_SCRIPT:${DUET_WORDS[*]} in
    duet:run | duet:watch | duet:launch)
      shift
      break
      ;;
    esac
    ;;
  esac
  shift
done
set -- ${DUET_WORDS[@]+"${DUET_WORDS[@]}"} "$@"
unset DUET_WORDS

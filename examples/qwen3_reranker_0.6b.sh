#!/usr/bin/env bash
# Trains the YAML of the same name; further arguments are options of `vembed train` (batch_size=64 --nproc 2).
# DRY_RUN=1 resolves everything without weights and prints what would be launched.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PATH="$PATH:$here/../.venv/bin"   # the environment of `make demo`, if no other vembed is installed
if [ "${DRY_RUN:-0}" = 1 ]; then set -- --dry-run "$@"; fi
exec vembed train "$here/$(basename "${BASH_SOURCE[0]}" .sh).yaml" "$@"

#!/usr/bin/env bash
# Mines hard negatives for the demo's data and trains on them. Further arguments are options of `vembed train`.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PATH="$PATH:$here/../../.venv/bin"   # the environment of `make demo`, if no other vembed is installed
[ -d demo ] || vembed demo
vembed mine "$here/mine.yaml"
exec vembed train "$here/train.yaml" "$@"

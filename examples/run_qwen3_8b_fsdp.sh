#!/usr/bin/env bash
# Trains Qwen3-VL-Embedding 8B with LoRA and FSDP2 on all GPUs of this machine; further arguments are options.
# DRY_RUN=1 resolves everything without weights and prints what would be launched.
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/qwen3_8b_fsdp.sh" "$@"

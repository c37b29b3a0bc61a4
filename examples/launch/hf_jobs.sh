#!/usr/bin/env bash
# vembed as a job on the Hugging Face Hub. The config and its data are files of a dataset repository.
#   hf auth login
#   IMAGE=YOU/vembed bash examples/launch/hf_jobs.sh YOU/data cfg.yaml YOU/model [key=value ...]
#   DRY_RUN=1 ...     print the command
# IMAGE is the image of the Dockerfile, pushed where the Hub can pull it. HF_TOKEN goes to the job as a secret.
set -euo pipefail

data="${1:?which dataset repository holds the config and the data?}"
config="${2:?which config in it?}"
model="${3:?to which model repository?}"
shift 3

# The job's disk is lost at its end, so the model is uploaded, privately, by the job itself.
inside='
  set -euo pipefail
  data="$1" config="$2" model="$3"
  shift 3
  hf download "$data" --repo-type dataset --local-dir data
  cd data
  vembed train "$config" output_dir=run "$@"
  hf upload "$model" run/final . --private
'
command=(hf jobs run --flavor "${FLAVOR:-a100-large}" --timeout "${TIMEOUT:-6h}" --secrets HF_TOKEN
  "${IMAGE:-YOUR_IMAGE}" bash -c "$inside" vembed "$data" "$config" "$model" "$@")
if [ "${DRY_RUN:-0}" = 1 ]; then
  printf '%q ' "${command[@]}"
  printf '\n'
  exit 0
fi
exec "${command[@]}"

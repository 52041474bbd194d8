#!/usr/bin/env bash
# The GPU set in one call of at most ten minutes; results go to $OUT, or to benchmarks/results (runs/ with --small).
# Nothing needs to be installed but torch, transformers, peft, lightning and pyarrow: the package is put together from
# symbolic links (pyproject.toml installs datamodules/, callbacks/ and configs/ as parts of selfcal_lightning).
# bash benchmarks/gpu.sh --device cpu --small   goes through all of it on a CPU
set -euo pipefail
cd "$(dirname "$0")/.."
site=$(mktemp -d -t site-XXXXXX)
trap 'rm -rf "$site"' EXIT
mkdir "$site/selfcal_lightning"
ln -s "$PWD"/selfcal_lightning/* "$PWD/datamodules" "$PWD/callbacks" "$PWD/configs" "$site/selfcal_lightning/"
PYTHONPATH="$site" PYTHONUNBUFFERED=1 "${PYTHON:-python3}" benchmarks/training/gpu_training.py ${OUT:+--output "$OUT"} "$@"

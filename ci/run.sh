#!/usr/bin/env bash
# What CI runs: the static checks, then the README's test command with MPICH and with Open MPI.
set -euo pipefail
export MPIDP_WERROR=1 # one build serves the lint and the tests
cd "$(dirname "${BASH_SOURCE[0]}")/.."

step() {
  local start=$SECONDS
  printf '\n===== %s\n' "$*"
  "$@"
  printf '===== %s: %d s\n' "$*" $((SECONDS - start))
}
step scripts/lint.sh
# The CUDA part is compiled where nvcc is, the same sources for AMD where hipcc is.
step scripts/cuda_report.sh
step scripts/hip_check.sh
# The PyTorch tests run where a CPU build can be had; they skip themselves elsewhere.
timeout 300 .venv/bin/python -m pip install --quiet "${MPIDP_CI_TORCH:-torch==2.13.0}" ||
  echo "no PyTorch: its tests are skipped"
step scripts/test.sh --mpi mpich
step scripts/test.sh --mpi openmpi

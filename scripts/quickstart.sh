#!/usr/bin/env bash
# From a fresh clone to results: sets up, measures on 2 ranks against the MPI's own all-reduce, and
# trains on 2 ranks with the proof that they equal one process.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if [ $# -gt 0 ]; then
  case $1 in
    -h | --help)
      echo "usage: scripts/quickstart.sh [--mpi mpich|openmpi|impi|system]"
      exit 0
      ;;
    --mpi) [ $# -eq 2 ] || die "--mpi needs a value" 2 ;;
    *) die "unknown argument $1" 2 ;;
  esac
fi
wanted=${2:-}
choose_mpi "$wanted"
"$root/scripts/setup.sh" ${wanted:+--mpi "$wanted"}
cd "$root"

printf '\n##### mpidp bench: all_reduce on 2 ranks, beside the MPI'\''s own\n\n'
mpi_run 2 120 "$venv/bin/python" -m mpidp bench -b 8 -e 16M -f 8 --memory both --backend mpidp,mpi
printf '\n##### mpidp train: handwritten digits on 2 ranks, compared with one process\n\n'
mpi_run 2 120 "$venv/bin/python" -m mpidp train --example digits-mlp --verify

#!/usr/bin/env bash
# rank.sh FOLDER COMMAND...: runs COMMAND as one rank of a job. Rank 0 prints; what the others
# print goes to FOLDER/rank-N, for the case that one of them has something to tell.
folder=$1
shift
rank=${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-${SLURM_PROCID:-0}}}}
# Ranks that share pytest's temporary folder sweep away each other's files.
export PYTEST_DEBUG_TEMPROOT=$folder/tmp-$rank
mkdir -p "$PYTEST_DEBUG_TEMPROOT"
[ "$rank" = 0 ] || exec "$@" >"$folder/rank-$rank" 2>&1
exec "$@"

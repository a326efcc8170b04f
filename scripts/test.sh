#!/usr/bin/env bash
# Sets up, then runs the tests: those without MPI once, the others at several rank counts.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<'TEXT'
usage: scripts/test.sh [--mpi mpich|openmpi|impi|system] [--ranks 1,2,3] [PATH...] [PYTEST OPTION...]

Without a path: tests/unit, tests/jobs and the kernels of tests/gpu without MPI, then tests/mpi,
tests/adapters and tests/gpu/mpi under mpiexec at 1, 2, 3, 4, 5 and 8 ranks. With paths, only those.
Options go to pytest, for example
  scripts/test.sh tests/mpi/test_all_reduce.py --ranks 2 -k float16
tests/gpu runs on the emulated device, or on a real one with MPIDP_TEST_DEVICE=cuda.
MPIDP_SANITIZE=address,undefined (or thread) tests a build with sanitizers.
TEXT
}

wanted=
ranks=1,2,3,4,5,8
paths=()
options=()
while [ $# -gt 0 ]; do
  case $1 in
    --mpi | --ranks) [ $# -gt 1 ] || die "$1 needs a value" 2 ;;&
    --mpi) wanted=$2 && shift ;;
    --mpi=*) wanted=${1#--mpi=} ;;
    --ranks) ranks=$2 && shift ;;
    --ranks=*) ranks=${1#--ranks=} ;;
    -h | --help) usage && exit 0 ;;
    *) if [ -e "${1%%::*}" ]; then paths+=("$(realpath "${1%%::*}")${1#"${1%%::*}"}"); else options+=("$1"); fi ;;
  esac
  shift
done
[[ $ranks =~ ^[1-9][0-9]*(,[1-9][0-9]*)*$ ]] || die "--ranks $ranks: give numbers such as 1,2,3" 2

choose_mpi "$wanted"
"$root/scripts/setup.sh" ${wanted:+--mpi "$wanted"}
cd "$root"
[ ${#paths[@]} -gt 0 ] || paths=(tests/unit tests/jobs tests/gpu tests/mpi tests/adapters)
serial=()
parallel=()
device=() # a process that has loaded a GPU plugin keeps it
for path in "${paths[@]}"; do
  path=${path#"$root"/}
  [ -e "${path%%::*}" ] || continue
  case $path in
    tests/gpu)
      for file in tests/gpu/test_*.py; do
        [ ! -e "$file" ] || serial+=("$file")
      done
      device+=(tests/gpu/mpi)
      ;;
    tests/gpu/mpi*) device+=("$path") ;;
    tests/unit* | tests/jobs* | tests/gpu*) serial+=("$path") ;;
    *) parallel+=("$path") ;;
  esac
done

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
pytest=("$venv/bin/python" -X faulthandler -m pytest -p no:cacheprovider --color=no)

# A sanitizer's library must come first in the process, and Python itself frees little at exit.
case ${MPIDP_SANITIZE:-} in
  "") ;;
  thread) preload=libtsan.so ;;
  *) preload=libasan.so ;;
esac
if [ -n "${preload:-}" ]; then
  # The C++ library too: a sanitizer looks for its functions, such as the one that throws, at once.
  preload="$("${CXX:-c++}" -print-file-name="$preload") $("${CXX:-c++}" -print-file-name=libstdc++.so)"
  pytest=(env "LD_PRELOAD=$preload"
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 "${pytest[@]}")
fi

passed=0
failed=0
skipped=0
summary=()

# number_of WORD: the number before WORD in pytest's closing line.
number_of() {
  local line
  line=$(grep -aE '^=*.* in [0-9.]+s.*' "$logs/rank-0" | tail -n 1)
  grep -aoE "[0-9]+ $1" <<<"$line" | grep -aoE '^[0-9]+' || echo 0
}

# tally NAME STATUS SECONDS: books one run, and shows what the other ranks said if it failed.
tally() {
  local name=$1 status=$2 bad log rank
  bad=$(($(number_of failed) + $(number_of error)))
  passed=$((passed + $(number_of passed)))
  skipped=$((skipped + $(number_of skipped)))
  if [ "$status" = 5 ]; then
    status=0 # nothing selected here, perhaps by -k
  fi
  if [ "$status" != 0 ] && [ "$bad" = 0 ]; then
    bad=1 # a crash, a hang or a failure on another rank alone
  fi
  failed=$((failed + bad))
  summary+=("$(printf '%-10s %5d passed %4d failed %4d skipped  %4d s' \
    "$name" "$(number_of passed)" "$bad" "$(number_of skipped)" "$3")")
  [ "$status" != 0 ] || return 0
  echo "$name: FAILED (exit status $status)" >&2
  for log in "$logs"/rank-*; do
    rank=${log##*-}
    if [ "$rank" != 0 ] && ! tail -n 1 "$log" | grep -qaE '^=* ?[0-9]+ passed[^,]*(, [0-9]+ skipped)? in'; then
      printf '\n----- what rank %s said, at the end -----\n' "$rank" >&2
      tail -n 120 "$log" >&2
    fi
  done
}

# run_pytest NAME COMMAND...: one pytest run, shown and booked.
run_pytest() {
  local name=$1 status=0 start=$SECONDS
  shift
  rm -rf "${logs:?}"/*
  printf '\n##### %s\n' "$name"
  "$@" 2>&1 | tee "$logs/rank-0" || status=${PIPESTATUS[0]}
  tally "$name" "$status" $((SECONDS - start))
}

if [ ${#serial[@]} -gt 0 ]; then
  run_pytest "no MPI" timeout -k 10 1500 "${pytest[@]}" "${serial[@]}" ${options[@]+"${options[@]}"}
fi
# run_ranks NAME COUNT PATH...
run_ranks() {
  local name=$1 count=$2
  shift 2
  run_pytest "$name" mpi_run "$count" 900 "$root/scripts/rank.sh" "$logs" \
    "${pytest[@]}" --with-mpi "$@" ${options[@]+"${options[@]}"}
}
for count in ${ranks//,/ }; do
  [ ${#parallel[@]} = 0 ] || run_ranks "$count ranks" "$count" "${parallel[@]}"
  [ ${#device[@]} = 0 ] || run_ranks "$count, GPU" "$count" "${device[@]}"
done

printf '\n##### summary, %s\n' "$mpi"
printf '%s\n' "${summary[@]}" ""
[ $((passed + failed)) -gt 0 ] || die "no test ran"
printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
[ "$failed" = 0 ]

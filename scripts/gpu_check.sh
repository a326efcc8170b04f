#!/usr/bin/env bash
# Proves and measures the GPU part on a machine that has an NVIDIA GPU. Needs no network, takes at
# most six minutes, goes on after a step that failed, and prints one table at the end.
set -uo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<'TEXT'
usage: scripts/gpu_check.sh [--emulated] [--wheelhouse FOLDER] [--out FOLDER] [--seconds N]

Builds mpidp with its CUDA part, runs tests/gpu on the GPU with 1, 2, 4 and 8 ranks that share it,
runs compute-sanitizer on the kernels, and measures the reduction kernel and all_reduce.

--wheelhouse  wheels to install from where .venv is not there yet; else the Python that $PYTHON
              names (python3) must have mpi4py, NumPy, nanobind, pytest and pytest-mpi
--out         where logs and JSON go (default: build/gpu_check)
--seconds     all there is (default: 350); steps that do not fit any more are left out
--emulated    rehearses everything on the emulated device, on a machine with no GPU
Exit status: 0 where every step that could run was ok.
TEXT
}

emulated=
wheelhouse=
out=$root/build/gpu_check
seconds=350
while [ $# -gt 0 ]; do
  case $1 in
    --wheelhouse | --out | --seconds) [ $# -gt 1 ] || die "$1 needs a value" 2 ;;&
    --emulated) emulated=1 ;;
    --wheelhouse) wheelhouse=$(realpath "$2") && shift ;;
    --out) out=$(realpath -m "$2") && shift ;;
    --seconds) seconds=$2 && shift ;;
    -h | --help) usage && exit 0 ;;
    *) die "unknown argument $1 (see --help)" 2 ;;
  esac
  shift
done
[[ $seconds =~ ^[1-9][0-9]*$ ]] || die "--seconds $seconds: give a whole number" 2

cd "$root" || exit 1
mkdir -p "$out" || exit 1
rm -f "$out"/*.log "$out"/*.json "$out"/steps.tsv
: >"$out/steps.tsv"
end=$((SECONDS + seconds))

# record NAME OUTCOME SECONDS DETAIL
record() {
  printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "${4//$'\t'/ }" >>"$out/steps.tsv"
  printf '%-26s %-9s %4s s  %s\n' "$1" "$2" "$3" "$4"
}

# step NAME LIMIT COMMAND...: runs it within LIMIT seconds and what is left of all; its output goes
# to a log, of which the line that says most is kept.
step() {
  local name=$1 limit=$2 start=$SECONDS left status detail outcome=ok
  shift 2
  left=$((end - SECONDS))
  if [ "$left" -lt 5 ]; then
    record "$name" "no time" 0 ""
    return 1
  fi
  [ "$left" -ge "$limit" ] || limit=$left
  timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1 </dev/null
  status=$?
  detail=$(grep -aE '[0-9]+ (passed|failed|error)|Avg bus bandwidth|ERROR SUMMARY|^Ready|GB/s' "$out/$name.log" |
    tail -n 1 | tr -s ' =' ' ' | cut -c1-70)
  case $status in
    0) ;;
    124 | 137) outcome="timeout" ;;
    *)
      outcome="failed"
      [ -n "$detail" ] || detail=$(tail -n 1 "$out/$name.log" | cut -c1-70)
      ;;
  esac
  record "$name" "$outcome" $((SECONDS - start)) "$detail"
  [ "$outcome" = ok ]
}

has() { command -v "$1" >/dev/null 2>&1; }

# Which Python, and which launcher of the MPI that it uses.
python=
launcher=
needs='import mpi4py, numpy, nanobind, setuptools, pytest, pytest_mpi'
prepare() {
  choose_mpi ""
  if [ -n "$wheelhouse" ]; then
    PIP_NO_INDEX=1 PIP_FIND_LINKS=$wheelhouse step setup 120 scripts/setup.sh
  elif [ -x "$venv/bin/python" ] && "$venv/bin/python" -c "$needs" 2>/dev/null; then
    step setup 120 scripts/setup.sh
  fi
  if [ -x "$venv/bin/python" ] && "$venv/bin/python" -c "$needs" 2>/dev/null; then
    python=$venv/bin/python
    launcher=$venv/bin/mpiexec
  else
    python=$(command -v "${PYTHON:-python3}") || return 1
    if ! "$python" -c "$needs" 2>/dev/null; then
      record setup failed 0 "no Python with mpi4py, numpy, nanobind, pytest: give --wheelhouse"
      return 1
    fi
    launcher=$(command -v mpiexec || command -v mpirun || true)
    record setup ok 0 "$python"
  fi
  [ -x "$launcher" ] || launcher=$(command -v mpiexec || command -v mpirun || true)
  export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
  [ -n "$launcher" ]
}

build() {
  local capability=
  if [ -n "$emulated" ]; then
    step build 150 "$python" setup.py -q build_ext --inplace || return 1
    [ -z "${MPIDP_DEVICE_PLUGIN:-}" ] || return 0
    step emulated-device 150 "$python" tests/gpu/emulated/build.py || return 1
    MPIDP_DEVICE_PLUGIN=$(tail -n 1 "$out/emulated-device.log")
    export MPIDP_DEVICE_PLUGIN
    return
  fi
  if ! has nvcc && [ -z "${NVCC:-}" ] && [ -z "${CUDA_HOME:-}" ]; then
    [ ! -x /usr/local/cuda/bin/nvcc ] || export CUDA_HOME=/usr/local/cuda
  fi
  # Code for this GPU alone: it builds in a fraction of the time.
  if has nvidia-smi; then
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d '. ')
  fi
  if [[ $capability =~ ^[0-9]+$ ]]; then
    export MPIDP_CUDA_ARCHITECTURES=$capability
  fi
  MPIDP_CUDA=1 step build 170 "$python" setup.py -q build_ext --inplace
}

kernel_tests=()
for file in tests/gpu/test_*.py; do
  [ ! -e "$file" ] || kernel_tests+=("$file")
done

if has nvidia-smi; then
  step nvidia-smi 20 nvidia-smi -L
else
  record nvidia-smi absent 0 ""
fi
if ! prepare; then
  record environment failed 0 "no Python or no MPI launcher"
elif ! build; then
  :
else
  if [ -n "$emulated" ]; then
    export MPIDP_TEST_DEVICE=emulated
    sizes=(-b 1K -e 1M -f 16 -n 5 -w 1)
    kernel_sizes=1M
    batches=2
  else
    export MPIDP_TEST_DEVICE=cuda
    sizes=(-b 1K -e 1G -f 16 -n 10 -w 2)
    kernel_sizes=64M,256M
    batches=10
  fi
  pytest=("$python" -X faulthandler -m pytest -q -p no:cacheprovider --color=no)
  if [ ${#kernel_tests[@]} -gt 0 ]; then
    step kernel-tests 60 "${pytest[@]}" "${kernel_tests[@]}"
  else
    record kernel-tests absent 0 ""
  fi
  step measure-kernels 40 "$python" scripts/gpu_measure.py --bytes "$kernel_sizes" \
    --batches "$batches" --json "$out/kernels.json"
  for backend in best staged; do
    backends=mpidp
    transport=staged
    if [ "$backend" = best ]; then
      backends=mpidp,mpi
      transport=auto
    fi
    MPIDP_DEVICE_TRANSPORT=$transport step "bench-$backend" 60 "$launcher" -n 2 "$python" -m mpidp \
      bench --device cuda --backend "$backends" "${sizes[@]}" -J "$out/bench-$backend.json"
  done
  # Processes that share a GPU take turns on it, so many of them get through fewer tests.
  for count in 2 1 4 8; do
    few=()
    if [ "$count" -gt 2 ]; then
      few=(-k "float32 or bfloat16 or late or flight or once or left or probe or caught")
    fi
    mkdir -p "$out/ranks-$count"
    step "tests-$count-ranks" 70 "$launcher" -n "$count" "$root/scripts/rank.sh" "$out/ranks-$count" \
      "${pytest[@]}" --with-mpi tests/gpu/mpi ${few[@]+"${few[@]}"}
  done
  if has compute-sanitizer && [ -z "$emulated" ] && [ -e tests/gpu/test_device_kernels.py ]; then
    step sanitizer 60 compute-sanitizer --tool memcheck --error-exitcode 9 --target-processes all \
      "${pytest[@]}" -x tests/gpu/test_device_kernels.py
  else
    record sanitizer absent 0 ""
  fi
fi
"${python:-python3}" scripts/gpu_report.py "$out"

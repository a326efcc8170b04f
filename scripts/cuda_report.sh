#!/usr/bin/env bash
# Compiles the CUDA part and prints the registers and spills of its kernels; fails on any spill.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$root"

nvcc=${NVCC:-}
[ -n "$nvcc" ] || nvcc=${CUDA_HOME:+$CUDA_HOME/bin/nvcc}
[ -n "$nvcc" ] || nvcc=$(command -v nvcc) || {
  echo "no nvcc: the CUDA part is not compiled here"
  exit 0
}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
architectures=()
for name in ${MPIDP_CUDA_ARCHITECTURES:-75 80 90}; do
  architectures+=("-gencode=arch=compute_${name},code=sm_${name}")
done
flags=(-std=c++17 -O3 -fmad=false -Xcompiler "-fPIC,-Wall,-Wextra" -Xptxas -v -Icsrc)
jobs=()
for source in csrc/reduce/*.cu csrc/transport/*.cu; do
  name=$folder/$(basename "$source")
  timeout 600 "$nvcc" "${flags[@]}" "${architectures[@]}" -c "$source" -o "$name.o" \
    >"$name.log" 2>&1 &
  jobs+=($!)
done
for job in "${jobs[@]}"; do
  wait "$job" || {
    cat "$folder"/*.log
    die "the CUDA part does not compile"
  }
done
"$nvcc" --version | tail -n 2
# One line for each register count, over all kernels and architectures.
cat "$folder"/*.log | grep -oE 'Used [0-9]+ registers' | sort -k2n | uniq -c |
  awk '{printf "%4d kernels use %3d registers\n", $1, $3}'
kernels=$(cat "$folder"/*.log | grep -c 'bytes spill stores') || true
spilled=$(cat "$folder"/*.log | grep -cE '[^0-9][1-9][0-9]* bytes spill') || true
printf '%d kernels compiled, %d spill\n' "$kernels" "$spilled"
[ "$kernels" -gt 0 ] && [ "$spilled" = 0 ] || die "a kernel spills registers"

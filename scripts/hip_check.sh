#!/usr/bin/env bash
# Compiles the GPU sources for AMD with hipcc, where it is installed (Debian's hipcc will do). They
# are compiled only: nobody has run them on an AMD GPU.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$root"

hipcc=$(command -v "${HIPCC:-hipcc}") || {
  echo "no hipcc: the sources are not compiled for AMD here"
  exit 0
}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for source in csrc/reduce/*.cu csrc/transport/*.cu; do
  HIP_PLATFORM=amd timeout 600 "$hipcc" -x hip --offload-arch="${MPIDP_HIP_ARCHITECTURE:-gfx90a}" -std=c++17 -O3 \
    -ffp-contract=off -fPIC -Wall -Wextra -Icsrc -D__HIP_PLATFORM_AMD__ \
    -c "$source" -o "$folder/$(basename "$source").o"
  echo "compiled for ${MPIDP_HIP_ARCHITECTURE:-gfx90a}: $source"
done

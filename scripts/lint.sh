#!/usr/bin/env bash
# All static checks; CI runs the same. `scripts/lint.sh --fix` formats in place first.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

choose_mpi ""
"$root/scripts/setup.sh"
cd "$root"
stamp=$venv/.lint-requirements
if ! cmp -s scripts/lint-requirements.txt "$stamp"; then
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    -r scripts/lint-requirements.txt
  cp scripts/lint-requirements.txt "$stamp"
fi
bin=$venv/bin
mapfile -t native < <(git ls-files --cached --others --exclude-standard 'csrc/*.cc' 'csrc/*.h' 'csrc/*.cu' \
  'tests/*.cc' 'tests/*.h')
mapfile -t shell < <(git ls-files --cached --others --exclude-standard '*.sh' .ci/run)

if [ "${1:-}" = --fix ]; then
  "$bin/ruff" check --quiet --fix .
  "$bin/ruff" format --quiet .
  "$bin/clang-format" -i "${native[@]}"
fi

# A file that passed is not looked at again until it, a header or the checks change.
clang_tidy() {
  local common source sources=() passed=build/tidy
  mkdir -p "$passed"
  common=$(cat .clang-tidy setup.py scripts/lint-requirements.txt csrc/*/*.h | sha256sum)
  for source in csrc/*/*.cc; do
    [ "$(cat "$passed/${source//\//-}" 2>/dev/null)" = "$common $(sha256sum "$source")" ] ||
      sources+=("$source")
  done
  [ ${#sources[@]} -gt 0 ] || return 0
  printf '%s\n' "${sources[@]}" |
    xargs -P "$(nproc)" -I{} "$bin/clang-tidy" --quiet -p build {} 2>/dev/null || return 1
  for source in "${sources[@]}"; do
    printf '%s %s\n' "$common" "$(sha256sum "$source")" >"$passed/${source//\//-}"
  done
}

failed=()
check() {
  local name=$1
  shift
  if "$@"; then echo "lint: $name ok"; else failed+=("$name"); fi
}
check "ruff check" "$bin/ruff" check .
check "ruff format" "$bin/ruff" format --check .
check mypy "$bin/mypy"
check clang-format "$bin/clang-format" --dry-run -Werror "${native[@]}"
check codespell "$bin/codespell" mpidp csrc tests scripts ci README.md CONTRIBUTING.md CHANGELOG.md
check shellcheck "$bin/shellcheck" -x "${shell[@]}"
# Warnings are errors here, but not for a user whose compiler knows more of them.
check "compiler warnings" env MPIDP_WERROR=1 PYTHONWARNINGS=ignore "$bin/python" setup.py --quiet build_ext \
  --build-lib build/lint --build-temp build/lint
check clang-tidy clang_tidy
[ ${#failed[@]} = 0 ] || die "failed: ${failed[*]}"

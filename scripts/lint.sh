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
mapfile -t native < <(git ls-files --cached --others --exclude-standard 'csrc/*.cc' 'csrc/*.h')
mapfile -t shell < <(git ls-files --cached --others --exclude-standard '*.sh' .ci/run)

if [ "${1:-}" = --fix ]; then
  "$bin/ruff" check --quiet --fix .
  "$bin/ruff" format --quiet .
  "$bin/clang-format" -i "${native[@]}"
fi

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
check "compiler warnings" env MPIDP_WERROR=1 "$bin/python" setup.py --quiet build_ext \
  --build-lib build/lint --build-temp build/lint
[ ${#failed[@]} = 0 ] || die "failed: ${failed[*]}"

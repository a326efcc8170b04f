"""The build: what setup.py makes of the compiler wrappers it meets, and what it rebuilds."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mpidp import _extension_path

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """The names of setup.py, without building anything."""
    setuptools = pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("mpidp_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **_: None)
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def wrapper(tmp_path: Path):
    """Makes an mpicc in tmp_path/bin that answers as the given table says, else fails."""

    def make(answers: dict[str, str]) -> list[str]:
        cases = "".join(f"'{option}') echo '{text}' ;;\n" for option, text in answers.items())
        path = tmp_path / "bin" / "mpicc"
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\ncase $1 in\n{cases}*) exit 1 ;;\nesac\n")
        path.chmod(0o755)
        return [str(path)]

    return make


def test_mpich_answers_with_one_line(build, wrapper):
    mpicc = wrapper({"-show": "cc -O2 -I/m/include -L/m/lib -Wl,-rpath -Wl,/m/lib -lmpi"})
    compile_flags, link_flags = build.mpi_flags(mpicc)
    assert compile_flags == ["-I/m/include"]
    assert link_flags == ["-L/m/lib", "-Wl,-rpath", "-Wl,/m/lib", "-lmpi"]


def test_open_mpi_answers_with_two_halves(build, wrapper):
    mpicc = wrapper({"--showme:compile": "-I/o/include -pthread", "--showme:link": "-L/o -lmpi"})
    compile_flags, link_flags = build.mpi_flags(mpicc)
    assert compile_flags == ["-I/o/include"]
    assert link_flags == ["-L/o", "-lmpi", "-Wl,-rpath,/o"]


def test_intel_mpi_from_a_wheel_is_told_its_place(build, wrapper, tmp_path):
    place = "I_MPI_SUBSTITUTE_INSTALLDIR"
    mpicc = wrapper({"-show": f'gcc -I"{place}/include" -L"{place}/lib" -Xlinker --a -lmpi'})
    compile_flags, link_flags = build.mpi_flags(mpicc)
    assert compile_flags == [f"-I{tmp_path}/include"]
    assert link_flags[:4] == [f"-L{tmp_path}/lib", "-Xlinker", "--a", "-lmpi"]


def test_a_wrapper_that_tells_nothing_needs_cxx(build, wrapper, monkeypatch):
    mpicc = wrapper({})
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.SetupError, match="set CXX"):
        build.mpi_flags(mpicc)
    monkeypatch.setenv("CXX", "CC")
    assert build.mpi_flags(mpicc) == ([], [])


@pytest.mark.parametrize("variable", ["MPICC", "CXX"])
def test_a_program_that_is_not_there(build, monkeypatch, variable):
    monkeypatch.setenv(variable, "no-such-compiler -x")
    find = {"MPICC": build.find_mpicc, "CXX": build.find_cxx}[variable]
    with pytest.raises(build.SetupError, match=f"{variable}=no-such-compiler -x"):
        find()


@pytest.mark.parametrize(("variable", "named"), [("MPICC", "no MPI compiler"), ("CXX", "no C")])
def test_nothing_on_path(build, monkeypatch, tmp_path, variable, named):
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    find = {"MPICC": build.find_mpicc, "CXX": build.find_cxx}[variable]
    with pytest.raises(build.SetupError, match=named):
        find()


def test_mpicc_may_carry_arguments(build, monkeypatch):
    monkeypatch.setenv("MPICC", "sh -c")
    assert build.find_mpicc() == ["sh", "-c"]


def test_an_object_is_current_until_a_dependency_is_newer(build, tmp_path):
    source, header, target = (tmp_path / name for name in ("a b.cc", "a.h", "a.o"))
    for age, path in enumerate([source, header, target]):
        path.touch()
        os.utime(path, ns=(age, age))
    target.with_suffix(".d").write_text(f"{target}: {tmp_path}/a\\ b.cc \\\n {header}\n")
    assert build.is_current(target)
    os.utime(header, ns=(9, 9))
    assert not build.is_current(target)
    header.unlink()
    assert not build.is_current(target)


def test_an_object_without_a_dependency_file_is_not_current(build, tmp_path):
    (tmp_path / "a.o").touch()
    assert not build.is_current(tmp_path / "a.o")


def test_host_sources_leave_out_cuda(build):
    names = {path.name for path in build.host_sources()}
    assert "ring.cc" in names
    assert not any(name.startswith("cuda") for name in names)


def test_the_package_looks_where_an_in_place_build_puts_the_extension(build, tmp_path):
    package = tmp_path / "mpidp"
    own = tmp_path / "build" / f"ext-{build.prefix_tag()}"
    for folder in (package, own, tmp_path / "build" / "ext-latest"):
        folder.mkdir(parents=True)
    assert _extension_path.search_path([str(package)]) == [str(own), str(package)]


def test_another_environment_takes_the_latest_build_last(tmp_path, monkeypatch):
    package = tmp_path / "mpidp"
    latest = tmp_path / "build" / "ext-latest"
    for folder in (package, latest):
        folder.mkdir(parents=True)
    installed = tmp_path / "site" / "mpidp"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    assert _extension_path.search_path([str(package)]) == [
        str(package),
        str(installed),
        str(latest),
    ]

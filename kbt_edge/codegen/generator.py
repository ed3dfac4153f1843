"""A bundle as C for a microcontroller: ``kbt-edge codegen BUNDLE -o DIR``.

    NAME.h  NAME.c        the verbs init, predict, observe, save and load, in physical units
    NAME_trunk.c          the frozen network as plain C: weights in flash, temporaries on the stack
    NAME_state.c          the head's configuration and state, byte for byte as in head.kbt
    NAME_arena.cpp        the memory the head learns in: static, of exactly the size this head needs
    kbt/                  the sources of the core, copied from the installed package as they are
    CMakeLists.txt        a static library of all that, for any CMake project
    README.md             how it was made, what it takes, how to call it
    codegen.json          the same for programs, with the SHA-256 of every file

There is no heap, no printf and no file beneath NAME.h. ``kbt_edge.load_generated`` compiles such a folder for the host
and speaks to it with the verbs of ``Model``: what it answers is what the firmware will answer.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kbt_edge import _core
from kbt_edge import bundle as bundles
from kbt_edge._version import __version__
from kbt_edge.errors import BackendError, BundleError, RangeError
from kbt_edge.model import Model
from kbt_edge.onnxfile import read_onnx
from kbt_edge.trunk.build import try_out
from kbt_edge.trunk.source import CArray, trunk_source

__all__ = ["generate"]

FORMAT: Final = 2  # 1: cov and total_var of a float32 head were float
MANIFEST: Final = "codegen.json"
CORE: Final = ("kbt/kbt.cpp", "kbt/store.c")
EXTRA: Final = ("kbt/recorder.cpp", "kbt/replay.cpp")  # packed as well, and linked by who calls it

# What may not be the name of a policy, because names are made of it that C or C++ has taken already.
_TAKEN: Final = re.compile(
    "kbt|kbt_.*|"
    "alignas|alignof|and|asm|auto|bitand|bitor|bool|break|case|catch|char|class|compl|concept|const|constexpr|continue|"
    "decltype|default|delete|do|double|else|enum|explicit|export|extern|false|final|float|for|friend|goto|if|inline|int|"
    "long|main|mutable|namespace|new|noexcept|not|nullptr|operator|or|override|private|protected|public|register|"
    "requires|restrict|return|short|signed|sizeof|static|std|struct|switch|template|this|throw|true|try|typedef|typeid|"
    "typename|union|unsigned|using|virtual|void|volatile|while|xor"
)

# NAME.h must not be found instead of a header of C, POSIX or newlib. (No include path of ours leads to it, but that of
# a sketch or a project of the user's may.) And a CMake target may not be called like one of CMake's or of libm.
_HEADERS: Final = re.compile(
    "aio|alloca|ar|argp|argz|assert|byteswap|complex|cpio|ctype|devctl|dirent|dlfcn|elf|endian|envlock|envz|err|"
    "errno|error|execinfo|fastmath|fcntl|features|fenv|float|fmtmsg|fnmatch|fpu_control|ftw|getopt|glob|grp|iconv|"
    "ieee754|ieeefp|ifaddrs|inttypes|iso646|langinfo|libgen|libintl|limits|link|locale|malloc|math|memory|monetary|"
    "mqueue|ndbm|netdb|newlib|nl_types|obstack|paths|poll|printf|pthread|pty|pwd|reent|regdef|regex|regexp|resolv|"
    "sched|search|semaphore|setjmp|sgtty|shadow|signal|spawn|stdalign|stdarg|stdatomic|stdbit|stdbool|stdckdint|"
    "stddef|stdfix|stdint|stdio|stdio_ext|stdlib|stdnoreturn|string|strings|stropts|syscall|sysexits|syslimits|"
    "syslog|tar|termio|termios|tgmath|threads|time|trace|uchar|ucontext|ulimit|unctrl|unistd|unwind|utime|utmp|utmpx|"
    "values|varargs|wait|wchar|wctype|wordexp|xlocale"
)
_TARGETS: Final = re.compile(
    "all|c|clean|codegen|depend|edit_cache|gcc|help|install|list_install_components|m|package|package_source|"
    "preinstall|rebuild_cache|test"
)

# As in CMakeLists.txt: what the same bits depend on, and what keeps a heap and exceptions out.
_COMMON_FLAGS: Final = ("-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra")
_C_FLAGS: Final = ("-std=gnu11", "-O2", "-fwrapv")
_CXX_FLAGS: Final = ("-std=c++17", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics")
# A Cortex-M4 with its single-precision FPU: the machine the README states figures for.
_M4F: Final = ("-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16")
_INLINE: Final = "--param max-inline-insns-size=30"  # GCC with -Os, here and in the generated CMakeLists.txt
_SMALL: Final = ("-Os", *_INLINE.split())
_COMPILE_SECONDS: Final = 600


# ---- from a bundle to C ----------------------------------------------------------------------------------------------


def generate(
    bundle: str | os.PathLike[str], folder: str | os.PathLike[str], name: str | None = None
) -> Mapping[str, Any]:
    """Write the C of ``bundle`` to ``folder`` and return what codegen.json says of it.

    bundle   the folder of a bundle, or the name of one that ships with the package
    folder   new, empty, or written by an earlier ``generate``, which is then replaced
    name     prefix of every C name; default: the name of the bundle's folder
    """
    source = bundles.find(bundle)
    name = checked_name(source.absolute().name if name is None else name)
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        read_manifest(target, oldest=1)  # refuses what is not ours to replace
    model = Model.load(bundle)
    policy = _Policy(name, model)
    files = policy.files()
    files |= {f"kbt/{path.name}": path.read_bytes() for path in _core_sources()}
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "kbt_edge": __version__,
        "name": name,
        "trunk_sha256": model.trunk.sha256,
        "made": dict(model.made),
        **policy.described(),
        "size": None,
        "files": {},
    }
    with tempfile.TemporaryDirectory(prefix="kbt-codegen-") as scratch:
        _write(Path(scratch), files, manifest)
        manifest["size"] = _measured(name, Path(scratch))
    files["README.md"] = policy.readme(manifest["size"])
    _write(target, files, manifest)
    return manifest


def checked_name(name: object) -> str:
    """``name`` as the prefix of C names, which are put into source files as they are."""
    if not isinstance(name, str) or not re.fullmatch(r"[a-z]([a-z0-9_]{0,30}[a-z0-9])?", name, re.ASCII):
        raise RangeError(
            f"name: expected a C identifier of at most 32 small letters, digits and single underscores, got {name!r}"
        )
    if "__" in name or _TAKEN.fullmatch(name):
        raise RangeError(f"name: expected an identifier that C, C++ and the core leave free, got {name!r}")
    if _HEADERS.fullmatch(name):
        raise RangeError(f"name: expected one that is no header of C, POSIX or newlib, got {name!r}; add a word to it")
    if _TARGETS.fullmatch(name):
        raise RangeError(
            f"name: expected one that is no target of CMake and no library, got {name!r}; add a word to it"
        )
    return name


def _core_sources() -> list[Path]:
    """The core as this package was built from it: in the package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    checkout = package.parent
    for folders in (
        [package / "include", package / "csrc", *sorted((package / "csrc").glob("*/"))],
        [*sorted((checkout / "csrc").glob("*/")), checkout / "cmake"],
    ):
        found: list[Path] = []
        names = [*(Path(source).name for source in (*CORE, *EXTRA)), "KbtEigen.cmake"]
        for name in names:  # and what they include, and what that includes
            path = next((folder / name for folder in folders if (folder / name).is_file()), None)
            if path is None:
                break
            found.append(path)
            included = re.findall(r'^#include "(\w+\.\w+)"', path.read_text(encoding="utf-8"), flags=re.M)
            names += [name for name in dict.fromkeys(included) if name not in names]
        else:
            return found
    raise BackendError("the sources of the core are not in this installation of kbt_edge; reinstall it")


def _write(folder: Path, files: Mapping[str, bytes], manifest: dict[str, Any]) -> None:
    """All files, instead of those that an earlier run left, and the manifest with their SHA-256."""
    manifest["files"] = {path: hashlib.sha256(content).hexdigest() for path, content in sorted(files.items())}
    try:
        if (folder / MANIFEST).exists():
            for path in read_manifest(folder, oldest=1)["files"].keys() - files.keys():
                if re.fullmatch(r"(kbt/)?[A-Za-z]\w*\.\w+", path):
                    (folder / path).unlink(missing_ok=True)
        (folder / "kbt").mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            (folder / path).write_bytes(content)
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise BundleError(f"{folder}: cannot be written: {error.strerror or error}") from error


def read_manifest(folder: Path, oldest: int = FORMAT) -> dict[str, Any]:
    try:
        found = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("files"), dict):
        raise BundleError(f"{folder}: expected a folder written by kbt-edge codegen, found no {MANIFEST} of its kind")
    if found.get("format") not in range(oldest, FORMAT + 1):
        raise BundleError(
            f"{folder}: written by another version of kbt-edge codegen (format {found.get('format')!r}, here "
            f"{FORMAT}); generate it again"
        )
    return found


class _Policy:
    """A model, and the C that does what it does: the same operations in the same order and precision."""

    def __init__(self, name: str, model: Model) -> None:
        self.name, self.model, self.bundle = name, model, model.bundle()
        trunk, head = model.trunk, model.head
        self.rows, self.outputs = trunk.rows, head.d_o
        self.softmax = head.config["output"] == "softmax"
        self.double = head.config["dtype"] == "float64"
        config = _core.state_config(self.bundle.head)
        assert not isinstance(config, int)  # Model.load has read it
        self.array_bytes = config.arena_bytes() - _rounded(_core.RECORD_BYTES[config.dtype], 64)
        count = len(trunk.inputs)
        self.arguments = dict(
            zip(["x"] if count == 1 else [f"x{i + 1}" for i in range(count)], trunk.inputs, strict=True)
        )

    def described(self) -> dict[str, Any]:
        """For codegen.json: what ``load_generated`` has to know."""
        return {
            "inputs": [
                {"name": spec.name, "shape": list(spec.shape), "dtype": spec.dtype} for spec in self.arguments.values()
            ],
            "rows": self.rows,
            "outputs": self.outputs,
            "output": "softmax" if self.softmax else "gaussian",
            "dtype": "float64" if self.double else "float32",
            "state_bytes": len(self.bundle.head),
            "slot_bytes": 64 + _rounded(len(self.bundle.head), 64),
            "arena_array_bytes": self.array_bytes,
        }

    def files(self) -> dict[str, bytes]:
        pieces = {**self._sizes(), **self._around_the_trunk(), **self._around_the_head(), **self._words()}
        name = self.name
        return {
            f"{name}.h": _filled("policy.h", pieces),
            f"{name}.c": _filled("policy.c", pieces),
            f"{name}_trunk.c": self._trunk(pieces["made"]).encode("ascii"),
            f"{name}_state.c": _filled("state.c", pieces),
            f"{name}_arena.cpp": _filled("arena.cpp", pieces),
            "CMakeLists.txt": _filled("CMakeLists.txt", pieces),
        }

    def readme(self, size: Mapping[str, Any] | None) -> bytes:
        takes = _what_it_takes(self.name, size, len(self.bundle.head), self.array_bytes)
        return _filled("README.md", {**self._sizes(), **self._words(), "takes": takes})

    def _trunk(self, made: str) -> str:
        """The network, with every name in it local to its file or led by the policy's."""
        name = self.name
        types = {"float32": "float", "int64": "int64_t"}
        inputs = [CArray(spec.shape, types[spec.dtype], spec.limit) for spec in self.arguments.values()]
        onnx = read_onnx(self.bundle.trunk)
        shape = tuple(length for length in onnx.graph.outputs[0].shape or () if isinstance(length, int))
        output = CArray(shape, "float")
        source = trunk_source(self.bundle.trunk, onnx, inputs, output, f"{name}_network")
        try_out(source, inputs, output, compiler("CC", "cc", "gcc", "clang"))
        source = re.sub(r"^(extern )?const ", "static const ", source, flags=re.M)
        source = re.sub(rf"^(void|_Bool) (?={name}_network)", r"static EMX_UNUSED \1 ", source, flags=re.M)
        source = source.replace("kbt_trunk_run", f"{name}_trunk_run")
        return f"/* {name}_trunk.c - the frozen network.\n * {made}\n */\n{source}"

    # Pieces of the templates, by the word that stands for them there.

    def _sizes(self) -> dict[str, str]:
        count = self.rows * self.outputs
        numbers = {"rows": self.rows, "outputs": self.outputs, "count": count, "count_squared": count**2}
        numbers |= {key: value for key, value in self.described().items() if key.endswith("_bytes")}
        return {
            "name": self.name,
            "upper": self.name.upper(),
            "real": "double" if self.double else "float",
            "inline": _INLINE,
            **{key: str(number) for key, number in numbers.items()},
        }

    def _around_the_trunk(self) -> dict[str, str]:
        """From x in physical units, or ids, to h."""
        parameters, comments, constants, code, passed = [], [], [], [], []
        for (x, spec), entry in zip(self.arguments.items(), self.bundle.inputs, strict=True):
            size, features, shape = math.prod(spec.shape), spec.shape[-1], " x ".join(map(str, spec.shape))
            if entry.mean is None or entry.scale is None:
                parameters.append(f"const int64_t {x}[{size}]")
                limit = "" if spec.limit is None else f" from 0 to {spec.limit - 1}"
                comments.append(f"{x}: {shape} ids{limit}")
                passed.append(x)
                continue
            parameters.append(f"const double {x}[{size}]")
            comments.append(f"{x}: {shape} in physical units")
            constants += [
                _array(f"{x}_mean", np.broadcast_to(entry.mean, (features,))),
                _array(f"{x}_scale", np.broadcast_to(entry.scale, (features,))),
            ]
            i = "i" if size == features else f"i % {features}"
            code += [
                f"  float {x}_scaled[{size}];",
                f"  for (int i = 0; i < {size}; ++i) {{",
                f"    {x}_scaled[i] = (float)(({x}[i] - {x}_mean[{i}]) / {x}_scale[{i}]);",
                "  }",
            ]
            passed.append(f"{x}_scaled")
        h = self.rows * self.model.trunk.d
        return {
            "inputs": ", ".join(parameters),
            "input_comment": "; ".join(comments),
            "input_constants": "\n".join(constants),
            "scale_inputs": "\n".join([*code, f"  const void *const inputs[] = {{{', '.join(passed)}}};"]),
            "null_inputs": " || ".join(f"{x} == NULL" for x in self.arguments),
            "refused_input": "KBT_E_NONFINITE" if len(constants) == 2 * len(self.arguments) else "KBT_E_RANGE",
            "h_count": str(h),
            "h_name": "h_double" if self.double else "h",
            "widen_h": f"\n  double h_double[{h}];\n  for (int i = 0; i < {h}; ++i) h_double[i] = (double)h[i];"
            if self.double
            else "",
        }

    def _around_the_head(self) -> dict[str, str]:
        """From the head's output to y in physical units, and back for its target."""
        sizes = self._sizes()
        if self.softmax:  # probabilities have no units
            pieces = {"output_constants": "", "to_physical": _PROBABILITIES, "to_head": _PROBABILITY_TARGET}
            pieces |= {"physical_result": "", "labels_declared": _LABELS_DECLARED, "labels": _LABELS}
            return {key: _replaced(text, sizes) for key, text in pieces.items()}
        scale = np.broadcast_to(self.model.output_scale, (self.outputs,))
        log_scale = 0.0
        for value in scale.tolist():
            log_scale += self.rows * math.log(value)
        constants = [
            _array("y_offset", np.broadcast_to(self.model.output_offset, (self.outputs,))),
            _array("y_scale", scale),
            f"static const double log_scale = {log_scale.hex()};",
        ]
        pieces = {"to_physical": _TO_PHYSICAL, "to_head": _TO_HEAD, "labels_declared": "", "labels": ""}
        pieces |= {"physical_result": "\n  if (result != NULL) result->log_likelihood -= log_scale;"}
        pieces = {key: _replaced(text, sizes) for key, text in pieces.items()}
        return {**pieces, "output_constants": "\n".join(constants)}

    def _words(self) -> dict[str, str]:
        """What is written for people, from our own vocabulary, and the state."""
        head, config, sha256 = self.model.head, self.model.head.config, self.model.trunk.sha256
        noise = np.ravel(head.noise_var).tolist()[:4] if config["noise"] != "multinomial" else []
        described = [
            f"widths {' -> '.join(map(str, config['widths']))}, {config['output']}, {config['dtype']}",
            " ".join([f"rule {config['rule']}, noise {config['noise']}", *(f"{value:g}" for value in noise)]),
            "prior_var " + ", ".join(f"{value:g}" for value in config["prior_var"]),
            f"covariance {config['covariance']}, relu_order {config['relu_order']}, max_rows {config['max_rows']}",
            f"forgetting {config['forgetting']:g}, input_var {config['input_var']:g}, gate {config['gate'] or 'off'}",
            f"samples learned before: {head.samples}",
        ]
        blob = self.bundle.head
        rows = (", ".join(f"0x{byte:02x}" for byte in blob[i : i + 20]) for i in range(0, len(blob), 20))
        kinds = {"float32": ("double", "0.0"), "int64": ("int64_t", "0")}
        declared = [f"{kinds[spec.dtype][0]} {x}[{math.prod(spec.shape)}];" for x, spec in self.arguments.items()]
        zeros = [f"np.zeros({spec.shape}, np.{spec.dtype})" for spec in self.arguments.values()]
        return {
            "version": __version__,
            "sha256": sha256,
            "made": f"Made by kbt-edge codegen {__version__} from a trunk.onnx with the SHA-256\n * {sha256}.",
            "config": "\n".join(f" *   {line}" for line in described),
            "target_comment": "probabilities, rows that sum to 1" if self.softmax else "in physical units",
            "state_array": "    " + ",\n    ".join(rows),
            "no_float64": "" if self.double else "KBT_NO_FLOAT64",
            "no_float64_flag": "" if self.double else " -DKBT_NO_FLOAT64",
            "declared": "\n".join(declared),
            "passed": ", ".join(self.arguments),
            "observed": "observe_labels(classes" if self.softmax else "observe(target",
            "zeros": ", ".join(zeros),
        }


_TO_PHYSICAL: Final = """\
  for (size_t i = @count@; i-- > 0;) {
    const double scale = y_scale[i % @outputs@];
    mean[i] = y_offset[i % @outputs@] + scale * (double)u[i];
    if (total_var != NULL) total_var[i] = scale * scale * head_value(total_var, i);
  }
  for (size_t i = @count_squared@; cov != NULL && i-- > 0;) {
    cov[i] = y_scale[i / @count@ % @outputs@] * y_scale[i % @count@ % @outputs@] * head_value(cov, i);
  }"""
_TO_HEAD: Final = """\
  @real@ target[@count@]; /* what does not fit becomes infinite, and is refused by the head */
  for (int i = 0; i < @count@; ++i) target[i] = (@real@)((y[i] - y_offset[i % @outputs@]) / y_scale[i % @outputs@]);"""
_PROBABILITIES: Final = """\
  for (size_t i = @count@; i-- > 0;) {
    mean[i] = (double)u[i];
    if (total_var != NULL) total_var[i] = head_value(total_var, i);
  }
  for (size_t i = @count_squared@; cov != NULL && i-- > 0;) cov[i] = head_value(cov, i);"""
_PROBABILITY_TARGET: Final = """\
  @real@ target[@count@];
  for (int i = 0; i < @count@; ++i) target[i] = (@real@)y[i];"""
_LABELS_DECLARED: Final = """
/* The same for class labels, one per row. */
kbt_status @name@_observe_labels(const int32_t labels[@rows@], kbt_result *result);
"""
_LABELS: Final = """
kbt_status @name@_observe_labels(const int32_t labels[@rows@], kbt_result *result) {
  return kbt_observe_labels(head, labels, NULL, 0, result);
}
"""


def _filled(template: str, pieces: Mapping[str, str]) -> bytes:
    text = (Path(__file__).parent / "templates" / f"{template}.j2").read_text(encoding="utf-8")
    return _replaced(text, pieces).encode("ascii")


def _replaced(text: str, pieces: Mapping[str, str]) -> str:
    """Every @word@ by the piece of that name."""
    return re.sub(r"@(\w+)@", lambda match: pieces[match[1]], text)


def _rounded(count: int, unit: int) -> int:
    return (count + unit - 1) // unit * unit


def _array(name: str, values: npt.NDArray[Any]) -> str:
    """A constant with every bit, as hexadecimal floating-point numbers."""
    numbers = [float(value).hex() for value in values]
    rows = (", ".join(numbers[i : i + 4]) for i in range(0, len(numbers), 4))
    return f"static const double {name}[{len(numbers)}] = {{\n    " + ",\n    ".join(rows) + "};"


# ---- what it takes on a Cortex-M4F -----------------------------------------------------------------------------------


def _measured(name: str, folder: Path) -> dict[str, Any] | None:
    """Bytes of every part, from the objects that arm-none-eabi-g++ makes; None where that is not installed."""
    prefix = "arm-none-eabi-"
    if shutil.which(f"{prefix}g++") is None or _eigen() is None:
        return None
    with tempfile.TemporaryDirectory(prefix="kbt-codegen-") as scratch:
        copy = Path(shutil.copytree(folder, Path(scratch) / "source"))
        objects = build_objects(copy, [f"{prefix}gcc"], [f"{prefix}g++"], (*_M4F, "-fstack-usage"), _SMALL)
        rows = [line.split() for line in call([f"{prefix}size", *map(str, objects)]).splitlines()[1:]]
        frames = [int(line.split("\t")[1]) for line in (copy / f"{name}_trunk.su").read_text().splitlines()]
    stems = [str(Path(row[5]).relative_to(copy).with_suffix("")) for row in rows]
    text, data, bss = ({stem: int(row[column]) for stem, row in zip(stems, rows, strict=True)} for column in range(3))
    flash = {
        "core": "kbt/kbt",
        "network": f"{name}_trunk",
        "state": f"{name}_state",
        "verbs": name,
        "store": "kbt/store",
    }
    version = call([f"{prefix}g++", "-dumpversion"]).strip()
    return {
        "target": f"Cortex-M4F, {prefix}g++ {version}, {shlex.join(_SMALL)} for the core",
        "flash": {part: text[stem] + data[stem] for part, stem in flash.items()},
        "ram": {"arena": data[f"{name}_arena"] + bss[f"{name}_arena"]},
        "stack": {"network": sum(sorted(frames)[-3:])},  # the run function, the network and the largest of its nodes
    }


def _what_it_takes(name: str, size: Mapping[str, Any] | None, state_bytes: int, arrays_bytes: int) -> str:
    if size is None:
        return (
            f"The state is {state_bytes:,} bytes of flash, the arena {arrays_bytes:,} bytes of RAM and a record of\n"
            "about 2 KB. What the code takes was not measured, as arm-none-eabi-g++ was not installed."
        )
    words = {
        "core": "`kbt/kbt.cpp`, the head's code",
        "network": f"`{name}_trunk.c`, the network's weights and code",
        "state": f"`{name}_state.c`, the head's state at the start",
        "verbs": f"`{name}.c`, physical units",
        "store": "`kbt/store.c`, two slots of flash",
        "arena": "the arena, in which the head learns",
    }
    lines = [f"Measured for {size['target']}:", "", "| part | flash (bytes) | RAM (bytes) |", "|---|---|---|"]
    lines += [f"| {words[part]} | {count:,} | |" for part, count in size["flash"].items()]
    lines += [f"| {words[part]} | | {count:,} |" for part, count in size["ram"].items()]
    lines += [f"| together | {sum(size['flash'].values()):,} | {sum(size['ram'].values()):,} |", ""]
    lines += [
        f"Beside that the network takes {size['stack']['network']:,} bytes of stack while it runs, and the linker adds",
        "what is called of libm and libgcc, and drops what is not called of the rest.",
    ]
    return "\n".join(lines)


# ---- compiling -------------------------------------------------------------------------------------------------------


def _eigen() -> Path | None:
    """Eigen's headers: the package cmeel-eigen, or a system Eigen."""
    candidates = [Path(entry) / "cmeel.prefix/include/eigen3" for entry in sys.path]
    candidates += [Path(os.environ.get("EIGEN3_INCLUDE_DIR", "/usr/include/eigen3")), Path("/usr/local/include/eigen3")]
    return next((folder for folder in candidates if (folder / "Eigen/Core").is_file()), None)


def build_objects(
    folder: Path, cc: Sequence[str], cxx: Sequence[str], flags: Sequence[str], level: Sequence[str]
) -> list[Path]:
    """Object files of a generated folder, beside their sources. ``level`` optimises the core."""
    about = read_manifest(folder)
    name = checked_name(about["name"])
    eigen = _eigen()
    if eigen is None:
        raise BackendError("Eigen's headers were not found (pip install cmeel-eigen)")
    # No include path for the folder: its sources find each other by their quotes, and nothing else finds them.
    common = [*flags, *_COMMON_FLAGS]
    if about["dtype"] == "float32":
        common.append("-DKBT_NO_FLOAT64")
    objects = []
    for source in (f"{name}.c", f"{name}_trunk.c", f"{name}_state.c", f"{name}_arena.cpp", *CORE):
        language = [*cxx, *_CXX_FLAGS, *level, "-isystem", str(eigen)] if source.endswith(".cpp") else [*cc, *_C_FLAGS]
        objects.append((folder / source).with_suffix(".o"))
        call([*language, *common, "-c", str(folder / source), "-o", str(objects[-1])])
    return objects


def call(command: Sequence[str]) -> str:
    """Standard output of a compiler or one of its kin."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        raise BackendError(f"{shlex.join(command)} failed: {error}") from None
    if done.returncode != 0:
        raise BackendError(f"{shlex.join(command)} failed: {done.stderr.strip()[:1000]}")
    return done.stdout


def compiler(variable: str, *names: str) -> list[str]:
    """The command in an environment variable, or the first of ``names`` that is installed."""
    for command in (shlex.split(os.environ.get(variable, "")), *([name] for name in names)):
        if command and shutil.which(command[0]) is not None:
            return command
    raise BackendError(f"no compiler was found (${variable}, {', '.join(names)})")

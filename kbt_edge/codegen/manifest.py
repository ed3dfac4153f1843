"""codegen.json: what a generated folder holds, with the SHA-256 of every file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kbt_edge.errors import BundleError, RangeError

__all__ = ["FORMAT", "check_target", "checked_name", "read", "write"]

# 1: cov and total_var of a float32 head were float. 2: without kbt/policy.c. 3: without defines.
FORMAT: Final = 4
FILE: Final = "codegen.json"

# Names that C, C++ or the core uses.
_TAKEN: Final = re.compile(
    "kbt|kbt_.*|"
    "alignas|alignof|and|asm|auto|bitand|bitor|bool|break|case|catch|char|class|compl|concept|const|constexpr|continue|"
    "decltype|default|delete|do|double|else|enum|explicit|export|extern|false|final|float|for|friend|goto|if|inline|int|"
    "long|main|mutable|namespace|new|noexcept|not|nullptr|operator|or|override|private|protected|public|register|"
    "requires|restrict|return|short|signed|sizeof|static|std|struct|switch|template|this|throw|true|try|typedef|typeid|"
    "typename|union|unsigned|using|virtual|void|volatile|while|xor"
)

# NAME.h must not hide a header of C, POSIX or newlib. Our own include paths do not lead to it, but those of a sketch or
# of the user's project may.
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

# Targets of CMake, and libraries that a compiler links.
_TARGETS: Final = re.compile(
    "all|c|clean|codegen|depend|edit_cache|gcc|help|install|list_install_components|m|package|package_source|"
    "preinstall|rebuild_cache|test"
)


def checked_name(name: object) -> str:
    """``name`` as the prefix of C names, which are put into source files as they are."""
    if not isinstance(name, str) or not re.fullmatch(r"[a-z]([a-z0-9_]{0,30}[a-z0-9])?", name, re.ASCII):
        raise RangeError(
            f"name: expected a C identifier of at most 32 small letters, digits and single underscores, got {name!r}"
        )
    if "__" in name or _TAKEN.fullmatch(name):
        raise RangeError(f"name: {name!r} is used by C, C++ or the core; choose another one")
    if _HEADERS.fullmatch(name):
        raise RangeError(f"name: {name}.h is a header of C, POSIX or newlib; add a word to the name")
    if _TARGETS.fullmatch(name):
        raise RangeError(f"name: {name!r} is a target of CMake or a library; add a word to the name")
    return name


def check_target(folder: Path) -> None:
    """Refuse a folder that is neither new, nor empty, nor written by any version of ``generate``."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        read(folder, oldest=1)


def read(folder: Path, oldest: int = FORMAT) -> dict[str, Any]:
    """The manifest of ``folder``, whose format must be ``oldest`` or newer."""
    try:
        found = json.loads((folder / FILE).read_bytes())
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("files"), dict):
        raise BundleError(f"{folder}: expected a folder written by kbt-edge codegen, found no valid {FILE}")
    if found.get("format") not in range(oldest, FORMAT + 1):
        raise BundleError(
            f"{folder}: written by another version of kbt-edge codegen (format {found.get('format')!r}, here "
            f"{FORMAT}); generate it again"
        )
    checked_name(found.get("name"))
    return found


def write(folder: Path, files: Mapping[str, bytes], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Write all files and the manifest, and delete the files of an earlier run. Returns what codegen.json holds."""
    digests = {path: hashlib.sha256(content).hexdigest() for path, content in sorted(files.items())}
    written = {**manifest, "files": digests}
    try:
        if (folder / FILE).exists():
            for path in read(folder, oldest=1)["files"].keys() - files.keys():
                if re.fullmatch(r"(kbt/)?[A-Za-z]\w*\.\w+", path):
                    (folder / path).unlink(missing_ok=True)
        (folder / "kbt").mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            (folder / path).write_bytes(content)
        (folder / FILE).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise BundleError(f"{folder}: cannot be written: {error.strerror or error}") from error
    return written

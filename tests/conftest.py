"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# pytest-xdist runs one process per core. Set before NumPy and torch are imported, which would start a thread per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For compiled trunks, so that each is built once."""
    return tmp_path_factory.mktemp("trunks")


@pytest.fixture(scope="session")
def alloc_counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library to preload that counts allocations."""
    import ctypes

    from cabi import TESTS, compiler, run

    cc = compiler("cc", "gcc", "clang")
    if cc is None or not hasattr(ctypes.CDLL(None), "__libc_memalign"):
        pytest.skip(f"counting allocations needs a C compiler (found: {cc}) and glibc")
    library = tmp_path_factory.mktemp("counter") / "alloc_counter.so"
    run(cc, "-O2", "-fPIC", "-shared", "-Wall", "-Werror", TESTS / "alloc_counter.c", "-o", library)
    return library

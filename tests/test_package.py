"""The package itself: what an import costs, and what it says when it cannot work."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import kbt_edge as kbt
from kbt_edge import _core, settings
from kbt_edge.results import Verdict


def test_a_checkout_without_its_core_names_the_fix(tmp_path: Path) -> None:
    (tmp_path / "kbt_edge").mkdir()
    shutil.copy(str(kbt.__file__), tmp_path / "kbt_edge")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import kbt_edge"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: {tmp_path / 'kbt_edge'} has no compiled core")
    assert "pip install -e ." in last


def test_a_program_with_only_a_head_imports_no_runtime() -> None:
    code = "import sys, kbt_edge; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"onnxruntime", "cffi", "torch", "kbt_edge.trunk", "kbt_edge.cli"} & set(loaded)


@pytest.mark.parametrize("name", ["Dtype", "Output", "Covariance", "Rule", "Noise"])
def test_the_types_of_choices_are_the_names_that_the_core_has(name: str) -> None:
    assert get_args(getattr(settings, name)) == getattr(_core, f"{name.upper()}S")


def test_the_type_of_verdicts_is_the_names_that_the_core_has() -> None:
    assert get_args(Verdict) == _core.VERDICTS


def test_every_public_name_is_there_and_no_other() -> None:
    assert all(getattr(kbt, name) is not None for name in kbt.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Modell'"):
        kbt.Modell  # noqa: B018

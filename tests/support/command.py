"""Calls ``kbt-edge`` in this process, as a shell would."""

from __future__ import annotations

import pytest

from kbt_edge import cli


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    try:
        code = cli.main(arguments)
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err

"""
What type checkers make of the library, in an application's code.

mypy checks these files, and that no ``type: ignore`` is without an error, with all others (``make
lint``); pyright is asked here.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.timeout(300)
def test_pyright_finds_the_mistakes_and_nothing_else() -> None:
    """
    In strict mode towards ``type: ignore``: one where pyright sees no error is an error.
    """
    pyright = shutil.which("pyright", path=str(Path(sys.executable).parent)) or shutil.which(
        "pyright"
    )
    if pyright is None:
        pytest.skip("pyright is not installed: pip install pyright")
    done = subprocess.run(
        [pyright, "--project", str(HERE), "--pythonpath", sys.executable],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

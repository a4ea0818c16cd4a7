"""
How `make` finds an interpreter, and what it says when there is none that will do.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Runs the program that it is given as an interpreter of another version and place would.
PRETEND = """
import sys
_, version, sys.executable, program = sys.argv
sys.version_info = (*map(int, version.split(".")), "final", 0)
exec(program)
"""


def interpreter(path: Path, version: str, *, only_if: str = "true") -> None:
    """
    Put an interpreter of this version at *path*, which runs where the shell finds *only_if* true.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"#!/bin/sh\n{only_if} || exit 127\n"
        f"exec '{sys.executable}' -IS -c '{PRETEND}' {version} '{path}' \"$2\"\n"
    )
    path.chmod(0o755)


def find(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """
    Look for an interpreter where only ``bin`` is on PATH and ``home`` is home.
    """
    return subprocess.run(
        ["/bin/sh", str(ROOT / "tools" / "find_python.sh")],
        env={"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("there", "found"),
    [
        ({"python3": "3.12.4", "python3.13": "3.13.1"}, "python3"),
        ({"python3": "3.9.2", "python3.10": "3.10.0", "python3.11": "3.11.9"}, "python3.11"),
        ({"python3": "3.14.0", "python3.14": "3.14.0", "python3.10": "3.10.0"}, "python3.10"),
        ({"python3.12": "3.12.0"}, "python3.12"),
        # A name is no promise.
        ({"python3": "2.7.18", "python3.13": "3.9.0", "python3.12": "3.12.1"}, "python3.12"),
        # Better than none.
        ({"python3": "3.14.0"}, "python3"),
        ({"python3": "3.9.2", "python3.14": "3.14.2"}, "python3.14"),
    ],
)
def test_an_interpreter_on_the_path_is_found(
    tmp_path: Path, there: dict[str, str], found: str
) -> None:
    """
    python3 where it will do, else the newest that will, else one without the embedded server.
    """
    for name, version in there.items():
        interpreter(tmp_path / "bin" / name, version)
    told = find(tmp_path)
    assert (told.stdout, told.stderr) == (f"{tmp_path}/bin/{found}\n", "")


def test_one_that_does_not_run_is_passed_over(tmp_path: Path) -> None:
    """
    A shim of pyenv, or an interpreter that makes no environments, stands there and is no use.
    """
    interpreter(tmp_path / "bin" / "python3", "3.12.0", only_if="false")
    interpreter(tmp_path / "bin" / "python3.13", "3.13.0", only_if="exit 1")
    interpreter(tmp_path / "bin" / "python3.11", "3.11.0")
    assert find(tmp_path).stdout == f"{tmp_path}/bin/python3.11\n"


def test_a_shim_is_told_its_version(tmp_path: Path) -> None:
    """
    Where pyenv has a version that is not the chosen one, its shim runs it on demand.
    """
    interpreter(tmp_path / "bin" / "python3", "3.8.1")
    shim = tmp_path / "bin" / "python3.12"
    interpreter(shim, "3.12.7", only_if='[ "$PYENV_VERSION" = 3.12 ]')
    assert find(tmp_path).stdout == f"{shim}\n"


def test_versions_of_pyenv_are_found_without_its_shims(tmp_path: Path) -> None:
    """
    The newest of those in its folder that will do.
    """
    interpreter(tmp_path / "bin" / "python3", "3.9.18")
    versions = tmp_path / "home" / ".pyenv" / "versions"
    for version in ("3.9.18", "3.10.13", "3.12.1", "3.14.0"):
        interpreter(versions / version / "bin" / "python3", version)
    assert find(tmp_path).stdout == f"{versions}/3.12.1/bin/python3\n"


@pytest.mark.parametrize("version", ["3.9.18", None])
def test_what_to_install_is_said(tmp_path: Path, version: str | None) -> None:
    """
    With no interpreter that will do, the message names what was found and what is needed.
    """
    if version is not None:
        interpreter(tmp_path / "bin" / "python3", version)
    told = find(tmp_path)
    assert (told.returncode, told.stdout) == (1, "")
    assert (
        f"Python 3.10 to 3.13 is needed, with its module venv; python3 is {version or 'missing'},"
        in (told.stderr)
    )
    assert "make PYTHON=" in told.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_a_named_interpreter_is_taken_or_refused(tmp_path: Path) -> None:
    """
    `make PYTHON=...` looks for no other: it says that the one is too old, and installs nothing.
    """
    interpreter(tmp_path / "python", "3.9.18")
    shutil.copy(ROOT / "Makefile", tmp_path)
    told = subprocess.run(
        ["make", f"PYTHON={tmp_path}/python", "install"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 2
    assert f"Python 3.10 or newer is needed, {tmp_path}/python is 3.9.18" in told.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_a_newer_interpreter_goes_without_the_embedded_server(tmp_path: Path) -> None:
    """
    `make` says so, and what works without one, before it installs.
    """
    # Its environment cannot be made, since it only plays the newer one.
    interpreter(tmp_path / "python", "3.14.0")
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    told = subprocess.run(
        ["make", f"PYTHON={tmp_path}/python", "install"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "newer than those that the embedded server is built for (3.10 to 3.13)" in told.stderr
    assert "Python 3.14.0" in told.stdout
    assert not (tmp_path / ".venv" / ".installed").exists()

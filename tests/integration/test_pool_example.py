"""
The pool's example: a fleet of pollers loses a process, and nothing else.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from pymongo import MongoClient

from tests.support import Document

ROOT = Path(__file__).parents[2]
PRINTED = r"""12 stations over 3 processes:
(?:  \w+ +polls +\d+: [\d ]+\n)+a second dispatch: a job with the key 'station:01' exists
(\w+) was killed \(SIGKILL\); its \d+ stations moved after (\d+\.\d) s:
(?:  \w+ +polls +\d+: [\d ]+\n)+station:12 was told to poll faster: 10 times, [^\n]+ \d+ times
(\w+) was ended \(SIGTERM\); its stations moved after \d+\.\d s:
  (\w+) +polls 12: 01 02 03 04 05 06 07 08 09 10 11 12
all stopped; jobs left: 0
"""


def test_the_pollers_lose_a_process_and_no_station(
    server_uri: str, client: MongoClient[Document]
) -> None:
    """
    Every station is polled by one process at any time, and by the last one in the end.
    """
    before = set(client.list_database_names())
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "pool_pollers.py")],
        env={**environment, "MSCHEDULER_URI": server_uri},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    found = re.fullmatch(PRINTED, done.stdout)
    assert found, done.stdout
    killed, _, ended, last = found.groups()
    assert sorted((killed, ended, last)) == ["berlin", "paris", "rome"]
    after = set(client.list_database_names())
    # A write of another test that was on its way may have made that one's database anew.
    assert {name for name in after - before if not name.startswith("test_")} == set()

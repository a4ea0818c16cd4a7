"""
Run the benchmarks: ``python -m benchmarks [--quick] [measure ...]``.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from benchmarks.figures import Row, table
from benchmarks.measures import MEASURES
from benchmarks.setting import FULL, QUICK, Scale, load, opened

_RESULTS: Final = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Measure, print the table, write the JSON; return 0, also where a goal is missed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure the library beside the floor that the server sets. The server is that "
        "of MSCHEDULER_URI, else an embedded one.",
    )
    parser.add_argument("names", nargs="*", metavar="measure", help=", ".join(MEASURES))
    parser.add_argument("--quick", action="store_true", help="less of everything: two minutes")
    parser.add_argument(
        "--million", action="store_true", help="growth also with 1,000,000 other documents"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to write the result")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in MEASURES]
    if unknown:
        parser.error(f"no such measure: {', '.join(unknown)}; there are {', '.join(MEASURES)}")
    scale = QUICK if options.quick else FULL
    if options.million:
        scale = attrs.evolve(scale, others=(*scale.others, 1_000_000))
    path = options.json or _RESULTS / f"{dt.datetime.now(dt.timezone.utc):%Y%m%d-%H%M%S}.json"
    _run([name for name in MEASURES if not options.names or name in options.names], scale, path)
    return 0


def _run(names: Sequence[str], scale: Scale, path: Path) -> None:
    began_s, load_before = time.monotonic(), load()
    rows: list[Row] = []
    with opened(scale) as bench:
        facts = bench.facts()
        is_embedded = bench.is_embedded
        for name in names:
            rows += MEASURES[name](bench)
    result = {
        "measured_at": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "scale": scale.name,
        "duration_s": round(time.monotonic() - began_s, 1),
        "load_before": load_before,
        "load_after": load(),
        **facts,
        "rows": [row.as_json(is_embedded=is_embedded) for row in rows],
    }
    print(_heading(result))
    print(table(rows, is_embedded=is_embedded))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{result['duration_s']} s; written to {path}")


def _heading(result: dict[str, Any]) -> str:
    machine, versions, server = result["machine"], result["versions"], result["server"]
    lines = [
        f"{machine['cores']} cores, {machine['cpu']}, {machine['memory_mib']:,} MiB; "
        f"{versions['python']}, pymongo {versions['pymongo']}, "
        f"mscheduler_sync {versions['mscheduler_sync']} ({versions['revision']})",
        f"server: {server['product']} ({server['kind']}), {result['scale']} scale",
    ]
    if result["load_before"] > machine["cores"] / 2:
        lines.append(
            f"The machine was busy when it began (load {result['load_before']:.1f}): "
            "trust the ratios, not the figures."
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())

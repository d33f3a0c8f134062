"""What a reconfiguration costs on our side: 1, 4 and 16 pairs moved on one TCP SCPI unit.

A link is two pairs, one each way, so the least that can be moved is two pairs. Runs `harness run`
as a user does, on an emulated bench of two ToRs, and reads run.json. Marks: overhead p50 <= 2 ms,
p99 <= 10 ms.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.emulated.lab import lab

COUNT = 60
LINKS = (1, 2, 8)
PORTS = 64
PARTS = ("cost", "device", "link", "communicator", "overhead")

HEAD = """
name = "wide"
world = "emulated"
launcher = "namespaces"
[nodes.a]
tor = "left"
[nodes.b]
tor = "right"
[tors.left]
uplinks = 17
driver = "netlink"
[tors.right]
uplinks = 17
driver = "netlink"
[switches.ocs]
driver = "polatis-scpi"
url = "tcp://"
ports = "1-34,65-98"
power_averaging = 1
[switches.ocs.emulate]
ports = 64
switch_ms = 10.0
[cables]
"""


def bench_file() -> str:
    rows = [f'"left:u{i}" = "ocs:{i}"' for i in range(1, 18)]
    rows += [f'"right:u{i}" = "ocs:{17 + i}"' for i in range(1, 18)]
    return HEAD + "\n".join(rows) + "\n"


def scenario_file(links: int) -> str:
    """Two shapes of `links` links that share none: the far ends are shifted by one uplink."""
    straight = [f"left:u{i}-right:u{i}@ocs" for i in range(1, links + 1)]
    shifted = [f"left:u{i}-right:u{i + 1}@ocs" for i in range(1, links + 1)]
    return f"""
question = "What does moving {links} links cost on our side?"
bench = "bench.toml"
[shapes.straight]
circuits = {json.dumps(straight)}
[shapes.shifted]
circuits = {json.dumps(shifted)}
[[steps]]
do = "shape"
shape = "straight"
[[steps]]
do = "reconfigure"
shapes = ["shifted", "straight"]
count = {COUNT}
size = "64KiB"
rest_ms = 30.0
"""


def run() -> dict[str, Any]:
    rows = []
    for links in LINKS:
        with tempfile.TemporaryDirectory() as folder, lab(Path(folder)) as made:
            (made.folder / "bench.toml").write_text(bench_file())
            (made.folder / "scenario.toml").write_text(scenario_file(links))
            code, out = made.run()
            if code:
                raise RuntimeError(out)
            metrics = json.loads((made.run_folder / "run.json").read_text())["metrics"]
        row: dict[str, Any] = {"links": links, "pairs": 2 * links}
        for part in PARTS:
            metric = metrics[f"reconfigure.{part}_ms"]
            row[part] = {key: metric[key] for key in ("p50", "p95", "p99", "n")}
        row["stages"] = {
            name.removeprefix("reconfigure.stage."): metric["p50"]
            for name, metric in metrics.items()
            if name.startswith("reconfigure.stage.") and "[" not in name
        }
        rows.append(row)
    held = all(row["overhead"]["p50"] <= 2 and row["overhead"]["p99"] <= 10 for row in rows)
    return {"rows": rows, "mark": "overhead p50 <= 2 ms, p99 <= 10 ms", "held": held}


def table(figures: dict[str, Any]) -> str:
    lines = ["links pairs " + " ".join(f"{part:>21}" for part in PARTS) + "   (p50/p95/p99 ms)"]
    for row in figures["rows"]:
        cells = (
            f"{row[part]['p50']:7.2f}/{row[part]['p95']:.2f}/{row[part]['p99']:.2f}".rjust(21)
            for part in PARTS
        )
        lines.append(f"{row['links']:5} {row['pairs']:5} " + " ".join(cells))
        lines.append("      " + ", ".join(f"{n} {v:.2f}" for n, v in row["stages"].items()))
    lines.append(f"mark: {figures['mark']}: {'held' if figures['held'] else 'MISSED'}")
    return "\n".join(lines)

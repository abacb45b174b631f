"""Print the speed of methods relative to a copy as a Markdown table, for `gcbench help methods`.

python results/speeds.py
  The rows are those of results/kernels.json: ResNet-50's tensors, one thread, the fastest kernel.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

METHODS = ("terngrad", "qsgd", "int8", "onebit", "signsgd", "topk", "powersgd")
WITH_FEEDBACK = ("onebit", "topk", "powersgd")
"""Methods whose encoding is that with error feedback, as they are used."""


def main() -> None:
    """Print the table."""
    if sys.argv[1:]:
        raise SystemExit(__doc__)
    path = Path(__file__).parent / "kernels.json"
    speeds: dict[str, float] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        if (row["size"], row["threads"]) == ("resnet50", 1) and row["backend"].startswith("cpu"):
            speed = row["copy_seconds"] / row["seconds"]
            speeds[row["op"]] = max(speed, speeds.get(row["op"], 0.0))
    print("|method|encode|decode|\n|:-|-:|-:|")
    for name in METHODS:
        feedback = name in WITH_FEEDBACK
        encode = speeds[f"{name}.encode" + "_feedback" * feedback]
        title = f"`{name}`" + " + feedback" * feedback
        print(f"|{title}|{encode:.2f}|{speeds[f'{name}.decode']:.2f}|")


if __name__ == "__main__":
    main()

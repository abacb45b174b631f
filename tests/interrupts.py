"""What a start of `gcbench` prints that SIGINT interrupts: a traceback, or one line.

Run by hand, as it takes a minute: `PYTHONPATH=tests python tests/interrupts.py`. The starts are
interrupted after times that are spread evenly from 0 to 0.4 s.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

COMMAND = (str(Path(sys.executable).with_name("gcbench")), "info")
SECONDS = 0.4


def outcome(errors: str) -> str:
    """Return who printed what: Python, the installed script before its import, or gcbench."""
    if "Fatal Python error" in errors:
        return "Python's own start"
    if "Traceback" not in errors:
        return "no traceback"
    lines = [line.strip() for line in errors.splitlines()]
    return f"traceback from {next(line for line in lines if line.startswith('File'))}"


def main() -> None:
    """Print how often each outcome came."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=240)
    count = parser.parse_args().starts
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    outcomes: Counter[str] = Counter()
    for number in range(count):
        process = subprocess.Popen(
            COMMAND, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        time.sleep(SECONDS * number / count)
        process.send_signal(signal.SIGINT)
        outcomes[outcome(process.communicate()[1])] += 1
    for name, times in outcomes.most_common():
        print(times, name)


if __name__ == "__main__":
    main()

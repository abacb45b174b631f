"""The console script, and `python -m gcbench`: a Ctrl-C while modules are imported ends quietly."""

import os
import signal
from types import FrameType


def _end(number: int, frame: FrameType | None) -> None:
    """End at once: an exception would be raised inside an import, which may swallow it."""
    os.write(2, b"gcbench: interrupted\n")
    os._exit(130)


def main() -> None:
    """Import the command line, which takes a while, and run it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not where Ctrl-C is ignored, as under nohup
        signal.signal(signal.SIGINT, _end)
    from gcbench import cli

    cli.main(interrupts=before)


if __name__ == "__main__":
    main()

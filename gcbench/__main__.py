"""The console script, and `python -m gcbench`: a Ctrl-C while modules are imported ends quietly.

Commands import torch and others when they need them, so this holds until the end of the process.
Importing this module sets the handler, before anything is imported that Python has not loaded by
then: the module `signal` imports `enum` and `re`, and takes longer than all else here.
"""

import _signal  # type: ignore[import-not-found]
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType


def _end(number: int, frame: "FrameType | None") -> None:
    """End at once: an exception would be raised inside an import, which may swallow it."""
    os.write(2, b"gcbench: interrupted\n")
    os._exit(130)


def _interrupt(number: int, frame: "FrameType | None") -> None:
    """End at once inside an import; elsewhere do what Ctrl-C did before, which is to raise."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            _end(number, frame)
        frame = frame.f_back
    _before(number, frame)


_before = _signal.getsignal(_signal.SIGINT)
if _before is _signal.default_int_handler:  # not where Ctrl-C is ignored, as under nohup
    _signal.signal(_signal.SIGINT, _end)


def main() -> None:
    """Import the command line, which takes a while, and run it."""
    from gcbench import cli

    raises = _before is _signal.default_int_handler
    cli.main(interrupts=_interrupt if raises else _before)


if __name__ == "__main__":
    main()

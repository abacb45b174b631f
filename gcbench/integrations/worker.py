"""One thread that runs submitted calls, first in, first out."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Job = tuple[Callable[[], Any], Future[Any]]
"""A call, and the future of its result."""


class Worker:
    """A daemon thread, so that a process whose collective hangs can still end.

    The thread ends after `close`, or when this object is garbage-collected.
    """

    def __init__(self, name: str) -> None:
        """Start the thread. Its operations use as many threads as those of the caller."""
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        arguments = self._queue, torch.get_num_threads()
        self._thread = threading.Thread(target=_work, args=arguments, name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._queue.put, None)

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run `call` after all calls submitted before; return its future."""
        future: Future[T] = Future()
        self._queue.put((call, future))
        return future

    def close(self, seconds: float) -> None:
        """End the thread after all submitted calls; wait at most this many seconds.

        A thread that still runs when the interpreter ends aborts the process.
        """
        self._queue.put(None)
        self._thread.join(seconds)


def _work(queue: SimpleQueue[Job | None], threads: int) -> None:
    torch.set_num_threads(threads)
    while (job := queue.get()) is not None:
        call, future = job
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        del job, call, future  # so that their objects are freed while the thread waits

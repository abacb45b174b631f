"""One thread that does what it is handed, first in, first out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Job = tuple[Callable[[], Any], Future[Any]]
"""What is to be done, and who waits for it."""


class Worker:
    """A daemon thread: a process whose collective hangs can still end."""

    def __init__(self, name: str) -> None:
        """The thread takes as many threads inside an operation as the one that makes it."""
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        words = self._queue, torch.get_num_threads()
        self._thread = threading.Thread(target=_work, args=words, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Have `call` done after all that was handed over before."""
        future: Future[T] = Future()
        self._queue.put((call, future))
        return future

    def close(self, seconds: float) -> None:
        """End the thread after all that was handed over before, and wait so long for its end.

        A thread that ends while the interpreter does would abort the process.
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
        del job, call, future  # what they hold is free while the thread waits

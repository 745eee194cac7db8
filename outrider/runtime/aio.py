"""A pipeline for asyncio: the same calls, run on one thread that the wrapper owns and joins."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from outrider.runtime.chat import Messages
from outrider.runtime.load import load
from outrider.runtime.pipeline import Chunk, Pipeline, Prompt, Result, gather

__all__ = ["AsyncPipeline"]

T = TypeVar("T")


class AsyncPipeline:
    """`generate`, `stream`, `chat` and `chat_stream` of a pipeline, which belongs to this object from now on.

    Generations run one after another, in the order in which they were asked for. Cancelling a task, or closing
    a stream, ends its generation within one forward and leaves the KV cache valid, as closing a pipeline's own
    stream does. The callbacks `progress` and `on_round` are called on the worker's thread.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider")

    @classmethod
    async def load(cls, directory: str | os.PathLike[str], **options: Any) -> AsyncPipeline:
        """`outrider.load` beside the event loop; what a cancelled task loads is closed again."""
        loading = _Loading(partial(load, directory, **options))
        try:
            return cls(await asyncio.to_thread(loading.run))
        except asyncio.CancelledError:
            loading.abandon()
            raise

    async def generate(self, prompt: Prompt, **options: Any) -> Result:
        """See `Pipeline.generate`."""
        chunks = [chunk async for chunk in self.stream(prompt, **options)]
        return gather(chunks, options.get("logprobs") is not None)

    async def chat(self, messages: Messages, **options: Any) -> Result:
        """See `Pipeline.chat`."""
        chunks = [chunk async for chunk in self.chat_stream(messages, **options)]
        return gather(chunks, options.get("logprobs") is not None)

    def stream(self, prompt: Prompt, **options: Any) -> AsyncGenerator[Chunk, None]:
        """See `Pipeline.stream`."""
        return self._stream(self.pipeline.stream, prompt, options)

    def chat_stream(self, messages: Messages, **options: Any) -> AsyncGenerator[Chunk, None]:
        """See `Pipeline.chat_stream`."""
        return self._stream(self.pipeline.chat_stream, messages, options)

    async def close(self) -> None:
        """Wait for the generation that runs, free the graphs and end the thread; closing twice is allowed."""
        async with self._turn:
            self.pipeline.close()
            self._thread.shutdown()

    async def __aenter__(self) -> AsyncPipeline:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _stream(
        self, start: Callable[..., Generator[Chunk, None, None]], content: Any, options: dict[str, Any]
    ) -> AsyncGenerator[Chunk, None]:
        async with self._turn:
            self.pipeline.refuse_closed()
            stop = threading.Event()
            worker = _Worker(
                start, content, {**options, "progress": _stopping(stop, options.get("progress"))}
            )
            try:
                while (chunk := await self._on_thread(worker.step)) is not None:
                    yield chunk
            finally:
                stop.set()
                # behind the step that a cancelled task left running; shielded, so that it cannot be lost
                await asyncio.shield(self._on_thread(worker.close))

    def _on_thread(self, function: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, function)


class _Loading:
    """A pipeline that is being loaded; a thread cannot be cancelled, but what comes of it can be given up."""

    def __init__(self, start: Callable[[], Pipeline]) -> None:
        self._start, self._lock = start, threading.Lock()
        self._pipeline: Pipeline | None = None
        self._abandoned = False

    def run(self) -> Pipeline:
        """Load it."""
        pipeline = self._start()
        with self._lock:
            self._pipeline = pipeline
            if self._abandoned:
                pipeline.close()
        return pipeline

    def abandon(self) -> None:
        """Close it, as soon as it is there."""
        with self._lock:
            self._abandoned = True
            if self._pipeline is not None:
                self._pipeline.close()


class _Worker:
    """One stream, touched by the worker's thread only."""

    def __init__(
        self, start: Callable[..., Generator[Chunk, None, None]], content: Any, options: dict[str, Any]
    ) -> None:
        self._start = partial(start, content, **options)
        self._chunks: Generator[Chunk, None, None] | None = None

    def step(self) -> Chunk | None:
        """The next chunk, None at the end."""
        if self._chunks is None:
            self._chunks = self._start()
        return next(self._chunks, None)

    def close(self) -> None:
        """End the generation."""
        if self._chunks is not None:
            self._chunks.close()


class _Stopped(Exception):  # noqa: N818  (not an error: nobody waits for this generation any more)
    """Ends a prompt that is still being run."""


def _stopping(
    stop: threading.Event, progress: Callable[[int, int], None] | None
) -> Callable[[int, int], None]:
    """`progress` that ends the generation once `stop` is set: a long prompt is left after its chunk."""

    def tell(done: int, total: int) -> None:
        if stop.is_set():
            raise _Stopped
        if progress is not None:
            progress(done, total)

    return tell

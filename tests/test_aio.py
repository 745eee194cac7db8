"""The async wrapper gives the sync core's text, cancels it, and owns the one thread it runs on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from outrider import AsyncPipeline
from outrider.errors import UsageError
from outrider.runtime.chat import ChatTemplate
from outrider.runtime.pipeline import Pipeline
from outrider.runtime.rounds import Engine
from outrider.runtime.text import Tokenizer
from outrider.targets.fake import FakeGraph

PROMPT = "the quick brown fox"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
OPTIONS: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}


class Gated(FakeGraph):
    """A graph whose forwards wait for `gate`; `waiting` says that one does."""

    def __init__(self, vocab_size: int, **options: Any) -> None:
        super().__init__(vocab_size, **options)
        self.gate, self.waiting, self.threads = threading.Event(), threading.Event(), set[str]()
        self.gate.set()

    def forward(self, *arguments: Any, **options: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        self.waiting.set()
        assert self.gate.wait(60)
        self.waiting.clear()
        return super().forward(*arguments, **options)


@pytest.fixture
def make(byte_level_bpe: Any) -> Callable[..., Pipeline]:
    """A pipeline over a gated graph; the draws are of seed 3."""
    tokenizer = Tokenizer(byte_level_bpe)

    def pipeline(**options: Any) -> Pipeline:
        graph = Gated(tokenizer.id_limit, max_context=400, seed=3)
        return Pipeline(Engine(graph, **options), tokenizer, ChatTemplate(TEMPLATE))

    return pipeline


async def reached(graph: Gated) -> None:
    """A forward has begun and waits."""
    assert await asyncio.to_thread(graph.waiting.wait, 60)


def workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("outrider")]


def test_results_are_those_of_the_sync_core(make: Callable[..., Pipeline]) -> None:
    async def run() -> Any:
        async with AsyncPipeline(make()) as pipeline:
            chunks = [chunk async for chunk in pipeline.stream(PROMPT, **OPTIONS)]
            messages = [{"role": "user", "content": PROMPT}]
            return (
                chunks,
                await pipeline.generate(PROMPT, **OPTIONS),
                await pipeline.chat(messages, **OPTIONS),
            )

    chunks, generated, chatted = asyncio.run(run())
    expected = make().generate(PROMPT, **OPTIONS)
    assert (generated.text, generated.tokens) == (expected.text, expected.tokens)
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert chatted.tokens == make().chat([{"role": "user", "content": PROMPT}], **OPTIONS).tokens


def test_the_event_loop_runs_on_while_a_forward_does_not(make: Callable[..., Pipeline]) -> None:
    async def run() -> None:
        inner = make()
        graph: Any = inner.engine.target
        async with AsyncPipeline(inner) as pipeline:
            graph.gate.clear()
            task = asyncio.create_task(pipeline.generate(PROMPT, **OPTIONS))
            await reached(graph)
            await asyncio.sleep(0)
            assert not task.done()
            graph.gate.set()
            assert len((await task).tokens) == 24
        assert graph.threads == {"outrider_0"}

    asyncio.run(run())


def test_cancelling_a_task_ends_its_generation_and_leaves_the_cache_valid(
    make: Callable[..., Pipeline],
) -> None:
    async def run() -> None:
        inner = make()
        graph: Any = inner.engine.target
        async with AsyncPipeline(inner) as pipeline:
            graph.gate.clear()
            task = asyncio.create_task(pipeline.generate(PROMPT, **OPTIONS))
            await reached(graph)
            task.cancel()
            await asyncio.sleep(0)
            graph.gate.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(graph.forwards) == 1
            again = await pipeline.generate(PROMPT, **OPTIONS)
        assert again.tokens == make().generate(PROMPT, **OPTIONS).tokens

    asyncio.run(run())


def test_a_long_prompt_is_left_after_the_chunk_that_runs(make: Callable[..., Pipeline]) -> None:
    async def run() -> None:
        inner = make(prefill_chunk=8)
        graph: Any = inner.engine.target
        async with AsyncPipeline(inner) as pipeline:
            graph.gate.clear()
            task = asyncio.create_task(pipeline.generate([5] * 200, **OPTIONS))
            await reached(graph)
            task.cancel()
            await asyncio.sleep(0)
            graph.gate.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert graph.forwards == [8]
            assert (await pipeline.generate(PROMPT, **OPTIONS)).tokens

    asyncio.run(run())


def test_closing_a_stream_cancels_it(make: Callable[..., Pipeline]) -> None:
    async def run() -> None:
        inner = make()
        graph: Any = inner.engine.target
        async with AsyncPipeline(inner) as pipeline:
            stream = pipeline.stream(PROMPT, **OPTIONS)
            await anext(stream)
            await stream.aclose()
            ran = len(graph.forwards)
            assert ran < 24
            assert (await pipeline.generate(PROMPT, **OPTIONS)).tokens == make().generate(
                PROMPT, **OPTIONS
            ).tokens

    asyncio.run(run())


def test_generations_take_turns(make: Callable[..., Pipeline]) -> None:
    async def run() -> Any:
        async with AsyncPipeline(make()) as pipeline:
            texts = [PROMPT, "lazy dog", PROMPT + " jumps"]
            return await asyncio.gather(*(pipeline.generate(text, **OPTIONS) for text in texts))

    found = asyncio.run(run())
    texts = [PROMPT, "lazy dog", PROMPT + " jumps"]
    assert [r.tokens for r in found] == [make().generate(text, **OPTIONS).tokens for text in texts]


def test_close_joins_the_thread_and_refuses_what_comes_later(make: Callable[..., Pipeline]) -> None:
    async def run() -> None:
        pipeline = AsyncPipeline(make())
        await pipeline.generate(PROMPT, **OPTIONS)
        assert workers()
        await pipeline.close()
        await pipeline.close()
        assert not workers()
        with pytest.raises(UsageError, match="closed"):
            await pipeline.generate(PROMPT, **OPTIONS)

    asyncio.run(run())


def test_a_mistake_in_an_option_reaches_the_caller(make: Callable[..., Pipeline]) -> None:
    async def run() -> None:
        async with AsyncPipeline(make()) as pipeline:
            with pytest.raises(UsageError, match="unknown option 'temprature'"):
                await pipeline.generate(PROMPT, temprature=1.0)
            assert len((await pipeline.generate(PROMPT, **OPTIONS)).tokens) == 24

    asyncio.run(run())


def test_a_bundle_is_loaded_beside_the_loop(float_bundle: Any) -> None:
    async def run() -> None:
        async with await AsyncPipeline.load(float_bundle, threads=1, draft=False) as pipeline:
            assert pipeline.pipeline.drafters == ("lookup",)
            assert (await pipeline.generate(PROMPT, max_tokens=3)).stats.output_tokens

    asyncio.run(run())


def test_what_a_cancelled_task_loads_is_closed_again(
    make: Callable[..., Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = make()
    begun, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def slowly(directory: str) -> Pipeline:
        begun.set()
        assert go_on.wait(60)
        return pipeline

    monkeypatch.setattr("outrider.runtime.aio.load", slowly)
    monkeypatch.setattr(pipeline, "close", closed.set)

    async def main() -> None:
        task = asyncio.create_task(AsyncPipeline.load("bundle"))
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not closed.is_set()
        go_on.set()
        assert await asyncio.to_thread(closed.wait, 60)

    asyncio.run(main())

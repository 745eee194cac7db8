"""A pipeline over the fake graph: the same text whole, in chunks, drafted or not, and after any cut."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.contracts import Output, Proposal, Sampling
from outrider.errors import ContextError, UsageError
from outrider.runtime.chat import ChatTemplate
from outrider.runtime.pipeline import Chunk, Pipeline
from outrider.runtime.rounds import Engine
from outrider.runtime.text import Tokenizer
from outrider.runtime.trace import replay
from outrider.targets.fake import FakeGraph, LogitsFunction

relaxed = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
IDS = 320  # of the tokenizer
VOCAB = IDS + 8  # of the graph: the rest pads the embedding
EOS = 0  # <|end|>
PROMPT = "the quick brown"


class Oracle:
    """A drafter that knows the next tokens, and spoils every `wrong`-th of them."""

    name = "oracle"

    def __init__(self, logits: LogitsFunction, wrong: int = 0) -> None:
        self.logits = logits
        self.wrong = wrong

    def propose(
        self, context: Sequence[int], k: int, sampling: Sampling, rng: np.random.Generator
    ) -> Proposal:
        tokens = list(context)
        for _ in range(k):
            best = int(np.argmax(self.logits(tuple(tokens))[:IDS]))
            spoiled = self.wrong and len(tokens) % self.wrong == 0
            tokens.append((best + 1) % 300 if spoiled else best)
        drafted = np.array(tokens[len(context) :], np.int64)
        return Proposal(drafted, np.arange(-1, k - 1))

    def observe(self, committed: Sequence[int], output: Output | None, rows: Sequence[int]) -> None:
        pass

    def reset(self) -> None:
        pass


def writes(tokens: Sequence[int], start: int) -> LogitsFunction:
    """A model that puts these tokens at positions from `start` on, and <|stop|> after them."""

    def logits(context: tuple[int, ...]) -> np.ndarray:
        row = np.random.default_rng(len(context)).standard_normal(VOCAB).astype(np.float32)
        place = len(context) - start
        row[tokens[place] if 0 <= place < len(tokens) else 2] += 30
        return row

    return logits


@pytest.fixture
def tokenizer(byte_level_bpe: Any) -> Tokenizer:
    return Tokenizer(byte_level_bpe, eos_ids=(EOS,))


def pipeline_for(
    tokenizer: Tokenizer, logits: LogitsFunction | None = None, max_context: int = 400, wrong: int = 3
) -> Pipeline:
    graph = FakeGraph(VOCAB, max_context, logits=logits, seed=5, order=3, scale=3.0)
    oracle = Oracle(graph._logits, wrong)
    engine = Engine(graph, {"oracle": oracle}, vocab_limit=tokenizer.id_limit, prefill_chunk=16)
    return Pipeline(engine, tokenizer)


def writing(tokenizer: Tokenizer, text: str, wrong: int = 3) -> Pipeline:
    """A pipeline that answers PROMPT with `text` and then EOS."""
    logits = writes([*tokenizer.encode(text, special=False), EOS], len(tokenizer.encode(PROMPT)))
    return pipeline_for(tokenizer, logits, wrong=wrong)


def joined(chunks: Sequence[Chunk]) -> tuple[str, list[int]]:
    return "".join(chunk.text for chunk in chunks), [token for chunk in chunks for token in chunk.tokens]


@pytest.mark.parametrize("k", [0, 1, 3, 7, "auto"])
def test_every_k_writes_the_same_text(tokenizer: Tokenizer, k: Any) -> None:
    plain = pipeline_for(tokenizer).generate(PROMPT, max_tokens=60, k=0, ignore_eos=True)
    result = pipeline_for(tokenizer).generate(PROMPT, max_tokens=60, k=k, ignore_eos=True)
    assert (result.text, result.tokens, result.finish_reason) == (plain.text, plain.tokens, "length")
    assert len(result.tokens) == 60


@pytest.mark.parametrize("k", [0, 4])
def test_chunks_add_up_to_the_result(tokenizer: Tokenizer, k: int) -> None:
    result = pipeline_for(tokenizer).generate(PROMPT, max_tokens=50, k=k, temperature=0.8, seed=3, logprobs=2)
    chunks = list(
        pipeline_for(tokenizer).stream(PROMPT, max_tokens=50, k=k, temperature=0.8, seed=3, logprobs=2)
    )
    assert joined(chunks) == (result.text, list(result.tokens))
    assert [entry for chunk in chunks for entry in chunk.logprobs] == list(result.logprobs or ())
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"
    assert [chunk.stats is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


@relaxed
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30),
    k=st.integers(0, 5),
    wrong=st.integers(0, 3),
)
def test_the_text_of_the_model_arrives_whole_and_no_character_is_split(
    tokenizer: Tokenizer, text: str, k: int, wrong: int
) -> None:
    chunks = list(writing(tokenizer, text, wrong).stream(PROMPT, k=k))
    assert "".join(chunk.text for chunk in chunks) == text
    assert chunks[-1].finish_reason == "stop"
    assert "\ufffd" in text or all("\ufffd" not in chunk.text for chunk in chunks)


@relaxed
@given(
    text=st.text("ab 🦊", min_size=4, max_size=40),
    begin=st.integers(0, 30),
    size=st.integers(1, 6),
    k=st.integers(0, 5),
)
def test_a_stop_string_cuts_the_text_and_the_cache_wherever_rounds_end(
    tokenizer: Tokenizer, text: str, begin: int, size: int, k: int
) -> None:
    stop = text[begin : begin + size]
    if not stop:
        return
    pipeline = writing(tokenizer, text)
    result = pipeline.generate(PROMPT, stop=[stop, "never"], k=k)
    assert result.text == text[: text.index(stop)]
    assert result.finish_reason == "stop"
    assert tokenizer.decode(result.tokens).startswith(result.text)
    assert result.stats.output_tokens == len(result.tokens)
    prompt = tokenizer.encode(PROMPT)
    kept = [*prompt, *result.tokens]
    assert list(pipeline.engine.cached) == kept[: len(pipeline.engine.cached)]
    shorter = tokenizer.decode(result.tokens[:-1])
    assert len(shorter) < len(result.text) or not result.text or shorter == result.text


def test_nothing_of_a_stop_string_is_shown_before_the_cut(tokenizer: Tokenizer) -> None:
    pipeline = writing(tokenizer, "one\nUser: two")
    shown = ""
    for chunk in pipeline.stream(PROMPT, stop="\nUser:", k=0):
        shown += chunk.text
        assert "one".startswith(shown)
    assert shown == "one"


def test_a_text_that_ends_inside_a_stop_string_is_given_out(tokenizer: Tokenizer) -> None:
    result = writing(tokenizer, "so long EN").generate(PROMPT, stop="END")
    assert (result.text, result.finish_reason) == ("so long EN", "stop")


def test_the_stop_token_is_counted_and_has_no_text(tokenizer: Tokenizer) -> None:
    result = writing(tokenizer, "yes").generate(PROMPT, k=4)
    assert result.text == "yes"
    assert result.tokens[-1] == EOS
    assert EOS not in result.tokens[:-1]


def test_eos_can_be_ignored(tokenizer: Tokenizer) -> None:
    result = writing(tokenizer, "yes").generate(PROMPT, max_tokens=40, ignore_eos=True)
    assert (len(result.tokens), result.finish_reason) == (40, "length")


def test_drafted_tokens_are_counted(tokenizer: Tokenizer) -> None:
    pipeline = pipeline_for(tokenizer, wrong=0)
    chunks = list(pipeline.stream(PROMPT, max_tokens=21, k=4))
    stats = chunks[-1].stats
    assert stats is not None
    assert sum(chunk.from_draft for chunk in chunks) == stats.accepted == 16
    assert (stats.prompt_tokens, stats.output_tokens) == (len(tokenizer.encode(PROMPT)), 21)
    plain = pipeline_for(tokenizer).generate(PROMPT, max_tokens=21, drafter=None)
    assert plain.stats.drafted == 0
    assert plain.tokens == tuple(joined(chunks)[1])


def test_logprobs_are_off_unless_asked_for(tokenizer: Tokenizer) -> None:
    assert pipeline_for(tokenizer).generate(PROMPT, max_tokens=4).logprobs is None
    result = pipeline_for(tokenizer).generate(PROMPT, max_tokens=4, logprobs=3)
    assert result.logprobs is not None
    assert [entry.token for entry in result.logprobs] == list(result.tokens)
    assert all(len(entry.top) == 3 and entry.top[0][0] == entry.token for entry in result.logprobs)


def test_token_ids_are_a_prompt_too(tokenizer: Tokenizer) -> None:
    by_text = pipeline_for(tokenizer).generate(PROMPT, max_tokens=9)
    by_ids = pipeline_for(tokenizer).generate(np.array(tokenizer.encode(PROMPT)), max_tokens=9)
    assert by_ids.tokens == by_text.tokens


@pytest.mark.parametrize("after", [0, 1, 2, 5])
@pytest.mark.parametrize("k", [0, 4])
def test_closing_the_iterator_leaves_a_pipeline_that_goes_on(
    tokenizer: Tokenizer, k: int, after: int
) -> None:
    expected = pipeline_for(tokenizer).generate(PROMPT, max_tokens=30, k=k)
    pipeline = pipeline_for(tokenizer)
    stream = pipeline.stream(PROMPT, max_tokens=30, k=k)
    seen = [token for _ in range(after) for token in next(stream).tokens]
    stream.close()
    assert list(expected.tokens[: len(seen)]) == seen
    again = pipeline.generate(PROMPT, max_tokens=30, k=k)
    assert again.tokens == expected.tokens


def test_on_round_can_cancel(tokenizer: Tokenizer) -> None:
    rounds: list[int] = []

    def second(result: Any) -> bool:
        rounds.append(len(result.tokens))
        return len(rounds) < 2

    result = pipeline_for(tokenizer).generate(PROMPT, k=3, on_round=second)
    assert result.finish_reason == "cancelled"
    assert len(result.tokens) == sum(rounds)
    assert len(rounds) == 2


def test_progress_counts_the_prompt(tokenizer: Tokenizer) -> None:
    seen: list[tuple[int, int]] = []
    prompt = [5] * 40
    pipeline_for(tokenizer).generate(prompt, max_tokens=1, progress=lambda *at: seen.append(at))
    assert seen == [(16, 40), (32, 40), (40, 40)]


def test_a_later_turn_runs_only_what_is_new(tokenizer: Tokenizer) -> None:
    pipeline = pipeline_for(tokenizer)
    first = pipeline.generate(PROMPT, max_tokens=20, k=4)
    prompt = [*tokenizer.encode(PROMPT), *first.tokens, 7, 8, 9]
    second = pipeline.generate(prompt, max_tokens=20, k=4)
    assert second.stats.reused_tokens >= len(prompt) - 4
    fresh = pipeline_for(tokenizer).generate(prompt, max_tokens=20, k=0)
    assert second.tokens == fresh.tokens
    pipeline.reset()
    assert pipeline.generate(prompt, max_tokens=1).stats.reused_tokens == 0


@relaxed
@given(seed=st.integers(0, 10_000))
def test_any_history_of_turns_stops_and_cancels_leaves_the_cache_of_a_replay(
    tokenizer: Tokenizer, seed: int
) -> None:
    rng = random.Random(seed)
    pipeline = pipeline_for(tokenizer, wrong=rng.choice([0, 2, 3]))
    prompt = tokenizer.encode(PROMPT)
    for _ in range(4):
        options: dict[str, Any] = {"max_tokens": rng.randint(1, 25), "k": rng.choice([0, 2, 5, "auto"])}
        options |= {"temperature": rng.choice([0.0, 1.0]), "seed": rng.randint(0, 99)}
        options |= {"stop": rng.sample(["a", "e", " t", "th"], rng.randint(0, 2)), "ignore_eos": True}
        stream = pipeline.stream(prompt, **options)
        taken = list(stream) if rng.random() < 0.5 else [c for c, _ in zip(stream, range(2), strict=False)]
        stream.close()
        tokens = joined(taken)[1]
        fresh = joined(list(pipeline_for(tokenizer).stream(prompt, **(options | {"k": 0}))))[1]
        assert fresh[: len(tokens)] == tokens
        graph = pipeline.engine.target
        assert isinstance(graph, FakeGraph)
        assert [place for _, place in graph.kv] == list(range(graph.length))
        assert tuple(graph.tokens) == pipeline.engine.cached
        prompt = [*prompt, *tokens, rng.randrange(3, 300)][: rng.randint(2, 60)]


def test_a_prompt_longer_than_the_context_names_both_numbers(tokenizer: Tokenizer) -> None:
    with pytest.raises(ContextError, match=r"70 tokens.*64"):
        pipeline_for(tokenizer, max_context=64).stream([5] * 70)


def test_generation_ends_with_the_context(tokenizer: Tokenizer) -> None:
    result = pipeline_for(tokenizer, max_context=32).generate([5] * 20, max_tokens=None, k=6, ignore_eos=True)
    assert (len(result.tokens), result.finish_reason) == (12, "length")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_token": 3},
            r"unknown option 'max_token'; known: drafter, drafting, ignore_eos.*sampling: banned_tokens",
        ),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": 1e-320}, "temperature is 1e-320; it must be 0 or between 1e-30"),
        ({"drafter": "eagle"}, "unknown drafter 'eagle'; this engine has: oracle"),
        ({"k": -1}, "k is -1"),
        ({"k": "many"}, "k is 'many'"),
        ({"stop": [""]}, "stop string is ''"),
        ({"logprobs": -1}, "logprobs is -1"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused_before_any_work(
    tokenizer: Tokenizer, options: dict[str, Any], message: str
) -> None:
    pipeline = pipeline_for(tokenizer)
    with pytest.raises(UsageError, match=message):
        pipeline.stream(PROMPT, **options)
    assert isinstance(pipeline.engine.target, FakeGraph)
    assert pipeline.engine.target.forwards == []


def test_an_empty_prompt_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="prompt is empty"):
        pipeline_for(tokenizer).generate("")


def test_sampling_fields_replace_those_of_a_sampling(tokenizer: Tokenizer) -> None:
    sampling = Sampling(temperature=1.0, seed=1)
    one = pipeline_for(tokenizer).generate(PROMPT, max_tokens=20, sampling=sampling, seed=2)
    two = pipeline_for(tokenizer).generate(PROMPT, max_tokens=20, temperature=1.0, seed=2)
    other = pipeline_for(tokenizer).generate(PROMPT, max_tokens=20, sampling=sampling)
    assert one.tokens == two.tokens != other.tokens


def test_a_chat_is_its_template_without_a_second_bos(byte_level_bpe: Any) -> None:
    tokenizer = Tokenizer(byte_level_bpe, eos_ids=(EOS,), bos_id=1, add_bos=True)
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ flavour }}{% endfor %}"
    pipeline = pipeline_for(tokenizer)
    pipeline.template = ChatTemplate(template, {"bos_token": "<|start|>"})
    messages = [{"role": "user", "content": "fox"}]
    tokens = pipeline.chat_tokens(messages, template_variables={"flavour": "!"})
    assert tokens == tokenizer.encode("<|start|>fox!", add_bos=False)
    result = pipeline.chat(messages, template_variables={"flavour": "!"}, max_tokens=5)
    assert result.tokens == pipeline_for(tokenizer).generate(tokens, max_tokens=5).tokens
    chunks = list(pipeline.chat_stream(messages, template_variables={"flavour": "!"}, max_tokens=5))
    assert joined(chunks)[1] == list(result.tokens)


def test_a_bundle_without_a_template_says_so(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="no chat template"):
        pipeline_for(tokenizer).chat([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_trace_replays_to_the_same_tokens(tokenizer: Tokenizer, tmp_path: Path, temperature: float) -> None:
    path = tmp_path / "trace.jsonl"
    options: dict[str, Any] = {"max_tokens": 24, "k": 3, "temperature": temperature, "seed": 4}
    result = pipeline_for(tokenizer).generate(PROMPT, trace=path, **options)
    assert replay(path).tokens == result.tokens
    assert replay(path).skipped == 0
    header = json.loads(path.read_text().splitlines()[0])
    assert (header["kind"], header["prompt"]) == ("decode", tokenizer.encode(PROMPT))


def test_a_trace_that_cannot_be_written_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        pipeline_for(tokenizer).generate(PROMPT, trace=tmp_path)


def test_a_stream_that_is_never_read_leaves_no_file_open(tokenizer: Tokenizer, tmp_path: Path) -> None:
    stream = pipeline_for(tokenizer).stream(PROMPT, trace=tmp_path / "trace.jsonl")
    del stream  # an open file would warn, and warnings are errors
    assert len((tmp_path / "trace.jsonl").read_text().splitlines()) == 1


def test_a_closed_pipeline_refuses_work_and_closes_what_it_owns(tokenizer: Tokenizer) -> None:
    owned = ExitStack()
    parts = pipeline_for(tokenizer)
    owned.callback(parts.engine.target.close)
    with Pipeline(parts.engine, tokenizer, owned=owned) as pipeline:
        pipeline.generate(PROMPT, max_tokens=2)
    pipeline.close()
    assert isinstance(parts.engine.target, FakeGraph)
    assert parts.engine.target.closed
    with pytest.raises(UsageError, match="closed"):
        pipeline.generate(PROMPT)


def test_closing_from_another_thread_waits_for_the_round_that_runs_and_ends_the_stream_in_words(
    tokenizer: Tokenizer,
) -> None:
    parts, asked = pipeline_for(tokenizer), threading.Event()
    engine, graph = parts.engine, parts.engine.target
    assert isinstance(graph, FakeGraph)

    class Told:
        """The engine's lock; it tells when someone waits for it."""

        def __enter__(self) -> None:
            asked.set()
            lock.__enter__()

        def __exit__(self, *error: Any) -> None:
            lock.__exit__(*error)

        def acquire(self, blocking: bool) -> bool:
            return lock.acquire(blocking)

        def release(self) -> None:
            lock.release()
            if asked.is_set():  # who waits has his turn
                closing.join(10.0)

    lock, engine._lock = engine._lock, Told()  # type: ignore[assignment]
    owned = ExitStack()
    owned.callback(graph.close)
    pipeline, original = Pipeline(engine, tokenizer, owned=owned), graph.forward
    closing = threading.Thread(target=pipeline.close)

    def forward(*args: Any, **options: Any) -> Any:
        if not closing.ident:
            closing.start()
            assert asked.wait(10.0)
        assert not graph.closed
        return original(*args, **options)

    graph.forward = forward  # type: ignore[method-assign]
    stream = pipeline.stream(PROMPT, max_tokens=50)
    with pytest.raises(UsageError, match="pipeline is closed"):
        list(stream)
    closing.join()
    assert graph.closed

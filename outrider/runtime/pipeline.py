"""What a user holds: a loaded bundle that turns a prompt or a chat into text, whole or as it comes."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from outrider.contracts import Sampling
from outrider.errors import TraceError, UsageError
from outrider.runtime.chat import ChatTemplate, Messages
from outrider.runtime.placed import Placement
from outrider.runtime.request import Drafting
from outrider.runtime.rounds import Engine, Request, Round
from outrider.runtime.sampling import TokenLogprob
from outrider.runtime.stats import Stats
from outrider.runtime.text import Tokenizer
from outrider.runtime.trace import TraceWriter
from outrider.runtime.transcript import Transcript

if TYPE_CHECKING:
    from outrider.manifest import Manifest
    from outrider.runtime.memory_budget import MemoryPlan

__all__ = ["Chunk", "FinishReason", "Options", "Pipeline", "Prompt", "Result", "gather"]

FinishReason = Literal["stop", "length", "cancelled"]
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Options:
    """Everything that `generate`, `stream`, `chat` and `chat_stream` can be told; every one is honoured.

    `max_tokens` None goes on to the end of the context. The fields of `Sampling` (`temperature`, `top_p`,
    `seed`, ...) may be given beside these and replace those of `sampling`. `k` is the draft length, "auto"
    for what pays, 0 for plain decoding. `drafter` names one, "auto" is any, None or "none" is plain. `drafting` is
    "serial" (before each verify), "overlapped" (beside it too) or "auto" (as it pays on two units). `stop`
    strings end the text before their first character; `ignore_eos` writes past the model's own stop
    tokens. `logprobs` None is off, 0 gives each token's own, n the n most likely as well.
    `progress(done, total)` counts prompt tokens; `on_round` sees every `Round` and may return False to
    cancel. `trace` is a file for the decode trace of `docs/formats.md`.
    """

    max_tokens: int | None = 256
    sampling: Sampling = field(default_factory=Sampling)
    k: int | Literal["auto"] = "auto"
    drafter: str | None = "auto"
    drafting: Drafting = "auto"
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    progress: Callable[[int, int], None] | None = None
    on_round: Callable[[Round], bool | None] | None = None
    trace: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Refuse values outside their range; the engine and `Sampling` check their own."""
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"max_tokens is {self.max_tokens}; it must be at least 1, or None for no limit")

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Options:
        """Options from keywords. Raises UsageError for an unknown one, listing the known."""
        own = {f.name for f in fields(cls)}
        of_sampling = {f.name for f in fields(Sampling)}
        unknown = sorted(set(given) - own - of_sampling)
        if unknown:
            raise UsageError(
                f"unknown option {unknown[0]!r}; known: {', '.join(sorted(own))}; "
                f"for sampling: {', '.join(sorted(of_sampling))}"
            )
        sampling = replace(
            given.get("sampling") or Sampling(), **{n: v for n, v in given.items() if n in of_sampling}
        )
        return cls(**{n: v for n, v in given.items() if n in own} | {"sampling": sampling})

    def request(self, eos_ids: Sequence[int]) -> Request:
        """What the engine is asked for."""
        return Request(
            sampling=self.sampling,
            max_new_tokens=self.max_tokens,
            stop_ids=frozenset() if self.ignore_eos else frozenset(eos_ids),
            k=0 if self.drafter in (None, "none") else self.k,
            drafter=None if self.drafter in (None, "none", "auto") else self.drafter,
            logprobs=self.logprobs,
            drafting=self.drafting,
        )


@dataclass(frozen=True)
class Chunk:
    """A piece of a stream. `from_draft` of its tokens were drafted; `stats` come with the last chunk."""

    text: str
    tokens: tuple[int, ...]
    from_draft: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stats: Stats | None = None


_READY = Chunk("", ())


@dataclass(frozen=True)
class Result:
    """A whole generation. `tokens` hold the stop token that ended it, `text` does not."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats
    logprobs: tuple[TokenLogprob, ...] | None = None


class Pipeline:
    """A target, its drafters and its tokenizer; made by `outrider.load`, or from parts.

    Batch 1: one generation at a time, from one thread. The KV cache lives on between calls, so a prompt
    that begins like the last text is not run again where it is equal. `owned` are closed with it; `machine`
    says in one line what measured times depend on (`runtime.timing`), `memory` what was expected to be taken.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        *,
        manifest: Manifest | None = None,
        placement: Sequence[Placement] = (),
        machine: str = "",
        memory: MemoryPlan | None = None,
        owned: ExitStack | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
        self.manifest = manifest
        self.placement = tuple(placement)
        self.machine = machine
        self.memory = memory
        self._owned = owned or ExitStack()
        self._closed = False

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names that the option `drafter` knows."""
        return tuple(self.engine.drafters)

    def generate(self, prompt: Prompt, **options: Any) -> Result:
        """Continue a text, or token ids, and return the whole continuation.

        `options` are those of `Options`. Raises UsageError for an option that cannot be honoured,
        ContextError when the prompt does not fit.
        """
        return gather(self.stream(prompt, **options), options.get("logprobs") is not None)

    def stream(self, prompt: Prompt, **options: Any) -> Generator[Chunk, None, None]:
        """Continue a text chunk by chunk, never splitting a character; the texts add up to `generate`'s.

        Closing the iterator cancels and leaves the KV cache valid for the next call.
        """
        self.refuse_closed()
        settings = Options.parse(options)
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        return self._start(tokens, settings)

    def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Result:
        """Answer a conversation by the model's chat template; otherwise as `generate`."""
        chunks = self.chat_stream(messages, tools=tools, template_variables=template_variables, **options)
        return gather(chunks, options.get("logprobs") is not None)

    def chat_stream(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Generator[Chunk, None, None]:
        """Answer a conversation chunk by chunk; otherwise as `stream`."""
        return self.stream(self.chat_tokens(messages, tools, template_variables), **options)

    def chat_tokens(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt of a conversation as token ids. Raises UsageError when there is no chat template."""
        if self.template is None:
            raise UsageError("this bundle has no chat template; use `generate` with a prompt of your own")
        text = self.template.render(messages, tools=tools, **(template_variables or {}))
        return self.tokenizer.encode(text, add_bos=False)

    def reset(self) -> None:
        """Forget the conversation: the next prompt is run from its first token."""
        self.refuse_closed()
        self.engine.reset()

    def close(self) -> None:
        """Free the graphs, once a round that another thread is in has ended; closing twice is allowed."""
        with self.engine.at_work:
            self._closed = True
            self._owned.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def refuse_closed(self) -> None:
        """Raise UsageError after `close`."""
        if self._closed:
            raise UsageError("this pipeline is closed; load the bundle again")

    def _start(self, prompt: list[int], options: Options) -> Generator[Chunk, None, None]:
        """A stream that has refused what can be refused, and has computed nothing yet."""
        chunks = self._chunks(prompt, options)
        next(chunks)
        return chunks

    def _chunks(self, prompt: list[int], options: Options) -> Generator[Chunk, None, None]:
        request = options.request(self.tokenizer.eos_ids)
        transcript = Transcript(self.tokenizer, prompt, options.stop)
        with ExitStack() as stack:
            trace = stack.enter_context(self._trace(prompt, request, options)) if options.trace else None
            rounds = stack.enter_context(
                closing(self.engine.decode(prompt, request, options.progress, trace))
            )
            yield _READY
            finish: FinishReason | None = None
            for result in rounds:
                stats = result.stats
                finish = _add(transcript, result)
                if options.on_round and options.on_round(result) is False:
                    finish = finish or "cancelled"
                if finish:
                    break
                piece = transcript.take()
                if piece.tokens or piece.text:
                    yield Chunk(piece.text, piece.tokens, piece.from_draft, piece.logprobs)
                self.refuse_closed()
        if not transcript.matched and transcript.finish():
            finish = "stop"
        self._roll_back(len(prompt) + len(transcript))
        piece = transcript.take(final=True)
        stats = deepcopy(stats)
        stats.output_tokens = len(transcript)
        yield Chunk(piece.text, piece.tokens, piece.from_draft, piece.logprobs, finish, stats)

    def _trace(self, prompt: list[int], request: Request, options: Options) -> TraceWriter:
        try:
            return TraceWriter(
                str(options.trace),
                sampling=request.sampling,
                vocab_limit=self.engine.vocab_limit,
                prompt=prompt,
                stop_ids=sorted(request.stop_ids),
                max_new_tokens=request.max_new_tokens,
            )
        except TraceError as error:
            raise UsageError(str(error)) from None

    def _roll_back(self, length: int) -> None:
        """Forget the KV rows of tokens that a stop string cut off."""
        with self.engine.at_work:
            if self.engine.target.length > length:
                self.engine.target.truncate(length)


def _add(transcript: Transcript, result: Round) -> FinishReason | None:
    by_id = result.finish_reason == "stop"
    cut = transcript.push(result.tokens, result.accepted, result.logprobs, ends_with_stop_id=by_id)
    return "stop" if cut else result.finish_reason


def gather(chunks: Iterable[Chunk], with_logprobs: bool) -> Result:
    """The whole generation that a stream's chunks add up to."""
    parts = list(chunks)
    last = parts[-1]
    if last.finish_reason is None or last.stats is None:
        raise AssertionError("a stream ends with a chunk that says why")
    return Result(
        "".join([part.text for part in parts]),
        tuple(token for part in parts for token in part.tokens),
        last.finish_reason,
        last.stats,
        tuple(entry for part in parts for entry in part.logprobs) if with_logprobs else None,
    )

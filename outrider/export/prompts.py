"""Token sequences that activations are seen on: the package's own, or a file of prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import UsageError
from outrider.export.calibrate import calibration_tokens
from outrider.export.tokenizer_files import TokenizerFiles
from outrider.runtime.chat import ChatTemplate

__all__ = ["calibration_sequences"]

LEAST_PROMPTS = 8
LEAST_TOKENS = 256
SEGMENT = 512  # tokens of the calibration text in one sequence
CHAT_TOKENS = 5000  # of the package's own prompts, whatever the tokenizer makes of them

Messages = list[dict[str, Any]]


def calibration_sequences(
    tokenizer: TokenizerFiles, max_context: int, path: Path | None = None
) -> list[NDArray[np.int64]]:
    """Sequences of at most `max_context` tokens, rendered by the chat template where there is one.

    Without a file: the package's prompts with their answers, and the text that comes with it. A file holds one
    prompt a line: as text, or as JSON with "prompt" (and "answer"), "turns" of the user (the first counts), or
    "messages". Raises UsageError for a file that says too little to set ranges by.
    """
    if path is None:
        packaged = files("outrider.quantize").joinpath("data/calibration_prompts.jsonl")
        chats = _encoded(tokenizer, _read(packaged.read_text(encoding="utf-8"), packaged.name), max_context)
        return [*_first(chats, CHAT_TOKENS), *calibration_tokens(tokenizer, min(SEGMENT, max_context))]
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read the calibration file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the calibration file {path} is no text in UTF-8 ({error}); save it as UTF-8, one prompt a line"
        ) from error
    prompts = _read(text, str(path))
    sequences = _encoded(tokenizer, prompts, max_context)
    tokens = sum(len(sequence) for sequence in sequences)
    if len(prompts) < LEAST_PROMPTS or tokens < LEAST_TOKENS:
        raise UsageError(
            f"{path} holds {len(prompts)} prompts of {tokens} tokens together; activation ranges need at least "
            f"{LEAST_PROMPTS} prompts and {LEAST_TOKENS} tokens. Add prompts like those that the model will get, or "
            "leave --calibration out"
        )
    return sequences


def _first(sequences: Iterable[NDArray[np.int64]], tokens: int) -> list[NDArray[np.int64]]:
    """The first sequences that hold so many tokens together; the last one is cut."""
    chosen: list[NDArray[np.int64]] = []
    for sequence in sequences:
        if tokens <= 0:
            break
        chosen.append(sequence[:tokens])
        tokens -= len(sequence)
    return chosen


def _encoded(
    tokenizer: TokenizerFiles, prompts: Sequence[Messages], max_context: int
) -> list[NDArray[np.int64]]:
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_str(tokenizer.tokenizer_json)
    begin = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    template = _template(tokenizer, encoder)
    found = []
    for messages in prompts:
        ids = encoder.encode(_text(messages, template), add_special_tokens=False).ids
        ids = ids if ids[: len(begin)] == begin else [*begin, *ids]
        found.append(np.asarray(ids[:max_context], np.int64))
    return [ids for ids in found if len(ids)]


def _text(messages: Messages, template: ChatTemplate | None) -> str:
    if template is None:
        return "\n".join(str(message["content"]) for message in messages)
    return template.render(messages, add_generation_prompt=messages[-1]["role"] != "assistant")


def _template(tokenizer: TokenizerFiles, encoder: object) -> ChatTemplate | None:
    if tokenizer.chat_template is None:
        return None
    names = {index: content for content, index in tokenizer.special_ids.items()}
    begin = names.get(tokenizer.bos_id, "") if tokenizer.bos_id is not None else ""
    end = tokenizer.eos_token or (names.get(tokenizer.eos_ids[0], "") if tokenizer.eos_ids else "")
    return ChatTemplate(tokenizer.chat_template, {"bos_token": begin, "eos_token": end})


def _read(text: str, name: str) -> list[Messages]:
    return [_messages(line, name, number) for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def _messages(line: str, name: str, number: int) -> Messages:
    """The conversation that one line of a file stands for."""
    if not line.lstrip().startswith("{"):
        return [{"role": "user", "content": line.strip()}]
    try:
        record = json.loads(line)
        if "messages" in record:
            return [{"role": str(m["role"]), "content": str(m["content"])} for m in record["messages"]]
        prompt = record["turns"][0] if "turns" in record else record["prompt"]
        answer = [{"role": "assistant", "content": str(record["answer"])}] if "answer" in record else []
        return [{"role": "user", "content": str(prompt)}, *answer]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise UsageError(
            f'{name}, line {number}: expected {{"prompt": "..."}}, {{"turns": ["..."]}} or '
            f'{{"messages": [{{"role": "user", "content": "..."}}]}} ({type(error).__name__}: {error})'
        ) from error

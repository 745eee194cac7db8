"""Token sequences that activations are seen on: the package's own, or a file of prompts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.errors import UsageError
from outrider.export.calibrate import calibration_tokens
from outrider.export.tokenizer_files import TokenizerFiles
from outrider.runtime.bench import default_prompts
from outrider.runtime.chat import ChatTemplate

__all__ = ["calibration_sequences"]

LEAST_PROMPTS = 8
LEAST_TOKENS = 256
SEGMENT = 512  # tokens of the calibration text in one sequence


def calibration_sequences(
    tokenizer: TokenizerFiles, max_context: int, path: Path | None = None
) -> list[NDArray[np.int64]]:
    """Sequences of at most `max_context` tokens, rendered by the chat template where there is one.

    Without a file: a few instructions, and the text that comes with the package. A file holds one prompt a line,
    as text or as JSON with "turns" or "prompt". Raises UsageError for a file that says too little to set ranges by.
    """
    if path is None:
        prompts = [prompt.turns[0] for prompt in default_prompts()]
        text = calibration_tokens(tokenizer, min(SEGMENT, max_context))
        return [*_encoded(tokenizer, prompts, max_context), *text]
    prompts = _read(path)
    sequences = _encoded(tokenizer, prompts, max_context)
    tokens = sum(len(sequence) for sequence in sequences)
    if len(prompts) < LEAST_PROMPTS or tokens < LEAST_TOKENS:
        raise UsageError(
            f"{path} holds {len(prompts)} prompts of {tokens} tokens together; activation ranges need at least "
            f"{LEAST_PROMPTS} prompts and {LEAST_TOKENS} tokens. Add prompts like those that the model will get, or "
            "leave --calibration out"
        )
    return sequences


def _encoded(tokenizer: TokenizerFiles, prompts: list[str], max_context: int) -> list[NDArray[np.int64]]:
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_str(tokenizer.tokenizer_json)
    begin = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    template = _template(tokenizer, encoder)
    found = []
    for prompt in prompts:
        text = prompt if template is None else template.render([{"role": "user", "content": prompt}])
        ids = encoder.encode(text, add_special_tokens=False).ids
        ids = ids if ids[: len(begin)] == begin else [*begin, *ids]
        found.append(np.asarray(ids[:max_context], np.int64))
    return [ids for ids in found if len(ids)]


def _template(tokenizer: TokenizerFiles, encoder: object) -> ChatTemplate | None:
    if tokenizer.chat_template is None:
        return None
    names = {index: content for content, index in tokenizer.special_ids.items()}
    begin = names.get(tokenizer.bos_id, "") if tokenizer.bos_id is not None else ""
    end = tokenizer.eos_token or (names.get(tokenizer.eos_ids[0], "") if tokenizer.eos_ids else "")
    return ChatTemplate(tokenizer.chat_template, {"bos_token": begin, "eos_token": end})


def _read(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the calibration file {path}: {error}") from error
    return [_prompt(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]


def _prompt(line: str, path: Path, number: int) -> str:
    if not line.lstrip().startswith("{"):
        return line.strip()
    try:
        record = json.loads(line)
        turns = record.get("turns") or [record["prompt"]]
        return str(turns[0])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise UsageError(
            f'{path}, line {number}: expected {{"turns": ["..."]}} or {{"prompt": "..."}} ({error})'
        ) from error

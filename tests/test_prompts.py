"""Calibration prompts: chat form where the model has one, files in every form, and too little is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import UsageError
from outrider.export.prompts import CHAT_TOKENS, calibration_sequences
from outrider.export.tokenizer_files import TokenizerFiles
from tests.conftest import CHAT_TEMPLATE, SPECIALS


def tokenizer_of(bpe: Any, template: str | None = CHAT_TEMPLATE, add_bos: bool = False) -> TokenizerFiles:
    special = {token: bpe.token_to_id(token) for token in SPECIALS}
    ids = [special[token] for token in SPECIALS]
    return TokenizerFiles(
        bpe.to_str(), template, ids[1], add_bos, (ids[0],), bpe.get_vocab_size(), special_ids=special
    )


def decoded(bpe: Any, sequences: list[Any]) -> list[str]:
    return [bpe.decode(sequence.tolist(), skip_special_tokens=False) for sequence in sequences]


def test_the_packages_prompts_come_with_answers_in_chat_form_and_text_after_them(byte_level_bpe: Any) -> None:
    sequences = calibration_sequences(tokenizer_of(byte_level_bpe), 700)
    texts = decoded(byte_level_bpe, sequences)
    chats = [text for text in texts if text.startswith("<|start|>user: ")]
    assert len(chats) >= 8
    assert all("assistant: " in text and text.count("assistant:") == 1 for text in chats if len(text) < 400)
    assert sum(len(s) for s, t in zip(sequences, texts, strict=True) if t in chats) == CHAT_TOKENS
    assert max(map(len, sequences)) <= 700
    assert len(texts) > len(chats)  # running text, too


def test_without_a_template_prompt_and_answer_are_plain_text_behind_a_bos_where_the_model_wants_one(
    byte_level_bpe: Any,
) -> None:
    plain = decoded(byte_level_bpe, calibration_sequences(tokenizer_of(byte_level_bpe, None), 300))
    assert not any("user:" in text[:20] or "<|start|>" in text for text in plain)
    begun = decoded(byte_level_bpe, calibration_sequences(tokenizer_of(byte_level_bpe, None, True), 300))
    assert all(text.startswith("<|start|>") for text in begun[:8])
    chats = decoded(byte_level_bpe, calibration_sequences(tokenizer_of(byte_level_bpe, add_bos=True), 300))
    assert not any(text.startswith("<|start|><|start|>") for text in chats)  # the template has put it there


def test_a_file_may_hold_text_prompts_turns_answers_and_messages(byte_level_bpe: Any, tmp_path: Path) -> None:
    long = "the quick brown fox jumps over the lazy dog " * 4
    records = [
        {"prompt": f"one {long}"},
        {"turns": [f"two {long}", "a second turn of the user"]},
        {"prompt": f"three {long}", "answer": "yes"},
        {"messages": [{"role": "system", "content": "short"}, {"role": "user", "content": f"four {long}"}]},
    ]
    lines = [json.dumps(record) for record in records] + [f"plain {i} {long}" for i in range(4)] + ["", "  "]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    texts = decoded(byte_level_bpe, calibration_sequences(tokenizer_of(byte_level_bpe), 400, path))
    assert len(texts) == 8
    assert texts[0].startswith("<|start|>user: one the quick")
    assert texts[0].endswith("<|end|>assistant:")
    assert "second turn" not in texts[1]
    assert texts[2].endswith("<|end|>assistant: yes<|end|>")
    assert texts[3].startswith("<|start|>system: short<|end|>user: four")
    assert texts[4].startswith("<|start|>user: plain 0 the quick")


def test_a_file_of_three_lines_is_refused_with_what_is_needed(byte_level_bpe: Any, tmp_path: Path) -> None:
    path = tmp_path / "few.txt"
    path.write_text("hello\nwhat is this\nbye\n", encoding="utf-8")
    with pytest.raises(
        UsageError, match=r"few\.txt holds 3 prompts of \d+ tokens.*at least 8 prompts and 256 tok"
    ):
        calibration_sequences(tokenizer_of(byte_level_bpe), 200, path)
    path.write_text("a\n" * 20, encoding="utf-8")
    with pytest.raises(UsageError, match="holds 20 prompts"):
        calibration_sequences(tokenizer_of(byte_level_bpe, None), 200, path)


@pytest.mark.parametrize(
    "line", ['{"text": "x"}', '{"turns": []}', '{"prompt": ', '{"messages": [{"role": "user"}]}']
)
def test_a_line_that_is_no_prompt_is_named(line: str, byte_level_bpe: Any, tmp_path: Path) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text('{"prompt": "right"}\n' + line, encoding="utf-8")
    with pytest.raises(UsageError, match=r'wrong\.jsonl, line 2: expected \{"prompt": "\.\.\."\}'):
        calibration_sequences(tokenizer_of(byte_level_bpe), 200, path)


def test_a_file_that_cannot_be_read_is_no_traceback(byte_level_bpe: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the calibration file"):
        calibration_sequences(tokenizer_of(byte_level_bpe), 200, tmp_path / "absent.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is no text in UTF-8"):
        calibration_sequences(tokenizer_of(byte_level_bpe), 200, tmp_path / "binary")

"""A Hugging Face model folder: config.json, safetensors and tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from outrider.errors import CheckpointError, TokenizerError
from outrider.export.tokenizer_files import TokenizerFiles, known_end_ids
from outrider.records import parsed

__all__ = ["read_json", "tokenizer_from_folder"]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON table. Raises CheckpointError when the file is missing or damaged."""
    try:
        data = parsed(json.loads, path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}); download it again") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a {type(data).__name__}, not a table; download it again")
    return data


def tokenizer_from_folder(folder: Path) -> TokenizerFiles:
    """The tokenizer of a model folder. Raises TokenizerError when it has no usable tokenizer.json."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(
            f"{folder} has no tokenizer.json; save one with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    text = path.read_text(encoding="utf-8")
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises bare Exception
        raise TokenizerError(f"{path} cannot be loaded ({error}); download it again") from None
    tables = [_optional(folder / name) for name in ("tokenizer_config.json", "generation_config.json")]
    model = _optional(folder / "config.json")
    names = _named_tokens(tables[0])
    named = {key: tokenizer.token_to_id(token) for key, token in names.items()}
    special = {
        added.content: index for index, added in tokenizer.get_added_tokens_decoder().items() if added.special
    }
    bos_id = named.get("bos_token", model.get("bos_token_id"))
    declared = [named.get("eos_token"), *_ids(model), *_ids(tables[1]), *_ids(model.get("text_config") or {})]
    probe = tokenizer.encode("a", add_special_tokens=True).ids
    return TokenizerFiles(
        tokenizer_json=text,
        chat_template=_chat_template(folder, tables[0]),
        bos_id=bos_id,
        add_bos=bos_id is not None and probe[:1] == [bos_id],
        eos_ids=known_end_ids(special, declared),
        vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
        pad_id=named.get("pad_token"),
        unk_id=named.get("unk_token"),
        eos_token=names.get("eos_token") or next((tokenizer.id_to_token(id) for id in _ids(model)), None),
        special_ids=special,
    )


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _named_tokens(table: Mapping[str, Any]) -> dict[str, str]:
    """bos, eos, pad and unk as written in tokenizer_config.json: a string, or a table with its content."""
    found: dict[str, str] = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = table.get(key)
        value = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(value, str):
            found[key] = value
    return found


def _ids(table: Mapping[str, Any]) -> Iterable[int]:
    value = table.get("eos_token_id")
    return [] if value is None else value if isinstance(value, list) else [value]


def _chat_template(folder: Path, table: Mapping[str, Any]) -> str | None:
    """A file of its own comes before tokenizer_config.json; of several, the one called default."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = table.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None

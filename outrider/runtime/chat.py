"""Chat messages to a prompt, by the model's own template, which is foreign code and runs in a sandbox.

Templates are written for transformers' `apply_chat_template`; the same extensions, filters and globals
are offered here, and no more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.errors import TokenizerError, UsageError

__all__ = ["ChatTemplate", "Messages"]

Messages = Sequence[Mapping[str, Any]]


class _Refused(Exception):  # noqa: N818  (a template's own verdict on the messages)
    """What a template says with `raise_exception`."""


class _GenerationBlock(Extension):
    """Accepts the `generation` block, which marks the assistant's words for training; it prints its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class ChatTemplate:
    """A compiled chat template. Raises TokenizerError when it is not valid Jinja.

    `special_tokens` are variables such as `bos_token` that every rendering sees.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(
                f"the chat template is not valid, line {error.lineno}: {error.message}"
            ) from None

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for these messages, ready to be encoded without adding BOS.

        Further `variables` are the template's own, such as `enable_thinking`. Raises UsageError when a
        message has no role or the template refuses the messages, TokenizerError when the template fails
        or reaches for what the sandbox forbids.
        """
        _check(messages)
        offered = {"tools": tools, "documents": None, **self.special_tokens, **variables}
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **offered
            )
        except _Refused as error:
            raise UsageError(f"the chat template refuses these messages: {error}") from None
        except SecurityError as error:
            raise TokenizerError(
                f"the chat template does what the sandbox forbids ({error}); do not trust this bundle"
            ) from None
        except Exception as error:  # foreign code: whatever it trips over is its failure
            raise TokenizerError(f"the chat template failed: {type(error).__name__}: {error}") from None


def _check(messages: Messages) -> None:
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise UsageError(
            f"messages is {messages!r:.60}; expected a list such as [{{'role': 'user', 'content': 'Hi'}}]"
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UsageError(f"messages[{index}] is {message!r:.60}; expected a 'role' and a 'content'")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise _Refused(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)

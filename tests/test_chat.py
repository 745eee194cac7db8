"""Chat templates render as transformers renders them, and cannot reach out of their sandbox."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.errors import OutriderError, TokenizerError, UsageError
from outrider.runtime.chat import ChatTemplate

# Shapes in use by published models, written for these tests: the constructs matter, not the wording.
TEMPLATES = {
    "chatml": """{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    "header": """{{- bos_token }}
{%- set ns = namespace(n=0) %}
{% for message in messages %}
    {% set ns.n = ns.n + 1 %}
    {{- '<|h|>' + message['role'] + '<|/h|>\\n\\n' + message['content'] | trim + eos_token }}
{% endfor %}
{%- if add_generation_prompt -%}<|h|>assistant<|/h|>{{ ns.n }}{%- endif -%}""",
    "turns": """{{ bos_token }}
{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}
{% for message in messages %}
{% set even = loop.index0 % 2 == 0 %}
{% if (message['role'] == 'user') != even %}{{ raise_exception('turns must alternate') }}{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<turn>' + role + '\\n' + message['content'] | trim + '</turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}""",
    "tools": """{% if tools %}{{ '<tools>\\n' }}
  {%- for tool in tools %}{{ tool | tojson }}{{ tool | tojson(indent=2) }}
  {%- endfor %}</tools>{% endif %}
{% for message in messages %}
  {% if message.role == 'system' %}{% continue %}{% endif %}
  {% if loop.index > 5 %}{% break %}{% endif %}
  {% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}{% else %}
[{{ message.role | upper }}] {{ message.content }}
  {% endif %}
{% endfor %}
{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
{{ strftime_now('%Y') }}""",
    "macro": """{% macro say(role, text) -%}
  <{{ role }}>{{ text }}</{{ role }}>
{%- endmacro %}
{% for m in messages[::-1] %}{{ say(m['role'], m['content'].split('|')[-1].lstrip()) }}{% endfor %}
{%- if messages | selectattr('role', 'equalto', 'user') | list | length > 1 %} many{% endif %}""",
}
USER = {"role": "user", "content": "  Grüße <b> & 'tea' | \"x\"\n"}
TALKS = {
    "one": [USER],
    "three": [USER, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "{{ 7 * 7 }}"}],
    "system": [{"role": "system", "content": "Be brief."}, USER],
}
TOOLS = [{"type": "function", "function": {"name": "né", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def oracle(byte_level_bpe: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="the oracle comes with the export extra")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe, bos_token="<|start|>", eos_token="<|end|>"
    )


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("shape", TEMPLATES)
def test_a_template_renders_as_transformers_renders_it(
    oracle: Any, shape: str, talk: str, prompt: bool
) -> None:
    template = ChatTemplate(TEMPLATES[shape], {"bos_token": "<|start|>", "eos_token": "<|end|>"})
    options = {"add_generation_prompt": prompt, "tools": TOOLS, "enable_thinking": False}

    def expected() -> str:
        return oracle.apply_chat_template(
            TALKS[talk], chat_template=TEMPLATES[shape], tokenize=False, **options
        )

    if shape == "turns" and talk == "system":
        with pytest.raises(Exception, match="no system"):
            expected()
        with pytest.raises(UsageError, match="refuses these messages: no system"):
            template.render(TALKS[talk], **options)
    else:
        assert template.render(TALKS[talk], **options) == expected()


ATTACKS = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__ }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ strftime_now.__globals__ }}",
    "{{ ''['__class__'].__mro__ }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ self.__init__.__globals__.__builtins__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ '%s' % messages.__class__.__mro__ }}",
    "{{ (''.format).__self__.__class__.__mro__ }}",
    "{{ messages.append({}) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ range(10000000) | list }}",
    "{% import 'os' as os %}{{ os }}",
    "{% include '/etc/passwd' %}",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_malicious_template_reaches_nothing(attack: str) -> None:
    messages = [dict(USER)]
    try:
        shown = ChatTemplate(attack).render(messages)
    except OutriderError:
        shown = ""
    assert messages == [USER]
    assert not any(word in shown for word in ("<class", "object", "root:", "uid=", "builtins", "module"))


def test_a_template_with_a_syntax_error_names_its_line() -> None:
    with pytest.raises(TokenizerError, match="not valid, line 2"):
        ChatTemplate("ok\n{% for %}")


def test_a_template_that_trips_says_over_what() -> None:
    with pytest.raises(TokenizerError, match="failed: TypeError"):
        ChatTemplate("{{ messages[0].content + 'x' }}").render([{"role": "user", "content": None}])


@pytest.mark.parametrize("messages", ["Hi", [], [{"content": "Hi"}], ["Hi"], [{"role": 3}], None])
def test_messages_of_another_shape_are_refused(messages: Any) -> None:
    with pytest.raises(UsageError, match="expected a"):
        ChatTemplate("x").render(messages)

"""Chat templates against Jinja2 as transformers sets it up, and what is refused."""

import copy
import json
import time
from datetime import UTC, datetime
from typing import Any

import jinja2
import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmrt.models.chat_template import MAX_OUTPUT, ChatTemplate
from llmrt.wire.errors import InvalidRequest, ModelError

NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3_LIKE = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday Date: " ~ date_string ~ "\n\n" }}
{{- system ~ "<|eot_id|>" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if not ('tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- else %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
QWEN_LIKE = """{%- macro call_text(call) -%}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>
{%- endmacro -%}
{%- set ns = namespace(last_user=-1, calls=0) %}
{%- for message in messages[::-1] %}
    {%- set index = messages | length - 1 - loop.index0 %}
    {%- if ns.last_user < 0 and message.role == "user" and message.content is string %}
        {%- set ns.last_user = index %}
    {%- endif %}
{%- endfor %}
{%- if tools is iterable and tools | length > 0 %}
    {{- '<|im_start|>system\n# Tools' }}
    {%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
    {{- '<|im_start|>' + message.role + '\n' + content }}
    {%- if message.tool_calls %}
        {%- for tool_call in message.tool_calls %}
            {%- set ns.calls = ns.calls + 1 %}
            {{- '\n' + call_text(tool_call.function) }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{{- ns.last_user }}/{{ ns.calls }}/{{ undefined_thing }}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""
GEMMA_LIKE = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
    {{ raise_exception('System role not supported') }}
{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'assistant' %}
        {% set role = 'model' %}
    {% else %}
        {% set role = message['role'] %}
    {% endif %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""
MISTRAL_LIKE = """{%- set loop_messages = messages | selectattr("role", "ne", "system") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message.role == "user" %}
        {%- if loop.last and tools %}
            {{- "[AVAILABLE_TOOLS] " }}
            {{- tools | map(attribute="function") | map(attribute="name") | join(", ") }}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " ~ message.content ~ "[/INST]" }}
    {%- elif message.role == "assistant" %}
        {%- generation -%}
        {{- " " + message.content | trim + eos_token }}
        {%- endgeneration -%}
    {%- elif message.role == "tool" %}
        {%- continue %}
    {%- endif %}
    {%- if loop.index > 50 %}{% break %}{% endif %}
{%- endfor %}"""

TEMPLATES = {
    "smollm2": SMOLLM2,
    "llama3": LLAMA3_LIKE,
    "qwen": QWEN_LIKE,
    "gemma": GEMMA_LIKE,
    "mistral": MISTRAL_LIKE,
}

USER = {"role": "user", "content": " 天气 <b>'\"&? \n"}
REPLY = {"role": "assistant", "content": "<think>\nhm</think>\n\nfine\U0001f600"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {
                "name": "weather",
                "arguments": {"city": "北京", "days": 2, "z": [1.5, None]},
            },
        }
    ],
}
ANSWER = {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"t": 3}'}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "of <a> 'place' & co"}}
]
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [USER]},
    "system": {"messages": [{"role": "system", "content": " Be brief. "}, USER]},
    "three turns": {"messages": [USER, REPLY, USER]},
    "no generation prompt": {"messages": [USER, REPLY], "add_generation_prompt": False},
    "tools": {"messages": [USER, CALL, ANSWER], "tools": TOOLS},
    "two users": {"messages": [USER, USER]},
}


class Generation(jinja2.ext.Extension):
    """The tag by which transformers marks turns for training; it renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_render")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> str:
        return str(caller())


def render_with_jinja2(source: str, **context: Any) -> str:
    """Set up like `transformers.utils.chat_template_utils`."""

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = NOW.strftime
    return environment.from_string(source).render(
        **{"tools": None, "documents": None, "add_generation_prompt": True, **context},
        bos_token="<s>",
        eos_token="</s>",
    )


def render(source: str, messages: list[Any], **options: Any) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(
        messages, **{"now": NOW, **options}
    )


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_text_is_that_of_jinja2_or_both_refuse(template: str, conversation: str) -> None:
    given = CONVERSATIONS[conversation]
    try:
        expected = render_with_jinja2(TEMPLATES[template], **copy.deepcopy(given))
    except jinja2.TemplateError as error:
        with pytest.raises(InvalidRequest, match=str(error)[:40]):
            render(TEMPLATES[template], **given)
    else:
        assert render(TEMPLATES[template], **given) == expected


def test_the_templates_that_refuse_say_why() -> None:
    with pytest.raises(InvalidRequest, match="Conversation roles must alternate"):
        render(GEMMA_LIKE, [USER, USER])


def test_variables_that_the_template_reads_are_passed_on_and_others_refused() -> None:
    assert render(QWEN_LIKE, [USER], enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert ChatTemplate(QWEN_LIKE).variables == {"enable_thinking", "undefined_thing"}
    with pytest.raises(InvalidRequest, match="does not read 'enable_thinking'"):
        render(SMOLLM2, [USER], enable_thinking=False)
    with pytest.raises(InvalidRequest, match="does not read 'bos_token'"):
        render(SMOLLM2, [USER], bos_token="x")


def test_the_date_is_the_given_one() -> None:
    source = "{{ strftime_now('%Y-%m-%d %H:%M') }}"
    assert render(source, [USER]) == "2026-03-04 05:06"
    assert render(source, [USER], now=0.0) == "1970-01-01 00:00"


def test_text_parts_are_joined_without_anything_between_them() -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    one = render(SMOLLM2, [{"role": "user", "content": parts}])
    assert one == render(SMOLLM2, [{"role": "user", "content": "hello"}])


def test_a_part_that_is_no_text_is_refused_by_its_type() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content\[0\].*'image_url'"):
        render(SMOLLM2, [{"role": "user", "content": parts}])


@pytest.mark.parametrize("message", [{"role": "assistant", "content": None}, {"role": "assistant"}])
def test_null_content_is_the_empty_text_and_the_turn_is_kept(message: dict[str, Any]) -> None:
    assert "<|im_start|>assistant\n<|im_end|>\n" in render(SMOLLM2, [USER, message])


def call_with(arguments: object) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [('{"a": [1]}', '{"a": [1]}'), ({"a": 1}, '{"a": 1}'), ("", "{}"), (None, "{}")],
)
def test_arguments_become_objects(arguments: object, text: str) -> None:
    assert f'"arguments": {text}}}' in render(QWEN_LIKE, [USER, call_with(arguments)])


@pytest.mark.parametrize("arguments", ['["x"]', "{", "3", ["x"], '"x"'])
def test_arguments_that_are_no_object_are_refused(arguments: object) -> None:
    with pytest.raises(
        InvalidRequest, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments"
    ):
        render(QWEN_LIKE, [USER, call_with(arguments)])


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ("hi", r"messages\[0\]"),
        ({"content": "hi"}, r"messages\[0\]"),
        ({"role": "user", "content": 3}, "content must be a text"),
        ({"role": "user", "content": "a\ud83d"}, r"U\+D83D\) at character 1"),
        ({"role": "user", "content": "", "x": float("nan")}, "plain JSON"),
        ({"role": "user", "content": "", "tool_calls": {"a": 1}}, "must be a list"),
        ({"role": "user", "content": "", "tool_calls": [3]}, r"tool_calls\[0\]\.function"),
    ],
)
def test_malformed_messages_are_refused_with_their_place(message: object, place: str) -> None:
    with pytest.raises(InvalidRequest, match=place):
        render(SMOLLM2, [message])


def test_a_template_cannot_change_its_callers_objects() -> None:
    messages = [{"role": "user", "content": "", "list": [1]}]
    assert (
        render("{{ messages[0].list.append(2) }}{{ messages[0].list }}", messages) == "None[1, 2]"
    )
    assert messages == [{"role": "user", "content": "", "list": [1]}]


def test_a_template_cannot_reach_into_python() -> None:
    source = "{{ strftime_now.__globals__ }}{{ ''.__class__ }}{{ messages.__class__ }}"
    assert render(source, [USER]) == ""


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ messages", "{% endif %}", "{{ 1 | nothing( }}"]
)
def test_a_template_that_does_not_compile_is_a_model_error(source: str) -> None:
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 50000000 }}",
        "{% for i in range(90000) %}{{ 'a' * 1000 }}{% endfor %}",
        "{% for i in range(9000) %}{% for j in range(9000) %}{% endfor %}{% endfor %}",
        "{% set n = namespace(s='a' * 99) %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}"
        "{% endfor %}{{ n.s }}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages | tojson(indent=1000000000) }}",
    ],
)
def test_bombs_are_stopped(source: str) -> None:
    start = time.process_time()
    with pytest.raises(InvalidRequest):
        render(source, [USER])
    assert time.process_time() - start < 5.0


def test_the_output_limit_counts_every_render_anew() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    message = {"role": "user", "content": "a" * (MAX_OUTPUT // 2 + 1)}
    assert {len(template.render([message], now=0.0)) for _ in range(2)} == {MAX_OUTPUT // 2 + 1}


def test_ten_thousand_messages_are_no_bomb() -> None:
    assert render(QWEN_LIKE, [USER, REPLY] * 5000).count("<|im_start|>") == 10001

"""Chat templates: from messages to the text of a prompt, as transformers renders it.

Templates are Jinja, rendered by minijinja. A template comes with the model's files and is trusted
as they are, but mistakes and bombs must not stop a worker: steps (`MAX_STEPS`) and output
(`MAX_OUTPUT`) are bounded. A template sees JSON only: its input is copied, so that it can neither
change its caller's objects nor reach into Python.
"""

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import minijinja

from llmrt.models.tokenizer import check_text
from llmrt.wire.errors import InvalidRequest, ModelError

# minijinja charges about one per instruction and one per 16 bytes of text that it makes. The
# longest templates take some 200 per message; 2 million are stopped within 0.2 s.
MAX_STEPS = 2_000_000
# Characters; what a prompt frame may carry.
MAX_OUTPUT = 16 << 20
MAX_INDENT = 16

_NAME = "chat_template"
_OWN_VARIABLES = {
    "messages",
    "tools",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "strftime_now",
    "raise_exception",
}
# transformers marks the assistant's turns for training with this tag, which renders its body.
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


class ChatTemplate:
    """One compiled template. Raises `ModelError` if the source can't be compiled.

    `variables` are the further names that the template reads (`enable_thinking`, ...), and the
    only ones that `render` takes.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._lock = threading.Lock()
        self._environment = _environment()
        try:
            self._environment.add_template(_NAME, _GENERATION.sub(_as_condition, source))
            read = self._environment.undeclared_variables_in_template(_NAME)
        except minijinja.TemplateError as error:
            raise ModelError(f"the chat template does not compile: {error}") from None
        self.variables = frozenset(read) - _OWN_VARIABLES - set(self._environment.globals)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        now: datetime | float,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> str:
        """The prompt of a conversation. Control tokens in it are written out by the template.

        `now` is what the template takes for the current time: seconds since 1970 are read as
        UTC. Text parts of a message are joined without anything between them; null or missing
        content is the empty text. Raises `InvalidRequest`, with the template's own message where
        it refuses the conversation.
        """
        unknown = sorted(set(variables) - self.variables)
        if unknown:
            known = ", ".join(sorted(self.variables)) or "none"
            raise InvalidRequest(
                f"the chat template does not read {unknown[0]!r}: leave it out "
                f"(variables that it reads: {known})"
            )
        instant = now if isinstance(now, datetime) else datetime.fromtimestamp(now, UTC)
        context = {
            "documents": None,
            **_copied(variables, "chat template variables"),
            "messages": [_message(message, i) for i, message in enumerate(messages)],
            "tools": _copied(tools, "tools") if tools else None,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": _clock(instant),
            **self._tokens,
        }
        try:
            return self._render(context)
        except _Refused as error:
            raise InvalidRequest(f"the chat template refuses the messages: {error}") from None
        except minijinja.TemplateError as error:
            raise InvalidRequest(f"the chat template fails on the messages: {error}") from None

    def _render(self, context: dict[str, Any]) -> str:
        # What a template emits costs no steps, so that the output has to be counted while it
        # grows; the counter belongs to the environment, hence the lock.
        with self._lock:
            self._environment.finalizer = _output_counter()
            text: str = self._environment.render_template(_NAME, **context)
        if len(text) > MAX_OUTPUT:
            raise _too_long()
        return text


class _Refused(Exception):
    """Raised by what a template calls; the message is for the author of the request."""


def _environment() -> minijinja.Environment:
    """Undefined values behave as in Jinja2: they print nothing, their attributes are errors."""
    environment = minijinja.Environment(
        trim_blocks=True, lstrip_blocks=True, undefined_behavior="lenient", fuel=MAX_STEPS
    )
    environment.debug = False
    environment.auto_escape_callback = lambda name: False
    environment.add_global("raise_exception", _raise_exception)
    environment.add_test("iterable", _is_iterable)
    environment.add_filter("tojson", _to_json)
    environment.add_filter("from_json", _from_json)
    return environment


def _as_condition(tag: "re.Match[str]") -> str:
    return f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}"


def _raise_exception(message: object) -> None:
    raise _Refused(str(message))


def _is_iterable(value: object) -> bool:
    """minijinja's own test says yes to None."""
    return isinstance(value, Iterable)


def _clock(instant: datetime) -> Callable[[str], str]:
    def strftime_now(format: str) -> str:
        try:
            return instant.strftime(format)
        except (TypeError, ValueError) as error:
            raise _Refused(f"strftime_now({format!r}): {error}") from None

    return strftime_now


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers: no escapes for HTML, letters as they are."""
    if isinstance(indent, int) and indent > MAX_INDENT:
        raise _Refused(f"tojson(indent={indent}): at most {MAX_INDENT} are allowed")
    try:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=(separators[0], separators[1]) if separators else None,
            sort_keys=sort_keys,
        )
    except (TypeError, ValueError, IndexError, RecursionError) as error:
        raise _Refused(f"tojson: {error}") from None


def _from_json(text: str) -> object:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise _Refused(f"from_json: {error}") from None


def _output_counter() -> Callable[[object], object]:
    left = MAX_OUTPUT

    def count(value: object) -> object:
        nonlocal left
        left -= len(value) if isinstance(value, str) else 1
        if left < 0:
            raise _too_long()
        return NotImplemented  # print it as usual

    return count


def _too_long() -> _Refused:
    return _Refused(f"the prompt gets longer than {MAX_OUTPUT} characters: send less")


def _message(message: object, index: int) -> dict[str, Any]:
    """A copy of a message in the form that all templates understand."""
    place = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{place} must be an object with a role")
    known: dict[str, Any] = {"role": message["role"]}
    known["content"] = _content(message.get("content"), f"{place}.content")
    if message.get("tool_calls"):
        known["tool_calls"] = _tool_calls(message["tool_calls"], f"{place}.tool_calls")
    others = {key: value for key, value in message.items() if key not in (*known, "tool_calls")}
    return {**known, **_copied(others, place)}


def _content(content: object, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        check_text(content, place)
        return content
    if not isinstance(content, list | tuple):
        raise InvalidRequest(
            f"{place} must be a text, a list of text parts or null, got {type(content).__name__}"
        )
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise InvalidRequest(
                f"{place}[{i}] is of type {kind!r}: this model takes parts of type 'text' only"
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequest(f"{place}[{i}].text must be a text, got {type(text).__name__}")
        check_text(text, f"{place}[{i}].text")
        texts.append(text)
    return "".join(texts)


def _tool_calls(calls: object, place: str) -> list[Any]:
    """Tool calls with their arguments as objects: half of all templates fail on JSON text."""
    copies = _copied(calls, place)
    if not isinstance(copies, list):
        raise InvalidRequest(f"{place} must be a list, got {type(calls).__name__}")
    for i, call in enumerate(copies):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise InvalidRequest(f"{place}[{i}].function must be an object")
        arguments = function.get("arguments")
        function["arguments"] = _arguments(arguments, f"{place}[{i}].function.arguments")
    return copies


def _arguments(arguments: object, place: str) -> dict[str, Any]:
    if arguments is None or arguments == "":
        return {}
    parsed = arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{place} is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise InvalidRequest(f"{place} must be an object, got {type(parsed).__name__}")
    return parsed


def _copied(value: Any, place: str) -> Any:
    """`value` as plain JSON values; raises `InvalidRequest` if it is none."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        check_text(text, place)
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{place} must be plain JSON: {error}") from None

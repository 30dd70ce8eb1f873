"""Chat messages to token ids, by the model's own Jinja template.

Imports jinja2 and engine.tokenizer, and no I/O. It promises that the result equals what `transformers` makes of the
same messages, and that no text in them (content, names, tools) is ever parsed as a control token: a literal
`<|im_end|>` that a user wrote reaches the model as the ordinary characters.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.tokenizer import Tokenizer

# A template adds little to its messages, which the request body's limit bounds (8 MiB by default). Four times that
# is a template that runs away.
RENDERED_CHARS_MAX = 32 * 1024 * 1024

Message = Mapping[str, Any]


class ChatError(ValueError):
    """These messages can't become a prompt; the text says why, for the client. `field`: which of the arguments beside
    the messages is at fault; "" for the messages."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class GuardUnbuilt(Exception):
    """These messages hold a marker, and the tokenizer's part that reads such was not built yet."""


class ChatTemplate:
    """One model's template, compiled once. Safe to use from any thread."""

    def __init__(
        self, source: str, bos_token: str = "", eos_token: str = "", *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        self._names: dict[str, Any] = {"bos_token": bos_token, "eos_token": eos_token}  # that every rendering knows
        self._template: jinja2.Template | None = None
        self.takes_tools = False  # whether it shows the model the tools that there are
        self._problem = "this model has no chat template; use the completions API with a whole prompt"
        if source:
            try:
                environment = _environment(now)
                self._template = environment.from_string(source)
                # Jinja chains the environment's names and the template's own, and copies them, in Python, to render.
                self._names = {**self._template.globals, **self._names}
                self._template.globals = {}
                self.takes_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
            except jinja2.TemplateError as error:
                self._problem = f"the model's chat template can't be compiled: {error}"

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt's text. Keys of a message whose value is None are left out, as if they were not there.
        `continue_final_message`: it ends within the last message, behind its content, which is text.

        Raises ChatError with the template's own words if it refuses the messages, and if there is no template.
        """
        if self._template is None:
            raise ChatError(self._problem)
        if not messages:
            raise ChatError("messages is empty; the chat template needs at least one message")
        if continue_final_message:
            final, mark = messages[-1], f"END{secrets.token_hex(16)} "
            marked = [*messages[:-1], {**final, "content": final["content"] + mark}]
            text = self.render(marked, tools=tools, add_generation_prompt=False, **kwargs)
            return _cut_at(text, mark, final["content"])
        context = {
            **self._names,
            **kwargs,
            "messages": [{key: value for key, value in message.items() if value is not None} for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _bounded(self._template, context)
        except jinja2.UndefinedError as error:
            raise ChatError(f"the model's chat template can't render these messages: {error}") from None
        except jinja2.TemplateError as error:
            raise ChatError(error.message or str(error)) from None
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            OverflowError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise ChatError(f"the model's chat template can't render these messages: {error}") from None


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    tools: Sequence[Message] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    build_guard: bool = True,
    **kwargs: Any,
) -> list[int]:
    """Ids of the rendered messages (see `ChatTemplate.render`). No BOS is added: a template that wants one writes it.

    Special markers in any string of `messages`, `tools` and `kwargs` become ordinary text. Raises ChatError; and, where
    the time for `Tokenizer.build_guard` isn't to be taken here, GuardUnbuilt.
    """
    guard = _Guard(tokenizer)
    if not _unmarked(tokenizer, messages):
        messages = guard.argument(messages)
    tools = guard.argument(tools, "tools")
    kwargs = {name: guard.argument(value, name) for name, value in kwargs.items()}
    if guard.masked and not (build_guard or tokenizer.guard_is_built):
        raise GuardUnbuilt
    text = template.render(
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **kwargs,
    )
    try:
        return tokenizer.encode_guarded(text) if guard.masked else tokenizer.encode(text, add_bos=False)
    except ValueError as error:
        raise ChatError(f"messages: {error}") from None


def _unmarked(tokenizer: Tokenizer, messages: Sequence[Message]) -> bool:
    """Whether these messages hold nothing but text, none of which must be guarded, as nearly always."""
    try:
        text = "\n".join([text for message in messages for pair in message.items() for text in pair])
    except TypeError:  # calls of tools, say
        return False
    return tokenizer.is_harmless(text)


class _Guard:
    """Copies JSON values with their strings guarded; `masked` tells whether any had to be."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._guard = tokenizer.guard
        self.masked = False

    def argument(self, value: Any, field: str = "") -> Any:
        """One of those of `encode_chat`; `field` as in ChatError, which it raises."""
        try:
            return self.value(value)
        except RecursionError:
            raise ChatError(f"{field or 'messages'} are nested too deeply", field) from None

    def value(self, value: Any) -> Any:
        if type(value) is str:
            guarded = self._guard(value)
            if guarded is not value:
                self.masked = True
            return guarded
        if type(value) is dict:
            return {self.value(key): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        if isinstance(value, Mapping):
            return self.value(dict(value))
        return value


def _cut_at(text: str, mark: str, content: str) -> str:
    """`text` up to the mark behind `content`, as `transformers` does it: a template that strips the mark's space would
    have stripped the content's too."""
    at = text.rfind(mark.strip())
    if at < 0 or content.strip() not in text:
        raise ChatError("the model's chat template leaves the last message out, so it can't be continued")
    return text[:at] if text.startswith(mark, at) else text[:at].rstrip()


def _bounded(template: jinja2.Template, context: dict[str, Any]) -> str:
    parts: list[str] = []
    chars = 0
    # As Template.generate, but for the traceback of an error, into which that puts the template's own lines.
    for part in template.root_render_func(template.new_context(context, shared=True)):
        parts.append(part)
        chars += len(part)
        if chars > RENDERED_CHARS_MAX:
            raise ChatError(f"the model's chat template made more than {RENDERED_CHARS_MAX} characters")
    return "".join(parts)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; serving renders only its body."""

    tags = {"generation"}  # noqa: RUF012 (declared so by the base class)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """The names and options that templates written for `transformers` rely on."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: now().strftime(format)
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which a prompt is not.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

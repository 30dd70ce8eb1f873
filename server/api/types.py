"""The request bodies of the OpenAI APIs, as msgspec types, and what turns their faults into sentences.

Every field works or is refused by name. Fields that are named here only to be refused carry the values that mean
"off", which SDKs send by themselves.
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from server.api.errors import ApiError, invalid
from server.api.json_checks import refuse_crowds, refuse_repeated_names

STOPS_MAX = 16
# Of one stop string. No text is sent that may be the start of one, and each takes memory of many times its own size.
STOP_CHARS_MAX = 4096
# OpenAI's own. A response's first and last events show all of it.
METADATA_MAX, METADATA_NAME_CHARS_MAX, METADATA_CHARS_MAX = 16, 64, 512
IDENTIFIER_CHARS_MAX = 512  # of `user` and its like, which stand there too
CHOICES_MAX = 16  # n; each is a sequence of its own in the engine
PROMPTS_MAX = 256  # of one completions request
MESSAGES_MAX = 4096  # a template costs some microseconds for each
STOP_IDS_MAX = 256
TOP_LOGPROBS_MAX = 20  # OpenAI's own limit
PROMPT_LOGPROBS_MAX = 262_144  # numbers for one prompt: some megabytes of an answer
PENALTY_MAX = 2  # OpenAI's own range, on either side of 0
REPETITION_PENALTY_MAX = 100  # beyond it nothing is left of a logit
BIAS_MAX = 100  # OpenAI's own range, on either side of 0
BIASED_IDS_MAX = 1024  # each costs time in every step


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """One part of a message's content; only text is understood, and what an assistant said in place of it. The other
    fields are those of parts that are refused by their type."""

    type: str
    text: str | None = None
    refusal: str | None = None
    prompt_cache_breakpoint: Any = None  # a prompt's whole is always cached, and so says nothing new
    cache_control: Any = None  # likewise
    image_url: Any = None
    input_audio: Any = None
    audio_url: Any = None
    video_url: Any = None
    file: Any = None


class CalledFunction(msgspec.Struct):
    """What an earlier answer called. `arguments` is JSON, as it came."""

    name: str
    arguments: str


class MessageToolCall(msgspec.Struct):
    """A call in an assistant's message."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None  # clients send earlier answers back as they came
    annotations: list[Any] | None = None
    audio: None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    function_call: None = None
    reasoning_content: str | None = None


class FunctionDefinition(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call; `parameters` is a JSON Schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(msgspec.Struct, forbid_unknown_fields=True):
    """One tool."""

    type: Literal["function"]
    function: FunctionDefinition


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream carries beside its text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # ours never pads


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A schema that the answer must follow, `strict` or not: there is no looser way."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """What form the answer has."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerationFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What chat and text completions share, the fields that vLLM's users add included."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None  # lower goes first, among requests of one key
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @classmethod
    def off(cls) -> dict[str, tuple[Any, ...]]:
        """Fields that are refused unless they hold one of these values, which say nothing."""
        return _OFF


class ChatRequest(GenerationFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    # Refused unless they say nothing.
    functions: list[Any] | None = None
    function_call: Any = None
    response_format: ResponseFormat | None = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: Any = None
    moderation: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None  # how many of the most likely tokens are shown beside each
    prompt_logprobs: int | None = None
    # Refused unless they say nothing.
    suffix: str | None = None
    best_of: int | None = None


class Range(NamedTuple):
    """Numbers from `low`, or above it, to `high`, if there is one."""

    low: float
    high: float | None = None
    open_below: bool = False


# Of each number that a request may hold, whatever the API.
RANGES = {
    "max_tokens": Range(1),
    "max_completion_tokens": Range(1),
    "max_output_tokens": Range(1),
    "max_tool_calls": Range(1),
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, open_below=True),
    "top_k": Range(-1),  # 0 and -1: off
    "min_p": Range(0, 1),
    "frequency_penalty": Range(-PENALTY_MAX, PENALTY_MAX),
    "presence_penalty": Range(-PENALTY_MAX, PENALTY_MAX),
    "repetition_penalty": Range(0, REPETITION_PENALTY_MAX, open_below=True),
    "n": Range(1, CHOICES_MAX),
    "min_tokens": Range(0),
    "logprobs": Range(0, TOP_LOGPROBS_MAX),  # in chat it is no number
    "top_logprobs": Range(0, TOP_LOGPROBS_MAX),
    "prompt_logprobs": Range(0, TOP_LOGPROBS_MAX),
    "priority": Range(-(2**63), 2**64 - 1),  # what the engine's wire carries
}

_OFF: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "suffix": ("",),
    "best_of": (1,),
    "store": (False,),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "moderation": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
}

_IDENTIFIERS = frozenset({"user", "safety_identifier", "prompt_cache_key"})

T = TypeVar("T", bound=GenerationFields)
S = TypeVar("S", bound=msgspec.Struct)

_at = re.compile(r" - at `\$?\.?(?P<path>[^`]*)`$")
_unknown = re.compile(r"unknown field `(?P<name>[^`]*)`")
_decimal = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)  # one way to write each number that fits in 64 bits
_missing = re.compile(r"missing required field `(?P<name>[^`]*)`")


def parse(body: bytes, kind: type[T], *, ids: int = 0) -> T:
    """The body as `kind`, with every value in its range. Raises ApiError 400."""
    return checked(decode(body, kind, ids=ids))


def decode(body: bytes, kind: type[S], *, ids: int = 0) -> S:
    """The body as `kind`, which may hold so many token `ids`. Raises ApiError 400 that names the field and says
    what is right."""
    refuse_crowds(body, ids=ids)
    try:
        request = msgspec.json.decode(body, type=kind)
        refuse_repeated_names(body.decode())
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        sentence = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise invalid(None, f"the body is not valid JSON: {sentence}", "invalid_json") from None
    return request


def convert(value: object, kind: type[T], *, strict: bool = True) -> T:
    """The same for a value that was JSON already, or (not strict) for a query, whose values are all strings."""
    try:
        request = msgspec.convert(value, type=kind, strict=strict)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    return checked(request)


def convert_at(value: object, kind: type[S], path: str) -> S:
    """A part of a request, which stands at `path`, as `kind`. Raises ApiError 400 that names the field."""
    try:
        return msgspec.convert(value, type=kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), path) from None


# msgspec's names of types, as people say them.
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_mismatch = re.compile(r"^Expected `(?P<wanted>[^`]*)`, got `(?P<got>[^`]*)`$")
_no_value = re.compile(r"^Invalid (enum )?value (?P<value>.*)$", re.DOTALL)


def _in_words(sentence: str) -> str:
    """msgspec's sentence about a type, for people who know JSON and no Python."""
    if found := _no_value.fullmatch(sentence):
        return f"{found['value']} is not one of the values that are allowed here"
    found = _mismatch.fullmatch(sentence)
    if found is None:
        return sentence
    wanted = [_KINDS.get(kind, kind) for kind in found["wanted"].split(" | ") if kind != "null"]
    return f"must be {' or '.join(wanted)}, not {_KINDS.get(found['got'], found['got'])}"


def _explain(sentence: str, under: str = "") -> ApiError:
    path = under
    if found := _at.search(sentence):
        path = ".".join(filter(None, [under, found["path"].replace("[...]", "").replace("[", ".").replace("]", "")]))
        sentence = sentence[: found.start()]
    code, sentence = "invalid_type", _in_words(sentence)
    for pattern, kind, words in (
        (_unknown, "unknown_parameter", "no field of this name is known here"),
        (_missing, "missing_parameter", "this field must be given"),
    ):
        if found := pattern.search(sentence):
            path = f"{path}.{found['name']}" if path else found["name"]
            code, sentence = kind, words
    return invalid(path or None, f"{path or 'the body'}: {sentence}", code)


def checked(request: T) -> T:
    """Refuse what no type can say. Raises ApiError."""
    off = request.off()
    fields = zip(request.__struct_fields__, msgspec.structs.astuple(request), strict=True)
    given = [(name, value) for name, value in fields if value is not None]  # a few of very many
    for name, value in given:
        if name in off and value not in off[name]:
            raise invalid(name, f"{name} is not supported", "unsupported_parameter")
        if type(value) is int and not -(2**63) <= value < 2**64:  # JSON's have no end, the engine's wire has
            raise invalid(name, f"{name} does not fit in 64 bits", "out_of_range")
    for name, value in given:
        if name in RANGES and not isinstance(value, bool):
            _check_range(name, value)
        elif name in _IDENTIFIERS and len(value) > IDENTIFIER_CHARS_MAX:
            raise invalid(name, f"{name} has at most {IDENTIFIER_CHARS_MAX} characters", "string_above_max_length")
    if isinstance(request, ChatRequest) and len(request.messages) > MESSAGES_MAX:
        raise invalid("messages", f"messages holds {len(request.messages)}; at most {MESSAGES_MAX} are allowed")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "stream_options is only allowed when stream is true")
    stops = stop_strings(request)
    if len(stops) > STOPS_MAX:
        raise invalid("stop", f"stop holds {len(stops)} strings; at most {STOPS_MAX} are allowed")
    if "" in stops:
        raise invalid("stop", "a stop string can't be empty")
    if stops and max(map(len, stops)) > STOP_CHARS_MAX:
        raise invalid("stop", f"a stop string has at most {STOP_CHARS_MAX} characters")
    if len(request.stop_token_ids or ()) > STOP_IDS_MAX:
        raise invalid("stop_token_ids", f"at most {STOP_IDS_MAX} stop_token_ids are allowed")
    if request.logit_bias:
        _check_bias(request.logit_bias)
    if request.metadata:
        _check_metadata(request.metadata)
    return request


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > METADATA_MAX:
        message = f"metadata holds {len(metadata)} names; at most {METADATA_MAX} are allowed"
        raise invalid("metadata", message, "object_above_max_properties")
    if max(map(len, metadata)) > METADATA_NAME_CHARS_MAX or max(map(len, metadata.values())) > METADATA_CHARS_MAX:
        message = f"metadata has names of at most {METADATA_NAME_CHARS_MAX} characters, values of {METADATA_CHARS_MAX}"
        raise invalid("metadata", message, "string_above_max_length")


def _check_bias(bias: dict[str, float]) -> None:
    """Which ids there are is for the model to say."""
    if len(bias) > BIASED_IDS_MAX:
        raise invalid("logit_bias", f"logit_bias names {len(bias)} ids; at most {BIASED_IDS_MAX} are allowed")
    for id_, value in bias.items():
        if not _decimal.fullmatch(id_):
            raise invalid("logit_bias", f"logit_bias has the key {id_[:20]!r}; keys are token ids in decimal digits")
        if not -BIAS_MAX <= value <= BIAS_MAX:
            message = f"logit_bias.{id_} is {value:g}; it must be at least {-BIAS_MAX} and at most {BIAS_MAX}"
            raise invalid(f"logit_bias.{id_}", message, "out_of_range")


def stop_strings(request: GenerationFields) -> tuple[str, ...]:
    """The stop strings, in one form."""
    stop = request.stop
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def _check_range(name: str, value: float) -> None:
    span = RANGES[name]
    low, high = span.low, span.high
    # Written so that NaN, which a query can hold, is refused too.
    if not (value > low if span.open_below else value >= low) or (high is not None and not value <= high):
        least = f"above {low:g}" if span.open_below else f"at least {low:g}"
        most = "" if high is None else f" and at most {high:g}"
        raise invalid(name, f"{name} is {value:g}; it must be {least}{most}", "out_of_range")

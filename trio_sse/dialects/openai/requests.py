"""What a client of OpenAI's API may ask for, and what becomes of it.

    body ──▶ json_in.decode ──▶ ChatRequest / CompletionRequest ──▶ GenerationRequest + Answer

Rules:

1. A field is read with its exact type, or the request is refused naming it. ``null`` is the same as leaving it out.
2. A field that OpenAI has and this server has not is refused by name, unless it says what would happen anyway (``tools: []``,
   ``n: 1``): a client that asked for three choices and silently got one would be worse off. The table is :data:`_NEUTRAL`.
3. Everything else is ignored: unknown fields, ``user``, ``metadata``, cache and safety hints, extra keys in messages and parts.
4. Defaults are OpenAI's, since that is what its clients were written against: temperature 1, top_p 1, ``max_tokens`` up to the
   context for a chat and 16 for a completion. ``max_completion_tokens`` wins over ``max_tokens``. Whether a number fits the
   context is the backend's to say, which alone can count the prompt.
5. ``model`` is accepted whatever it says, for clients insist on sending one; the answer names the model that really answered.
6. ``top_k``, ``min_p`` and ``repetition_penalty`` are vLLM's and llama.cpp's additions, under their names.
7. Text parts are joined with nothing between them: what the model reads is what the client wrote.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from trio_sse.dialects.base import AnswerContext, Parsed
from trio_sse.dialects.openai.answers import ChatAnswer, CompletionAnswer
from trio_sse.errors import BadRequest
from trio_sse.events import GenerationRequest, Message, Sampling
from trio_sse.json_in import Int64, decode

__all__ = ["ChatRequest", "CompletionRequest", "parse_chat", "parse_completion"]

MAX_STOPS = 4
MAX_STOP_LENGTH = 1000  # characters; what may be a stop string's beginning is held back, so its length bounds the delay
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_ID_DIGITS = 9
COMPLETION_TOKENS = 16

_Count = Annotated[int, Meta(ge=1, le=2**63 - 1)]
_Fraction = Annotated[float, Meta(ge=0, le=1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
_Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
_Bias = Annotated[float, Meta(ge=-100, le=100)]

# Field → the values at which it asks for nothing that would not happen anyway. None, which is the default, always does.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Common(msgspec.Struct, kw_only=True):
    """What both APIs share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: _Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: _Fraction | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # 0 and −1 are both "off" to somebody
    min_p: _Fraction | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[str, _Bias], Meta(max_length=MAX_BIASES)] | None = None
    seed: Int64 | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=MAX_STOPS)] | None = None
    # Known, and refused unless neutral.
    n: Any = None
    store: Any = None
    service_tier: Any = None


class Part(msgspec.Struct):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[Part] | None = None
    # Known, and refused unless neutral.
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None
    audio: Any = None


class ChatRequest(_Common, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: _Logprobs | None = None
    # Known, and refused unless neutral.
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    tool_choice: Any = None
    tools: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionRequest(_Common, kw_only=True):
    prompt: str | list[str]
    logprobs: _Logprobs | None = None
    # Known, and refused unless neutral.
    best_of: Any = None
    echo: Any = None
    suffix: Any = None


def parse_chat(body: bytes, context: AnswerContext) -> Parsed:
    """Reads the body of ``POST /v1/chat/completions``; raises :class:`~trio_sse.errors.BadRequest` naming the field."""
    asked = decode(body, ChatRequest)
    _refuse_unsupported(asked)
    logprobs = None
    if asked.logprobs:
        logprobs = asked.top_logprobs or 0
    elif asked.top_logprobs:
        raise BadRequest("top_logprobs asks for logprobs to be true.", param="top_logprobs")
    limit = asked.max_completion_tokens
    work = GenerationRequest(
        messages=tuple(_message(message, f"messages[{index}]") for index, message in enumerate(asked.messages)),
        max_tokens=asked.max_tokens if limit is None else limit,
        stop=_stop(asked),
        sampling=_sampling(asked, logprobs),
        model=asked.model,
    )
    return Parsed(request=work, stream=bool(asked.stream), answer=ChatAnswer(context, usage=_wants_usage(asked)))


def parse_completion(body: bytes, context: AnswerContext) -> Parsed:
    """Reads the body of ``POST /v1/completions``; raises :class:`~trio_sse.errors.BadRequest` naming the field."""
    asked = decode(body, CompletionRequest)
    _refuse_unsupported(asked)
    prompts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
    if len(prompts) != 1:
        raise BadRequest("prompt must be one string, or a list of one: a request is answered with one choice.", param="prompt")
    if not prompts[0]:
        raise BadRequest("prompt must not be empty.", param="prompt")
    work = GenerationRequest(
        prompt=prompts[0],
        max_tokens=COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens,
        stop=_stop(asked),
        sampling=_sampling(asked, asked.logprobs),
        model=asked.model,
    )
    return Parsed(request=work, stream=bool(asked.stream), answer=CompletionAnswer(context, usage=_wants_usage(asked)))


def _refuse_unsupported(asked: _Common) -> None:
    for name in asked.__struct_fields__:
        if name in _NEUTRAL and not _neutral(getattr(asked, name), _NEUTRAL[name]):
            raise BadRequest(f"{name} is not supported here.", param=name, code="unsupported_parameter")


def _neutral(value: object, neutral: tuple[object, ...]) -> bool:
    # The class is compared too, or true would pass for 1.
    return value is None or any(value.__class__ is one.__class__ and value == one for one in neutral)


def _wants_usage(asked: _Common) -> bool:
    return asked.stream_options is not None and bool(asked.stream_options.include_usage)


# --- messages -----------------------------------------------------------------------------------------------------------------

# Developer is the newer name of system, which chat templates do not know.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def _message(message: ChatMessage, where: str) -> Message:
    role = _ROLES.get(message.role)
    if role is None:
        if message.role in ("tool", "function"):
            raise BadRequest(f"{where}.role: tools are not supported here.", param=f"{where}.role", code="unsupported_parameter")
        raise BadRequest(f"{where}.role must be system, developer, user or assistant.", param=f"{where}.role")
    for name, neutral in (("tool_calls", ([],)), ("function_call", ()), ("refusal", ()), ("audio", ())):
        if not _neutral(getattr(message, name), neutral):
            raise BadRequest(f"{where}.{name} is not supported here.", param=f"{where}.{name}", code="unsupported_parameter")
    return Message(role=role, content=_content(message, f"{where}.content"))


def _content(message: ChatMessage, where: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        # OpenAI's clients replay an assistant's turn as it came, and its content may be null there.
        if message.role == "assistant":
            return ""
        raise BadRequest(f"{where} is required.", param=where)
    if not content:
        raise BadRequest(f"{where} must not be empty.", param=where)
    return "".join(_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _text(part: Part, where: str) -> str:
    if part.type != "text":
        raise BadRequest(f"{where} must be a text part; this server reads text only.", param=where, code="unsupported_parameter")
    if part.text is None:
        raise BadRequest(f"{where}.text is required.", param=f"{where}.text")
    return part.text


# --- sampling -----------------------------------------------------------------------------------------------------------------


def _stop(asked: _Common) -> tuple[str, ...]:
    if asked.stop is None:
        return ()
    return (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop)


def _sampling(asked: _Common, logprobs: int | None) -> Sampling:
    return Sampling(
        temperature=_given(asked.temperature, 1.0),
        top_p=_given(asked.top_p, 1.0),
        top_k=max(0, asked.top_k or 0),
        min_p=_given(asked.min_p, 0.0),
        presence_penalty=_given(asked.presence_penalty, 0.0),
        frequency_penalty=_given(asked.frequency_penalty, 0.0),
        repetition_penalty=_given(asked.repetition_penalty, 1.0),
        logit_bias=_logit_bias(asked.logit_bias),
        seed=asked.seed,
        logprobs=logprobs,
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(biases: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    """``{"50256": -100}`` as pairs. Whether the model has such a token is the backend's to say."""
    pairs: dict[int, float] = {}
    for key, bias in (biases or {}).items():
        # int() alone would take " 5 ", "1_0" and Arabic digits.
        if not (key.isascii() and key.isdigit()) or len(key) > MAX_ID_DIGITS:
            raise BadRequest("logit_bias must have token ids as its keys.", param="logit_bias")
        if int(key) in pairs:
            raise BadRequest("logit_bias has a token id twice.", param="logit_bias")
        pairs[int(key)] = bias
    return tuple(pairs.items())

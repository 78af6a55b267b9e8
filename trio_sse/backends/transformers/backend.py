"""The local model as a backend: loads it, prepares requests for it, and lets the engine generate.

    prepare:   messages ─▶ chat template ─▶ text ─▶ ids ─▶ does it fit?      in a worker thread, before a slot is asked for
    generate:  ids ─▶ Sequence ─▶ Engine.serve                              with the slot held

Rules:

1. Nothing here imports torch: the loader does, in the model thread, when the server runs.
2. Prompt and answer together are at most ``context`` tokens; what cannot fit is refused in ``prepare``, naming the field.
3. ``max_tokens`` None means: as many as fit.
4. A prompt is continued as it stands; messages go through the model's chat template, whose own special tokens are all it gets.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import trio
from tokenizers import Tokenizer

from trio_sse.backends.base import Backend, Prepared
from trio_sse.backends.transformers.engine import Engine, longest_sequence
from trio_sse.backends.transformers.sequence import Sequence
from trio_sse.backends.transformers.steps import StepModel
from trio_sse.backends.transformers.text import TokenStream, Vocabulary
from trio_sse.backends.transformers.thread import ModelThread
from trio_sse.channel import EventChannel
from trio_sse.errors import BadRequest, NotReady
from trio_sse.events import GenerationRequest, Message

__all__ = ["ChatTokenizer", "LoadedModel", "PreparedText", "TransformersBackend", "load_model"]

T = TypeVar("T")
log = logging.getLogger(__name__)

_PIECE = 32 * 1024  # characters of a long prompt that are tokenised before anybody can leave


class ChatTokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    @property
    def backend_tokenizer(self) -> Tokenizer: ...

    @property
    def chat_template(self) -> Any: ...

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any: ...


class LoadedModel(Protocol):
    """What a loader gives. All of it was made in the model thread."""

    @property
    def name(self) -> str: ...

    @property
    def slots(self) -> int: ...

    @property
    def steps(self) -> StepModel: ...

    @property
    def tokenizer(self) -> Any: ...

    def warm(self) -> None:
        """Runs what is slow only the first time. Called once, in the model thread."""


class Loading(Protocol):
    """Loads a model; called in the model thread. ``progress`` takes a line for the log, and may raise to end the loading."""

    def __call__(
        self, model: str, *, device: str, dtype: str, threads: int | None, slots: int | None, progress: Callable[[str], None]
    ) -> LoadedModel: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedText(Prepared):
    """With the prompt's ids and how many tokens may follow it."""

    ids: list[int]
    max_tokens: int


class LoadingStopped(Exception):
    """The server is stopping, so the model need not be loaded any more."""


def load_model(model: str, **options: Any) -> LoadedModel:
    """The loader of this package. Its module imports torch, so this must be called in the model thread."""
    from trio_sse.backends.transformers.model import load_model as load

    return load(model, **options)


def _field(request: GenerationRequest) -> str:
    return "prompt" if request.messages is None else "messages"


def _too_long(limit: str, request: GenerationRequest) -> BadRequest:
    return BadRequest(f"The prompt is too long: {limit}.", param=_field(request), code="context_length_exceeded")


class TransformersBackend(Backend):
    """A causal language model in this process.

    Args:
      model: ``smollm2``, a Hugging Face directory, or whatever else the loader takes.
      device, dtype: ``auto`` or a name.
      threads: torch's threads; None is for the loader to choose.
      slots: how many requests may generate at once; None is for the loader to choose.
      load: another loader, for tests.
    """

    def __init__(
        self,
        *,
        model: str = "smollm2",
        device: str = "auto",
        dtype: str = "auto",
        threads: int | None = None,
        slots: int | None = None,
        load: Loading = load_model,
    ) -> None:
        self.name = model
        self.slots = slots or 1
        self._load = functools.partial(load, model, device=device, dtype=dtype, threads=threads, slots=slots)
        self._thread = ModelThread()
        self._engine: Engine | None = None
        # Tokenising holds a core, and its threads must not be those that somebody else waits for.
        self._tokenising = trio.CapacityLimiter(2)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Loads the model, warms it, and runs the engine until cancelled.

        Resource handling: owns the model thread.
        Error handling: what the loader raises leaves as it is; so does :exc:`ConfigError` for a tokenizer that cannot stream.
        Cancellation: while loading, ends the loading at its next line of progress; later, after the step that runs.
        """
        error: Exception | None = None
        async with trio.open_nursery() as nursery:
            await nursery.start(self._thread.run)
            try:
                loaded = await self._thread.call(self._prepare_model)
                self._engine = self._take(loaded)
            except LoadingStopped:
                await trio.lowlevel.checkpoint_if_cancelled()  # the reason why it stopped
            except Exception as failure:  # noqa: BLE001  (raised below: out of the nursery it would come as a group)
                error = failure
                nursery.cancel_scope.cancel(reason="the model could not be loaded")
            else:
                await nursery.start(self._engine.run)
                task_status.started()
        if error is not None:
            raise error

    def _prepare_model(self) -> LoadedModel:
        loaded = self._load(progress=self._progress)
        self._progress("warming the model")
        loaded.warm()
        return loaded

    def _progress(self, line: str) -> None:
        if self._thread.stopping:
            raise LoadingStopped
        log.info("%s", line)

    def _take(self, loaded: LoadedModel) -> Engine:
        self.name = loaded.name
        self.slots = loaded.slots
        self.context = longest_sequence(loaded.steps)
        self._chat: ChatTokenizer = loaded.tokenizer
        self._tokenizer: Tokenizer = self._chat.backend_tokenizer
        self._vocabulary = Vocabulary(self._tokenizer)
        return Engine(loaded.steps, self._thread)

    async def prepare(self, request: GenerationRequest) -> Prepared:
        """Makes ids of the prompt, and checks that prompt and answer fit.

        Cancellation: while it waits for its turn, and after every piece of a long prompt (some 40 ms each). What is certainly too
        long is refused after the pieces that show it; the rest is short enough to be tokenised in one go.
        """
        if self._engine is None:
            raise NotReady("The model is being loaded.")
        assert self.context is not None
        text = request.prompt
        if request.messages is not None:
            text = await self._off_the_loop(self._templated, request.messages)
        if text is None:
            raise BadRequest("This model needs a prompt.", param="prompt")
        special = request.messages is None  # a chat template has written them itself
        if len(text) > _PIECE:
            tokens = 0
            for begin in range(0, len(text), _PIECE):
                tokens += len(await self._off_the_loop(self._encode, text[begin : begin + _PIECE], False))
                # Cutting the text changes the count by a few tokens at each cut, so this is no close call.
                if tokens > 1.25 * self.context + 100:
                    raise _too_long(f"the model's context is {self.context} tokens", request)
        return self._fitted(request, await self._off_the_loop(self._encode, text, special))

    async def _off_the_loop(self, fn: Callable[..., T], *args: Any) -> T:
        return await trio.to_thread.run_sync(fn, *args, limiter=self._tokenising)

    def _encode(self, text: str, special: bool) -> list[int]:
        # Of the ways to encode one text, those for a batch give up the GIL, and this one makes no offsets.
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def _templated(self, messages: tuple[Message, ...]) -> str:
        if not self._chat.chat_template:
            raise BadRequest("This model has no chat template; use a prompt.", param="messages")
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._chat.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates refuse what they do not like by raising, in their own words
            log.info("the chat template refused a request: %s", error)
            raise BadRequest("The model's chat template does not accept these messages.", param="messages") from error
        return str(text)

    def _fitted(self, request: GenerationRequest, ids: list[int]) -> PreparedText:
        assert self.context is not None
        if not ids:
            raise BadRequest("The prompt has no tokens.", param=_field(request))
        room = self.context - len(ids)
        limit = f"the model's context is {self.context} tokens, and the prompt has {len(ids)}"
        if room < 1:
            raise _too_long(limit, request)
        if request.max_tokens is not None and request.max_tokens > room:
            message = f"max_tokens is {request.max_tokens}, but {limit}."
            raise BadRequest(message, param="max_tokens", code="context_length_exceeded")
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        if any(not 0 <= token < size for token, _ in request.sampling.logit_bias):
            raise BadRequest(f"logit_bias names a token that is not among the model's {size}.", param="logit_bias")
        return PreparedText(request=request, prompt_tokens=len(ids), ids=ids, max_tokens=request.max_tokens or room)

    async def generate(self, prepared: Prepared, events: EventChannel) -> None:
        """Generates; see :meth:`Engine.serve` for errors and cancellation."""
        if not isinstance(prepared, PreparedText):
            raise TypeError("this request was prepared by another backend")
        if self._engine is None:
            raise NotReady("The model is being loaded.")
        request = prepared.request
        text = TokenStream(self._vocabulary, request.stop, continues=request.messages is None)
        await self._engine.serve(Sequence(prepared.ids, prepared.max_tokens, request.sampling, text, events))

    def step_age(self) -> float:
        return 0.0 if self._engine is None else self._engine.step_age()

    @property
    def paused_sequences(self) -> int:
        """Sequences that wait for their reader."""
        return 0 if self._engine is None else self._engine.paused_sequences

    @property
    def kv_cache_bytes(self) -> int:
        """Cache memory that sequences hold."""
        return 0 if self._engine is None else self._engine.kv_cache_bytes

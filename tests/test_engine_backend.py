"""The backend around the engine: loading, prompts, limits. With a fake model, a real tokenizer and the real model thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
from tokenizers import Tokenizer, processors

from tests.fakes.small_tokenizers import ChatTokenizer, byte_level, metaspace
from tests.fakes.step_model import FakeModel, expected
from trio_sse.backends.base import Prepared
from trio_sse.backends.transformers import TransformersBackend
from trio_sse.backends.transformers.backend import PreparedText
from trio_sse.channel import EventChannel
from trio_sse.errors import BadRequest, ConfigError, NotReady
from trio_sse.events import Event, Finish, GenerationRequest, Message, Sampling, Started, Token
from trio_sse.trace import Record


@dataclass
class Loaded:
    steps: FakeModel = field(default_factory=lambda: FakeModel(chunk=8, context=100))
    tokenizer: Any = field(default_factory=lambda: ChatTokenizer(byte_level()))
    name: str = "little"
    slots: int = 3
    warmed_in: int | None = None

    def warm(self) -> None:
        self.warmed_in = threading.get_ident()


class Loader:
    """Gives ``loaded``, or raises it; keeps what it was asked for."""

    def __init__(self, loaded: Loaded | Exception | None = None) -> None:
        self.loaded = loaded or Loaded()
        self.asked: dict[str, Any] = {}
        self.thread: int | None = None

    def __call__(self, model: str, *, progress: Callable[[str], None], **options: Any) -> Loaded:
        self.thread = threading.get_ident()
        self.asked = {"model": model, **options}
        progress("reading the weights")
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


@asynccontextmanager
async def running(loader: Loader) -> AsyncIterator[TransformersBackend]:
    backend = TransformersBackend(load=loader, model="a/path", device="cpu", dtype="float32", threads=2, slots=3)
    async with trio.open_nursery() as nursery:
        await nursery.start(backend.run)
        yield backend
        nursery.cancel_scope.cancel()


async def answer(backend: TransformersBackend, request: GenerationRequest) -> list[Event]:
    """Everything that ``generate`` sends."""
    channel = EventChannel(200, Record("id", "/", marks=True))
    await backend.generate(await backend.prepare(request), channel)
    channel.close()
    events = []
    while True:
        try:
            events.append(await channel.receive())
        except trio.EndOfChannel:
            return events


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Token))


# Loading


async def test_loads_and_warms_in_the_model_thread(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    loader = Loader()
    assert isinstance(loader.loaded, Loaded)
    async with running(loader) as backend:
        assert loader.asked == {"model": "a/path", "device": "cpu", "dtype": "float32", "threads": 2, "slots": 3}
        assert loader.thread == loader.loaded.warmed_in != threading.get_ident()
        assert (backend.name, backend.slots, backend.context) == ("little", 3, 100)
        assert [record.getMessage() for record in caplog.records] == ["reading the weights", "warming the model"]
        assert (backend.step_age(), backend.paused_sequences, backend.kv_cache_bytes) == (0.0, 0, 0)


async def test_not_ready_before_it_runs() -> None:
    backend = TransformersBackend(load=Loader())
    request = GenerationRequest(prompt="hi")
    with pytest.raises(NotReady):
        await backend.prepare(request)
    with pytest.raises(NotReady):
        await backend.generate(PreparedText(request=request, ids=[1], max_tokens=1), EventChannel(1, Record("id", "/")))
    assert backend.step_age() == backend.paused_sequences == backend.kv_cache_bytes == 0


async def test_what_the_loader_raises_comes_out_as_it_is() -> None:
    unreadable = Tokenizer.from_str(byte_level().to_str())
    unreadable.decoder = None
    for loaded in (ConfigError("--model: there is none"), Loaded(tokenizer=ChatTokenizer(unreadable))):
        with pytest.raises(ConfigError, match="--model"):
            await TransformersBackend(load=Loader(loaded)).run()


async def test_cancelled_while_loading() -> None:
    """The loading ends at its next line of progress, and the thread with it."""
    reached = threading.Event()
    went_on = False

    def load(model: str, *, progress: Callable[[str], None], **_: Any) -> Loaded:
        nonlocal went_on
        for n in range(1000):
            progress(str(n))
            reached.set()
            threading.Event().wait(0.005)
        went_on = True
        return Loaded()

    with trio.fail_after(2):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(TransformersBackend(load=load).run)
            await trio.to_thread.run_sync(reached.wait)
            nursery.cancel_scope.cancel()
    assert not went_on


# Prompts


async def test_a_prompt_is_continued() -> None:
    async with running(Loader()) as backend:
        events = await answer(backend, GenerationRequest(prompt="hi there", max_tokens=7))
        ids = byte_level().encode("hi there").ids
        assert events[0] == Started()
        assert events[-1] == Finish("length")
        assert text(events) == byte_level().decode(expected(ids, 7))


async def test_messages_go_through_the_template() -> None:
    loader = Loader()
    async with running(loader) as backend:
        prepared = await backend.prepare(GenerationRequest(messages=(Message("user", "hé"),), max_tokens=1))
        assert isinstance(prepared, PreparedText)
        assert prepared.ids == byte_level().encode("<user>hé<eos><assistant>").ids
        assert prepared.prompt_tokens == len(prepared.ids)


async def test_special_tokens_come_once() -> None:
    """A prompt gets what the tokenizer puts in front of it; a chat has it from its template."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.post_processor = processors.TemplateProcessing(
        "<eos> $A", special_tokens=[("<eos>", tokenizer.token_to_id("<eos>"))]
    )
    async with running(Loader(Loaded(tokenizer=ChatTokenizer(tokenizer)))) as backend:
        prompt = await backend.prepare(GenerationRequest(prompt="hi"))
        chat = await backend.prepare(GenerationRequest(messages=(Message("user", "hi"),)))
    assert isinstance(prompt, PreparedText)
    assert isinstance(chat, PreparedText)
    eos = tokenizer.token_to_id("<eos>")
    assert prompt.ids[0] == eos
    assert prompt.ids.count(eos) == chat.ids.count(eos) == 1


async def test_a_continued_prompt_keeps_its_space() -> None:
    """D06, where the tokenizer writes a space in front of words."""
    steps = FakeModel(context=100)
    steps.choose = lambda tokens: [0, 2][len(tokens) % 2]
    async with running(Loader(Loaded(steps=steps, tokenizer=ChatTokenizer(metaspace())))) as backend:
        assert text(await answer(backend, GenerationRequest(prompt="cc", max_tokens=2))) == " ac"
        assert text(await answer(backend, GenerationRequest(messages=(Message("user", "c"),), max_tokens=2))) in ("ac", "c a")


async def test_stop_and_usage() -> None:
    whole = byte_level().decode(expected(byte_level().encode("hi").ids, 9))
    async with running(Loader()) as backend:
        events = await answer(backend, GenerationRequest(prompt="hi", max_tokens=9, stop=(whole[4:6],)))
    assert text(events) == whole[:4]
    assert events[-1] == Finish("stop")
    assert sum(event.count for event in events if isinstance(event, Token)) == 6


# Limits


async def test_the_context_is_enforced() -> None:
    loader = Loader()
    assert isinstance(loader.loaded, Loaded)
    async with running(loader) as backend:
        one = byte_level().encode("~").ids
        assert len(one) == 1
        for length, limit, left in [(99, None, 1), (99, 1, 1), (90, None, 10), (90, 10, 10), (90, 3, 3)]:
            prepared = await backend.prepare(GenerationRequest(prompt="~" * length, max_tokens=limit))
            assert isinstance(prepared, PreparedText)
            assert (prepared.prompt_tokens, prepared.max_tokens) == (length, left)
        refusals: list[tuple[GenerationRequest, str]] = [
            (GenerationRequest(prompt="~" * 100), "prompt"),
            (GenerationRequest(prompt="~" * 100_000, max_tokens=5), "prompt"),
            (GenerationRequest(messages=(Message("user", "~" * 100),)), "messages"),
            (GenerationRequest(prompt="~" * 90, max_tokens=11), "max_tokens"),
            (GenerationRequest(prompt=""), "prompt"),
            (GenerationRequest(), "prompt"),
            (GenerationRequest(prompt="x", sampling=Sampling(logit_bias=((10**6, 1.0),))), "logit_bias"),
            (GenerationRequest(prompt="x", sampling=Sampling(logit_bias=((-1, 1.0),))), "logit_bias"),
        ]
        for request, field_name in refusals:
            with pytest.raises(BadRequest) as caught:
                await backend.prepare(request)
            assert caught.value.param == field_name
            assert "100 tokens" in caught.value.message or "context" not in caught.value.message
        assert loader.loaded.steps.steps == []


async def test_a_small_pool_is_the_context() -> None:
    loaded = Loaded(steps=FakeModel(pool=40, context=100))
    async with running(Loader(loaded)) as backend:
        assert backend.context == 40
        events = await answer(backend, GenerationRequest(prompt="~" * 30))
        assert sum(event.count for event in events if isinstance(event, Token)) == 10


async def test_a_long_prompt_can_be_left() -> None:
    """And it holds up nobody: a megabyte that fits (so that all of it is looked at) is tokenised in pieces off the loop."""
    loaded = Loaded(steps=FakeModel(pool=10**7, context=10**6))
    beats = 0
    with trio.fail_after(20):
        async with running(Loader(loaded)) as backend, trio.open_nursery() as nursery:

            async def beat() -> None:
                nonlocal beats
                while True:
                    await trio.sleep(0.002)
                    beats += 1

            nursery.start_soon(beat)
            with trio.move_on_after(0.1) as scope:
                await backend.prepare(GenerationRequest(prompt="the dog " * 120_000))
            assert scope.cancelled_caught
            assert beats > 10
            nursery.cancel_scope.cancel()


async def test_a_long_prompt_that_fits_is_tokenised_in_one_go() -> None:
    words = "the quick brown fox " * 3000
    async with running(Loader(Loaded(steps=FakeModel(pool=10**6, context=10**5)))) as backend:
        prepared = await backend.prepare(GenerationRequest(prompt=words, max_tokens=1))
    assert isinstance(prepared, PreparedText)
    assert prepared.ids == byte_level().encode(words).ids


@pytest.mark.parametrize("template", ["x", None])
async def test_template_that_refuses(template: str | None) -> None:
    """A11: what the template says itself stays in the log."""
    loaded = Loaded(tokenizer=ChatTokenizer(byte_level(), template))
    async with running(Loader(loaded)) as backend:
        with pytest.raises(BadRequest) as caught:
            await backend.prepare(GenerationRequest(messages=(Message("wizard", "hi"),)))
    assert caught.value.param == "messages"
    assert "secret" not in caught.value.message


async def test_prepared_by_somebody_else() -> None:
    async with running(Loader()) as backend:
        foreign = Prepared(request=GenerationRequest(prompt="hi"))
        with pytest.raises(TypeError):
            await backend.generate(foreign, EventChannel(1, Record("id", "/")))


async def test_many_at_once_over_the_real_thread() -> None:
    """Thirty requests share steps, some of them cancelled at a random moment; the rest are exact, and the memory is back."""
    loaded = Loaded(steps=FakeModel(pool=300, context=100))
    done: dict[int, str] = {}

    async def one(backend: TransformersBackend, n: int) -> None:
        if n % 3 == 0:
            with trio.move_on_after(0.0005 * n):
                await answer(backend, GenerationRequest(prompt="~" * (n + 1), max_tokens=60))
        else:
            done[n] = text(await answer(backend, GenerationRequest(prompt="~" * (n + 1), max_tokens=20)))

    async with running(Loader(loaded)) as backend:
        async with trio.open_nursery() as nursery:
            for n in range(30):
                nursery.start_soon(one, backend, n)
        assert backend.kv_cache_bytes == loaded.steps.used == 0
    assert len(done) == 20
    for n, found in done.items():
        assert found == byte_level().decode(expected(byte_level().encode("~" * (n + 1)).ids, 20))

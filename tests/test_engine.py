"""The scheduler, on the fake clock, with a fake model that notices every token out of place. A step takes one virtual second."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from tests.fakes.small_tokenizers import byte_level
from tests.fakes.step_model import FakeCache, FakeModel, ScriptedRunner, expected
from trio_sse.backends.transformers.engine import Engine, ModelFailed, longest_sequence
from trio_sse.backends.transformers.sequence import Sequence
from trio_sse.backends.transformers.text import TokenStream, Vocabulary
from trio_sse.channel import EventChannel
from trio_sse.errors import BadRequest, NotReady
from trio_sse.events import Event, Finish, Sampling, Started, Token
from trio_sse.trace import Outcome, Record

VOCABULARY = Vocabulary(byte_level())
PROMPTS = [[n, 2 * n, 7, 9] for n in range(40)]


def now_ns() -> int:
    return round(trio.current_time() * 1e9)


class Job:
    """One request as the exchange would run it: a producer in a scope of its own, and a reader with a pace."""

    def __init__(self, engine: Engine, prompt: list[int], count: int, *, stops: tuple[str, ...] = (), capacity: int = 16) -> None:
        self.engine = engine
        self.prompt = prompt
        self.count = count
        self.record = Record("id", "/", marks=True, clock=now_ns)
        self.channel = EventChannel(capacity, self.record)
        self.seq = Sequence(prompt, count, Sampling(), TokenStream(VOCABULARY, stops), self.channel)
        self.scope = trio.CancelScope()
        self.events: list[Event] = []
        self.times: list[float] = []
        self.reading = trio.Event()
        self.ended_at: float | None = None
        self.error: Exception | None = None

    async def produce(self) -> None:
        with self.scope:
            try:
                await self.engine.serve(self.seq)
            except Exception as error:  # noqa: BLE001  (the test looks at it)
                self.error = error
        self.ended_at = trio.current_time()
        self.channel.close()

    async def read(self) -> None:
        await self.reading.wait()
        while True:
            try:
                self.events.append(await self.channel.receive())
            except trio.EndOfChannel:
                return
            self.times.append(trio.current_time())

    def start(self, nursery: trio.Nursery, *, read: bool = True) -> Job:
        nursery.start_soon(self.produce)
        nursery.start_soon(self.read)
        if read:
            self.reading.set()
        return self

    def cancel(self) -> None:
        self.record.reach(Outcome.CLIENT_DISCONNECTED, "reset")
        self.reading.set()  # nobody holds the test up
        self.scope.cancel(reason="the client has gone")

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Token))

    @property
    def tokens(self) -> int:
        return sum(event.count for event in self.events if isinstance(event, Token))

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]

    def marks(self, *kinds: str) -> list[tuple[str | int | None, ...]]:
        return [(mark[0], *mark[2:]) for mark in self.record.marks if mark[0] in kinds]

    def assert_complete(self) -> None:
        assert self.error is None
        assert self.text == decoded(expected(self.prompt, self.count))
        assert self.tokens == self.count
        assert self.events[0] == Started()
        assert self.events[-1] == Finish("length")
        assert self.kinds()[1:-1] == ["Token"] * (len(self.events) - 2)


def decoded(ids: list[int]) -> str:
    return str(byte_level().decode(ids))


@asynccontextmanager
async def running(model: FakeModel, runner: ScriptedRunner | None = None) -> AsyncIterator[tuple[Engine, trio.Nursery]]:
    """An engine at work, and a nursery for the jobs; when they have ended nothing may be left."""
    async with trio.open_nursery() as outer:
        engine = Engine(model, runner or ScriptedRunner())
        await outer.start(engine.run)
        async with trio.open_nursery() as nursery:
            yield engine, nursery
        assert_empty(engine, model)
        outer.cancel_scope.cancel()


def assert_empty(engine: Engine, model: FakeModel) -> None:
    assert engine.kv_cache_bytes == 0
    assert engine.sequences == 0
    assert engine.paused_sequences == 0
    assert model.used == 0
    assert all(cache.closed for cache in model.opened)


# One sequence


async def test_one_sequence(autojump_clock: trio.testing.MockClock) -> None:
    """N tokens: the prompt's chunks, then N − 1 decode steps, each mark in its place, and the memory back at the end."""
    model = FakeModel(chunk=8)
    prompt = list(range(20))
    async with running(model) as (engine, nursery):
        job = Job(engine, prompt, 5).start(nursery)
    job.assert_complete()
    assert [[n for _, n in step] for step in model.steps] == [[8], [8], [4], [1], [1], [1], [1]]
    assert job.times[0] == 0.0  # Started comes before prefill
    assert job.times[1:] == [3.0, 4.0, 5.0, 6.0, 7.0, 7.0]
    assert job.ended_at == 7.0
    assert job.seq.steps == 7
    assert model.opened[0].capacity == 24
    model_lane = ("started", "prefill_begin", "prefill_end", "step_begin", "step_end", "cache_released")
    assert job.marks(*model_lane) == [
        ("started",),
        *[mark for n in (8, 8, 4) for mark in (("prefill_begin", n), ("prefill_end", n))],
        *[mark for n in (1, 2, 3, 4) for mark in (("step_begin", n), ("step_end", n))],
        ("cache_released", 240),
    ]


async def test_one_token_is_one_prefill(autojump_clock: trio.testing.MockClock) -> None:
    model = FakeModel()
    async with running(model) as (engine, nursery):
        job = Job(engine, [1, 2, 3], 1).start(nursery)
    job.assert_complete()
    assert len(model.steps) == 1


async def test_cached_prefix_is_not_fed(autojump_clock: trio.testing.MockClock) -> None:
    model = FakeModel()
    model.cached = 14
    async with running(model) as (engine, nursery):
        job = Job(engine, list(range(20)), 2).start(nursery)
        whole = Job(engine, [4], 2).start(nursery)
    job.assert_complete()
    whole.assert_complete()
    assert job.marks("prefill_begin") == [("prefill_begin", 6)]


async def test_end_token(autojump_clock: trio.testing.MockClock) -> None:
    """It ends the text, is not part of it, and is not fed."""
    model = FakeModel()
    model.eos_after = 4
    async with running(model) as (engine, nursery):
        job = Job(engine, [1, 2, 3], 9).start(nursery)
    assert job.text == decoded(expected([1, 2, 3], 3))
    assert job.tokens == 3
    assert job.events[-1] == Finish("stop")
    assert len(model.steps) == 4


async def test_end_token_at_once(autojump_clock: trio.testing.MockClock) -> None:
    model = FakeModel()
    model.eos_after = 1
    async with running(model) as (engine, nursery):
        job = Job(engine, [1], 9).start(nursery)
    assert job.events == [Started(), Finish("stop")]


async def test_stop_string(autojump_clock: trio.testing.MockClock) -> None:
    """Steps stop at the token that completes it, which is counted; what was held back for it is not shown."""
    model = FakeModel()
    whole = decoded(expected([5], 20))
    async with running(model) as (engine, nursery):
        job = Job(engine, [5], 20, stops=(whole[6:9], whole[2:5] + "\n")).start(nursery)
    assert job.text == whole[:6]
    assert job.tokens == 9
    assert job.events[-1] == Finish("stop")
    assert len(model.steps) == 9


async def test_text_held_back_is_released_at_the_limit(autojump_clock: trio.testing.MockClock) -> None:
    model = FakeModel()
    whole = decoded(expected([5], 6))
    async with running(model) as (engine, nursery):
        job = Job(engine, [5], 6, stops=(whole[3:] + "\n",)).start(nursery)
    assert (job.text, job.tokens, job.events[-1]) == (whole, 6, Finish("length"))
    assert [event.count for event in job.events if isinstance(event, Token)] == [1, 1, 1, 3]


async def test_half_a_character_is_released_at_the_limit(autojump_clock: trio.testing.MockClock) -> None:
    emoji = byte_level().encode("x🦙").ids
    model = FakeModel()
    model.choose = lambda tokens: emoji[len(tokens) - 1]
    async with running(model) as (engine, nursery):
        job = Job(engine, [5], len(emoji) - 1).start(nursery)
    assert job.text == "x\ufffd"
    assert job.events[-1] == Finish("length")


# Company


async def test_same_tokens_in_any_company(autojump_clock: trio.testing.MockClock) -> None:
    """Forty prompts of all lengths that come, pause, leave and fail at random times: the others get exactly their own tokens."""
    rng = random.Random(7)
    model = FakeModel(pool=600)
    broken: set[FakeCache] = set()
    model.fail_item = lambda cache: ValueError() if cache in broken and rng.random() < 0.2 else None

    async def visit(engine: Engine, nursery: trio.Nursery, n: int) -> tuple[Job, str]:
        await trio.sleep(rng.uniform(0, 60))
        job = Job(engine, list(range(n, n + rng.randrange(1, 30))), rng.randrange(1, 20), capacity=rng.choice([1, 16]))
        fate = rng.choice(["normal", "normal", "slow", "cancelled", "failed"])
        job.start(nursery, read=fate != "slow")
        if fate == "slow":
            await trio.sleep(rng.uniform(0, 30))
            job.reading.set()
        elif fate == "cancelled":
            await trio.sleep(rng.uniform(0, 10))
            job.cancel()
        elif fate == "failed":
            await trio.sleep(rng.uniform(0, 10))
            if isinstance(job.seq.cache, FakeCache):
                broken.add(job.seq.cache)
        return job, fate

    jobs: list[tuple[Job, str]] = []
    async with running(model) as (engine, nursery):

        async def run(n: int) -> None:
            jobs.append(await visit(engine, nursery, n))

        for n in range(40):
            nursery.start_soon(run, n)
    fates = Counter(fate if job.error is None else "failed" for job, fate in jobs)
    assert set(fates) >= {"normal", "slow", "cancelled", "failed"}
    for job, fate in jobs:
        if fate in ("normal", "slow") or (fate == "failed" and job.error is None):
            job.assert_complete()
        else:
            assert decoded(expected(job.prompt, job.count)).startswith(job.text)


async def test_decode_and_prefill_share_every_step(autojump_clock: trio.testing.MockClock) -> None:
    """A long prompt neither holds up who decodes nor is held up by them; a short one does not wait behind it."""
    model = FakeModel(chunk=8)
    async with running(model) as (engine, nursery):
        decoding = [Job(engine, prompt, 40).start(nursery) for prompt in PROMPTS[:3]]
        await trio.sleep(4.5)
        long = Job(engine, list(range(160)), 2).start(nursery)
        await trio.sleep(3)
        short = Job(engine, [1, 2, 3, 4, 5], 2).start(nursery)
    for job in decoding:
        gaps = [b - a for a, b in zip(job.times[1:-1], job.times[2:], strict=True)]
        assert set(gaps) == {1.0, 0.0}
        assert gaps.count(0.0) == 1  # Finish comes with the last token
    assert short.times[1] - short.times[0] <= 2.0
    assert long.times[1] - long.times[0] == 160 / 8 + 1  # one turn went to the short one
    for step in model.steps:
        assert sum(n for _, n in step if n > 1) <= 8


async def test_two_long_prompts_take_turns(autojump_clock: trio.testing.MockClock) -> None:
    model = FakeModel(chunk=8)
    async with running(model) as (engine, nursery):
        jobs = [Job(engine, list(range(n, n + 64)), 2).start(nursery) for n in range(3)]
    firsts = sorted(job.times[1] for job in jobs)
    assert firsts == [22.0, 23.0, 24.0]


async def test_short_prompts_share_a_step(autojump_clock: trio.testing.MockClock) -> None:
    model = FakeModel(chunk=8)
    async with running(model) as (engine, nursery):
        jobs = [Job(engine, prompt[:2], 2).start(nursery) for prompt in PROMPTS[:4]]
    assert [job.times[1] for job in jobs] == [1.0] * 4


async def test_chunks_are_cut_the_same_in_any_company(autojump_clock: trio.testing.MockClock) -> None:
    model = FakeModel(chunk=8)
    async with running(model) as (engine, nursery):
        Job(engine, list(range(30)), 2).start(nursery)
        for n in range(1, 9):
            Job(engine, list(range(n)), 2).start(nursery)
    cuts = [n for step in model.steps for cache, n in step if len(cache.prompt) == 30]
    assert cuts == [8, 8, 8, 6, 1]


# Slow readers


async def test_a_stalled_reader_pauses_only_itself(autojump_clock: trio.testing.MockClock) -> None:
    """Issue 7, 4: three stalled beside a healthy one. Their step counters stand still; its tokens come as if it were alone."""
    model = FakeModel()
    async with running(model) as (engine, nursery):
        stalled = [Job(engine, prompt, 50, capacity=4).start(nursery, read=False) for prompt in PROMPTS[:3]]
        healthy = Job(engine, PROMPTS[3], 50, capacity=4).start(nursery)
        await trio.sleep(20)
        # Four events are in the channel, Started among them, and one more token waits to enter it.
        assert [job.seq.generated for job in stalled] == [4, 4, 4]
        assert engine.paused_sequences == 3
        assert engine.kv_cache_bytes == model.used > 0
        counters = [job.seq.steps for job in stalled]
        await trio.sleep(40)
        assert [job.seq.steps for job in stalled] == counters
        assert healthy.ended_at is not None
        assert {round(b - a, 6) for a, b in zip(healthy.times[1:-2], healthy.times[2:-1], strict=True)} == {1.0}
        for job in stalled:
            job.reading.set()
    for job in [*stalled, healthy]:
        job.assert_complete()


async def test_an_idle_engine_is_woken_by_a_reader(autojump_clock: trio.testing.MockClock) -> None:
    model = FakeModel()
    async with running(model) as (engine, nursery):
        job = Job(engine, [1], 8, capacity=1).start(nursery, read=False)
        await trio.sleep(100)
        assert len(model.steps) == 1
        for taken in range(1, 5):
            await job.channel.receive()
            await trio.sleep(10)
            assert len(model.steps) == 1 + taken  # one for one
        job.cancel()
    assert len(model.steps) == 5


async def test_a_finished_sequence_with_a_slow_reader_holds_no_memory(autojump_clock: trio.testing.MockClock) -> None:
    model = FakeModel()
    async with running(model) as (engine, nursery):
        job = Job(engine, [1], 3, capacity=3).start(nursery, read=False)
        await trio.sleep(10)
        assert engine.kv_cache_bytes == 0
        assert engine.paused_sequences == 0
        assert job.ended_at is None
        job.reading.set()
    job.assert_complete()


# Cancellation


@pytest.mark.parametrize("offset", [0.0, 0.4, 0.5, 0.999])
async def test_at_most_one_step_after_the_verdict(autojump_clock: trio.testing.MockClock, offset: float) -> None:
    """At each moment of prefill and decode. The step that runs is waited for, and no second one begins."""
    for second in range(8):
        model = FakeModel(chunk=8)
        async with running(model) as (engine, nursery):
            job = Job(engine, list(range(30)), 50).start(nursery)
            neighbour = Job(engine, [1], 30).start(nursery)
            begin = trio.current_time()
            await trio.sleep(second + offset)
            before = len(model.steps)
            job.cancel()
        assert job.ended_at is not None
        assert job.ended_at <= begin + second + 1
        cache = next((cache for cache in model.opened if len(cache.prompt) == 30), None)
        if cache is None:
            assert (second, offset) == (0, 0.0)  # it left before it was admitted
            continue
        assert sum(other is cache for step in model.steps[before:] for other, _ in step) <= 1
        assert job.record.tokens_after_verdict <= 1
        assert job.marks("cache_released") == [("cache_released", 790)]
        neighbour.assert_complete()


async def test_work_for_nobody_is_counted(autojump_clock: trio.testing.MockClock) -> None:
    model = FakeModel()
    async with running(model) as (engine, nursery):
        job = Job(engine, [1], 50).start(nursery)
        await trio.sleep(4.5)
        job.cancel()
    assert job.record.tokens_generated == 5
    assert job.record.tokens_after_verdict == 1


async def test_cancelled_while_paused(autojump_clock: trio.testing.MockClock) -> None:
    model = FakeModel()
    async with running(model) as (engine, nursery):
        job = Job(engine, [1], 50, capacity=2).start(nursery, read=False)
        await trio.sleep(10)
        steps = len(model.steps)
        job.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert job.ended_at == trio.current_time()
        assert engine.kv_cache_bytes == 0
    assert len(model.steps) == steps


async def test_cancelled_in_a_step_that_does_not_end(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The slot stays taken, because it is: ``serve`` returns with the step, and says so meanwhile. The watchdog sees the age."""
    model = FakeModel()
    runner = ScriptedRunner()
    async with running(model, runner) as (engine, nursery):
        job = Job(engine, [1], 50).start(nursery)
        await trio.sleep(1.5)
        runner.step = 100.0
        await trio.sleep(1)
        job.cancel()
        await trio.sleep(91)
        assert engine.sequences == 1
        assert engine.step_age() == 91.5
        assert len(caplog.records) == 3
    assert job.ended_at == 102.0
    assert engine.step_age() == 0.0


async def test_thousand_aborts_leave_the_pool_empty(autojump_clock: trio.testing.MockClock) -> None:
    """Issue 7, 5."""
    rng = random.Random(11)
    model = FakeModel(pool=400)
    runner = ScriptedRunner()
    runner.seconds = lambda name: rng.uniform(0, 0.1) if name == "step" else rng.choice([0.0, 0.001])
    async with running(model, runner) as (engine, nursery):

        async def abort(n: int) -> None:
            await trio.sleep(rng.uniform(0, 100))
            job = Job(engine, list(range(n % 40 + 1)), 20, capacity=rng.choice([1, 2, 16])).start(
                nursery, read=rng.random() < 0.7
            )
            await trio.sleep(rng.choice([0.0, rng.uniform(0, 0.1), rng.uniform(0, 3)]))
            job.cancel()

        for n in range(1000):
            nursery.start_soon(abort, n)
    assert len(model.opened) > 300
    async with running(model, runner) as (engine, nursery):
        last = Job(engine, [1, 2], 5).start(nursery)
    last.assert_complete()


class CancelAt(trio.abc.Instrument):
    """Calls ``action`` before the n-th scheduling of any task."""

    def __init__(self, n: int, action: object) -> None:
        self.left = n
        self.action = action

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.left -= 1
        if self.left == 0:
            assert callable(self.action)
            self.action()


@pytest.mark.parametrize("capacity", [1, 16])
async def test_cancellation_at_every_scheduling_point(autojump_clock: trio.testing.MockClock, capacity: int) -> None:
    """From the first point on until the generation is over: the memory comes back, the neighbour notices nothing."""
    n = 0
    while True:
        n += 1
        model = FakeModel(chunk=8)
        async with running(model) as (engine, nursery):
            neighbour = Job(engine, [3], 12, capacity=capacity).start(nursery)
            job = Job(engine, list(range(12)), 6, capacity=capacity).start(nursery)
            steps = 0

            def cancel(job: Job = job, model: FakeModel = model) -> None:
                nonlocal steps
                steps = len(model.steps)
                job.cancel()

            instrument = CancelAt(n, cancel)
            trio.lowlevel.add_instrument(instrument)
        trio.lowlevel.remove_instrument(instrument)
        neighbour.assert_complete()
        if instrument.left > 0:
            break
        late = [cache for step in model.steps[steps:] for cache, _ in step if len(cache.prompt) == 12]
        assert len(late) <= 1 or job.kinds()[-1] == "Finish"
        assert job.record.tokens_after_verdict <= 1 or job.kinds()[-1] == "Finish"
    assert n > 60


# Failures


@pytest.mark.parametrize("error", [RuntimeError("secret"), MemoryError(), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [1, 2, 5])
async def test_a_step_that_raises(autojump_clock: trio.testing.MockClock, error: BaseException, at: int) -> None:
    """L16: it fails the sequences in it, paused ones excepted, and the engine goes on."""
    model = FakeModel()

    def on_step(number: int) -> None:
        if number == at:
            raise error

    model.on_step = on_step
    async with running(model) as (engine, nursery):
        jobs = [Job(engine, [n], 9).start(nursery) for n in (1, 2)]
        paused = Job(engine, [3], 9, capacity=1)
        if at == 5:
            paused.start(nursery, read=False)
        await trio.sleep(at + 0.5)
        after = Job(engine, [8], 3).start(nursery)
        paused.reading.set()
    for job in jobs:
        assert isinstance(job.error, ModelFailed)
        assert job.error.__cause__ is error
        assert job.tokens == at - 1
        assert not any(isinstance(event, Finish) for event in job.events)
    if at == 5:
        paused.assert_complete()
    after.assert_complete()


async def test_an_item_that_fails(autojump_clock: trio.testing.MockClock) -> None:
    model = FakeModel()
    model.fail_item = lambda cache: ValueError("no") if cache.prompt == [2] and cache.length == 4 else None
    async with running(model) as (engine, nursery):
        good, bad = (Job(engine, [n], 9).start(nursery) for n in (1, 2))
    good.assert_complete()
    assert isinstance(bad.error, ModelFailed)
    assert bad.tokens == 3


async def test_held_back_text_is_released_before_a_failure(autojump_clock: trio.testing.MockClock) -> None:
    model = FakeModel()
    model.fail_item = lambda cache: ValueError("no") if cache.length == 7 else None
    whole = decoded(expected([1], 6))
    async with running(model) as (engine, nursery):
        job = Job(engine, [1], 9, stops=(whole[2:] + "\n",)).start(nursery)
    assert isinstance(job.error, ModelFailed)
    assert (job.text, job.tokens) == (whole, 6)


async def test_cache_that_cannot_be_opened(autojump_clock: trio.testing.MockClock) -> None:
    """It fails before Started, so that it becomes a status; a refusal in the model's own words stays one."""
    model = FakeModel()

    def on_open(prompt: list[int]) -> None:
        if prompt == [1]:
            raise MemoryError
        if prompt == [2]:
            raise BadRequest("No.", param="seed")

    model.on_open = on_open
    async with running(model) as (engine, nursery):
        jobs = [Job(engine, [n], 3).start(nursery) for n in (1, 2, 3)]
    assert isinstance(jobs[0].error, ModelFailed)
    assert isinstance(jobs[1].error, BadRequest)
    assert jobs[0].events == jobs[1].events == []
    assert jobs[0].marks("cache_released") == []
    jobs[2].assert_complete()


async def test_cache_that_cannot_be_closed(autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture) -> None:
    model = FakeModel()

    def on_close(cache: FakeCache) -> None:
        raise RuntimeError("device lost")

    model.on_close = on_close
    async with running(model) as (engine, nursery):
        jobs = [Job(engine, [n], 3).start(nursery) for n in (1, 2)]
    for job in jobs:
        job.assert_complete()
    assert len(caplog.records) == 2


async def test_a_model_that_returns_nonsense(autojump_clock: trio.testing.MockClock) -> None:
    model = FakeModel()
    answers = model.step
    model.step = lambda work: answers(work)[1:]  # type: ignore[method-assign]
    async with running(model) as (engine, nursery):
        short = Job(engine, [1], 3).start(nursery)
    model.step = lambda work: [None for _ in answers(work)]  # type: ignore[method-assign]
    async with running(model) as (engine, nursery):
        silent = Job(engine, [1], 3).start(nursery)
    assert isinstance(short.error, ModelFailed)
    assert isinstance(silent.error, ModelFailed)


async def test_a_fault_in_one_sequences_text_stops_no_other(autojump_clock: trio.testing.MockClock) -> None:
    class Broken(TokenStream):
        def feed(self, id: int, logprob: object = None) -> Token | None:
            raise IndexError

    model = FakeModel()
    async with running(model) as (engine, nursery):
        good = Job(engine, [1], 3).start(nursery)
        bad = Job(engine, [2], 3)
        bad.seq.text = Broken(VOCABULARY)
        bad.start(nursery)
    good.assert_complete()
    assert isinstance(bad.error, IndexError)


# The pool


async def test_sequences_wait_for_memory_in_order(autojump_clock: trio.testing.MockClock) -> None:
    """A big one in front is not overtaken by small ones that would fit; whoever leaves the line lets the next one up."""
    model = FakeModel(pool=100)
    async with running(model) as (engine, nursery):
        order = []
        for prompt, count in ((60, 5), (60, 41), (60, 3), (60, 30), (1, 5)):
            order.append(Job(engine, list(range(prompt)), count).start(nursery))
            await trio.testing.wait_all_tasks_blocked()
        small = order[4]
        await trio.sleep(1)
        assert engine.sequences == 5
        assert len(model.opened) == 1
        order[2].cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert order[2].ended_at == trio.current_time()
    for job in (order[0], order[1], order[3], small):
        job.assert_complete()
    starts = [job.times[0] for job in (order[0], order[1], order[3], small)]
    assert starts == sorted(starts)
    assert starts[0] == 0.0 < starts[1]


async def test_the_head_of_the_line_leaves(autojump_clock: trio.testing.MockClock) -> None:
    model = FakeModel(pool=100)
    async with running(model) as (engine, nursery):
        first = Job(engine, [1], 50).start(nursery)
        await trio.sleep(1)
        big = Job(engine, [2], 90).start(nursery)
        await trio.sleep(1)
        small = Job(engine, [3], 20).start(nursery)
        await trio.sleep(1)
        assert small.events == []
        big.cancel()
        await trio.sleep(1)
        assert small.events != []
    first.assert_complete()
    small.assert_complete()


async def test_a_sequence_that_can_never_fit_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    model = FakeModel(pool=50)
    assert longest_sequence(model) == 50
    async with running(model) as (engine, nursery):
        job = Job(engine, [1], 51).start(nursery)
    assert isinstance(job.error, ValueError)
    model.pool_bytes = 10**9
    assert longest_sequence(model) == model.context


# The end


async def test_stopping_fails_whoever_is_there(autojump_clock: trio.testing.MockClock) -> None:
    """L19: nothing waits for ever, a full channel included, and the step that ran has ended."""
    model = FakeModel(pool=100)
    runner = ScriptedRunner()
    engine = Engine(model, runner)
    async with trio.open_nursery() as outer:
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            jobs = [Job(engine, [n], 50).start(outer, read=n != 2) for n in (1, 2, 3)]
            await trio.sleep(4.5)
            cancelled = jobs[0]
            cancelled.cancel()
            nursery.cancel_scope.cancel()
        assert not runner.running
        jobs[1].reading.set()
    assert cancelled.error is None
    assert isinstance(jobs[1].error, NotReady)
    assert isinstance(jobs[2].error, NotReady)
    assert engine.kv_cache_bytes == engine.sequences == 0
    with pytest.raises(NotReady):
        await engine.serve(Job(engine, [1], 1).seq)

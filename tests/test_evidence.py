"""The measured cases: what the matrix may say, what the client notes, and that each figure is what its words promise."""

from __future__ import annotations

import fcntl
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.evidence_sample import MATRIX, abort_marks, lines, whole_marks
from trio_sse.evidence import lock, manifest, matrix, report, timelines
from trio_sse.evidence.client import Client, EventCounter
from trio_sse.evidence.figures import FIGURES, figures_of, summarise, verdicts
from trio_sse.evidence.matrix import Behaviour, MatrixError, Rule
from trio_sse.evidence.traces import TraceError, load

# ---- Matrix ----


def test_the_matrix_names_only_figures_that_there_are() -> None:
    cases = matrix.parse(matrix.MATRIX.read_text()).cases
    assert len(cases) >= 18
    for case in cases:
        assert {rule.figure for rule in case.must} | set(case.reference) <= set(FIGURES), case.name
        assert case.must, case.name


def test_the_first_seven_cases_carry_the_reference() -> None:
    cases = matrix.parse(matrix.MATRIX.read_text()).cases
    told = [(case.reference["produced"], case.reference["received"], case.reference["channel_peak"]) for case in cases[:7]]
    assert told == [(300, 301, 4), (300, 301, 4), (5, 5, 1), (100, 5, 2), (15, 17, 2), (12, 5, 4), (80, 81, 2)]
    assert [case.reference["completed_after_verdict"] for case in cases[:7]] == [0, 0, 0, 95, 0, 0, 0]
    assert all("4" in case.server for case in cases[:7])


@pytest.mark.parametrize(
    ("change", "blamed"),
    [
        (("must = [", "musst = ["), "musst"),
        (('leave = "fin"', 'leave = "loudly"'), "leave"),
        (("after_events = 2", "after_evnts = 2"), "after_evnts"),
        ((", after_events = 2 }", " }"), "leave"),
        (('"produced = 3"', '"produced == 3"'), "produced == 3"),
        (('name = "whole"', 'name = "abort"'), "of one name"),
        (('name = "whole"', 'name = "../whole"'), "no name"),
        (("schema = 1", "schema = 2"), "schema"),
        (("schema = 1", "schema = "), "TOML"),
        (('title = "A client that reads to the end"\n', ""), "title"),
    ],
)  # fmt: skip
def test_a_matrix_that_makes_no_sense_is_refused_by_name(change: tuple[str, str], blamed: str) -> None:
    text = MATRIX.replace(*change)
    assert text != MATRIX
    with pytest.raises(MatrixError, match=blamed):
        matrix.parse(text)


def test_only_known_cases_can_be_chosen() -> None:
    parsed = matrix.parse(MATRIX)
    assert [case.name for case in parsed.chosen(("whole",)).cases] == ["whole"]
    assert [case.name for case in parsed.chosen(()).cases] == ["abort", "whole"]
    with pytest.raises(MatrixError, match="nothing"):
        parsed.chosen(("nothing",))


def test_a_rule_holds_only_for_a_figure_of_its_kind() -> None:
    assert Rule("produced", "=", 3).holds(3)
    assert not Rule("produced", "=", 3).holds(4)
    assert Rule("produced", "<=", 3).holds(3)
    assert not Rule("produced", "<=", 3).holds(3.5)
    assert Rule("produced", ">=", 3).holds(3)
    assert not Rule("produced", ">=", 3).holds(2)
    assert not Rule("produced", "<=", 3).holds(None)
    assert not Rule("produced", "<=", 3).holds("completed")
    assert Rule("outcome", "=", "completed").holds("completed")
    assert not Rule("outcome", "=", "completed").holds("cancelled")


# ---- Figures: each value below was worked out from the marks in evidence_sample.py by hand ----


def test_figures_of_an_abort() -> None:
    [exchange] = load(lines(1, abort_marks(), "client_disconnected"))
    figures = figures_of(exchange)
    expected = {
        "outcome": "client_disconnected", "status": 200, "produced": 4, "received": 2, "content_events": 2, "last_event": "token",
        "seq_gaps": 0, "channel_peak": 2, "enqueue_wait_ms": 2.0, "completed_after_verdict": 0, "produced_after_leaving": 1,
        "discarded": 2, "unaccounted": 0, "duration_ms": 29.6, "first_event_ms": 15.5, "ahead_events": 3,
        # Two events of 50 bytes were being written when the third entered the channel; it counts as long as the last one framed.
        "user_backlog_events": 3, "user_backlog_bytes": 150, "backlog_beyond_write_events": 1, "largest_write_bytes": 200,
        "write_wait_ms": 4.0, "kernel_unsent_bytes": 30, "kernel_unacked_bytes": 200, "bytes_taken": 300,
        "leaving_to_eof_ms": 0.5, "leaving_to_verdict_ms": 1.0, "verdict_to_cancel_ms": 1.0, "verdict_to_cache_ms": 2.0,
        "verdict_to_slot_ms": 3.0, "leaving_to_slot_ms": 4.0, "slot_after_last_event_ms": 3.3, "slot_taken": 1, "slot_released": 1,
        "cache_released_bytes": 4096, "probes": 1, "memory_mib": 50.0, "memory_growth_kib": 1024, "cpu_ms": 3.0,
    }  # fmt: skip
    assert {name: figures[name] for name in expected} == expected


def test_figures_of_a_whole_stream_and_of_a_platform_that_tells_less() -> None:
    [exchange] = load(lines(1, whole_marks(), "completed"))
    figures = figures_of(exchange)
    assert (figures["produced"], figures["received"], figures["content_events"], figures["last_event"]) == (3, 4, 3, "done")
    assert figures["production_share"] == round(10 / 12, 3)
    # Nobody left, nothing was told of the kernel, and no cache was taken: None, not 0.
    for name in ("leaving_to_verdict_ms", "produced_after_leaving", "kernel_unsent_bytes", "kernel_unacked_bytes", "cache_released_bytes"):
        assert figures[name] is None, name


def test_without_a_trace_only_the_clients_side_is_told() -> None:
    untraced = [entry for entry in whole_marks() if entry["side"] == "client"]
    [exchange] = load(lines(1, untraced, "completed"))
    exchange.record = None
    figures = figures_of(exchange)
    assert figures["received"] == 4
    assert figures["duration_ms"] == 18.0
    assert figures["produced"] is None
    assert figures["channel_peak"] is None
    assert figures["slot_taken"] is None


def test_work_after_the_verdict_is_counted_and_a_lost_event_is_noticed() -> None:
    late = abort_marks()
    moved = [entry | {"at": entry["at"] + 10_000_000} if entry["mark"] == "produced" and entry["seq"] == 4 else entry for entry in late]
    [exchange] = load(lines(1, [entry for entry in moved if entry["mark"] != "discarded"], "client_disconnected"))
    figures = figures_of(exchange)
    assert figures["completed_after_verdict"] == 1
    assert figures["unaccounted"] == 2


def test_a_gap_in_the_ids_is_noticed() -> None:
    marks = [entry for entry in whole_marks() if entry.get("id") != 2]
    [exchange] = load(lines(1, marks, "completed"))
    assert figures_of(exchange)["seq_gaps"] == 1


def test_the_median_is_a_measured_value_and_companions_do_not_count() -> None:
    exchanges = load(
        [line for run, shift in enumerate((0.0, 0.25, 1.0, 5.0), 1) for line in lines(run, abort_marks(shift), "client_disconnected")]
    )
    exchanges[3].role = "companion"
    spread = summarise(exchanges)["leaving_to_verdict_ms"]
    assert (spread["median"], spread["min"], spread["max"]) == (1.25, 1.0, 2.0)
    assert spread["values"] == [1.0, 1.25, 2.0]


def test_a_rule_that_is_broken_in_one_run_does_not_hold() -> None:
    case = matrix.parse(MATRIX).cases[0]
    exchanges = load(lines(1, abort_marks(), "client_disconnected") + lines(2, abort_marks(), "cancelled"))
    results = {rule: (held, values) for rule, held, values in verdicts(case, summarise(exchanges))}
    assert results["outcome = client_disconnected"] == (False, ["cancelled"])
    assert results["completed_after_verdict = 0"] == (True, [0, 0])
    assert results["produced >= 5"] == (False, [4, 4])


def test_values_are_told_in_the_order_of_numbers() -> None:
    assert report.told([8.68, 2.025, 0.17, 9, None]) == "0.17 … None"
    assert report.told([8.68, 2.025, 0.17, 10, 10]) == "0.17 … 10"
    assert report.told([3, 2, 3]) == "2, 3"
    assert report.told(["b", "a"]) == "a, b"
    assert report.told([8.68, 2.025, 0.17, 9], 1) == "9 … 2.025"  # as recordings of the first form have it


@pytest.mark.parametrize("bad", ["{", '{"run": 1, "exchange": 1, "side": "server", "at": 1, "mark": "eof"}', "7", '{"run": 1}'])
def test_a_line_that_is_no_mark_is_named(bad: str) -> None:
    with pytest.raises(TraceError, match="line 1 "):
        load([bad])


# ---- Report and timelines ----


def test_report_and_timeline_are_the_same_every_time(tmp_path: Path) -> None:
    parsed = matrix.parse(MATRIX)
    traces = {
        "abort": load(lines(1, abort_marks(), "client_disconnected")),
        "whole": load(lines(1, whole_marks(), "completed")),
    }
    summaries = {name: summarise(exchanges) for name, exchanges in traces.items()}
    first, second = (report.render("1", parsed, 1, {"b": 1, "a": 2}, summaries, traces) for _ in range(2))
    assert first == second
    assert "| `abort` | `produced >= 5` | **does not hold** | 4 |" in first
    assert "| `abort` | produced | 12 | 4 |" in first
    for case in parsed.cases:
        pictures = []
        for name in ("one.svg", "two.svg"):
            timelines.draw(tmp_path / name, case, traces[case.name])
            pictures.append((tmp_path / name).read_bytes())
        assert pictures[0] == pictures[1]
        assert (b"client leaves" in pictures[0]) == (case.name == "abort")


def test_a_compressed_trace_has_no_clock_in_it(tmp_path: Path) -> None:
    text = lines(1, abort_marks(), "x") * 40
    manifest.write_trace(tmp_path, "a", text)
    manifest.write_trace(tmp_path, "b", text[:30])
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == ["a.jsonl.gz", "b.jsonl"]
    assert (tmp_path / "traces/a.jsonl.gz").read_bytes()[4:8] == b"\0\0\0\0"
    assert manifest.read_text(tmp_path / "traces/a.jsonl.gz").splitlines() == text


def test_the_lock_keeps_others_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lock, "LOCK", tmp_path / "lock")
    with lock.alone(), (tmp_path / "lock").open("w") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("module", ["matrix", "traces", "figures", "report", "manifest", "replay"])
def test_what_replay_needs_is_the_standard_library(module: str) -> None:
    code = f"import sys; import trio_sse.evidence.{module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    others = {name for name in done.stdout.split() if name not in sys.stdlib_module_names} - {"trio_sse", "__main__", "site"}
    assert not {name for name in others if not name.startswith("_")}


# ---- The client ----


def test_events_are_counted_however_the_bytes_are_cut() -> None:
    stream = (
        b': hb\nevent: token\nid: 1\ndata: {"seq": 1}\n\n: hb\n\ndata: {"token": "a"}\n\n'
        b"event: done\nid: 2\ndata: {}\n\ndata: [DONE]\n\ndata: x"
    )
    expected = [("token", 1), ("message", None), ("done", 2), ("done", None)]
    for size in (1, 2, 3, 7, len(stream)):
        counter = EventCounter()
        found = [event for at in range(0, len(stream), size) for event in counter.feed(stream[at : at + size])]
        assert found == expected


Serve = Callable[[socket.socket], None]


@contextmanager
def peer(serve: Serve) -> Iterator[tuple[str, int]]:
    """A server on loopback that answers one connection with ``serve``, in a thread. What goes wrong there is raised here."""
    failed: list[BaseException] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)

        def accept() -> None:
            try:
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(10)
                    while b"\r\n\r\n" not in connection.recv(65536, socket.MSG_PEEK):
                        pass
                    connection.recv(65536)
                    serve(connection)
            except Exception as error:  # noqa: BLE001  (raised in the test's own thread below)
                failed.append(error)

        thread = threading.Thread(target=accept)
        thread.start()
        yield listener.getsockname()
        thread.join(10)
    assert not failed, failed


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(number: int) -> bytes:
    return chunk(b"event: token\nid: %d\ndata: {}\n\n" % number)


def kinds(client: Client) -> list[str]:
    return [str(mark["mark"]) for mark in client.marks if mark["mark"] != "received"]


def run_client(address: tuple[str, int], behaviour: Behaviour) -> Client:
    client = Client(address, "GET /events?events=3", "", "test-1", behaviour)
    client.run()
    assert client.error is None, client.error
    assert client.begun.is_set()
    times = [mark["at"] for mark in client.marks]
    assert times == sorted(times)  # type: ignore[type-var]
    return client


@pytest.mark.net
def test_a_client_that_reads_to_the_end() -> None:
    def serve(connection: socket.socket) -> None:
        connection.sendall(HEAD + event(1) + event(2) + chunk(b"event: done\nid: 3\ndata: {}\n\n") + b"0\r\n\r\n")

    with peer(serve) as address:
        client = run_client(address, Behaviour())
    assert kinds(client) == ["connected", "sent", "head", "event", "event", "event", "end"]
    assert client.head == {"status": 200, "content_type": "text/event-stream"}


@pytest.mark.net
@pytest.mark.parametrize("how", ["fin", "rst"])
def test_a_client_that_leaves(how: str) -> None:
    seen: list[object] = []

    def serve(connection: socket.socket) -> None:
        connection.sendall(HEAD + event(1) + event(2))
        try:
            seen.append(connection.recv(1))
        except ConnectionResetError as error:
            seen.append(type(error))

    with peer(serve) as address:
        client = run_client(address, Behaviour(leave=how, after_events=2))
    assert kinds(client) == ["connected", "sent", "head", "event", "event", "leave", "left"]
    assert seen == [b"" if how == "fin" else ConnectionResetError]


@pytest.mark.net
def test_a_client_that_leaves_before_any_answer() -> None:
    with peer(lambda connection: print(connection.recv(1))) as address:
        client = run_client(address, Behaviour(leave="fin", after_ms=20))
    assert kinds(client) == ["connected", "sent", "leave", "left"]
    assert client.head["status"] is None


@pytest.mark.net
def test_a_client_that_half_closes_reads_on() -> None:
    def serve(connection: socket.socket) -> None:
        connection.sendall(HEAD + event(1))
        assert connection.recv(1) == b""
        connection.sendall(event(2) + b"0\r\n\r\n")

    with peer(serve) as address:
        client = run_client(address, Behaviour(leave="half_close", after_events=1))
    assert kinds(client) == ["connected", "sent", "head", "event", "leave", "left", "event", "end"]


@pytest.mark.net
def test_a_client_that_stalls_sees_the_reset_without_reading() -> None:
    def serve(connection: socket.socket) -> None:
        connection.sendall(HEAD + event(1))
        connection.sendall(event(2))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    with peer(serve) as address:
        client = run_client(address, Behaviour(leave="stall", after_events=1))
    assert kinds(client)[-2:] == ["leave", "left"]


@pytest.mark.net
def test_a_client_that_meets_a_server_cut_off_says_so() -> None:
    with peer(lambda connection: connection.sendall(HEAD + event(1))) as address:
        client = Client(address, "GET /events", "", "test-1", Behaviour())
        client.run()
    assert client.error is not None


def test_a_wait_that_the_verdict_cut_short_counts_up_to_it() -> None:
    stalled = [entry for entry in abort_marks() if entry["mark"] != "write" and not (entry["mark"] == "enqueued" and entry["seq"] == 3)]
    [exchange] = load(lines(1, stalled, "client_stalled"))
    figures = figures_of(exchange)
    assert figures["write_wait_ms"] == 20.0  # framed at 11, verdict at 31
    assert figures["enqueue_wait_ms"] == 0.3  # the last event was produced at 30.7

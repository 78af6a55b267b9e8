"""Options, environment and ``ask``."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trio_sse import cli
from trio_sse.config import Config, options
from trio_sse.errors import ConfigError
from trio_sse.evidence.process import Server

ROOT = Path(__file__).parents[1]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trio_sse", *arguments],
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT, env={**os.environ, **environment},
    )  # fmt: skip


def test_help_lists_every_option_with_unit_and_default() -> None:
    told = " ".join(run("serve", "--help").stdout.split())
    for name, option in options().items():
        assert f"--{name.replace('_', '-')}" in told
        assert option.help in told
    assert "(default: 30 s)" in told
    assert "(default: 65536 bytes)" in told


def test_the_defaults_are_those_of_the_contract() -> None:
    config = Config()
    assert (config.host, config.port, config.backend, config.model) == ("127.0.0.1", 8766, "transformers", "smollm2")
    assert (config.queue, config.queue_timeout, config.channel_capacity, config.max_event) == (0, 30, 16, 65536)
    assert (config.write_timeout, config.heartbeat, config.header_timeout, config.body_timeout) == (30, 15, 10, 30)
    assert (config.keep_alive, config.request_deadline, config.cancel_grace, config.step_timeout) == (5, 0, 30, 60)
    assert (config.grace, config.max_body, config.max_header, config.max_connections) == (10, 1 << 20, 16384, 1000)
    assert config.events_slots == 8


@pytest.mark.parametrize(
    ("arguments", "environment", "named"),
    [
        (["--port", "x"], {}, "--port"),
        (["--port", "70000"], {}, "--port"),
        (["--port", "1.5"], {}, "--port"),
        (["--slots", "0"], {}, "--slots"),
        (["--heartbeat", "nan"], {}, "--heartbeat"),
        (["--write-timeout", "0"], {}, "--write-timeout"),
        (["--device", "tpu"], {}, "--device"),
        (["--certfile", "a"], {}, "--keyfile"),
        (["--cors-origin", "example.org"], {}, "--cors-origin"),
        (["--api-key", " "], {}, "--api-key"),
        (["--backend", "nobody"], {}, "--backend"),
        (["--backend", "no.such.module:thing"], {}, "--backend"),
        (["--backend", "scripted", "--script", "events=0"], {}, "--script"),
        (["--backend", "scripted", "--script", "speed=9"], {}, "--script"),
        (["--backend", "scripted", "--script", "events"], {}, "--script"),
        (["--backend", "scripted", "--host", "no.such.host.invalid"], {}, "--host"),
        (["--backend", "scripted", "--certfile", "/no/such", "--keyfile", "/no/such"], {}, "--certfile"),
        ([], {"TRIO_SSE_PORT": "x"}, "--port"),
        ([], {"TRIO_SSE_LAB": "perhaps"}, "--lab"),
        (["--no-such-option"], {}, "--no-such-option"),
    ],
    ids=str,
)
def test_a_bad_value_exits_2_with_one_line_that_names_the_option(
    arguments: list[str], environment: dict[str, str], named: str
) -> None:
    done = run("serve", *arguments, **environment)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert named in done.stderr
    assert done.stdout == ""


def test_environment_and_command_line() -> None:
    environment = {
        "TRIO_SSE_PORT": "1", "TRIO_SSE_LAB": "off", "TRIO_SSE_API_KEY": "a,b", "TRIO_SSE_SLOTS": "auto", "TRIO_SSE_GRACE": "2.5",
    }  # fmt: skip
    config = cli._config({"port": "2", "cors_origin": ["https://a.example"]}, environment)
    assert (config.port, config.lab, config.api_key, config.slots, config.grace) == (2, False, ("a", "b"), None, 2.5)
    assert config.cors_origin == ("https://a.example",)
    with pytest.raises(ConfigError, match="--port"):
        cli._config({"port": "-1"}, environment)


def test_port_in_use_is_told_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        begin = time.monotonic()
        done = run("serve", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert "127.0.0.1:" in done.stderr
    assert "errno 98" in done.stderr
    assert time.monotonic() - begin < 20  # seconds; loading the model would not be over


def test_ask_streams_and_ctrl_c_cancels() -> None:
    with Server(("--backend", "scripted", "--script", "interval_ms=20,events=200,size=4")) as server:
        url = f"http://{server.address[0]}:{server.address[1]}"
        done = run("ask", "hi", "--url", url, "--max-tokens", "3")
        assert (done.returncode, done.stdout.strip()) == (0, "w1 ww2 ww3 w")
        assert "completed: 3 events" in done.stderr
        chat = run("ask", "hi", "--url", url, "--max-tokens", "3", "--chat")
        assert (chat.returncode, chat.stdout.strip()) == (0, "w1 ww2 ww3 w")
        refused = run("ask", "hi", "--url", url, "--max-tokens", "3000")
        assert refused.returncode == 1
        assert "max_new_tokens" in refused.stderr

        asking = subprocess.Popen(
            [sys.executable, "-m", "trio_sse", "ask", "hi", "--url", url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
        )
        assert asking.stdout is not None
        assert asking.stdout.read(4) == b"w1 w"
        asking.send_signal(signal.SIGINT)
        _, told = asking.communicate(timeout=20)
        assert asking.returncode == 130
        assert b"cancelled" in told
        until = time.monotonic() + 10
        while "outcome=client_disconnected" not in server.printed() and time.monotonic() < until:
            time.sleep(0.05)
        assert "tokens_after_verdict=0" in server.printed().splitlines()[-1]


def test_ask_without_a_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    done = run("ask", "hi", "--url", f"http://127.0.0.1:{port}")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1

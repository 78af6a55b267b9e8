"""``python -m trio_sse``. ``replay`` is found before anything that needs an installed package is imported."""

from __future__ import annotations

import sys


def main(arguments: list[str]) -> int:
    """Runs one command; returns the exit status."""
    if arguments[:1] == ["replay"]:
        from trio_sse.evidence import replay

        return replay.command(arguments[1:])
    from trio_sse import cli

    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

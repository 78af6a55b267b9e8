"""Measured cases, their recording, and a replay that anyone can run offline.

    matrix.toml ─▶ record ─▶ evidence/N/{matrix, traces, environment, sources} ─▶ figures ─▶ report, timelines ─▶ manifest
                                                  └────────────── replay: all of it again, compared ──────────────┘

``matrix``, ``traces``, ``figures``, ``report``, ``manifest`` and ``replay`` import the standard library alone (and
:mod:`trio_sse.trace`, which does the same). ``record``, ``client``, ``process`` and ``timelines`` are what a recording needs besides.
"""

"""Argument types of the commands: what `argparse` calls to read a word."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """An integer >= 1, in plain digits. Raises ArgumentTypeError."""
    return _integer(text, 1)


def natural(text: str) -> int:
    """An integer >= 0, in plain digits. Raises ArgumentTypeError."""
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected an integer >= {least}, got {text!r}")
    return int(text)

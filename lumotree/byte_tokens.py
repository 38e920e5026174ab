"""The vocabulary of the shipped model: bytes, one end token, and padding that no text holds."""

from __future__ import annotations

from collections.abc import Sequence

from lumotree.errors import InputError

#: Stands before and behind every document.
END = 256
#: 256 bytes, the end token, and unused numbers up to a multiple of 16.
VOCAB = 272


def encode(text: str | bytes) -> list[int]:
    """The tokens of a text: END, then its bytes (UTF-8)."""
    return [END, *(text.encode() if isinstance(text, str) else text)]


def decode(tokens: Sequence[int]) -> str:
    """The text of tokens: bytes up to the first token that is none after the leading END; bad UTF-8 becomes U+FFFD.

    Raises InputError for a token outside the vocabulary.
    """
    for place, token in enumerate(tokens):
        if not 0 <= token < VOCAB:
            raise InputError(
                f"decode: token {token} at place {place} is outside the vocabulary; allowed: 0..{VOCAB - 1}"
            )
    body = tokens[1:] if tokens and tokens[0] == END else tokens
    end = next((place for place, token in enumerate(body) if token > 255), len(body))
    return bytes(body[:end]).decode(errors="replace")

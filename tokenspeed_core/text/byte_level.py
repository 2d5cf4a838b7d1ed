"""Byte-level vocabularies, which write every byte as one character."""

from __future__ import annotations


def byte_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary represents.

    Printable bytes represent themselves, the others are numbered from 256 on, as in GPT-2 (Radford et al.
    2019, openai/gpt-2 `encoder.py`).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}

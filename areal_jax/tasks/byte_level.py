"""The bytes that each id of a tokenizer adds to a text, if it is byte-level or has ids for single bytes."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend


def byte_table(backend: Backend) -> dict[int, bytes]:
    """Returns id -> bytes for every id of a byte-level tokenizer; b"" for special tokens."""
    added = backend.get_added_tokens_decoder()
    letters = byte_letters()
    table = {}
    for text, token in backend.get_vocab(with_added_tokens=True).items():
        if token in added:
            table[token] = b"" if added[token].special else text.encode()
        elif all(letter in letters for letter in text):
            table[token] = bytes(letters[letter] for letter in text)
        else:
            table[token] = text.encode()
    return table


def byte_ids(backend: Backend) -> dict[int, bytes]:
    """Returns id -> byte for the ids of single bytes, <0x00> to <0xFF>, of SentencePiece's models."""
    ids = ((backend.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
    return {token: bytes([byte]) for token, byte in ids if token is not None}


def byte_letters() -> dict[str, int]:
    """Returns the letters by which byte-level vocabularies write the 256 bytes, letter -> byte.

    A byte that is a printable character of Latin-1 is written as this character; the other 68 bytes, in
    ascending order, are written as the characters from U+0100 on (Radford et al. 2019, GPT-2).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}

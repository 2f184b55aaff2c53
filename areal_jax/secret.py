"""The secret shared by a server and its clients, required if other machines can reach the server."""

from __future__ import annotations

import hmac
import ipaddress
import os
from pathlib import Path

from areal_jax.types import ArealError

SHORTEST = 16
"""Minimum length of a secret, in characters."""

VARIABLE = "AREAL_JAX_SECRET"


class Secret:
    """A secret, sent as `authorization: Bearer <secret>` in gRPC metadata and in HTTP headers."""

    REFUSAL = "send the server's secret as `authorization: Bearer <secret>`"

    def __init__(self, text: str) -> None:
        """Raises ArealError if the secret is too short, or has characters that a header cannot carry."""
        if len(text) < SHORTEST or not text.isascii() or not text.isprintable() or " " in text:
            raise ArealError(
                f"the secret has {len(text)} characters; give at least {SHORTEST}, printable ASCII without "
                "spaces, such as `openssl rand -hex 32` makes"
            )
        self._expected = f"Bearer {text}".encode()

    def is_in(self, header: str | bytes | None) -> bool:
        """Whether `header` (None: absent) is `Bearer <secret>`; the comparison takes constant time."""
        given = header.encode("utf-8", "replace") if isinstance(header, str) else header or b""
        return hmac.compare_digest(given, self._expected)


def read_secret(file: Path | None) -> Secret | None:
    """Returns the secret in `file` or, if `file` is None, in AREAL_JAX_SECRET; None if neither is given.

    Raises ArealError if the file cannot be read, or the secret is too short or not printable ASCII.
    """
    if file is None:
        text = os.environ.get(VARIABLE)
        return None if text is None else Secret(text)
    try:
        return Secret(file.read_text("utf-8").strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ArealError(
            f"--secret-file {file} cannot be read: {error}; give a text file with the secret"
        ) from None


def require_secret(host: str, secret: Secret | None) -> None:
    """Raises ArealError if `secret` is None, and other machines can reach the address `host`."""
    if secret is None and not is_loopback(host):
        raise ArealError(
            f"--host {host} can be reached from other machines, and there is no secret; set {VARIABLE} or "
            "give --secret-file, or bind 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address or `localhost`; False for any other name, without a lookup."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"

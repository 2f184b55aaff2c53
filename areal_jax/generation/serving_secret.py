"""The shared secret: what keeps a server that others can reach from answering everybody."""

from __future__ import annotations

import hmac
import ipaddress

from areal_jax.types import ArealError

SHORTEST = 16
"""Characters a secret has at least."""

VARIABLE = "AREAL_JAX_SECRET"


class Secret:
    """Sent as `authorization: Bearer <secret>`, in gRPC metadata and in HTTP headers alike."""

    REFUSAL = "send the server's secret as `authorization: Bearer <secret>`"

    def __init__(self, text: str) -> None:
        """Raises ArealError for one that is short, or that a header cannot carry."""
        if len(text) < SHORTEST or not text.isascii() or not text.isprintable() or " " in text:
            raise ArealError(
                f"the secret has {len(text)} characters; give at least {SHORTEST}, printable ASCII without "
                "spaces, such as `openssl rand -hex 32` makes"
            )
        self._expected = f"Bearer {text}".encode()

    def is_in(self, header: str | bytes | None) -> bool:
        """Whether the header carries it; takes as long for a near miss as for a far one."""
        given = header.encode("utf-8", "replace") if isinstance(header, str) else header or b""
        return hmac.compare_digest(given, self._expected)


def require_secret(host: str, secret: Secret | None) -> None:
    """Raises ArealError for an address that others can reach, without a secret."""
    if secret is None and not _is_loopback(host):
        raise ArealError(
            f"--host {host} is reached from other machines, and there is no secret; set {VARIABLE} or give "
            "--secret-file, or bind 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    """Of a name only `localhost` is: what others resolve to may change."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"

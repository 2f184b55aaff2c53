"""A connection to Redis that reconnects, with errors that name the remedy.

If the connection is lost or the server is still loading, an operation is repeated until its deadline, so
running an operation twice must have the effect of running it once. The password appears in no message, log or
repr.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from areal_jax.plugin import needing
from areal_jax.secret import is_loopback
from areal_jax.types import ArealError

with needing("a run over several machines", "cluster"):
    import redis
    from redis import exceptions
    from redis.backoff import NoBackoff
    from redis.retry import Retry

RedisError = exceptions.RedisError

T = TypeVar("T")

SOCKET_S = 10.0
"""Seconds that Redis may take to answer one request before the connection counts as lost."""
PAUSES_S = (0.02, 1.0)
"""First and longest pause before an operation is repeated, in seconds; the pause doubles each time."""
OLDEST = (6, 2)
"""The oldest version (major, minor) of Redis that has every command that areal-jax uses."""
_REMEDIES: dict[type[Exception], str] = {
    exceptions.OutOfMemoryError: "raise maxmemory in its redis.conf (docs/launching.md gives the size)",
    exceptions.ReadOnlyError: "this server is a read-only replica: set runtime.redis to the primary server",
    exceptions.NoPermissionError: "give this Redis user the rights ~areal:* +@all -@dangerous +info",
}
_MISCONFIGURED = (
    "Redis cannot write its own files: free space on its disk, then resume the run; nothing is lost"
)

log = logging.getLogger(__name__)


def shown_without_passwords(parts: SplitResult) -> str:
    """Returns the url without passwords, to show in messages and files."""
    query = parse_qsl(parts.query, keep_blank_values=True)
    user, _, place = parts.netloc.rpartition("@")
    name = user.partition(":")[0]
    place = f"{name}@{place}" if name else place
    options = urlencode([(key, value) for key, value in query if "password" not in key])
    return f"{parts.scheme}://{place}{parts.path}" + (f"?{options}" if options else "")


class Link:
    """A connection to Redis that repeats an operation, until a deadline, while Redis does not answer.

    Threads may share it.
    """

    def __init__(self, url: str, secret: str | None, deadline_s: float, refusal: type[ArealError]) -> None:
        """Checks the url; the first operation opens the connection.

        `secret`: the password if the url has none. `deadline_s`: seconds for which an operation is repeated.
        `refusal`: the class of every error that this link raises; raised here if the url or its options are
        invalid, or if a server on another machine is to be used without TLS and without a password.
        """
        self._refusal, self._deadline_s = refusal, deadline_s
        parts = urlsplit(url)
        self.shown = shown_without_passwords(parts)
        if not _is_whole(parts):
            raise refusal(
                f"runtime.redis: {self.shown} is not a valid url of a Redis server; write "
                "redis://HOST:PORT/DATABASE, "
                "rediss:// for TLS, or unix:///PATH"
            )
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        self._has_password = bool(secret or parts.password) or "password" in options
        # Other machines reach such a server over a connection without TLS.
        is_open = parts.scheme == "redis" and not is_loopback(unquote(parts.hostname or ""))
        if is_open and not self._has_password:
            raise refusal(
                f"{self.shown} can be reached from other machines, and no password is given: any of "
                "them could "
                "control the run. Set requirepass in the server's redis.conf, and AREAL_JAX_SECRET on this "
                "machine to that password"
            )
        wire = {"socket_connect_timeout": min(SOCKET_S, deadline_s), "socket_keepalive": True}
        try:
            # The client itself does not retry: `run` does, with pauses and a deadline.
            pool = redis.ConnectionPool.from_url(
                url,
                password=secret,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                socket_timeout=min(SOCKET_S, deadline_s),
                health_check_interval=15,
                **({} if url.startswith("unix:") else wire),
            )
            self._client: Any = redis.Redis(connection_pool=pool)
            pool.make_connection()
        except (TypeError, ValueError) as error:
            raise refusal(
                f"{self.shown}: {_plain(error)}; correct the options after the ? in runtime.redis"
            ) from None
        self._is_away = self._is_closed = False

    def run(self, work: Callable[[Any], T], deadline_s: float | None = None) -> T:
        """Returns `work(client)`, with the redis client; calls `work` again while Redis does not answer.

        Raises `refusal` if Redis has not answered after `deadline_s` seconds (0: after one attempt; None: the
        link's deadline), and at once if Redis refuses the operation.
        """
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        if self._is_closed:
            raise self._refusal(
                f"this process has closed its connection to Redis at {self.shown}; open a new connection"
            )
        end_s, pause_s = time.monotonic() + deadline_s, PAUSES_S[0]
        while True:
            try:
                answer = work(self._client)
                self._is_away = False
                return answer
            except exceptions.AuthenticationError as error:
                self._refuse_password(error)
            except (exceptions.ConnectionError, exceptions.TimeoutError) as error:
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise self._refusal(
                        f"no Redis answers at {self.shown} within {deadline_s:g} s ({_plain(error)}); start "
                        "a Redis server there, or correct runtime.redis, the network or its firewall"
                    ) from None
                if not self._is_away:
                    log.warning("Redis at %s: %s; retrying for %.0f s", self.shown, _plain(error), left_s)
                self._is_away = True
                time.sleep(min(pause_s, left_s))
                pause_s = min(2 * pause_s, PAUSES_S[1])
            except exceptions.ResponseError as error:
                self._refuse(error)

    def script(
        self, text: str, keys: Sequence[str], values: Sequence[Any] = (), deadline_s: float | None = None
    ) -> Any:
        """Runs the Lua script `text`, which Redis executes atomically, and returns its result.

        `keys` and `values`: the script's KEYS and ARGV; `deadline_s`: as in `run`.
        """
        return self.run(lambda client: client.register_script(text)(keys, values), deadline_s)

    def require_supported(self) -> None:
        """Raises `refusal` if the server is older than OLDEST, or may delete keys when its memory is full."""
        info = self.run(lambda client: client.info())
        version, policy = str(info["redis_version"]), str(info.get("maxmemory_policy", "noeviction"))
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
            raise self._refusal(
                f"{self.shown} is Redis {version}, which is too old; install "
                f"Redis {'.'.join(map(str, OLDEST))} or newer"
            )
        if policy.startswith("allkeys"):
            raise self._refusal(
                f"{self.shown} deletes keys when its memory is full (maxmemory-policy {policy}): set "
                "maxmemory-policy noeviction in the server's redis.conf"
            )

    def close(self) -> None:
        """Closes the idle connections; an operation that a thread has started still gets its answer."""
        self._is_closed = True
        self._client.connection_pool.disconnect(inuse_connections=False)

    # --- inside ---------------------------------------------------------------------------------------------

    def _refuse_password(self, error: Exception) -> NoReturn:
        if "without any password" in str(error):
            remedy = "the server has no password, but one was given: set requirepass in its redis.conf"
        elif self._has_password:
            remedy = (
                "the password is wrong: set AREAL_JAX_SECRET, or the password in runtime.redis, to the "
                "server's requirepass"
            )
        else:
            remedy = "the server requires a password, but none was given: set AREAL_JAX_SECRET"
        raise self._refusal(f"{self.shown} refuses the connection: {remedy}") from None

    def _refuse(self, error: Exception) -> NoReturn:
        text = _plain(error)
        remedy = _REMEDIES.get(
            type(error), _MISCONFIGURED if "MISCONF" in text else "see the log of the Redis server"
        )
        raise self._refusal(f"{self.shown}: {text}; {remedy}") from error


def _is_whole(parts: SplitResult) -> bool:
    if parts.scheme == "unix":
        return bool(parts.path)
    try:
        has_place = bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        return False
    database = parts.path.strip("/")
    return parts.scheme in ("redis", "rediss") and has_place and (not database or database.isdecimal())


def _plain(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__

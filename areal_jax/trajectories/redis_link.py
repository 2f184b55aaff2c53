"""A connection to Redis that outlives its breaks, and errors that say what to do.

An operation is tried again until its deadline whenever the connection is lost or the server is still loading,
so every operation has to bear being done twice. The password is in the client alone: no message, log or repr
has it.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from areal_jax.types import ArealError

try:
    import redis
    from redis import exceptions
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ModuleNotFoundError as error:
    raise ArealError(f"a run over several machines needs {error.name}: install areal-jax[cluster]") from error

ResponseError = exceptions.ResponseError
"""What the server refused; one that `run` sees becomes the link's refusal."""

T = TypeVar("T")

SOCKET_S = 10.0
"""How long one answer may take before the connection counts as lost."""
PAUSES_S = (0.02, 1.0)
"""The first and the longest pause between two attempts; each is twice the one before."""
OLDEST = (6, 2)
"""The oldest Redis that has every command used here."""
OPTIONS = {"durability": ("aof", "none"), "lost": ("refuse", "accept")}
"""What a url may say to us, as `?name=value`; the first is the default. Others are the client's."""

_REMEDIES: dict[type[Exception], str] = {
    exceptions.OutOfMemoryError: "its maxmemory is reached: raise it, or write checkpoints more often",
    exceptions.ReadOnlyError: "it is a replica: name the server that takes writes",
    exceptions.NoPermissionError: "give this user the rights ~areal:* +@all -@dangerous +info",
}
_MISCONFIGURED = "it cannot write its own files: free space on its disk, then go on, for nothing is lost"

log = logging.getLogger(__name__)


class Url(NamedTuple):
    """A url of a Redis, taken apart."""

    shown: str
    """Without passwords and our options: for messages, files and runtime.redis."""
    plain: str
    """As the client takes it."""
    options: dict[str, str]
    has_password: bool
    is_open: bool
    """Others reach it as they like: over the network, without TLS."""


def parse_url(url: str) -> Url:
    """Raises ArealError for one that is none; the message has no password."""
    parts = urlsplit(url)
    options = {name: values[0] for name, values in OPTIONS.items()}
    ours, rest = [], []
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        (ours if name in OPTIONS else rest).append((name, value))
    for name, value in ours:
        if value not in OPTIONS[name]:
            raise ArealError(f"runtime.redis: ?{name}= is {' or '.join(OPTIONS[name])}, not {value!r}")
        options[name] = value
    user, _, place = parts.netloc.rpartition("@")
    name = user.partition(":")[0]
    shown = _joined(parts.scheme, f"{name}@{place}" if name else place, parts.path, _without_passwords(rest))
    if not _is_whole(parts):
        raise ArealError(
            f"runtime.redis: {shown} is no url of a Redis; write redis://HOST:PORT/DATABASE, rediss:// for "
            "TLS, or unix:///PATH"
        )
    return Url(
        shown,
        _joined(parts.scheme, parts.netloc, parts.path, rest),
        options,
        bool(parts.password) or "password" in dict(rest),
        parts.scheme == "redis" and not _is_loopback(parts.hostname or ""),
    )


class Link:
    """Redis as journal and broker use it. Safe to share between threads."""

    def __init__(self, url: str, secret: str | None, deadline_s: float, refusal: type[ArealError]) -> None:
        """Connects at the first use. The url's password, where it has one, goes before `secret`.

        Raises `refusal`, here and everywhere: for a url that is none, and for a server that others can reach
        and that wants no password.
        """
        self._refusal, self._deadline_s = refusal, deadline_s
        try:
            self.shown, plain, self.options, has_password, is_open = parse_url(url)
        except ArealError as error:
            raise refusal(str(error)) from None
        self._has_password = has_password or bool(secret)
        if is_open and not self._has_password:
            raise refusal(
                f"{self.shown} is reached from other machines, and there is no password for it: whoever "
                "comes by could steer the run. Set requirepass in its redis.conf and AREAL_JAX_SECRET here"
            )
        wire = {"socket_connect_timeout": min(SOCKET_S, deadline_s), "socket_keepalive": True}
        try:
            pool = redis.ConnectionPool.from_url(
                plain,
                password=secret,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                socket_timeout=min(SOCKET_S, deadline_s),
                health_check_interval=15,
                **({} if plain.startswith("unix:") else wire),
            )
            self._client: Any = redis.Redis(connection_pool=pool)
            pool.make_connection()
        except (TypeError, ValueError) as error:
            raise refusal(f"{self.shown}: {_plain(error)}; mend the options of runtime.redis") from None
        self._scripts: dict[str, Any] = {}
        self._is_away = self._is_closed = False

    def __repr__(self) -> str:
        return f"Link({self.shown})"

    def run(self, work: Callable[[Any], T], deadline_s: float | None = None) -> T:
        """`work(client)`, as often as it takes to get an answer."""
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        if self._is_closed:
            raise self._refusal(f"the connection to {self.shown} is closed; open a new one")
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
                        f"no Redis answers at {self.shown} within {deadline_s:g} s ({_plain(error)}); "
                        "start it, or mend runtime.redis, the network or its firewall"
                    ) from None
                if not self._is_away:
                    log.warning("%s: %s; trying again for %.0f s", self.shown, _plain(error), left_s)
                self._is_away = True
                time.sleep(min(pause_s, left_s))
                pause_s = min(2 * pause_s, PAUSES_S[1])
            except exceptions.ResponseError as error:
                self._refuse(error)

    def script(
        self, text: str, keys: Sequence[str], values: Sequence[Any] = (), deadline_s: float | None = None
    ) -> Any:
        """What the Lua script answers: all of it happens at once, or nothing."""
        if text not in self._scripts:
            self._scripts[text] = self._client.register_script(text)
        return self.run(lambda _: self._scripts[text](keys, values), deadline_s)

    def require_durable(self) -> None:
        """Refuses a server that forgets what it acknowledged when it ends, or that is too old.

        `?durability=none` in the url turns the first into a warning.
        """
        info = self.run(lambda client: client.info())
        version = str(info["redis_version"])
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
            raise self._refusal(
                f"{self.shown} is Redis {version}; this needs {'.'.join(map(str, OLDEST))} or newer"
            )
        policy = str(info.get("maxmemory_policy", "noeviction"))
        faults = []
        if not info.get("aof_enabled"):
            faults.append(
                "keeps no append-only file, so it forgets the journal when it ends: set `appendonly yes` in "
                "its redis.conf, or now with `redis-cli config set appendonly yes`"
            )
        if policy.startswith("allkeys"):
            faults.append(
                f"throws away keys when its memory is full (maxmemory-policy {policy}): set noeviction"
            )
        for fault in faults:
            if self.options["durability"] == "aof":
                raise self._refusal(
                    f"{self.shown} {fault}. To run without, and lose the run with the server, add "
                    "?durability=none to runtime.redis"
                )
            log.warning("%s %s", self.shown, fault)

    def close(self) -> None:
        """Ends the connections; those that another thread waits on, with their answer."""
        self._is_closed = True
        self._client.connection_pool.disconnect(inuse_connections=False)

    # --- inside ---------------------------------------------------------------------------------------------

    def _refuse_password(self, error: Exception) -> NoReturn:
        if "without any password" in str(error):
            remedy = "it has no password, and one was given: set requirepass in its redis.conf"
        elif self._has_password:
            remedy = (
                "the password is wrong: AREAL_JAX_SECRET, or the url's, has to be the server's requirepass"
            )
        else:
            remedy = "it wants a password, and none was given: set AREAL_JAX_SECRET"
        raise self._refusal(f"{self.shown} lets nobody in: {remedy}") from None

    def _refuse(self, error: Exception) -> NoReturn:
        text = _plain(error)
        remedy = _REMEDIES.get(type(error), _MISCONFIGURED if "MISCONF" in text else "see its log")
        raise self._refusal(f"{self.shown}: {text}; {remedy}") from error


def text_of(value: bytes | str) -> str:
    """Redis' answers are bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _joined(scheme: str, netloc: str, path: str, query: Sequence[tuple[str, str]]) -> str:
    return f"{scheme}://{netloc}{path}" + (f"?{urlencode(query)}" if query else "")


def _without_passwords(query: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in query if "password" not in name]


def _is_whole(parts: SplitResult) -> bool:
    if parts.scheme == "unix":
        return bool(parts.path)
    try:
        has_place = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        return False
    database = parts.path.strip("/")
    return parts.scheme in ("redis", "rediss") and has_place and (not database or database.isdecimal())


def _plain(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _is_loopback(host: str) -> bool:
    """Of a name only `localhost` is: what others resolve to may change."""
    host = unquote(host)
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"

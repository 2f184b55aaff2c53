"""Hosts on this one machine: network namespaces on a switch, with links that can be cut.

Each host is a namespace with an address of its own and nothing but its link to the switch, which is a bridge
in a namespace of its own; this machine's network is not touched. Names are drawn for each set of hosts, and
removed with all they hold when the block ends.
"""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tests.programs import require, require_root

NETWORK = "10.77.0"


@dataclass(frozen=True)
class Network:
    prefix: str
    count: int

    @property
    def switch(self) -> str:
        return f"{self.prefix}-switch"

    def host(self, number: int) -> str:
        return f"{self.prefix}-{number}"

    def address(self, number: int) -> str:
        return f"{NETWORK}.{number + 1}"

    def inside(self, number: int, words: Sequence[str]) -> list[str]:
        """The command that runs `words` on that host; it becomes them, so its id is theirs."""
        return ["ip", "netns", "exec", self.host(number), *words]

    def cut(self, number: int) -> None:
        """From now on nothing passes the host's link: what is sent waits or is lost."""
        _ip("-n", self.switch, "link", "set", f"port{number}", "down")

    def mend(self, number: int) -> None:
        _ip("-n", self.switch, "link", "set", f"port{number}", "up")


@contextmanager
def hosts(count: int) -> Iterator[Network]:
    """`count` hosts that reach each other and no other machine, until the block ends."""
    require("ip")
    require_root("network namespaces are made")
    network = Network(f"areal-{secrets.token_hex(3)}", count)
    with ExitStack() as stack:
        _namespace(stack, network.switch)
        _ip("-n", network.switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", network.switch, "link", "set", "bridge0", "up")
        for number in range(count):
            _namespace(stack, network.host(number))
            _link(network, number)
        yield network


def _namespace(stack: ExitStack, name: str) -> None:
    _ip("netns", "add", name)
    stack.callback(_ip, "netns", "delete", name)
    _ip("-n", name, "link", "set", "lo", "up")


def _link(network: Network, number: int) -> None:
    host, port = network.host(number), f"port{number}"
    _ip("-n", network.switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
    _ip("-n", network.switch, "link", "set", port, "master", "bridge0", "up")
    _ip("-n", host, "address", "add", f"{network.address(number)}/24", "dev", "eth0")
    _ip("-n", host, "link", "set", "eth0", "up")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"

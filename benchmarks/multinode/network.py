"""Several hosts on one machine: network namespaces on a bridge."""

import ipaddress
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

from benchmarks.multinode import delay_line
from runtime.errors import ConfigError

# RFC 2544 keeps them for tests of networks: no other network has them.
NETWORKS = ipaddress.IPv4Network("198.18.0.0/15")
# RFC 5737 keeps it for documentation.
SECOND_NETWORK = ipaddress.IPv4Network("203.0.113.0/24")
MAX_HOSTS = 100

END_TIMEOUT_S = 5.0
ADVICE = (
    "run as root, or run the command by `unshare --map-root-user --net`, "
    "or use machines of their own with --address"
)


class Network:
    """So many hosts with an address each, and this process beside them, on a network of their own.

    A host is a namespace without a name, which is there, and its links with it, as long as a
    process is in it: those that hold them end with this one, however it ends.
    With `is_split` each host has a second network, to which its default route leads, and on which
    it reaches none of the others. `delay_s` is added to the round trip between two hosts.
    """

    def __init__(self, num_hosts: int, *, is_split: bool = False, delay_s: float = 0.0) -> None:
        """Raises ConfigError: it can't be made here; the message says what can be done."""
        if not 1 <= num_hosts <= MAX_HOSTS:
            raise ConfigError(f"num_hosts={num_hosts} must be in [1, {MAX_HOSTS}]")
        self._cut: tuple[int, int] | None = None
        with ExitStack() as stack:
            self._switch = stack.enter_context(_Namespace())
            self._hosts = [stack.enter_context(_Namespace()) for _ in range(num_hosts)]
            self._join(_free_network(), is_delayed=delay_s > 0)
            if is_split:
                self._split()
            if delay_s > 0:
                stack.enter_context(self._delay(delay_s))
            self._cleanup = stack.pop_all()

    def command(self, host: int, words: Sequence[str]) -> list[str]:
        """What runs a command on a host."""
        return self._hosts[host].command(words)

    def cut(self, one: int, other: int) -> None:
        """Nothing gets from one host to the other any more, and neither is told."""
        if self._cut is not None:
            raise ConfigError(f"hosts {self._cut} are cut off from each other already: heal them")
        # Isolated ports of a bridge reach all but each other.
        self._cut = one, other
        self._isolate("on", self._cut)

    def heal(self) -> None:
        """What was cut is whole again, if anything was."""
        cut, self._cut = self._cut, None
        if cut is not None:
            self._isolate("off", cut)

    def close(self) -> None:
        """Leaves the hosts, which are gone with the last process on them. May be called twice."""
        self._cleanup.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _join(self, network: ipaddress.IPv4Network, *, is_delayed: bool) -> None:
        switch = self._switch
        self.addresses = [str(network[1 + number]) for number in range(len(self._hosts))]
        ours = f"ls{switch.pid}"
        switch.ip("link add bridge type bridge", "link set bridge up")
        _ip(
            [],
            f"link add {ours} type veth peer name outside netns {switch.pid}",
            f"addr add {network[-2]}/{network.prefixlen} dev {ours}",
            f"link set {ours} up",
        )
        switch.ip("link set outside master bridge up")
        for number, host in enumerate(self._hosts):
            cable = f"cable{number}" if is_delayed else f"host{number}"
            host.ip(
                "link set lo up",
                f"link add eth0 type veth peer name {cable} netns {switch.pid}",
                f"addr add {self.addresses[number]}/{network.prefixlen} dev eth0",
                "link set eth0 up",
            )
            if is_delayed:
                switch.ip(
                    f"link set {cable} up",
                    f"link add host{number} type veth peer name line{number}",
                    f"link set line{number} up",
                )
            switch.ip(f"link set host{number} master bridge up")

    @contextmanager
    def _delay(self, delay_s: float) -> Iterator[None]:
        """Copies between cables and lines; a round trip of two hosts passes four times."""
        pairs = [f"cable{number}:line{number}" for number in range(len(self._hosts))]
        command = [sys.executable, "-P", delay_line.__file__, f"{delay_s / 4}", *pairs]
        line = subprocess.Popen(
            self._switch.command(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert line.stdin is not None
        assert line.stdout is not None
        with line.stdin, line.stdout:
            try:
                if not line.stdout.readline():
                    raise ConfigError(f"frames can't be delayed here: {ADVICE}")
                yield
            finally:
                line.stdin.close()
                line.wait(END_TIMEOUT_S)

    def _split(self) -> None:
        for number, host in enumerate(self._hosts):
            # Before eth0 for whoever goes by names. Its other end is on no bridge.
            host.ip(
                f"link add en0 type veth peer name second{number} netns {self._switch.pid}",
                f"addr add {SECOND_NETWORK[1 + number]}/{SECOND_NETWORK.prefixlen} dev en0",
                "link set en0 up",
                "route add default dev en0",
            )
            self._switch.ip(f"link set second{number} up")

    def _isolate(self, state: str, hosts: tuple[int, int]) -> None:
        self._switch.ip(*(f"link set host{i} type bridge_slave isolated {state}" for i in hosts))


class _Namespace:
    """A network namespace, held by a process that ends with its standard input."""

    def __init__(self) -> None:
        for name in ("ip", "nsenter", "unshare"):
            if shutil.which(name) is None:
                raise ConfigError(f"{name} isn't installed: Debian has it in iproute2, util-linux")
        self._process = subprocess.Popen(
            ["unshare", "--net", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a terminal's Ctrl-C is for this process
        )
        answer, error = self._ask()
        if not answer:
            self.__exit__()
            raise ConfigError(f"no network namespace can be made here: {error.strip()}: {ADVICE}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def command(self, words: Sequence[str]) -> list[str]:
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", "--", *words]

    def ip(self, *commands: str) -> None:
        _ip(self.command([]), *commands)

    def _ask(self) -> tuple[str, str]:
        """Its answer, which tells that it is in the namespace; or none, and its error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        try:
            self._process.stdin.write("there?\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return "", self._process.stderr.read()
        answer = self._process.stdout.readline()
        return answer, "" if answer else self._process.stderr.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Not by `communicate`, which would wait for a process that doesn't end.
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                continue  # it ended before it read
        self._process.wait(END_TIMEOUT_S)


def _free_network() -> ipaddress.IPv4Network:
    """One in which this host has no address. Raises ConfigError: it has one in each.

    Another process looks elsewhere first: both may be looking at once.
    """
    shown = subprocess.run(["ip", "-json", "addr"], capture_output=True, text=True, check=True)
    interfaces: list[dict[str, Any]] = json.loads(shown.stdout)
    taken = {
        ipaddress.ip_address(address["local"])
        for interface in interfaces
        for address in interface["addr_info"]
    }
    networks = [*NETWORKS.subnets(new_prefix=24)]
    first = os.getpid() % len(networks)
    for network in networks[first:] + networks[:first]:
        if not any(address in network for address in taken):
            return network
    raise ConfigError("this host has addresses in all networks of 198.18.0.0/15: remove some")


def _ip(prefix: Sequence[str], *commands: str) -> None:
    """Runs `ip` with each. Raises ConfigError, in its words: one failed."""
    done = subprocess.run(
        [*prefix, "ip", "-batch", "-"],
        input="\n".join(commands) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ConfigError(f"the network can't be made here: {done.stderr.strip()}: {ADVICE}")

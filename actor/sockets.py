"""Every ZeroMQ socket of every process: its options, and the endpoints that it may use.

Names are resolved here and not by libzmq, which tries a name over IPv6 alone when IPv6 is on
(`localhost` would miss a server on 127.0.0.1) and asks the name server on its only I/O thread.
"""

import contextlib
import errno
import ipaddress
import os
import re
import socket as net
import stat
from contextlib import ExitStack
from typing import NamedTuple, TypeAlias

import zmq

from llmrt.wire.envelope import MAX_RAW_BYTES
from llmrt.wire.errors import AddressInUse, ConfigError

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

# A frame above this drops the connection of its sender; the slack lets a frame that is only a
# little too large arrive and be answered with a coded error.
MAX_FRAME_BYTES = MAX_RAW_BYTES + (1 << 20)
# sun_path of unix(7) has 108 bytes with its end.
MAX_IPC_PATH_BYTES = 107
LINGER_MS = 500
# Bounds what libzmq holds per peer; the rest waits in the outbox of the channel.
HIGH_WATER_MESSAGES = 1000
_PROBE_S = 0.2

OPTIONS: dict[zmq.SocketOption, int] = {
    zmq.SocketOption.LINGER: LINGER_MS,
    zmq.SocketOption.SNDHWM: HIGH_WATER_MESSAGES,
    zmq.SocketOption.RCVHWM: HIGH_WATER_MESSAGES,
    zmq.SocketOption.MAXMSGSIZE: MAX_FRAME_BYTES,
    zmq.SocketOption.IPV6: 1,
    # A message for a peer that is not connected is never queued for it: the send says so.
    zmq.SocketOption.IMMEDIATE: 1,
    # Finds a peer that vanished without closing; the work loops have beats of their own.
    zmq.SocketOption.HEARTBEAT_IVL: 1000,
    zmq.SocketOption.HEARTBEAT_TIMEOUT: 3000,
    zmq.SocketOption.HEARTBEAT_TTL: 3000,
    zmq.SocketOption.HANDSHAKE_IVL: 3000,
    zmq.SocketOption.RECONNECT_IVL: 100,
    # A restarted broker is found within a second; there are few peers to knock.
    zmq.SocketOption.RECONNECT_IVL_MAX: 1000,
}
ROUTER_OPTIONS: dict[zmq.SocketOption, int] = {
    # A message for an unknown peer is an error of the send, not lost.
    zmq.SocketOption.ROUTER_MANDATORY: 1,
    # A peer that reconnects before its old connection is known to be dead takes its place;
    # without this libzmq accepts the new connection and never delivers anything from it.
    zmq.SocketOption.ROUTER_HANDOVER: 1,
}


def context() -> Context:
    """One per process, on one I/O thread. Its `term` waits for open sockets."""
    return zmq.Context()


def router(ctx: Context) -> Socket:
    return _make(ctx, zmq.ROUTER, OPTIONS | ROUTER_OPTIONS)


def dealer(ctx: Context, identity: bytes) -> Socket:
    """`identity` is the routing id that the peer's router sees; it must be unique there."""
    socket = _make(ctx, zmq.DEALER, OPTIONS)
    socket.setsockopt(zmq.SocketOption.ROUTING_ID, identity)
    return socket


def bind(socket: Socket, endpoint: str) -> str:
    """Bind and return the real endpoint: port `*` or 0 takes a free one.

    Raises `AddressInUse`, or `ConfigError` for an endpoint that cannot be served here. Resolves
    a name, which may block.
    """
    target = _ipc_bind_target(endpoint) or _tcp_bind_target(endpoint)
    try:
        socket.bind(target)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise _in_use(endpoint) from None
        raise ConfigError(f"cannot bind {endpoint}: {error.strerror}") from None
    bound = socket.getsockopt_string(zmq.SocketOption.LAST_ENDPOINT)
    # With IPv6 on, libzmq names an IPv4 address in its mapped form, ::ffff:127.0.0.1.
    return re.sub(r"\[::ffff:([\d.]+)\]", r"\1", bound)


def remove_ipc_file(endpoint: str) -> None:
    """Remove what a socket that was bound to `endpoint` left in the file system, if anything."""
    path = endpoint.removeprefix("ipc://")
    if path != endpoint and not path.startswith(("@", "*")):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def connect(socket: Socket, endpoint: str) -> None:
    """Connect now or whenever the peer appears; raises `ConfigError` as `resolve` does."""
    for target in resolve(endpoint):
        socket.connect(target)


def check_free(endpoint: str) -> str:
    """Raise what `bind` would raise; returns the endpoint with its port chosen, and free again."""
    (free,) = check_all_free(endpoint)
    return free


def check_all_free(*endpoints: str) -> tuple[str, ...]:
    """As `check_free`, bound all at a time: raises `ConfigError` for two that are the same."""
    bound: list[str] = []
    try:
        with context() as ctx, ExitStack() as sockets:
            for endpoint in endpoints:
                socket = sockets.enter_context(router(ctx))
                bound.append(bind(socket, endpoint))
    except AddressInUse:
        taken, others = endpoints[len(bound)], endpoints[: len(bound)]
        if others:  # which are free again: raises if it is another program's
            check_free(taken)
            raise ConfigError(
                f"{taken} is the address of {' or '.join(others)} too: choose another endpoint"
            ) from None
        raise
    return tuple(bound)


def resolve(endpoint: str) -> tuple[str, ...]:
    """The numeric forms of an endpoint to connect to. A name lookup blocks: call it in a thread.

    Of a name with several addresses the first that accepts a connection is taken. While none
    does, all are: nobody knows yet where the peer will appear, and nothing is sent to an address
    that nobody serves (`IMMEDIATE`).
    """
    ipc = _ipc_target(endpoint)
    if ipc is not None:
        return (ipc,)
    host, port = _split_tcp(endpoint)
    if port == 0 or host == "*":
        raise ConfigError(f"cannot connect to {endpoint}: give the host and port of the peer")
    addresses = _addresses(endpoint, host)
    if len(addresses) > 1:
        answering = (address for address in addresses if _accepts(address, port))
        first = next(answering, None)
        addresses = addresses if first is None else [first]
    return tuple(_tcp(address, port) for address in addresses)


def _make(ctx: Context, kind: int, options: dict[zmq.SocketOption, int]) -> Socket:
    socket = ctx.socket(kind)
    for option, value in options.items():
        socket.setsockopt(option, value)
    return socket


class _HostPort(NamedTuple):
    host: str
    port: int


def _split_tcp(endpoint: str) -> _HostPort:
    scheme, separator, rest = endpoint.partition("://")
    if not separator or scheme != "tcp":
        raise ConfigError(
            f"{endpoint!r} is no endpoint: write tcp://HOST:PORT, tcp://[IPV6]:PORT or ipc://PATH"
        )
    host, _, port_text = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"{endpoint!r}: put an IPv6 address in brackets: tcp://[::1]:7700")
    port = 0 if port_text == "*" else _port(port_text)
    if not host or port is None:
        raise ConfigError(f"{endpoint!r}: write tcp://HOST:PORT with a port from 0 to 65535")
    return _HostPort(host, port)


def _port(text: str) -> int | None:
    if not (text.isascii() and text.isdigit() and len(text) <= 5):
        return None
    port = int(text)
    return port if port < 1 << 16 else None


def _tcp(address: str, port: int) -> str:
    host = f"[{address}]" if ":" in address else address
    return f"tcp://{host}:{port}"


def _tcp_bind_target(endpoint: str) -> str:
    host, port = _split_tcp(endpoint)
    address = "0.0.0.0" if host == "*" else _addresses(endpoint, host)[0]  # noqa: S104
    if not ipaddress.ip_address(address).is_loopback:
        raise ConfigError(
            f"{endpoint} is reachable from other hosts, which needs CURVE keys, and those "
            "are not available yet: bind 127.0.0.1, [::1] or an ipc:// path"
        )
    return _tcp(address, port)


def _addresses(endpoint: str, host: str) -> list[str]:
    """IPv4 first: that is where most servers listen."""
    if host == "localhost":  # both loopbacks, whatever the hosts file says (RFC 6761, 6.3)
        return ["127.0.0.1", "::1"]
    try:
        found = net.getaddrinfo(host, None, type=net.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ConfigError(
            f"{endpoint}: the name {host!r} does not resolve: check it, or write the address"
        ) from None
    found.sort(key=lambda entry: entry[0] != net.AF_INET)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _accepts(address: str, port: int) -> bool:
    try:
        net.create_connection((address, port), timeout=_PROBE_S).close()
    except OSError:
        return False
    return True


def _ipc_target(endpoint: str) -> str | None:
    """The endpoint itself if it is `ipc://`, checked; None for another scheme."""
    if not endpoint.startswith("ipc://"):
        return None
    path = endpoint.removeprefix("ipc://")
    if not path or len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
        raise ConfigError(
            f"{endpoint!r}: an ipc path has 1 to {MAX_IPC_PATH_BYTES} bytes: use a shorter folder"
        )
    return endpoint


def _ipc_bind_target(endpoint: str) -> str | None:
    """As `_ipc_target`, but free: libzmq deletes whatever lies at the path before it binds."""
    target = _ipc_target(endpoint)
    if target is None:
        return None
    path = endpoint.removeprefix("ipc://")
    if path.startswith(("@", "*")):  # abstract or chosen by libzmq: nothing is deleted
        return target
    if os.path.exists(path) and not stat.S_ISSOCK(os.stat(path).st_mode):
        raise ConfigError(f"cannot bind {endpoint}: a file that is no socket lies there: remove it")
    with net.socket(net.AF_UNIX, net.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError, PermissionError):
            return target
        except TimeoutError:
            pass  # its backlog is full, so somebody listens
    raise _in_use(endpoint)


def _in_use(endpoint: str) -> AddressInUse:
    return AddressInUse(
        f"{endpoint} is in use by another program: stop that one or choose another endpoint"
    )

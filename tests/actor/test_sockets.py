"""Socket options, and the endpoints that may be bound and connected to."""

import socket as net
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from llmrt.actor import sockets
from llmrt.wire.envelope import MAX_RAW_BYTES
from llmrt.wire.errors import AddressInUse, ConfigError

pytestmark = pytest.mark.integration


class Sockets:
    """Makes sockets and remembers them."""

    def __init__(self) -> None:
        self._context = sockets.context()
        self._made: list[sockets.Socket] = []

    def router(self) -> sockets.Socket:
        self._made.append(sockets.router(self._context))
        return self._made[-1]

    def dealer(self, identity: bytes) -> sockets.Socket:
        self._made.append(sockets.dealer(self._context, identity))
        return self._made[-1]

    def close(self) -> None:
        for socket in self._made:
            socket.close(linger=0)
        self._context.term()


@pytest.fixture
def ctx() -> Iterator[Sockets]:
    made = Sockets()
    yield made
    made.close()


def test_every_socket_has_every_option(ctx: Sockets) -> None:
    wanted = {
        zmq.SocketOption.LINGER: 500,
        zmq.SocketOption.IPV6: 1,
        zmq.SocketOption.IMMEDIATE: 1,
        zmq.SocketOption.HEARTBEAT_IVL: 1000,
        zmq.SocketOption.HEARTBEAT_TIMEOUT: 3000,
        zmq.SocketOption.HEARTBEAT_TTL: 3000,
        zmq.SocketOption.HANDSHAKE_IVL: 3000,
        zmq.SocketOption.RECONNECT_IVL: 100,
        zmq.SocketOption.RECONNECT_IVL_MAX: 1000,
        zmq.SocketOption.SNDHWM: 1000,
        zmq.SocketOption.RCVHWM: 1000,
    }
    for socket in (ctx.router(), ctx.dealer(b"me")):
        assert {option: socket.getsockopt(option) for option in wanted} == wanted
        assert int(socket.getsockopt(zmq.SocketOption.MAXMSGSIZE)) > MAX_RAW_BYTES
    assert sockets.ROUTER_OPTIONS[zmq.SocketOption.ROUTER_MANDATORY] == 1
    assert socket.getsockopt(zmq.SocketOption.ROUTING_ID) == b"me"


def test_router_names_a_peer_that_is_not_there(ctx: Sockets) -> None:
    """ROUTER_MANDATORY cannot be read back, so its effect is tested."""
    with pytest.raises(zmq.ZMQError, match="Host unreachable"):
        ctx.router().send_multipart([b"nobody", b"hello"])


def test_dealer_keeps_nothing_for_an_absent_peer(ctx: Sockets) -> None:
    """IMMEDIATE: a queue for nobody would be lost with the process, in silence."""
    socket = ctx.dealer(b"me")
    sockets.connect(socket, "tcp://127.0.0.1:9")
    with pytest.raises(zmq.Again):
        socket.send(b"hello", zmq.NOBLOCK)


def test_a_peer_that_comes_back_takes_its_old_place(ctx: Sockets) -> None:
    """Without handover libzmq mutes the second connection for ever."""
    server = ctx.router()
    endpoint = sockets.bind(server, "tcp://127.0.0.1:*")
    for text in (b"first", b"second"):
        peer = ctx.dealer(b"same")
        sockets.connect(peer, endpoint)
        peer.send(text)
        assert server.poll(5000)
        assert server.recv_multipart() == [b"same", text]
    server.send_multipart([b"same", b"answer"])
    assert peer.poll(5000)
    assert peer.recv() == b"answer"


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
@pytest.mark.parametrize("port", ["*", "0"])
def test_bind_tells_the_real_port(ctx: Sockets, host: str, port: str) -> None:
    server = ctx.router()
    endpoint = sockets.bind(server, f"tcp://{host}:{port}")
    real_host, _, real_port = endpoint.removeprefix("tcp://").rpartition(":")
    assert real_host == host.replace("localhost", "127.0.0.1")
    assert int(real_port) > 0
    client = ctx.dealer(b"c")
    sockets.connect(client, endpoint)
    client.send(b"hello")
    assert server.poll(5000)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_localhost_finds_a_server_on_either_address(ctx: Sockets, host: str) -> None:
    server = ctx.router()
    port = sockets.bind(server, f"tcp://{host}:*").rpartition(":")[2]
    client = ctx.dealer(b"c")
    sockets.connect(client, f"tcp://localhost:{port}")
    client.send(b"hello")
    assert server.poll(5000)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_localhost_finds_a_server_that_comes_later(ctx: Sockets, host: str) -> None:
    endpoint = sockets.check_free(f"tcp://{host}:*")
    client = ctx.dealer(b"c")
    sockets.connect(client, endpoint.replace(host, "localhost"))
    server = ctx.router()
    sockets.bind(server, endpoint)
    assert client.poll(5000, zmq.POLLOUT)
    client.send(b"hello")
    assert server.poll(5000)


def test_bind_names_the_address_that_another_program_holds(ctx: Sockets) -> None:
    with net.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(AddressInUse, match=f"{endpoint} is in use"):
            sockets.bind(ctx.router(), endpoint)
        with pytest.raises(AddressInUse, match=endpoint):
            sockets.check_free(endpoint)


def test_bind_does_not_steal_the_ipc_path_of_a_server(ctx: Sockets, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/broker"
    first = ctx.router()
    sockets.bind(first, endpoint)
    with pytest.raises(AddressInUse, match="in use"):
        sockets.bind(ctx.router(), endpoint)


def test_bind_takes_the_ipc_path_of_a_dead_server(ctx: Sockets, tmp_path: Path) -> None:
    path = tmp_path / "broker"
    with net.socket(net.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    assert sockets.bind(ctx.router(), f"ipc://{path}") == f"ipc://{path}"


def test_bind_never_deletes_a_file(ctx: Sockets, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("kept")
    with pytest.raises(ConfigError, match="no socket"):
        sockets.bind(ctx.router(), f"ipc://{path}")
    assert path.read_text() == "kept"


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:*", "tcp://*:7700", "tcp://[::]:*"])
def test_bind_refuses_addresses_that_other_hosts_reach(ctx: Sockets, endpoint: str) -> None:
    with pytest.raises(ConfigError, match="CURVE keys"):
        sockets.bind(ctx.router(), endpoint)


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "7700",
        "127.0.0.1:7700",
        "http://127.0.0.1:7700",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:-1",
        "tcp://127.0.0.1:port",
        "tcp://:7700",
        "tcp://::1:7700",
        "tcp://no such host:7700",
        "tcp://name.invalid:7700",
        "ipc://",
        "ipc:///no/such/folder/socket",
        f"ipc:///tmp/{'x' * 110}",
    ],
)
def test_bind_explains_what_is_wrong_with_an_endpoint(ctx: Sockets, endpoint: str) -> None:
    with pytest.raises(ConfigError):
        sockets.bind(ctx.router(), endpoint)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "tcp://*:7700", "tcp://name.invalid:1"])
def test_connect_explains_what_is_wrong_with_an_endpoint(ctx: Sockets, endpoint: str) -> None:
    with pytest.raises(ConfigError):
        sockets.connect(ctx.dealer(b"c"), endpoint)


def test_check_free_chooses_a_port_and_leaves_it_free(ctx: Sockets) -> None:
    endpoint = sockets.check_free("tcp://127.0.0.1:*")
    assert sockets.bind(ctx.router(), endpoint) == endpoint


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ipc://{folder}/x", "ipc://{folder}/x"),
        ("ipc://{folder}/x", "ipc://{folder}/../{name}/x"),
        ("ipc://@llmrt-{name}", "ipc://@llmrt-{name}"),
        ("{tcp}", "{tcp}"),
    ],
)
def test_two_endpoints_that_are_one_are_refused(first: str, second: str, tmp_path: Path) -> None:
    names = {
        "folder": tmp_path,
        "name": tmp_path.name,
        "tcp": sockets.check_free("tcp://127.0.0.1:*"),
    }
    first, second = first.format(**names), second.format(**names)
    with pytest.raises(ConfigError) as refused:
        sockets.check_all_free(first, second)
    assert refused.value.message == (
        f"{second} is the address of {first} too: choose another endpoint"
    )
    assert sockets.check_free(second)


def test_of_several_endpoints_the_one_that_is_taken_is_named() -> None:
    with net.create_server(("127.0.0.1", 0)) as other:
        taken = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(AddressInUse, match=taken):
            sockets.check_all_free("tcp://127.0.0.1:*", taken)
    chosen = sockets.check_all_free("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    assert len({*chosen}) == 2

"""The transports of bulk links, best first."""

from llmrt.kvtransfer.tcp_exporter import TcpExporter
from llmrt.kvtransfer.tcp_reader import TcpReader
from llmrt.kvtransfer.transport import Transport

TCP = Transport(scheme="tcp", why_not=lambda: None, exporter=TcpExporter, reader=TcpReader)

TRANSPORTS: dict[str, Transport] = {transport.scheme: transport for transport in (TCP,)}


def scheme_of(address: str) -> str:
    """The transport that an address of a peer is for, which may be one that we do not know."""
    return address.partition("://")[0]

"""The transports of bulk links, best first."""

from llmrt.kvtransfer import nixl_agent
from llmrt.kvtransfer.nixl_exporter import NixlExporter
from llmrt.kvtransfer.nixl_reader import NixlReader
from llmrt.kvtransfer.tcp_exporter import TcpExporter
from llmrt.kvtransfer.tcp_reader import TcpReader
from llmrt.kvtransfer.transport import Transport

NIXL = Transport(
    scheme="nixl",
    why_not=nixl_agent.why_not,
    exporter=lambda arena, check, options: NixlExporter(arena),
    reader=lambda address, arena, options: NixlReader(address, arena),
)
TCP = Transport(scheme="tcp", why_not=lambda: None, exporter=TcpExporter, reader=TcpReader)

TRANSPORTS: dict[str, Transport] = {transport.scheme: transport for transport in (NIXL, TCP)}

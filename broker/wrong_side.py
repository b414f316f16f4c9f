"""Peers that took the broker's endpoint for clients for the one for workers, or the reverse."""

from llmrt.broker.settings import BrokerSettings
from llmrt.wire import messages as m
from llmrt.wire.errors import ConfigError, ProtocolError

CLIENT_KINDS = frozenset((m.HELLO, m.GENERATE, m.TOKENIZE, m.CANCEL, m.ACK, m.BEAT, m.PS))
WORKER_KINDS = frozenset(
    (m.REGISTER, m.HEARTBEAT, m.STEP, m.BYE, m.FINISHED, m.FAILED, m.TOKENIZED)
)


def not_from_client(settings: BrokerSettings, kind: str) -> ProtocolError:
    """The answer to a message that no client sends."""
    if kind in WORKER_KINDS:
        return _wrong_side("clients", "workers", settings.worker_bind)
    return ProtocolError(f"a client sent {kind!r}, which no client sends")


def not_from_worker(settings: BrokerSettings, kind: str) -> ProtocolError:
    """The answer to a message that no worker sends."""
    if kind in CLIENT_KINDS:
        # Unlike a worker, a client does not name in front of this where it asked.
        prefix = "" if _is_open(settings.worker_bind) else f"{settings.worker_bind}: "
        return _wrong_side("workers", "clients", settings.bind, prefix)
    return ProtocolError(f"a worker sent {kind!r}, which no worker sends")


def _is_open(endpoint: str) -> bool:
    """Whether only the socket knows the port."""
    return endpoint.endswith((":*", ":0"))


def _wrong_side(here: str, there: str, endpoint: str, prefix: str = "") -> ProtocolError:
    named = "" if _is_open(endpoint) else f", {endpoint}"
    return ProtocolError(
        f"{prefix}this is the broker's endpoint for {here}: "
        f"give --broker the one for {there}{named}",
        code=ConfigError.code,
    )

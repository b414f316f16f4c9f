"""Every error that llmrt raises or sends, with its code.

    LlmrtError
    ├── LocalError                 our caller is at fault; trying again changes nothing
    │   ├── InvalidRequest         invalid_request
    │   ├── ContextLengthExceeded  context_length_exceeded
    │   ├── MessageTooLarge        message_too_large
    │   ├── RequestConflict        request_conflict
    │   ├── ModelError             model_invalid
    │   ├── ModelNotFound          model_not_found
    │   ├── ConfigError            config_invalid
    │   └── AddressInUse           address_in_use
    ├── RemoteError                something else failed; trying again may work
    │   ├── BrokerUnreachable      broker_unreachable
    │   ├── NoWorker               no_worker
    │   ├── Overloaded             overloaded
    │   ├── DeadlineExceeded       deadline_exceeded
    │   ├── WorkerLost             worker_lost
    │   ├── RequestCancelled       cancelled
    │   ├── SlowConsumer           slow_consumer
    │   ├── OutOfBlocks            out_of_blocks
    │   ├── RegistrationRefused    registration_refused
    │   ├── TransferFailed         transfer_failed
    │   └── InternalError          internal_error
    └── ProtocolError              protocol_error; bytes that are no message of ours
        └── VersionMismatch        version_mismatch

A code is part of the protocol: it never changes its meaning, and a code that this version does
not know becomes a plain `RemoteError` that keeps it.
"""

import reprlib
from typing import Any, ClassVar


class LlmrtError(Exception):
    """Root of the tree. `message` says what was expected, what came and what to do."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.error_code = code or self.code


class LocalError(LlmrtError):
    """Our caller's fault."""

    code = "invalid"


class InvalidRequest(LocalError):
    """A field of a request is wrong; the message names field, value and remedy."""

    code = "invalid_request"


class ContextLengthExceeded(LocalError):
    """Prompt and wanted tokens do not fit the context; the message has all three numbers."""

    code = "context_length_exceeded"


class MessageTooLarge(LocalError):
    """A message is above the limit that the broker announced; nothing was sent."""

    code = "message_too_large"


class RequestConflict(LocalError):
    """The request id is in use by another client or with another body."""

    code = "request_conflict"


class ModelError(LocalError):
    """A model file is missing, damaged or of an unknown kind; the message names the place."""

    code = "model_invalid"


class ModelNotFound(LocalError):
    """No worker serves the model that the request names, or the path does not exist."""

    code = "model_not_found"


class ConfigError(LocalError):
    """A setting is wrong; the message names it, where it came from and what is allowed."""

    code = "config_invalid"


class AddressInUse(LocalError):
    """Another program holds the address."""

    code = "address_in_use"


class RemoteError(LlmrtError):
    """A peer failed or refused."""

    code = "remote"


class BrokerUnreachable(RemoteError):
    """No broker answers at the endpoint."""

    code = "broker_unreachable"


class NoWorker(RemoteError):
    """No worker that could serve the request is alive."""

    code = "no_worker"


class Overloaded(RemoteError):
    """A queue is full."""

    code = "overloaded"


class DeadlineExceeded(RemoteError):
    """The budget of the request ran out."""

    code = "deadline_exceeded"


class WorkerLost(RemoteError):
    """The worker died and the request could not go on elsewhere."""

    code = "worker_lost"


class RequestCancelled(RemoteError):
    """The request was cancelled."""

    code = "cancelled"


class SlowConsumer(RemoteError):
    """The reader of a stream did not keep up."""

    code = "slow_consumer"


class OutOfBlocks(RemoteError):
    """The request can never fit the worker's KV arena."""

    code = "out_of_blocks"


class RegistrationRefused(RemoteError):
    """The broker or a peer refused a worker; the message has both values."""

    code = "registration_refused"


class TransferFailed(RemoteError):
    """KV blocks could not be handed over."""

    code = "transfer_failed"


class InternalError(RemoteError):
    """A fault of llmrt itself; the worker's log has the details."""

    code = "internal_error"


class ProtocolError(LlmrtError):
    """Bytes from outside that are no message of this protocol."""

    code = "protocol_error"


class VersionMismatch(ProtocolError):
    """The peer speaks another major version."""

    code = "version_mismatch"


def _tree(root: type[LlmrtError]) -> list[type[LlmrtError]]:
    return [root, *(cls for child in root.__subclasses__() for cls in _tree(child))]


ERROR_BY_CODE: dict[str, type[LlmrtError]] = {cls.code: cls for cls in _tree(LlmrtError)}


def error_from_code(code: str, message: str) -> LlmrtError:
    """The exception for a code that came over the wire."""
    return ERROR_BY_CODE.get(code, RemoteError)(message, code=code)


MAX_SHOWN = 80


class _ShortRepr(reprlib.Repr):
    """Never makes the whole text of a large value, and never fails on one."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = MAX_SHOWN

    def repr_int(self, x: int, level: int) -> str:
        # CPython refuses to print integers of thousands of digits.
        return repr(x) if x.bit_length() <= 256 else f"<int of {x.bit_length()} bits>"

    def repr_bytes(self, x: Any, level: int) -> str:
        return repr(x[:MAX_SHOWN])


_SHORT_REPR = _ShortRepr()


def shown(value: object) -> str:
    """A value for a message, in at most 80 characters, whatever its size."""
    text = _SHORT_REPR.repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."

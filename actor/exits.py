"""What a process says when it ends: its exit code, and one line on stderr.

0    done; a server that was told to stop
1    failed
2    usage, or a request that cannot be served as it is
69   no worker
74   stdout cannot be written
75   broker not reachable, or overloaded: try again later
77   registration refused
78   bad configuration or model
130  interrupted (SIGINT), or cancelled
141  nobody reads stdout any more
143  terminated (SIGTERM) before it was done
"""

import errno
import sys

from llmrt.actor.streams import OutputError
from llmrt.wire.errors import (
    AddressInUse,
    BrokerUnreachable,
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    LlmrtError,
    MessageTooLarge,
    ModelError,
    ModelNotFound,
    NoWorker,
    Overloaded,
    RegistrationRefused,
    RequestCancelled,
    VersionMismatch,
)

OK, FAILED = 0, 1
UNWRITABLE = 74
# 128 and the number of the signal, as shells have it.
INTERRUPTED, BROKEN_PIPE, TERMINATED = 130, 141, 143
# Numbers of sysexits(3). 2, 77 and 78 mean that the same command will fail again.
EXIT_CODES: dict[type, int] = {
    InvalidRequest: 2,
    ContextLengthExceeded: 2,
    MessageTooLarge: 2,
    NoWorker: 69,
    BrokerUnreachable: 75,
    Overloaded: 75,
    RegistrationRefused: 77,
    AddressInUse: 78,
    ConfigError: 78,
    ModelError: 78,
    ModelNotFound: 78,
    VersionMismatch: 78,
    RequestCancelled: INTERRUPTED,
    KeyboardInterrupt: INTERRUPTED,
}


def exit_code(error: BaseException) -> int:
    """What a process that ends by `error` tells its supervisor or shell."""
    if isinstance(error, OutputError):
        return BROKEN_PIPE if error.errno == errno.EPIPE else UNWRITABLE
    return next((EXIT_CODES[kind] for kind in type(error).__mro__ if kind in EXIT_CODES), FAILED)


def report(error: BaseException) -> int:
    """Say on stderr why the process ends: one line for a known error, nothing for a pipe that
    nobody reads, else a log entry with the place. Returns its exit code."""
    if isinstance(error, LlmrtError):
        print(f"error: {error.message} ({error.error_code})", file=sys.stderr)
    elif isinstance(error, OutputError):
        if error.errno != errno.EPIPE:
            print(f"error: {error}", file=sys.stderr)
    elif not isinstance(error, KeyboardInterrupt):
        import structlog  # takes some 0.1 s, and most errors are known

        if not structlog.is_configured():
            # By default structlog writes to stdout, and shows local variables: prompts, say.
            from llmrt.actor.log import configure

            configure("cli")
        structlog.get_logger(__name__).error("process.crashed", error=repr(error), exc_info=error)
    return exit_code(error)

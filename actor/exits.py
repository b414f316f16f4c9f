"""What a process says when it ends: its exit code, and one line on stderr."""

import sys

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

OK, FAILED, INTERRUPTED = 0, 1, 130
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
    return next((EXIT_CODES[kind] for kind in type(error).__mro__ if kind in EXIT_CODES), FAILED)


def report(error: BaseException) -> int:
    """Say on stderr why the process ends: one line for a known error, else a log entry with the
    place. Returns its exit code."""
    if isinstance(error, LlmrtError):
        print(f"error: {error.message} ({error.error_code})", file=sys.stderr)
    elif not isinstance(error, KeyboardInterrupt):
        import structlog  # takes some 0.1 s, and most errors are known

        if not structlog.is_configured():
            # By default structlog writes to stdout, and shows local variables: prompts, say.
            from llmrt.actor.log import configure

            configure("cli")
        structlog.get_logger(__name__).error("process.crashed", error=repr(error), exc_info=error)
    return exit_code(error)

"""Errors for users: one line with the file, the field and the fix, and an exit code (docs/scale.md has all codes)."""

from __future__ import annotations

import logging
import re


class UserError(Exception):
    """Bad input. The message is a line with the file, the field and the fix."""

    exit_code = 2
    """The same command ends in the same way, until somebody changes something."""


class Outage(UserError):
    """A service does not answer now. The same command may work later, without any change."""

    exit_code = 75
    """EX_TEMPFAIL of sysexits.h."""


class PrintableRecord(logging.LogRecord):
    """A log record with control characters written out. All loggers of the process make it, those of libraries too."""

    def getMessage(self) -> str:
        return printable(super().getMessage())

    @property
    def exc_text(self) -> str | None:
        """The formatted traceback. The exception's message in this text may hold control characters."""
        return self._exc_text

    @exc_text.setter
    def exc_text(self, text: str | None) -> None:
        self._exc_text = printable(text) if text else None


def printable(text: str) -> str:
    r"""Write control characters out ("\x1b"), except tabs and line breaks, so that no terminal obeys a text.

    Our log lines quote untrusted services and files.
    """
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: f"\\x{ord(match[0]):02x}", text)


def innermost(error: BaseException) -> BaseException:
    """Return the first error in a group of errors, at any depth; any other error itself.

    asyncio's and anyio's task groups raise groups, whose own text names no cause.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def require(ok: object, message: str) -> None:
    """Raise ValueError with this message unless `ok` holds. For the `__post_init__` of a config."""
    if not ok:
        raise ValueError(message)


def raise_all(*messages: str) -> None:
    """Raise an ExceptionGroup with one ValueError per message. Does nothing without messages."""
    if messages:
        raise ExceptionGroup("contradictions", [ValueError(message) for message in messages])

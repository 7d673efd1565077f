"""Bad input is answered with one line that names the file, the field and the fix, and with exit code 2."""

from __future__ import annotations

import logging
import re


class UserError(Exception):
    """Bad input. The message is one line that names the file, the field and the fix."""


class PrintableRecord(logging.LogRecord):
    """A line of the log, ours or a library's."""

    def getMessage(self) -> str:
        return printable(super().getMessage())

    @property
    def exc_text(self) -> str | None:
        """The traceback, which has the words of an exception."""
        return self._exc_text

    @exc_text.setter
    def exc_text(self, text: str | None) -> None:
        self._exc_text = printable(text) if text else None


def printable(text: str) -> str:
    r"""Return a text that a terminal shows and does not obey: with control characters, but for tabs and line breaks,
    written out ("\x1b"). What strangers' services and files say is part of our lines."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


def require(ok: object, message: str) -> None:
    """Raise ValueError with the message unless `ok`; for the `__post_init__` of a config."""
    if not ok:
        raise ValueError(message)


def refuse(*messages: str) -> None:
    """Raise an ExceptionGroup of ValueErrors, one with each message; nothing where there is none."""
    if messages:
        raise ExceptionGroup("contradictions", [ValueError(message) for message in messages])

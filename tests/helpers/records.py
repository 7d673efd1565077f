"""The log records of the package."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """The messages of our own loggers, as this process shows them."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("arpo").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("arpo").removeHandler(handler)

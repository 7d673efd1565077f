"""Reads what wandb wrote without a network: a log of protocol buffers in LevelDB's format."""

import json
import time
from pathlib import Path

BLOCK_BYTES, HEADER_BYTES = 32768, 7
PATIENCE_S = 300.0


def history(run_folder: Path, num_rows: int) -> list[dict]:
    """The rows that were logged, from all offline runs of a run's folder, the oldest first.

    wandb's own process writes them, and may still be at it when the run is finished: waits until there are `num_rows`.
    """
    deadline = time.monotonic() + PATIENCE_S
    while len(rows := _history(run_folder)) < num_rows and time.monotonic() < deadline:
        time.sleep(0.1)
    return rows


def _history(run_folder: Path) -> list[dict]:
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for file in sorted(run_folder.glob("wandb/offline-run-*/*.wandb")):
        for data in _records(file.read_bytes()):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                rows.append(
                    {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                )
    return rows


def _records(data: bytes):
    """A record is in one piece (type 1), or in several (2, 3 ..., 4) that blocks keep apart."""
    position, parts = HEADER_BYTES, []  # the file's own header is as long as a record's
    while position + HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < HEADER_BYTES:
            position += left
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        position += HEADER_BYTES
        if position + length > len(data):
            return  # it is being written
        parts.append(data[position : position + length])
        position += length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []

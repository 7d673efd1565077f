"""Checks the files of train_sft.py's options before torch is imported (see arpo/start/inputs.py)."""

from __future__ import annotations

from itertools import islice
from typing import Any

from arpo.data.hub import local_file
from arpo.data.model_folder import check_model_folder
from arpo.protocol import form_of
from arpo.sft.conversations import read_conversations
from arpo.start.inputs import NUM_ROWS, check_run


def check_sft(cfg: Any) -> None:
    """Raise UserError if a file of train_sft.py's config is missing, or if the first rows of a file cannot be used."""
    check_model_folder(cfg.model.path)
    for path in filter(None, (cfg.data.train, cfg.data.valid)):
        parse = form_of(cfg.protocol.format).parse_row
        for _ in islice(read_conversations(local_file(path), parse=parse), NUM_ROWS):
            pass
    check_run(cfg)

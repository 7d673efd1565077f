"""Tokenised conversations on disk, made once by all ranks together, then read row by row, whatever their size.

    runs/NAME/tokens/train/manifest.json   what they were made of, and how many there are
                           part_00000.bin  little-endian uint32 per token: id * 2 + loss mask; one file per rank
                           lengths.npy     int32 tokens of each row, in file order
                           overlong.jsonl  what was left out: {"place", "tokens"}

The rows and their order depend on the file and the options alone. Only 12 bytes per row are kept in memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jinja2 import TemplateError
from tqdm import tqdm

from arpo.batch import Row
from arpo.config.bounded import read_json
from arpo.config.sections import SFTDataConfig
from arpo.errors import UserError
from arpo.protocol import Codec, form_of
from arpo.protocol.codec import Rendered
from arpo.protocol.format_rules import turns_of
from arpo.protocol.messages import Conversation
from arpo.protocol.prompts import with_system_prompt
from arpo.ranks import Ranks
from arpo.sft.conversations import read_conversations
from arpo.tools import system_prompt_for

logger = logging.getLogger(__name__)

OVERLONG = "overlong.jsonl"
FORMAT = 5  # raise it when the same file would give other tokens, or another layout


class ConversationRows(Sequence):
    """The rows of a folder that `tokenise` made. Rows are read when they are asked for."""

    def __init__(self, folder: Path):
        manifest = read_json(folder / "manifest.json")
        self.folder = folder
        self.origin: dict = manifest["origin"]  # everything that the tokens depend on
        self.num_dropped: int = manifest["num_dropped"]
        self.defects: dict[str, int] = manifest["defects"]
        self._lengths = np.load(folder / "lengths.npy")  # (R,) of R rows
        is_sound = self._lengths.ndim == 1 and self._lengths.dtype.kind in "iu" and (self._lengths > 0).all()
        counts = manifest["rows_per_part"]
        if not is_sound or min(counts) < 0 or sum(counts) != len(self._lengths):
            raise ValueError(f"{folder}: the lengths of its rows are damaged")
        self._first_rows = np.concatenate([[0], np.cumsum(manifest["rows_per_part"])])
        self._starts = np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)])  # (R + 1,) over all parts

    def is_whole(self) -> bool:
        sizes = np.diff(4 * self._starts[self._first_rows])
        return all(_part(self.folder, part).stat().st_size == size for part, size in enumerate(sizes))

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Row:
        """Read row `index`; its "response" begins with the first token that counts in the loss."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = int(np.searchsorted(self._first_rows, index, side="right")) - 1
        start = self._starts[index] - self._starts[self._first_rows[part]]
        coded = np.fromfile(_part(self.folder, part), "<u4", int(self._lengths[index]), offset=4 * int(start))
        token_ids, loss_mask = (coded >> 1).astype(np.int32), (coded & 1).astype(np.int8)
        first = int(loss_mask.argmax())
        return Row(prompt_ids=token_ids[:first], response_ids=token_ids[first:], loss_mask=loss_mask[first:])


def tokenise(path: str | Path, cfg: SFTDataConfig, codec: Codec, folder: Path, ranks: Ranks) -> ConversationRows:
    """Turn the conversations of `path` into rows of at most `cfg.max_tokens`, in file order, kept in `folder`.

    A collective operation: each rank tokenises its part of the file, into a folder that all ranks see. Rows that are
    there already, from the same file, tokenizer and options, are used again. Raises UserError, the same on every rank,
    for a conversation that cannot be used or masked exactly, and where none is short enough.
    """
    cfg = replace(cfg, system_prompt=system_prompt_for(cfg.system_prompt, cfg.tools, form=codec.format))
    origin = _origin(Path(path), cfg, codec)
    if not ranks.all_gather_objects(ranks.is_main and _is_there(folder, origin))[0]:
        _build(path, cfg, codec, folder, ranks, origin)
    rows = ConversationRows(folder)
    logger.info(
        "%s: %d conversations, %d tokens; longer than %d: %d left out (%s)",
        path, len(rows), rows.num_tokens, cfg.max_tokens, rows.num_dropped, folder / OVERLONG,
    )  # fmt: skip
    if rows.defects:
        named = ", ".join(f"{reason} {number}" for reason, number in rows.defects.items())
        logger.warning("%s: broken tags, for which a trajectory of RL gets -1: %s conversations", path, named)
    return rows


def _build(path: str | Path, cfg: SFTDataConfig, codec: Codec, folder: Path, ranks: Ranks, origin: dict) -> None:
    logger.info("tokenising %s", path)
    building = folder.with_name(f"{folder.name}.building")
    if ranks.is_main:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
    ranks.barrier()
    try:
        part = ranks.together(lambda: _write_part(path, cfg, codec, building, ranks))
        parts = ranks.all_gather_objects(part)
        overlong = [entry for part in parts for entry in part.overlong]
        if not any(part.lengths for part in parts):
            raise UserError(f"{path}: {_why_none(cfg, overlong)}")
        if ranks.is_main:
            manifest = {
                "origin": origin,
                "rows_per_part": [len(part.lengths) for part in parts],
                "num_dropped": len(overlong),
                "defects": dict(sum((part.defects for part in parts), Counter()).most_common()),
            }
            np.save(building / "lengths.npy", np.concatenate([np.frombuffer(p.lengths, np.int32) for p in parts]))
            (building / OVERLONG).write_text("".join(json.dumps(entry) + "\n" for entry in overlong))
            (building / "manifest.json").write_text(json.dumps(manifest, indent=1))
            shutil.rmtree(folder, ignore_errors=True)
            building.rename(folder)
    finally:
        if ranks.is_main:
            shutil.rmtree(building, ignore_errors=True)
    ranks.barrier()


class _Part(NamedTuple):
    """The tokenised part of the file that one rank worked on."""

    lengths: array
    overlong: list[dict]
    defects: Counter[str]


def _part(folder: Path, number: int) -> Path:
    return folder / f"part_{number:05d}.bin"


def _write_part(path: str | Path, cfg: SFTDataConfig, codec: Codec, folder: Path, ranks: Ranks) -> _Part:
    """Write this rank's tokens. Raises UserError for a bad conversation."""
    part = _Part(array("i"), [], Counter())
    parse = form_of(codec.format).parse_row
    conversations = read_conversations(path, part=ranks.rank, num_parts=ranks.world_size, parse=parse)
    silent = None if ranks.is_main else True  # None = unless it is a terminal
    try:
        with _part(folder, ranks.rank).open("wb") as file:
            for place, conversation in tqdm(
                conversations, f"tokenising on rank {ranks.rank}", leave=False, disable=silent
            ):
                rendered = render_row(conversation, cfg, codec, place)
                part.defects.update(_defects(conversation, codec))
                num_tokens = len(rendered.token_ids)
                if num_tokens > cfg.max_tokens:
                    part.overlong.append({"place": place, "tokens": num_tokens})
                    continue
                coded = np.asarray(rendered.token_ids, "<u4") * 2 + np.asarray(rendered.loss_mask)
                coded.astype("<u4").tofile(file)
                part.lengths.append(num_tokens)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # of the writing: read_rows names its own
        raise UserError(
            f"{folder}: cannot write the tokens ({error.strerror}); run.dir must be a folder all nodes share"
        ) from None
    return part


def render_row(conversation: list[dict] | Conversation, cfg: SFTDataConfig, codec: Codec, place: str) -> Rendered:
    messages, functions = conversation if isinstance(conversation, Conversation) else (conversation, None)
    try:
        rendered = codec.render_conversation(
            with_system_prompt(messages, cfg.system_prompt),
            mask_results=cfg.mask_results,
            train_turns=cfg.train_turns,
            functions=functions,
        )
    except (ValueError, TemplateError) as error:  # TemplateError: templates refuse what they do not know
        raise UserError(f"{place}: {error}") from None
    if not any(rendered.loss_mask):
        raise UserError(f"{place}: no token would be trained, since the assistant's weights are 0; leave the row out")
    return rendered


def _defects(conversation: list[dict] | Conversation, codec: Codec) -> list[str]:
    """Return what is first wrong with the tags of a conversation in the eyes of the reward, if anything is.

    A missing answer or thought is no defect here: a conversation need not be a trajectory.
    """
    rules = form_of(codec.format).rules
    messages = conversation.messages if isinstance(conversation, Conversation) else conversation
    found: list[str] = []
    for text in [message["content"] for message in messages if message["role"] == "assistant"]:
        segments = rules.derive_segments(text, codec.tools)
        found += [rules.turn_error(*turn, codec.tools) for turn in turns_of(segments)]
        found.append(rules.format_error(segments, codec.tools))
    return [reason for reason in found if reason.startswith(("un", "model_", "malformed"))][:1]


def _why_none(cfg: SFTDataConfig, overlong: list[dict]) -> str:
    if not overlong:
        return "the file has no conversations; was the export interrupted?"
    limit, shortest = f"data.max_tokens={cfg.max_tokens}", min(entry["tokens"] for entry in overlong)
    return f"no conversation has at most {limit} tokens (the shortest has {shortest}); raise it"


def _origin(path: Path, cfg: SFTDataConfig, codec: Codec) -> dict:
    """Return everything that the tokens depend on. A file is known by path, size and time of change, unread."""
    try:
        stat = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot read the file ({error.strerror}); check the path") from None
    tokenizer = f"{codec.tokenizer.backend_tokenizer.to_str()}{codec.tokenizer.chat_template}"
    return {
        "format": FORMAT,
        "file": [str(path.resolve()), stat.st_size, stat.st_mtime_ns],
        "tokenizer": hashlib.sha256(tokenizer.encode()).hexdigest(),
        "enable_thinking": codec.enable_thinking,
        "tools": sorted(codec.tools),
        "max_tokens": cfg.max_tokens,
        "mask_results": cfg.mask_results,
        "train_turns": cfg.train_turns,
        "system_prompt": cfg.system_prompt,
    } | codec.origin


def _is_there(folder: Path, origin: dict) -> bool:
    """Return whether the folder has whole rows of this origin."""
    try:
        rows = ConversationRows(folder)
        return rows.origin == origin and rows.is_whole()
    except (OSError, EOFError, ValueError, KeyError, IndexError, TypeError):
        return False

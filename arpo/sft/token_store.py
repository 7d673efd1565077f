"""Tokenised conversations on disk. All ranks together write the tokens once, and then read row by row.

    runs/NAME/tokens/train/manifest.json   origin of the tokens, and number of rows
                           part_00000.bin  little-endian uint32 per token: id * 2 + loss mask; one file per rank
                           lengths.npy     int32 number of tokens of each row, in file order
                           overlong.jsonl  conversations that were left out: {"place", "tokens"}

The rows and their order depend only on the file and the options. Only 12 bytes per row are kept in memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

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

T = TypeVar("T")
logger = logging.getLogger(__name__)

OVERLONG = "overlong.jsonl"
FORMAT = 7
"""Version of the stored tokens. Raise the number if the same file would give other tokens or another layout on disk."""


class ConversationRows(Sequence):
    """The rows in a folder that `tokenise` wrote. A row is read from disk at each access."""

    def __init__(self, folder: Path):
        manifest = read_json(folder / "manifest.json")
        self.folder = folder
        self.origin: dict = manifest["origin"]
        """Everything that the tokens depend on, see `_origin`."""
        self.num_dropped: int = manifest["num_dropped"]
        self.defects: dict[str, int] = manifest["defects"]
        """Reason -> number of conversations with broken tags."""
        self._lengths = np.load(folder / "lengths.npy")  # (R,) for R rows
        is_sound = self._lengths.ndim == 1 and self._lengths.dtype.kind in "iu" and (self._lengths > 0).all()
        counts = manifest["rows_per_part"]
        if not is_sound or min(counts) < 0 or sum(counts) != len(self._lengths):
            raise ValueError(f"{folder}: the lengths of its rows are damaged")
        self._first_rows = np.concatenate([[0], np.cumsum(counts)])  # (parts + 1,)
        self._starts = np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)])  # (R + 1,) over all parts

    def is_complete(self) -> bool:
        """Return True if each part's file has the expected size."""
        sizes = np.diff(4 * self._starts[self._first_rows])
        return all(_part_file(self.folder, part).stat().st_size == size for part, size in enumerate(sizes))

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Row:
        """Read row `index`. The "response" begins with the first token in the loss."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = int(np.searchsorted(self._first_rows, index, side="right")) - 1
        start = self._starts[index] - self._starts[self._first_rows[part]]
        file = _part_file(self.folder, part)
        coded = np.fromfile(file, "<u4", count=int(self._lengths[index]), offset=4 * int(start))
        token_ids = (coded >> 1).astype(np.int32)
        loss_mask = (coded & 1).astype(np.int8)
        first = int(loss_mask.argmax())
        return Row(prompt_ids=token_ids[:first], response_ids=token_ids[first:], loss_mask=loss_mask[first:])


def tokenise(path: str | Path, cfg: SFTDataConfig, codec: Codec, *, folder: Path, ranks: Ranks) -> ConversationRows:
    """Tokenise the conversations of `path` into rows of at most `cfg.max_tokens`, in file order, stored in `folder`.

    Collective: each rank tokenises its part of the file. All ranks must see the folder. If it already has rows of the
    same file, tokenizer and options, they are used again. Raises UserError, the same on every rank, for a conversation
    that cannot be used or masked exactly, and if no conversation is short enough.
    """
    cfg = replace(cfg, system_prompt=system_prompt_for(cfg.system_prompt, cfg.tools, form=codec.format))
    origin = _origin(Path(path), cfg, codec)
    # The main rank decides for all: another rank may not see a new folder of a network file system yet.
    [is_stored, *_] = ranks.all_gather_objects(ranks.is_main and _is_stored(folder, origin))
    if not is_stored:
        _write(path, cfg, codec, folder=folder, ranks=ranks, origin=origin)
    rows = ConversationRows(folder)
    overlong = f"longer than {cfg.max_tokens}: {rows.num_dropped} left out ({folder / OVERLONG})"
    logger.info("%s: %d conversations, %d tokens; %s", path, len(rows), rows.num_tokens, overlong)
    if rows.defects:
        counts = ", ".join(f"{reason} {count}" for reason, count in rows.defects.items())
        logger.warning("%s: broken tags, for which a trajectory of RL gets -1: %s conversations", path, counts)
    return rows


def _write(path: str | Path, cfg: SFTDataConfig, codec: Codec, *, folder: Path, ranks: Ranks, origin: dict) -> None:
    """Write all parts into a temporary folder, then rename the folder. So a stopped run leaves no half folder."""
    logger.info("tokenising %s", path)
    building = folder.with_name(f"{folder.name}.building")
    if ranks.is_main:
        shutil.rmtree(building, ignore_errors=True)
    _write_together(lambda: ranks.is_main and building.mkdir(parents=True), building, ranks)
    try:
        part = _write_together(lambda: _write_part(path, cfg, codec, building, ranks), building, ranks)
        parts = ranks.all_gather_objects(part)
        overlong = [conversation for part in parts for conversation in part.overlong]
        if not any(part.lengths for part in parts):
            raise UserError(f"{path}: {_why_none(cfg, overlong)}")
        _write_together(lambda: ranks.is_main and _finish(building, folder, parts, overlong, origin), building, ranks)
    finally:
        if ranks.is_main:
            shutil.rmtree(building, ignore_errors=True)
    ranks.barrier()


def _write_together(write: Callable[[], T], folder: Path, ranks: Ranks) -> T:
    """Call `write` on each rank and return this rank's value. If one rank cannot write, all ranks raise UserError."""

    def attempt() -> T:
        try:
            return write()
        except OSError as error:
            reason = f"rank {ranks.rank}: {error.strerror or error}"  # NumPy's error for a full disk has no strerror
            fix = "free some space, or set run.dir to a folder that all nodes share"
            raise UserError(f"{folder}: cannot write the tokens ({reason}); {fix}") from None

    return ranks.call_together(attempt)


def _finish(building: Path, folder: Path, parts: list[_Part], overlong: list[dict], origin: dict) -> None:
    """Write the tables of all parts, and give the folder its name."""
    manifest = {
        "origin": origin,
        "rows_per_part": [len(part.lengths) for part in parts],
        "num_dropped": len(overlong),
        "defects": dict(sum((part.defects for part in parts), Counter()).most_common()),
    }
    lengths = np.concatenate([np.frombuffer(part.lengths, np.int32) for part in parts])
    np.save(building / "lengths.npy", lengths)
    lines = [json.dumps(conversation) + "\n" for conversation in overlong]
    (building / OVERLONG).write_text("".join(lines))
    (building / "manifest.json").write_text(json.dumps(manifest, indent=1))
    shutil.rmtree(folder, ignore_errors=True)
    building.rename(folder)


class _Part(NamedTuple):
    """What a rank found in its part of the file."""

    lengths: array
    """Number of tokens of each row that was written."""
    overlong: list[dict]
    """Conversations that were left out: {"place", "tokens"}."""
    defects: Counter[str]
    """Reason -> number of conversations with broken tags."""


def _part_file(folder: Path, part: int) -> Path:
    return folder / f"part_{part:05d}.bin"


def _write_part(path: str | Path, cfg: SFTDataConfig, codec: Codec, folder: Path, ranks: Ranks) -> _Part:
    """Write this rank's tokens. Raises UserError for a bad conversation, or a file that cannot be read."""
    part = _Part(lengths=array("i"), overlong=[], defects=Counter())
    parse = form_of(codec.format).parse_row
    conversations = read_conversations(path, part=ranks.rank, num_parts=ranks.world_size, parse=parse)
    is_silent = None if ranks.is_main else True  # None: a progress bar only on a terminal
    progress = tqdm(conversations, f"tokenising on rank {ranks.rank}", leave=False, disable=is_silent)
    with _part_file(folder, ranks.rank).open("wb") as file:
        for place, conversation in progress:
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
    return part


def render_row(conversation: list[dict] | Conversation, cfg: SFTDataConfig, codec: Codec, place: str) -> Rendered:
    """Return the conversation's tokens and loss mask. Raises UserError, which begins with `place` ("file:line")."""
    if isinstance(conversation, Conversation):
        messages, functions = conversation
    else:
        messages = conversation
        functions = None
    try:
        rendered = codec.render_conversation(
            with_system_prompt(messages, cfg.system_prompt),
            mask_results=cfg.mask_results,
            train_turns=cfg.train_turns,
            functions=functions,
        )
    except (ValueError, TemplateError) as error:  # TemplateError: the template refuses a message
        raise UserError(f"{place}: {error}") from None
    if not any(rendered.loss_mask):
        raise UserError(f"{place}: no token would be trained, since the assistant's weights are 0; leave the row out")
    return rendered


def _defects(conversation: list[dict] | Conversation, codec: Codec) -> list[str]:
    """Return the first format error of the reward's rules in the conversation's tags, as a list; [] without one.

    A missing answer or thought does not count, since a conversation need not be a full trajectory.
    """
    rules = form_of(codec.format).rules
    messages = conversation.messages if isinstance(conversation, Conversation) else conversation
    reasons: list[str] = []
    for message in messages:
        if message["role"] != "assistant":
            continue
        segments = rules.derive_segments(message["content"], codec.tools)
        reasons += [rules.turn_error(*turn, codec.tools) for turn in turns_of(segments)]
        reasons.append(rules.format_error(segments, codec.tools))
    broken_tags = [reason for reason in reasons if reason.startswith(("un", "model_", "malformed"))]
    return broken_tags[:1]


def _why_none(cfg: SFTDataConfig, overlong: list[dict]) -> str:
    """Return the message for a file without any usable conversation."""
    if not overlong:
        return "the file has no conversations; was the export interrupted?"
    shortest = min(conversation["tokens"] for conversation in overlong)
    limit = f"data.max_tokens={cfg.max_tokens}"
    return f"no conversation has at most {limit} tokens (the shortest has {shortest}); raise it"


def _origin(path: Path, cfg: SFTDataConfig, codec: Codec) -> dict:
    """Return everything that the tokens depend on. The file is not read: path, size and time of change identify it."""
    try:
        stat = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot read the file ({error.strerror}); check the path") from None
    loaded = codec.tokenizer
    # A template may name the special tokens: {{ eos_token }}. Only tokenizer_config.json says which they are.
    tokenizer = f"{loaded.backend_tokenizer.to_str()}{loaded.chat_template}{loaded.special_tokens_map}"
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


def _is_stored(folder: Path, origin: dict) -> bool:
    """Return True if the folder has complete rows of this origin."""
    try:
        rows = ConversationRows(folder)
        return rows.origin == origin and rows.is_complete()
    except (OSError, EOFError, ValueError, KeyError, IndexError, TypeError):
        return False

"""What strangers wrote ends in one line with the file, soon, and in little memory: bombs of every kind that we read."""

import gzip
import json
import os
import random
import sqlite3
import tracemalloc
import zlib

import pytest

from arpo.checkpoint.manifest import find_problem, size_and_checksum
from arpo.config.bounded import PIECE_BYTES, inflate, read_file
from arpo.data import load_prompts
from arpo.data.model_folder import read_json
from arpo.errors import UserError
from arpo.evals.records import read_grades
from arpo.log import read_metrics
from arpo.log.dumps import read_dump
from arpo.log.metrics_file import MetricsFile, rows_until
from arpo.log.settings import begun_settings, settings_of
from arpo.protocol import FORMS
from arpo.sampling.carried_state import check_nothing_is_left
from arpo.sft.conversations import read_conversations
from arpo.start.load import load_config
from arpo.tools.cache.rows import DamagedEntry, unpack
from arpo.tools.cache.store import CacheFile
from extras.cache.released import read_released
from extras.export import model_of_run
from train_rl import RLConfig

DEEP = "[" * 100_000
DEEP_BUT_WHOLE = "[" * 400 + "]" * 400
NUMBER = "1" * 5_000
LAUGHS = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" if n else "a0: &a0 [x]" for n in range(12))
MERGES = "\n".join(f"a{n}: &a{n} {{{', '.join([f'<<: *a{n - 1}'] * 9)}}}" if n else "a0: &a0 {x: 1}" for n in range(12))


def spaces(num_bytes: int) -> bytes:
    """A gzip file of so many spaces, made without holding or packing them: one packed block, again and again."""
    block, packer, checksum = b" " * (1 << 24), zlib.compressobj(9, wbits=-15), 0
    packed = packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)
    for _ in range(num_bytes // len(block)):
        checksum = zlib.crc32(block, checksum)
    trailer = checksum.to_bytes(4, "little") + num_bytes.to_bytes(4, "little")
    return gzip.compress(b"")[:10] + packed * (num_bytes // len(block)) + packer.flush() + trailer


BOMB = spaces((1 << 30) + (1 << 24))
EMPTY_LISTS = gzip.compress(b"[" + b"[]," * (1 << 24) + b"[]]", 1)


def conversations(form: str):
    return lambda path: list(read_conversations(path, parse=FORMS[form].parse_row))


def question(text: str) -> str:
    return f'{{"question": "q", "answer": "a"}}\n{{"question": {text}, "answer": "a"}}\n'


def called(arguments: str) -> str:
    turns = [{"role": "user", "content": "q"}, {"role": "function_call", "content": arguments}]
    return json.dumps({"messages": [*turns, {"role": "tool", "content": "r"}, {"role": "assistant", "content": "a"}]})


READERS = {
    "config.yaml": lambda path: load_config(RLConfig, [str(path)]),
    "run": lambda path: settings_of(path.parent),
    "export": lambda path: model_of_run(path.parent / "checkpoints" / "step_000001", ""),
    "prompts": load_prompts,
    "sft": conversations("tags"),
    "hermes": conversations("hermes"),
    "dump": lambda path: list(read_dump(path)),
    "carried": lambda path: check_nothing_is_left([path]),
    "grades": read_grades,
    "metrics": lambda path: read_metrics(path.parent),
    "cache": read_released,
    "model": lambda path: read_json("model.path", path.parent, path.name, "copy it again"),
}
BOMBS = [
    *[(reader, "config.yaml", text) for reader in ("config.yaml", "run", "export")
      for text in (LAUGHS, MERGES, DEEP, "run: &a\n  seed: *a", f"a: {NUMBER}", "? [a]\n: 1", "2001-99-99: 1")],
    *[("prompts", "q.jsonl", question(text)) for text in (DEEP, DEEP_BUT_WHOLE, NUMBER, r'"a \ud800 b"')],
    *[("prompts", "q.json", f"[{question(text).split()[-1]}]") for text in (DEEP, NUMBER)],
    ("prompts", "q.json", json.dumps([{"question": "\ud83d", "answer": "a"}])),
    ("prompts", "q.jsonl", question(f'"q", "meta": {DEEP_BUT_WHOLE}')),
    *[(form, "c.jsonl", called(f'{{"name": "search", "arguments": {{"query": {value}}}}}'))
      for form in ("sft", "hermes") for value in (DEEP, DEEP_BUT_WHOLE, r'"\ud800"')],
    *[("dump", "d.jsonl", text + "\n") for text in (DEEP, NUMBER, f'{{"a": {NUMBER}}}', "5", "[]")],
    ("dump", "d.jsonl.gz", BOMB),
    *[("dump", "d.jsonl.gz", packed) for packed in (gzip.compress(b"a\n")[:-9], b"no gzip")],
    *[("carried", "carried_00000.json.gz", bomb) for bomb in (BOMB, EMPTY_LISTS)],
    *[("carried", "carried_00000.json.gz", gzip.compress(text.encode())) for text in (DEEP, NUMBER + "x")],
    ("carried", "carried_00000.json.gz", gzip.compress(b"{}")[:-1]),
    *[("metrics", "metrics.jsonl", text + "\n") for text in (DEEP, NUMBER, "[]")],
    *[("grades", "g.jsonl", text + "\n") for text in (DEEP, NUMBER)],
    *[("cache", "c.json", f'{{"a": {text}}}') for text in (DEEP, NUMBER, DEEP_BUT_WHOLE)],
    *[("model", "config.json", text) for text in (DEEP, f'{{"a": {NUMBER}}}', "[]")],
]  # fmt: skip


@pytest.mark.parametrize("reader, name, content", BOMBS, ids=[f"{b[0]}-{n}" for n, b in enumerate(BOMBS)])
def test_a_bomb_is_one_line_that_names_the_file(tmp_path, reader, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as error:
        READERS[reader](path)
    said = str(error.value)
    assert str(path if reader != "run" else tmp_path) in said.replace("model.path=", "").replace(": config", "/config")
    assert "\n" not in said and len(said) < 1000
    if name.endswith(".jsonl") and reader in ("prompts", "sft", "hermes", "dump", "grades"):
        assert f"{path}:{2 if reader == 'prompts' else 1}: " in said


def test_only_as_much_is_unpacked_as_is_allowed():
    tracemalloc.start()
    with pytest.raises(ValueError, match="more than 1 MiB when unpacked"):
        inflate(BOMB, 1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(BOMB) < 2 << 20 and peak < 8 << 20
    assert inflate(zlib.compress(b"a")) == inflate(gzip.compress(b"a")) == b"a"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_run_folder_of_devices_ends_at_once(tmp_path, make):
    make(tmp_path / "config.yaml")
    make(tmp_path / "metrics.jsonl")
    assert begun_settings(tmp_path) == {}
    for read in (read_metrics, lambda folder: rows_until(folder / "metrics.jsonl", 1)):
        with pytest.raises(UserError, match=r"metrics\.jsonl: no plain file; move it away"):
            read(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.mkdir()])
def test_what_is_no_file_is_not_read(tmp_path, make):
    make(tmp_path / "x")
    with pytest.raises((ValueError, OSError)):
        read_file(tmp_path / "x")


@pytest.mark.parametrize(
    "value",
    [
        zlib.compress(b'{"query": "q", "text": "' + b" " * (65 << 20) + b'"}'),
        *[zlib.compress(f'{{"query": "q", "text": {text}}}'.encode()) for text in (DEEP, NUMBER, "1", '["a"]', "null")],
        zlib.compress(b"[]"),
    ],
)
def test_a_value_of_a_cache_that_is_no_answer_is_a_damaged_entry(value):
    with pytest.raises(DamagedEntry):
        unpack(value)


def test_a_cache_whose_rows_have_no_end_is_not_opened(tmp_path):
    cache = CacheFile(tmp_path / "c.sqlite")
    cache.put(b"k", "b", "q", "text")
    cache.close()
    with sqlite3.connect(tmp_path / "c.sqlite") as connection:
        endless = (
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i, x'00', 'b', 'q', x'00', 0, 0.0"
        )
        connection.executescript(f"DROP TABLE entries; CREATE VIEW entries AS {endless} FROM n;")
    with pytest.raises(UserError, match=r"c\.sqlite: not a cache of this version"):
        CacheFile(tmp_path / "c.sqlite", read_only=True)


@pytest.mark.timeout(60)
def test_a_file_that_is_mostly_a_hole_is_not_read(tmp_path):
    with (tmp_path / "huge").open("wb") as file:
        file.write(b"x")
        file.truncate(1 << 40)
    assert find_problem(tmp_path, {"huge": [1 << 40, 0]}) == "huge is mostly a hole"
    with (tmp_path / "small").open("wb") as file:  # a tensor of zeros, where a file system makes holes of them
        file.truncate(1 << 20)
    (tmp_path / "huge").unlink()
    assert find_problem(tmp_path, {"small": size_and_checksum(tmp_path / "small")}) is None


def test_packed_bytes_of_any_size_are_unpacked_whole():
    for size in (0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES):
        assert inflate(gzip.compress(bytes(size))) == bytes(size)
    noise = random.Random(0).randbytes(PIECE_BYTES + 9)
    assert inflate(zlib.compress(noise)) == noise
    for damaged in (gzip.compress(noise)[:-9], gzip.compress(b"")[:5], b""):
        with pytest.raises(ValueError, match="cut short"):
            inflate(damaged)


@pytest.mark.parametrize("line", [
    '{"step": Infinity}', '{"step": 1e400}', '{"step": -1}', '{"step": NaN}', '{"step": 1.5}', '{"step": true}',
    '{"step": "1"}', '{"step": null}', '{"step": 1, "entropy/root": "x"}', '{"step": 1, "valid/reward": null}',
    '{"step": 1, "reward/mean": [1]}', "{}", "null", '"step"', "1",
])  # fmt: skip
def test_a_line_of_metrics_that_is_none_is_named_or_left_out_at_a_resume(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "valid/reward": 1.0}}\n{line}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: not a line of metrics; drop the line"):
        read_metrics(tmp_path, ["reward/mean"])
    MetricsFile(path, 1)
    assert rows_until(path, 1) == {1: {"step": 1, "valid/reward": 1.0}} and len(path.read_text().splitlines()) == 1


def test_a_long_file_of_metrics_is_read_without_taking_its_size(tmp_path):
    path = tmp_path / "metrics.jsonl"
    names = [f"group/number_{n}" for n in range(120)]
    with path.open("w") as file:
        for step in range(1, 1001):
            file.write(json.dumps({"step": step} | dict.fromkeys(names, step / 7)) + "\n")
    tracemalloc.start()
    MetricsFile(path, 1000)
    assert rows_until(path, 1000, names=["group/number_7"])[500] == {"step": 500, "group/number_7": 500 / 7}
    assert rows_until(path, 1000, names=["valid/reward"]) == {}
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 4 << 20 and peak < 1 << 20

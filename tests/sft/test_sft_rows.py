"""Tokenised conversations on disk: the same rows whatever the number of ranks, and little of them in memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.files import write_jsonl, write_parquet
from helpers.models import build_tiny_tokenizer
from helpers.ranks import mesh_of_one, ranks_of, run_ranks

from arpo.config.sections import SFTDataConfig
from arpo.errors import UserError
from arpo.protocol import TagsCodec
from arpo.sft.token_store import OVERLONG, ConversationRows, tokenise

ROOT = Path(__file__).resolve().parents[2]
CFG = SFTDataConfig(train="x", max_tokens=200)


def conversations(num: int = 30) -> list[dict]:
    """Every tenth is longer than 200 tokens."""
    trajectory = "<python>print({0} + 1)</python> <result>\n{1}\n</result><answer>{1}</answer>"
    return [
        {"messages": [{"role": "user", "content": f"{n} + 1?" * (1 + n % 3)},
                      {"role": "assistant", "content": trajectory.format(n, n + 1) * (12 if n % 10 == 5 else 1)}]}
        for n in range(num)
    ]  # fmt: skip


def tokenise_on(num_ranks: int, path: Path, folder: Path, cfg: SFTDataConfig = CFG) -> ConversationRows:
    run_ranks(num_ranks, _tokenise, path, folder, cfg)
    return ConversationRows(folder)


def _tokenise(ranks, path, folder, cfg) -> None:
    tokenise(path, cfg, TagsCodec(build_tiny_tokenizer()), folder=folder, ranks=ranks)


def arrays(rows: ConversationRows) -> list[tuple]:
    return [(r.prompt_ids.tolist(), r.response_ids.tolist(), r.loss_mask.tolist()) for r in rows]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data") / "sft.jsonl", conversations())


@pytest.fixture(scope="module")
def rows(data, tmp_path_factory) -> ConversationRows:
    return tokenise_on(1, data, tmp_path_factory.mktemp("rows") / "train")


def test_a_row_is_the_rendered_conversation_cut_at_its_first_loss_token(rows):
    codec = TagsCodec(build_tiny_tokenizer())
    rendered = [codec.render_conversation(row["messages"]) for row in conversations()]
    rendered = [r for r in rendered if len(r.token_ids) <= 200]
    assert len(rows) == len(rendered) == 27 and rows.num_tokens == sum(len(r.token_ids) for r in rendered)
    for row, r in zip(rows, rendered, strict=True):
        assert [*row.prompt_ids, *row.response_ids] == r.token_ids
        assert [0] * len(row.prompt_ids) + row.loss_mask.tolist() == r.loss_mask
        assert row.loss_mask[0] == 1 and row.prompt_ids.dtype == np.int32


def test_overlong_conversations_are_left_out_counted_and_listed(rows, data):
    assert rows.num_dropped == 3
    listed = [json.loads(line) for line in (rows.folder / OVERLONG).read_text().splitlines()]
    assert [entry["place"] for entry in listed] == [f"{data}:{line}" for line in (6, 16, 26)]
    assert all(entry["tokens"] > 200 for entry in listed)


def test_a_conversation_of_exactly_the_limit_is_kept(rows, data, tmp_path):
    longest = max(len(row.prompt_ids) + len(row.response_ids) for row in rows)
    assert len(tokenise_on(1, data, tmp_path / "train", replace(CFG, max_tokens=longest))) == 27


@pytest.mark.slow
def test_any_number_of_ranks_makes_the_same_rows(rows, data, tmp_path):
    for num_ranks in (2, 3):
        assert arrays(tokenise_on(num_ranks, data, tmp_path / f"of_{num_ranks}")) == arrays(rows)
    parquet = write_parquet(tmp_path / "sft.parquet", conversations())
    assert arrays(tokenise_on(2, parquet, tmp_path / "parquet")) == arrays(rows)


def test_what_is_there_is_used_again_until_file_or_options_change(tmp_path):
    path, folder = write_jsonl(tmp_path / "sft.jsonl", conversations()), tmp_path / "train"
    made = lambda: (folder / "manifest.json").stat().st_mtime_ns  # noqa: E731
    tokenise_on(1, path, folder)
    first = made()
    tokenise_on(1, path, folder)
    assert made() == first
    assert len(tokenise_on(1, path, folder, replace(CFG, max_tokens=5000))) == 30 and made() > first
    write_jsonl(path, conversations(12))
    assert len(tokenise_on(1, path, folder)) == 11


def test_rows_of_another_end_token_are_not_used_again(data, tmp_path):
    """The template names it {{ eos_token }}, and only tokenizer_config.json says which it is. (A part of the tokenizer
    that its cache did not depend on: allenai/open-instruct 1518.)"""
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "{{ eos_token }}")
    last_tokens = []
    with mesh_of_one() as mesh:
        for eos in ("<|im_end|>", "<|endoftext|>"):
            tokenizer.eos_token = eos
            codec = TagsCodec(tokenizer)
            row = tokenise(data, CFG, codec, folder=tmp_path / "train", ranks=ranks_of(mesh))[0]
            last_tokens.append(row.response_ids[np.flatnonzero(row.loss_mask)[-1]])
    assert last_tokens == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])


def test_a_folder_that_was_not_finished_is_made_again(data, rows, tmp_path):
    folder = tmp_path / "train"
    tokenise_on(1, data, folder)
    part = folder / "part_00000.bin"
    part.write_bytes(part.read_bytes()[:-4])
    (tmp_path / "train.building").mkdir()
    (tmp_path / "train.building" / "part_00007.bin").write_bytes(b"left over")
    assert arrays(tokenise_on(1, data, folder)) == arrays(rows)
    assert [path.name for path in tmp_path.iterdir()] == ["train"]
    assert sorted(path.name for path in folder.glob("part_*")) == ["part_00000.bin"]


@pytest.mark.parametrize("damage", [
    lambda folder: (folder / "manifest.json").write_text("[" * 100_000),
    lambda folder: (folder / "manifest.json").write_text("[]"),
    lambda folder: change_manifest(folder, rows_per_part="many"),
    lambda folder: change_manifest(folder, rows_per_part=[3, "4"]),
    lambda folder: change_manifest(folder, rows_per_part=[-1, 31]),
    lambda folder: np.save(folder / "lengths.npy", -np.load(folder / "lengths.npy")),
    lambda folder: np.save(folder / "lengths.npy", np.load(folder / "lengths.npy") + 0.5),
    lambda folder: np.save(folder / "lengths.npy", np.load(folder / "lengths.npy")[None]),
], ids=["deep", "list", "text", "text in it", "negative part", "negative", "floats", "2-d"])  # fmt: skip
def test_a_folder_whose_tables_are_damaged_is_made_again(data, rows, tmp_path, damage):
    tokenise_on(1, data, tmp_path / "train")
    damage(tmp_path / "train")
    assert arrays(tokenise_on(1, data, tmp_path / "train")) == arrays(rows)


def change_manifest(folder: Path, **values: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "bad", "message"),
    [
        ((31, 38), {"messages": []}, "needs a list"),
        ((31,), {"system": "s", **conversations(1)[0]}, "no system, please"),  # the template says so
    ],
    ids=["no row", "refused by the template"],
)
def test_every_rank_names_the_first_bad_conversation_of_the_file(tmp_path, at, bad, message):
    rows = conversations(40)
    for index in at:
        rows[index] = bad
    path = write_jsonl(tmp_path / "sft.jsonl", rows)
    said = run_ranks(2, _error, path, tmp_path / "train")
    assert said[0] == said[1] and said[0].startswith(f"{path}:32: {message}")
    assert not (tmp_path / "train").exists() and not (tmp_path / "train.building").exists()


@pytest.mark.parametrize("file", ["part_00000.bin", "lengths.npy", "manifest.json"])
def test_a_full_disk_is_said_on_all_ranks(data, tmp_path, file):
    folder = tmp_path / "train"
    said = run_ranks(2, _error_of_full_disk, data, folder, file)
    assert said[0] == said[1] and "\n" not in said[0]
    assert said[0].startswith(f"{folder}.building: cannot write the tokens (rank 0: "), said[0]
    assert said[0].endswith("; free some space, or set run.dir to a folder that all nodes share")
    assert "None" not in said[0] and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_said_on_all_ranks(data, tmp_path):
    (tmp_path / "tokens").touch()
    said = run_ranks(2, _error_of_full_disk, data, tmp_path / "tokens" / "train", "")
    assert said[0] == said[1] and "cannot write the tokens (rank 0: Not a directory)" in said[0]


def _error_of_full_disk(ranks, path, folder, file: str) -> str:
    """What is said if rank 0's disk is full as soon as this file is opened."""
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def limit(event: str, args: tuple) -> None:
        if event == "open" and ranks.rank == 0 and file and str(args[0]).endswith(file):
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, largest))

    sys.addaudithook(limit)
    with pytest.raises(UserError) as caught:
        tokenise(path, CFG, TagsCodec(build_tiny_tokenizer()), folder=folder, ranks=ranks)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))  # for this value itself
    return str(caught.value)


def _error(ranks, path, folder) -> str:
    tokenizer = build_tiny_tokenizer()
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system, please') }}{% endif %}"
    tokenizer.chat_template = refusal + tokenizer.chat_template
    with pytest.raises(UserError) as caught:
        tokenise(path, CFG, TagsCodec(tokenizer), folder=folder, ranks=ranks)
    return str(caught.value)


def test_broken_tags_are_counted_and_said(tmp_path, caplog):
    """What is never closed is; what lacks an answer, or is a plain chat, is no trajectory and no mistake."""
    said = ["<python>print(3*4)", "<think>t<answer>\\boxed{1}</answer>", "just a chat", "<answer>\\boxed{1}"]
    rows = [[*conversations(1)[0]["messages"][:1], {"role": "assistant", "content": text}] for text in said]
    path = write_jsonl(tmp_path / "sft.jsonl", [{"messages": messages} for messages in rows] + conversations(3))
    defects = {"unclosed_call": 1, "unpaired_think": 1, "unclosed_answer": 1}
    assert tokenise_on(2, path, tmp_path / "rows").defects == defects
    with mesh_of_one() as mesh, caplog.at_level("WARNING"):
        _tokenise(ranks_of(mesh), path, tmp_path / "rows", CFG)  # those that are there say it too
    assert "for which a trajectory of RL gets -1: unclosed_call 1, unpaired_think 1" in caplog.text


@pytest.mark.slow
def test_a_large_file_is_tokenised_and_read_in_little_memory(tmp_path):
    """6 MB of short conversations in a fresh process: memory grows by a fraction of that."""
    path = tmp_path / "big.jsonl"
    rows = conversations(1000)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text * (6_000_000 // len(text)))
    code = (
        "import resource, sys; from pathlib import Path\n"
        "sys.path.insert(0, 'tests')\n"
        "from helpers.models import build_tiny_tokenizer\n"
        "from arpo.ranks import init_ranks\n"
        "from arpo.config.sections import SFTDataConfig\n"
        "from arpo.protocol import TagsCodec\n"
        "from arpo.sft.token_store import tokenise\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "ranks, codec = init_ranks(), TagsCodec(build_tiny_tokenizer())\n"
        "cfg = SFTDataConfig(train='x', max_tokens=500)\n"
        "def run(file, folder):\n"
        "    rows = tokenise(file, cfg, codec, folder=Path(folder), ranks=ranks)\n"
        "    return len(rows), sum(rows[i].num_tokens for i in range(0, len(rows), 97))\n"
        "run(sys.argv[2], sys.argv[2] + '.rows')\n"  # all that is imported late
        "before = peak(); num, _ = run(sys.argv[1], sys.argv[1] + '.rows'); print(num, peak() - before)\n"
        "ranks.close()"
    )
    small = write_jsonl(tmp_path / "small.jsonl", rows[:200])
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(small)],
        cwd=ROOT, capture_output=True, text=True, timeout=900, check=True,
    )  # fmt: skip
    num_rows, growth_kib = map(int, done.stdout.splitlines()[-1].split())
    assert num_rows == 6_000_000 // len(text) * 1000 and growth_kib < 2_500

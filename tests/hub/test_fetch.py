"""Fetching from the Hub: whole, resumed, checked; every way in which it fails is one line. Real HTTP, on loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.hub_server import COMMIT, HubServer

from arpo.data.hub_catalog import CATALOG, find
from arpo.data.hub_remote import said
from arpo.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
REASONING = "datasets/dongguanting/ARPO-RL-Reasoning-10K"


def questions(num_rows: int = 4) -> bytes:
    rows = [
        {
            "data_source": "DR_grpo_mix",
            "prompt": [{"role": "system", "content": "Use \x08oxed."}, {"role": "user", "content": f"{i} + 1?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        }
        for i in range(num_rows)
    ]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


def conversations(num_rows: int, num_characters: int) -> bytes:
    turns = [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "t" * num_characters}]
    return (json.dumps({"conversations": turns}) + "\n").encode() * num_rows


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "arpo.hub", *argv]


def hub(server: HubServer | None, folder: Path, *argv: str, **environment: str) -> subprocess.CompletedProcess:
    """Run the command as a user does, with its downloads below `folder`."""
    env = (
        os.environ | {"PYTHONPATH": str(ROOT)} | (server.environment(folder / "cache") if server else {}) | environment
    )
    env.pop("HF_TOKEN", None) if "HF_TOKEN" not in environment else None
    return subprocess.run(command(*argv), cwd=folder, env=env, capture_output=True, text=True, timeout=600)


def test_a_data_set_is_fetched_checked_and_read_and_the_next_command_is_shown(tmp_path):
    files = {"train_10k.parquet": questions(), "README.md": b"# card"}
    with HubServer({REASONING: files}) as server:
        done = hub(server, tmp_path, "fetch", "arpo-rl-reasoning-10k")
        assert done.returncode == 0, done.stderr
        again = hub(server, tmp_path, "fetch", "dongguanting/ARPO-RL-Reasoning-10K")
        assert server.downloads() == [None]  # the second call fetched nothing
    assert (tmp_path / "data/train_10k.parquet").read_bytes() == files["train_10k.parquet"]
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["train_10k.parquet"]
    assert f"ARPO-RL-Reasoning-10K@{COMMIT}: 1 files" in done.stdout and "SHA-256 as published" in done.stdout
    assert "data/train_10k.parquet: 4 usable questions of 4 rows" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("next: arpo-rl configs/qwen2.5_7b.yaml ")
    assert done.stdout.splitlines()[-1].endswith("--data.train data/train_10k.parquet")
    assert "train_10k.parquet: there already, SHA-256 as published" in again.stdout


def test_a_killed_download_goes_on_where_it_was_interrupted(tmp_path):
    content = conversations(500, num_characters=100_000)  # 50 MB
    with HubServer({"datasets/dongguanting/ARPO-SFT-54K": {"final_5w4_still.jsonl": content}}) as server:
        env = os.environ | server.environment(tmp_path / "cache") | {"PYTHONPATH": str(ROOT)}
        server.cut_after += [len(content) // 2, *[0] * 100]  # then nothing comes, as often as its client tries again
        process = subprocess.Popen(command("fetch", "ARPO-SFT-54K"), cwd=tmp_path, env=env, stderr=subprocess.DEVNULL)
        parts = tmp_path / "data/.fetching"
        while not (parts.is_dir() and sum(part.stat().st_size for part in parts.iterdir()) > 1 << 20):
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        [part] = parts.iterdir()
        begun = part.stat().st_size
        assert 0 < begun < len(content) and not (tmp_path / "data/final_5w4_still.jsonl").exists()
        server.requests.clear()
        server.cut_after.clear()
        done = hub(server, tmp_path, "fetch", "ARPO-SFT-54K")
        assert server.downloads() == [f"bytes={begun}-"]
    assert "data/final_5w4_still.jsonl: 500 conversations of 2.0 messages, all usable" in done.stdout
    assert (tmp_path / "data/final_5w4_still.jsonl").read_bytes() == content and not parts.exists()


def test_a_broken_connection_is_taken_up_again_at_once(tmp_path):
    content = conversations(250, num_characters=100_000)  # 25 MB, which come in pieces of 10 MiB
    with HubServer({"datasets/o/d": {"sft.jsonl": content}}, cut_after=[15_000_000]) as server:
        done = hub(server, tmp_path, "fetch", "o/d")
        assert server.downloads() == [None, f"bytes={10 << 20}-"]
    assert done.returncode == 0 and (tmp_path / "data/d/sft.jsonl").read_bytes() == content


@pytest.mark.parametrize("small", [False, True])
def test_bytes_with_another_checksum_are_thrown_away(small, tmp_path):
    with HubServer({REASONING: {"train_10k.parquet": questions()}}, corrupt={"train_10k.parquet"}) as server:
        server.small |= {"train_10k.parquet"} if small else set()
        done = hub(server, tmp_path, "fetch", "ARPO-RL-Reasoning-10K")
        assert done.returncode == 2 and "came with a wrong checksum and was thrown away" in last_line(done)
        assert not [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
        server.corrupt.clear()
        assert hub(server, tmp_path, "fetch", "ARPO-RL-Reasoning-10K").returncode == 0


def test_a_file_that_was_changed_on_the_disk_is_fetched_again(tmp_path):
    content = questions()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train_10k.parquet").write_bytes(content[:-1] + b"x")
    with HubServer({REASONING: {"train_10k.parquet": content}}) as server:
        assert hub(server, tmp_path, "fetch", "ARPO-RL-Reasoning-10K").returncode == 0
    assert (tmp_path / "data/train_10k.parquet").read_bytes() == content


def test_a_model_is_fetched_into_a_folder_of_its_own(tmp_path):
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    files = {
        "config.json": b'{"model_type": "qwen2"}',
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-00001-of-00001.safetensors": b"weights" * 100,
        "original/params.json": b"{}",
        "pytorch_model.bin": b"not wanted",
    }
    with HubServer({"models/o/M": files}, small={"config.json", "model.safetensors.index.json"}) as server:
        done = hub(server, tmp_path, "fetch", "o/M", "--model", HF_TOKEN="hf_secret")
        assert done.returncode == 0, done.stderr
        sent = {path.startswith("/blob"): headers.get("authorization") for _, path, headers in server.requests}
    assert sent == {True: None, False: "Bearer hf_secret"}  # the token goes to the Hub, and not to its CDN
    assert sorted(path.name for path in (tmp_path / "models/M").iterdir()) == sorted(
        files.keys() - {"original/params.json", "pytorch_model.bin"}
    )
    assert "models/M: qwen2, 1 weight files" in done.stdout and "git's checksum as published" in done.stdout


def last_line(done: subprocess.CompletedProcess) -> str:
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_every_failure_is_one_line_that_says_what_to_do(tmp_path):
    gated = "datasets/gaia-benchmark/GAIA"
    repos = {gated: {"2023/test.parquet": questions()}, "datasets/o/images": {"a.png": b"x"}}
    repos["datasets/o/notes"] = {"notes.json": b'[{"title": "no question"}]'}
    with HubServer(repos, gated={gated}) as server:
        names = ("gaia-benchmark/GAIA", "nobody/nothing", "o/images", "o/notes", "ARPO-SFT-55K")
        answers = {name: hub(server, tmp_path, "fetch", name) for name in names}
        page = server.url
    answers["no server"] = hub(server, tmp_path, "fetch", "ARPO-SFT-54K")  # it is gone
    answers["offline"] = hub(server, tmp_path, "fetch", "ARPO-SFT-54K", HF_HUB_OFFLINE="1")
    assert {done.returncode for done in answers.values()} == {2}
    assert {name: last_line(done) for name, done in answers.items()} == {
        "gaia-benchmark/GAIA": f"error: gaia-benchmark/GAIA: behind a form; accept it at {page}/datasets/"
        "gaia-benchmark/GAIA, then set HF_TOKEN (now not set)",
        "nobody/nothing": f"error: nobody/nothing: {page} has no data set nobody/nothing, or a "
        "private one: correct the name, or set HF_TOKEN (now not set)",
        "o/images": "error: o/images: has none of *.parquet, *.jsonl, *.json; is it a dataset?",
        "o/notes": "error: none of the 1 files can be trained on",
        "ARPO-SFT-55K": "error: ARPO-SFT-55K: not in the catalogue; did you mean ARPO-SFT-54K? `python -m arpo.hub "
        "list` shows it, or give OWNER/NAME",
        "no server": f"error: dongguanting/ARPO-SFT-54K: {page} cannot be reached; check the network or the proxy, set "
        "HF_ENDPOINT to a mirror, or HF_HUB_OFFLINE=1 to take what the cache has ([Errno 111] Connection refused)",
        "offline": "error: dongguanting/ARPO-SFT-54K: it is not in the Hub's cache, and HF_HUB_OFFLINE is set",
    }


def test_a_full_disk_is_one_line():
    line = r"^o/d: the disk is full; make room, or take another \(--out, HF_HOME\)$"
    with pytest.raises(UserError, match=line), said("o/d", "o/d", "dataset"), Path("/dev/full").open("wb") as full:
        full.write(b"x")


def test_the_list_names_every_repository_with_link_size_and_licence(tmp_path):
    shown = hub(None, tmp_path, "list").stdout
    for repo, entry in CATALOG.items():
        assert f"{entry.url(repo)}\n    {entry.what}; size: {entry.size}; licence: {entry.licence}\n" in shown
        assert entry.licence and find(repo.partition("/")[2].upper()) == repo
        for word in entry.command.split():
            assert not word.startswith("configs/") or (ROOT / word).exists(), word

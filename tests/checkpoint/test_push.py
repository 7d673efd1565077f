"""Upload of a finished model: its card, and huggingface_hub itself against a Hub on loopback."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.hub_server import HubServer
from helpers.models import build_tiny_model

from arpo.checkpoint.card import base_of, card_of, find_source, licence_of
from arpo.checkpoint.export import point_to
from arpo.config.load import load_config, save_config
from arpo.errors import UserError
from train_rl import RLConfig
from train_sft import SFTConfig

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "hf_secret"


def model_files(folder: Path) -> Path:
    """The files of a model folder, as far as a card and an upload look at them: names and bytes."""
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(os.urandom(100_000))
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text(json.dumps({"file": name}))
    return folder


def finished(runs: Path, name: str, root: type, flags: list[str], rows: list[dict], step: int = 20) -> Path:
    """A run's folder with the export of a step, as train_rl.py leaves it."""
    run = runs / name
    exported = run / "checkpoints" / f"step_{step:06d}" / "hf"
    model_files(exported)
    save_config(load_config(root, ["--run.name", name, "--run.dir", str(runs), *flags]), run / "config.yaml")
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    point_to(exported, run / "hf")
    return run


@pytest.fixture
def run(tmp_path) -> Path:
    """RL from an SFT of ours, which began with a local copy of a model that names its licence."""
    base = model_files(tmp_path / "Qwen2.5-3B")
    (base / "README.md").write_text("---\nlicense: other\nlicense_name: qwen-research\n---\n# Qwen\n")
    sft_flags = ["--model.path", str(base), "--data.train", "dongguanting/ARPO-SFT-54K@0123:final.jsonl"]
    sft = finished(tmp_path / "runs", "my_sft", SFTConfig, sft_flags, [{"step": 20, "loss/nll": 0.5}])
    flags = ["--model.path", str(sft / "hf"), "--data.train", f"{tmp_path}/secret_folder/train_10k.parquet"]
    flags += ["--reward.terms", "answer=1", f"{tmp_path}/secret_folder/mine.py:style=0.2", "--loss.kind", "gspo"]
    rows = [
        {"step": s, "reward/mean": s / 100, **({"valid/accuracy": s / 50} if s % 5 == 0 else {})} for s in range(31)
    ]
    made = finished(tmp_path / "runs", "my_rl", RLConfig, flags, rows)
    change = {"step": 10, "changes": {"optim.lr": [1e-6, 5e-7]}}
    (made / "changes.jsonl").write_text(json.dumps(change) + "\n")
    return made


def head_of(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


# ---- the card


def test_the_card_says_what_the_model_is_made_of_and_how_good_it_is(run):
    card = card_of(find_source(run))
    head = head_of(card)
    assert head["license"] == "other" and head["license_name"] == "qwen-research"
    assert head["library_name"] == "transformers" and "reinforcement-learning" in head["tags"]
    assert "# my_rl" in card and "Trained from **Qwen2.5-3B**" in card and "Stages before this one: my_sft." in card
    assert "gspo loss) with branching (arpo)" in card and "commit " in card and "step 20." in card
    assert "| `reward/mean` | 0.2 | 20 |" in card and "| `valid/accuracy` | 0.4 | 20 |" in card  # not those of step 30
    assert (
        "| `optim.lr` | 5e-07 |" in card
        and "| `loss.kind` | gspo |" in card
        and "| `rollout.group_size` | 16 |" in card
    )
    assert "`loss.clip_low`" not in card  # a default, and none that always matters
    assert "- data.train: train_10k.parquet" in card and "answer=1, mine.py:style=0.2" in card


def test_the_card_has_no_local_path(run, tmp_path):
    card = card_of(find_source(run))
    assert str(tmp_path) not in card and "secret_folder" not in card


def test_a_model_of_the_hub_is_named_as_the_base_and_an_unknown_licence_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    flags = ["--model.path", "Owner/Model-7B", "--data.train", "openai/gsm8k@0123:main/train.parquet"]
    run = finished(tmp_path, "plain", RLConfig, flags, [])
    card = card_of(find_source(run))
    assert head_of(card)["base_model"] == "Owner/Model-7B" and head_of(card)["datasets"] == ["openai/gsm8k"]
    assert "license" not in head_of(card) and "The licence of Owner/Model-7B is not known here" in card
    assert "The run has logged none." in card


def test_a_base_is_followed_through_our_own_runs(run, tmp_path):
    assert base_of(run) == (str(tmp_path / "Qwen2.5-3B"), ["my_sft"])
    assert licence_of(str(tmp_path / "Qwen2.5-3B"))["license"] == "other"


def test_a_folder_that_no_run_made_has_a_card_too(tmp_path):
    assert head_of(card_of(find_source(model_files(tmp_path / "mine"))))["library_name"] == "transformers"


@pytest.mark.parametrize(
    "absent, words",
    [("config.json", "neither a run with a finished model"), ("model.safetensors", "has no weights")],
)
def test_what_is_no_model_is_one_line(tmp_path, absent, words):
    folder = model_files(tmp_path / "incomplete")
    (folder / absent).unlink()
    with pytest.raises(UserError, match=words):
        find_source(folder)


# ---- the upload


def start(server: HubServer | None, folder: Path, *argv: str, token: str = TOKEN) -> subprocess.Popen:
    """The command as a user gives it, without waiting for it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | {"PYTHONPATH": str(ROOT)}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HOME": str(folder)}
    environment |= server.environment(folder / "cache") if server else {}
    environment |= {"HF_TOKEN": token} if token else {}
    command = [sys.executable, "-m", "arpo.checkpoint", "push", *argv]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def push(server: HubServer | None, folder: Path, *argv: str, token: str = TOKEN) -> tuple[int, str, str]:
    process = start(server, folder, *argv, token=token)
    out, err = process.communicate(timeout=600)
    assert TOKEN not in out + err and "Traceback" not in err, err[-3000:]
    return process.returncode, out, err


@pytest.mark.slow
def test_a_finished_run_is_uploaded_with_its_card_and_an_edited_card_is_kept(run, tmp_path):
    build_tiny_model((run / "hf").resolve())
    with HubServer({}, writer=TOKEN) as server:
        code, out, err = push(server, tmp_path, str(run), "me/my_rl", "--dry-run", token="")
        card = run.resolve() / "checkpoints/step_000020/hf/README.md"
        assert code == 0 and out == f"card: {card}\n" and server.requests == [], err
        card.write_text(card.read_text() + "\nMine.\n")
        code, out, err = push(server, tmp_path, str(run), "me/my_rl", "--private")
        assert code == 0 and out.splitlines()[-1] == f"{server.url}/me/my_rl/commit/{server.commit}", err
        there = server.repos["models/me/my_rl"]
        assert there["README.md"].endswith(b"\nMine.\n") and server.private == {"models/me/my_rl"}
        names = {path.name for path in (run / "hf").iterdir()}
        assert there.keys() == names and there["model.safetensors"] == (run / "hf" / "model.safetensors").read_bytes()
        uploads = [headers for method, path, headers in server.requests if method == "PUT"]
        assert len(uploads) == 1 and "authorization" not in uploads[0]  # the storage is another server

        assert push(server, tmp_path, str(run / "hf"), "me/my_rl")[0] == 0  # again: nothing large is sent twice
        assert [method for method, _, _ in server.requests].count("PUT") == 1


@pytest.mark.slow
def test_an_upload_that_was_killed_goes_on_with_the_file_that_is_missing(run, tmp_path):
    weights = run / "hf" / "model.safetensors"
    for number in range(3):
        (run / "hf" / f"extra-{number}.safetensors").write_bytes(weights.read_bytes() + bytes([number]))
    with HubServer({}, writer=TOKEN, hangs_at_upload=3) as server:
        process = start(server, tmp_path, str(run), "me/my_rl")
        assert server.is_hanging.wait(300), process.communicate()
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        server.let_go()
        stored, before = len(server.stored), server.num_uploads
        assert 2 <= stored < 4 and server.repos["models/me/my_rl"] == {}
        code, _, err = push(server, tmp_path, str(run), "me/my_rl")
        assert code == 0, err
        assert server.num_uploads - before == 4 - stored and len(server.stored) == 4
        assert server.repos["models/me/my_rl"]["extra-2.safetensors"].endswith(b"\2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "token, fails_commit, words",
    [
        ("", 0, "me/my_rl: uploading needs a token that may write there; set HF_TOKEN, or run `hf auth login`"),
        ("hf_wrong", 0, "me/my_rl: the Hub refuses the token (HTTP 403); it must be valid, and may write to me/my_rl"),
        (TOKEN, 507, "me/my_rl: http://127.0.0.1:PORT answered HTTP 507; try again later"),
    ],
)
def test_what_goes_wrong_is_one_line(run, tmp_path, token, fails_commit, words):
    with HubServer({}, writer=TOKEN, fails_commit=fails_commit) as server:
        code, _, err = push(server, tmp_path, str(run), "me/my_rl", token=token)
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2 and re.sub(r":\d{4,5}", ":PORT", line) == f"error: {words}"


@pytest.mark.slow
@pytest.mark.parametrize("repo", ["my_rl", "me/my rl", "a/b/c"])
def test_a_name_that_is_none_is_one_line_before_anything_is_written(run, tmp_path, repo):
    code, _, err = push(None, tmp_path, str(run), repo)
    assert code == 2 and f"error: {repo}: not a name of the Hub; it is OWNER/NAME" in err
    assert not (run / "hf" / "README.md").exists()

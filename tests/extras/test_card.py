"""The card of an export: what a run's settings and the model that it began with say, and no place on this machine."""

import json
from pathlib import Path

import pytest
from helpers.edits import ROOT
from huggingface_hub import ModelCard

from arpo.config.contents import contents_of
from arpo.log.settings import save_config
from arpo.start.load import load_config
from extras.card import card_of, main
from train_rl import RLConfig
from train_sft import SFTConfig


def export(runs: Path, name: str, root: type, source: str, *flags: str) -> Path:
    """A run's folder, and in it the card of an export of step 20, as a run leaves it. Returns the export."""
    cfg = load_config(root, ["--run.name", name, "--run.dir", str(runs), "--model.path", source, *flags])
    exported = runs / name / "checkpoints" / "step_000020" / "hf"
    exported.mkdir(parents=True)
    save_config(cfg, runs / name / "config.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["card", str(exported)])
        main()
    return exported


@pytest.fixture
def base(tmp_path) -> Path:
    """A local copy of a model that names its licence."""
    folder = tmp_path / "secret_folder" / "Qwen2.5-3B"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: other\nlicense_name: qwen-research\n---\n# Qwen\n")
    return folder


def test_a_card_says_what_the_model_is_made_from_and_names_no_folder(base, tmp_path):
    flags = ["--data.train", f"{tmp_path}/secret_folder/rows.parquet", "--loss.kind", "gspo"]
    flags += ["--reward.terms", "answer=1", f"{tmp_path}/secret_folder/mine.py:style=0.2"]
    (tmp_path / "secret_folder" / "mine.py").write_text(
        "def style(data_source, solution_str, ground_truth, extra_info): ...\n"
    )
    card = ModelCard.load(export(tmp_path / "runs", "my_rl", RLConfig, str(base), *flags) / "README.md")
    assert (card.data.license, card.data.license_name, card.data.base_model) == ("other", "qwen-research", None)
    assert card.data.tags == ["arpo-torch", "tool-use", "reinforcement-learning"]
    assert "# my_rl\n" in card.text and "is not known here" not in card.text
    assert "Trained from **Qwen2.5-3B** by reinforcement learning with tool calls, 20 steps" in card.text
    rows = [line for line in card.text.splitlines() if line.startswith("| `")]
    assert {"| `data.train` | rows.parquet |", "| `loss.kind` | gspo |", "| `optim.lr` | 1e-06 |"} <= {*rows}
    assert "| `reward.terms` | answer=1, mine.py:style=0.2 |" in rows and "`loss.clip_low`" not in card.text
    assert "secret_folder" not in card.content and str(tmp_path) not in card.content


def test_a_card_says_how_to_ask_the_model_and_where_to_stop_it_elsewhere(base, tmp_path):
    flags = ["--data.train", "rows.jsonl", "--data.system_prompt", "default"]
    text = ModelCard.load(export(tmp_path, "my_rl", RLConfig, str(base), *flags) / "README.md").text
    command = "python -m extras.ask --model.path OWNER/my_rl --protocol.format tags --tools.names"
    assert f"\n{command} python search --eval.system_prompt default\n" in text
    assert r"stop it after `</python>` or `</search>`, run the call, append ` <result>\n...\n</result>`" in text
    flags = ["--data.train", "rows.jsonl", "--protocol.format", "hermes"]
    text = ModelCard.load(export(tmp_path, "json", RLConfig, str(base), *flags) / "README.md").text
    assert "--protocol.format hermes --tools.names" in text and "stop it after" not in text
    flags = ["--data.train", "rows.jsonl", "--tools.names", "python", f"{ROOT}/extras/tools/sql.py:SqlTool"]
    text = ModelCard.load(export(tmp_path, "own", RLConfig, str(base), *flags) / "README.md").text
    assert "--tools.names python sql.py:SqlTool" in text and "stop it after" not in text  # its tag is the file's to say


def test_names_of_the_hub_are_kept_and_an_unknown_licence_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    data = "openai/gsm8k@0123456789012345678901234567890123456789:main/train.parquet"
    card = ModelCard.load(export(tmp_path, "plain", RLConfig, "Owner/Model-7B", "--data.train", data) / "README.md")
    assert (card.data.base_model, card.data.datasets, card.data.license) == ("Owner/Model-7B", ["openai/gsm8k"], None)
    assert "The licence of Owner/Model-7B is not known here" in card.text and f"| `data.train` | {data} |" in card.text


def test_a_run_that_begins_with_one_of_ours_hands_on_base_and_licence(tmp_path, monkeypatch):
    cached = tmp_path / "cache" / "models--Owner--Model-7B"
    for file, text in {"refs/main": "0123", "snapshots/0123/README.md": "---\nlicense: mit\n---\n"}.items():
        (cached / file).parent.mkdir(parents=True)
        (cached / file).write_text(text)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    sft = export(tmp_path, "my_sft", SFTConfig, "Owner/Model-7B", "--data.train", "rows.jsonl")
    card = ModelCard.load(export(tmp_path, "my_rl", RLConfig, str(sft), "--data.train", "rows.jsonl") / "README.md")
    assert (card.data.base_model, card.data.license) == ("Owner/Model-7B", "mit")
    assert "Trained from **my_sft**" in card.text
    assert ModelCard.load(sft / "README.md").data.tags == ["arpo-torch", "tool-use", "sft"]


def without_card(export: Path) -> Path:
    """The run's link to its export, RUN/hf, as a run leaves it: nobody has written a card there."""
    (export / "README.md").unlink()
    link = export.parents[2] / "hf"
    link.symlink_to(export.relative_to(link.parent))
    return link


def test_sft_and_then_rl_name_the_base_model_though_the_sft_run_has_no_card(tmp_path, monkeypatch):
    """The README's two commands. Cards that named a local folder as the base, or none: huggingface/transformers#28286,
    huggingface/peft#938."""
    cached = tmp_path / "cache" / "models--Qwen--Qwen2.5-3B-Instruct"
    card = "---\nlicense: other\nlicense_name: qwen-research\nlicense_link: https://example.org/LICENSE\n---\n"
    for file, text in {"refs/main": "0123", "snapshots/0123/README.md": card}.items():
        (cached / file).parent.mkdir(parents=True)
        (cached / file).write_text(text)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    sft = export(Path("runs"), "qwen-sft", SFTConfig, "Qwen/Qwen2.5-3B-Instruct", "--data.train", "rows.jsonl")
    without_card(sft)
    rl = export(Path("runs"), "qwen-rl", RLConfig, "runs/qwen-sft/hf", "--data.train", "rows.jsonl")
    again = export(Path("runs"), "again", RLConfig, str(without_card(rl)), "--data.train", "rows.jsonl")
    rl = rl.resolve()
    monkeypatch.chdir("/")  # relative paths in a run's settings are those of its start
    for checkpoint, source in ((rl.parent, "qwen-sft"), (tmp_path / again.parent, "qwen-rl")):
        text = card_of(checkpoint)
        found = ModelCard(text)
        assert found.data.base_model == "Qwen/Qwen2.5-3B-Instruct"
        assert (found.data.license, found.data.license_name) == ("other", "qwen-research")
        assert found.data.license_link == "https://example.org/LICENSE"
        assert f"Trained from **{source}** (itself trained from Qwen/Qwen2.5-3B-Instruct) by reinforcement" in text
        assert "is not known here" not in text and "**hf**" not in text


def test_of_two_stages_a_local_base_is_named_without_its_folders(base, tmp_path):
    sft = without_card(export(tmp_path / "runs", "my_sft", SFTConfig, str(base), "--data.train", "rows.jsonl"))
    card = ModelCard.load(
        export(tmp_path / "runs", "my_rl", RLConfig, str(sft), "--data.train", "r.jsonl") / "README.md"
    )
    assert "Trained from **my_sft** (itself trained from Qwen2.5-3B) by reinforcement" in card.text
    assert (card.data.base_model, card.data.license_name) == (None, "qwen-research")
    assert "secret_folder" not in card.content and str(tmp_path) not in card.content


def test_the_best_export_of_a_run_is_an_export_of_it_too(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    sft = export(tmp_path, "my_sft", SFTConfig, "Owner/Model-7B", "--data.train", "rows.jsonl")
    best = sft.parents[1] / "best_000020"
    sft.rename(best)
    (best / "README.md").unlink()
    (tmp_path / "my_sft" / "best").symlink_to(best)
    link = str(tmp_path / "my_sft" / "best")
    card = ModelCard.load(export(tmp_path, "my_rl", RLConfig, link, "--data.train", "rows.jsonl") / "README.md")
    assert card.data.base_model == "Owner/Model-7B" and "The licence of Owner/Model-7B is not known here" in card.text


def test_runs_that_name_each_other_end_at_the_last_of_them(base, tmp_path):
    first = without_card(export(tmp_path, "one", SFTConfig, str(base), "--data.train", "rows.jsonl"))
    second = without_card(export(tmp_path, "two", RLConfig, str(first), "--data.train", "rows.jsonl"))
    save_config(load_config(SFTConfig, ["--run.name", "one", "--run.dir", str(tmp_path), "--model.path", str(second),
                                        "--data.train", "rows.jsonl"]), tmp_path / "one" / "config.yaml")  # fmt: skip
    assert "Trained from **one** (itself trained from hf) by" in card_of(second.resolve().parent)


def test_a_setting_that_was_changed_on_the_way_is_the_one_that_is_named(base, tmp_path):
    checkpoint = export(tmp_path, "r", RLConfig, str(base), "--data.train", "rows.jsonl").parent
    (tmp_path / "r" / "changes.jsonl").write_text(json.dumps({"step": 10, "changes": {"optim.lr": [1e-6, 5e-7]}}))
    assert "| `optim.lr` | 5e-07 |" in card_of(checkpoint)


@pytest.mark.parametrize("head", ["", "---\n- a\n---\n", "---\na: [\n---\n", "---\nlicense: \xff\n---\n"])
def test_a_base_whose_card_cannot_be_read_has_no_licence(base, tmp_path, head):
    (base / "README.md").write_bytes(head.encode("latin-1"))
    exported = export(tmp_path, "r", RLConfig, str(base), "--data.train", "rows.jsonl")
    assert "The licence of Qwen2.5-3B is not known here" in (exported / "README.md").read_text()


def test_a_folder_that_no_run_made_has_no_card(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["card", str(tmp_path / "checkpoints" / "step_000001")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and f"{tmp_path}" in capsys.readouterr().err


def test_an_export_elsewhere_gets_the_card_of_its_checkpoint(base, tmp_path, monkeypatch):
    exported, out = export(tmp_path, "r", RLConfig, str(base), "--data.train", "rows.jsonl"), tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr("sys.argv", ["card", str(exported.parent), str(out)])
    main()
    assert (out / "README.md").read_text() == (exported / "README.md").read_text()


@pytest.mark.parametrize(
    ("source", "shown", "base_model"),
    [
        ("/home/alice/secret/m", "m", None),  # a folder of another machine
        ("~/secret/m/", "m", None),
        ("runs/secret/hf", "hf", None),
        ("./m", "m", None),
        ("../secret/m", "m", None),
        ("C:\\secret\\m", "m", None),
        ("/cache/secret/hub/models--Owner--Model-7B/snapshots/0123", "Owner/Model-7B", "Owner/Model-7B"),
        ("Owner/Model-7B", "Owner/Model-7B", "Owner/Model-7B"),
    ],
)
def test_a_path_that_is_not_here_is_no_name_of_the_hub(source, shown, base_model, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    own = ["--protocol.format", f"{tmp_path}/secret.py:FORM"]
    (tmp_path / "secret.py").write_text("FORM = 1\n")
    exported = export(tmp_path / "runs", "mine", SFTConfig, source, "--data.train", "/secret/rows.jsonl", *own)
    card = ModelCard.load(exported / "README.md")
    assert card.data.base_model == base_model and f"Trained from **{shown}** by" in card.text
    assert "alice" not in card.content and "secret/" not in card.content and str(tmp_path) not in card.content
    if base_model is None:
        assert "secret" not in card.content.replace("secret.py", "").replace(f"**{shown}**", "")


def test_a_folder_that_looks_like_a_name_of_the_hub_is_known_by_its_digest(tmp_path, monkeypatch):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "models" / "mine" / "model.safetensors").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    exported = export(tmp_path / "runs", "one", SFTConfig, "models/mine", "--data.train", "rows.jsonl")
    cfg = load_config(SFTConfig, ["--model.path", "models/mine", "--data.train", "rows.jsonl"])
    save_config(cfg, tmp_path / "runs" / "one" / "config.yaml", contents_of(cfg))
    monkeypatch.chdir("/")
    card = card_of(exported.parent)
    assert "models/mine" not in card and "Trained from **mine** by" in card

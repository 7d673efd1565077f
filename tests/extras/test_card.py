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

QWEN = "license: other\nlicense_name: qwen-research\nlicense_link: https://example.org/LICENSE\n"


@pytest.fixture(autouse=True)
def hub_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def base(tmp_path) -> Path:
    """A local copy of a model that names its licence."""
    folder = tmp_path / "secret_folder" / "Qwen2.5-3B"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(f"---\n{QWEN}---\n# Qwen\n")
    return folder


def export(runs: Path, name: str, source: str | Path, *flags: str, root: type = RLConfig) -> Path:
    """A run's folder, and in it the card of an export of step 20, as a run leaves it. Returns the export."""
    data = () if "--data.train" in flags else ("--data.train", "rows.jsonl")
    cfg = load_config(root, ["--run.name", name, "--run.dir", str(runs), "--model.path", str(source), *data, *flags])
    exported = runs / name / "checkpoints" / "step_000020" / "hf"
    exported.mkdir(parents=True)
    save_config(cfg, runs / name / "config.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["card", str(exported)])
        main()
    return exported


def exported_card(runs: Path, name: str, source: str | Path, *flags: str, root: type = RLConfig) -> ModelCard:
    return ModelCard.load(export(runs, name, source, *flags, root=root) / "README.md")


def without_card(export: Path) -> Path:
    """The run's link to its export, RUN/hf, as a run leaves it: nobody has written a card there."""
    (export / "README.md").unlink()
    link = export.parents[2] / "hf"
    link.symlink_to(export.relative_to(link.parent))
    return link


def cached(hub_cache: Path, name: str, head: str) -> None:
    """The card of a model of the Hub in the local cache."""
    folder = hub_cache / f"models--{name.replace('/', '--')}"
    for file, text in {"refs/main": "0123", "snapshots/0123/README.md": f"---\n{head}---\n"}.items():
        (folder / file).parent.mkdir(parents=True)
        (folder / file).write_text(text)


def test_a_card_says_what_the_model_is_made_from_and_names_no_folder(base, tmp_path):
    own = base.parent / "mine.py"
    own.write_text("def style(data_source, solution_str, ground_truth, extra_info): ...\n")
    flags = ["--data.train", f"{base.parent}/rows.parquet", "--loss.kind", "gspo"]
    card = exported_card(tmp_path / "runs", "my_rl", base, *flags, "--reward.terms", "answer=1", f"{own}:style=0.2")
    assert (card.data.license, card.data.license_name, card.data.base_model) == ("other", "qwen-research", None)
    assert card.data.tags == ["arpo-torch", "tool-use", "reinforcement-learning"]
    assert "# my_rl\n" in card.text and "is not known here" not in card.text
    assert "Trained from **Qwen2.5-3B** by reinforcement learning with tool calls, 20 steps" in card.text
    rows = [line for line in card.text.splitlines() if line.startswith("| `")]
    assert {"| `data.train` | rows.parquet |", "| `loss.kind` | gspo |", "| `optim.lr` | 1e-06 |"} <= {*rows}
    assert "| `reward.terms` | answer=1, mine.py:style=0.2 |" in rows and "`loss.clip_low`" not in card.text
    assert "secret_folder" not in card.content and str(tmp_path) not in card.content


def test_a_card_says_how_to_ask_the_model_and_where_to_stop_it_elsewhere(base, tmp_path):
    text = exported_card(tmp_path, "my_rl", base, "--data.system_prompt", "default").text
    command = "python -m extras.ask --model.path OWNER/my_rl --protocol.format tags --tools.names"
    assert f"\n{command} python search --eval.system_prompt default\n" in text
    assert r"stop it after `</python>` or `</search>`, run the call, append ` <result>\n...\n</result>`" in text
    text = exported_card(tmp_path, "json", base, "--protocol.format", "hermes").text
    assert "--protocol.format hermes --tools.names" in text and "stop it after" not in text
    text = exported_card(tmp_path, "own", base, "--tools.names", "python", f"{ROOT}/extras/tools/sql.py:SqlTool").text
    assert "--tools.names python sql.py:SqlTool" in text and "stop it after" not in text  # its tag is the file's to say


def test_names_of_the_hub_are_kept_and_an_unknown_licence_is_said(tmp_path):
    data = "openai/gsm8k@0123456789012345678901234567890123456789:main/train.parquet"
    card = exported_card(tmp_path, "plain", "Owner/Model-7B", "--data.train", data)
    assert (card.data.base_model, card.data.datasets, card.data.license) == ("Owner/Model-7B", ["openai/gsm8k"], None)
    assert "The licence of Owner/Model-7B is not known here" in card.text and f"| `data.train` | {data} |" in card.text


def test_a_run_that_begins_with_one_of_ours_hands_on_base_and_licence(tmp_path, hub_cache):
    cached(hub_cache, "Owner/Model-7B", "license: mit\n")
    sft = export(tmp_path, "my_sft", "Owner/Model-7B", root=SFTConfig)
    card = exported_card(tmp_path, "my_rl", sft)
    assert (card.data.base_model, card.data.license) == ("Owner/Model-7B", "mit")
    assert "Trained from **my_sft**" in card.text
    assert ModelCard.load(sft / "README.md").data.tags == ["arpo-torch", "tool-use", "sft"]


def test_sft_and_then_rl_name_the_base_model_though_the_sft_run_has_no_card(tmp_path, hub_cache, monkeypatch):
    """The README's two commands. Cards that named a local folder as the base, or none: huggingface/transformers#28286,
    huggingface/peft#938."""
    cached(hub_cache, "Qwen/Qwen2.5-3B-Instruct", QWEN)
    monkeypatch.chdir(tmp_path)
    without_card(export(Path("runs"), "qwen-sft", "Qwen/Qwen2.5-3B-Instruct", root=SFTConfig))
    rl = export(Path("runs"), "qwen-rl", "runs/qwen-sft/hf")
    again = export(Path("runs"), "again", without_card(rl))
    rl = rl.resolve()
    monkeypatch.chdir("/")  # relative paths in a run's settings are those of its start
    for checkpoint, source in ((rl.parent, "qwen-sft"), (tmp_path / again.parent, "qwen-rl")):
        found = ModelCard(card_of(checkpoint))
        assert found.data.base_model == "Qwen/Qwen2.5-3B-Instruct"
        assert (found.data.license, found.data.license_name) == ("other", "qwen-research")
        assert found.data.license_link == "https://example.org/LICENSE"
        assert f"from **{source}** (itself trained from Qwen/Qwen2.5-3B-Instruct) by reinforcement" in found.text
        assert "is not known here" not in found.text and "**hf**" not in found.text


def test_of_two_stages_a_local_base_is_named_without_its_folders(base, tmp_path):
    sft = without_card(export(tmp_path / "runs", "my_sft", base, root=SFTConfig))
    card = exported_card(tmp_path / "runs", "my_rl", sft)
    assert "Trained from **my_sft** (itself trained from Qwen2.5-3B) by reinforcement" in card.text
    assert (card.data.base_model, card.data.license_name) == (None, "qwen-research")
    assert "secret_folder" not in card.content and str(tmp_path) not in card.content


def test_the_best_export_of_a_run_is_an_export_of_it_too(tmp_path):
    sft = export(tmp_path, "my_sft", "Owner/Model-7B", root=SFTConfig)
    best = sft.rename(sft.parents[1] / "best_000020")
    (best / "README.md").unlink()
    (tmp_path / "my_sft" / "best").symlink_to(best)
    assert exported_card(tmp_path, "my_rl", tmp_path / "my_sft" / "best").data.base_model == "Owner/Model-7B"


def test_runs_that_name_each_other_end_at_the_last_of_them(base, tmp_path):
    first = without_card(export(tmp_path, "one", base, root=SFTConfig))
    second = without_card(export(tmp_path, "two", first))
    flags = ["--run.name", "one", "--run.dir", str(tmp_path), "--model.path", str(second), "--data.train", "rows.jsonl"]
    save_config(load_config(SFTConfig, flags), tmp_path / "one" / "config.yaml")
    assert "Trained from **one** (itself trained from hf) by" in card_of(second.resolve().parent)


def test_a_setting_that_was_changed_on_the_way_is_the_one_that_is_named(base, tmp_path):
    checkpoint = export(tmp_path, "r", base).parent
    (tmp_path / "r" / "changes.jsonl").write_text(json.dumps({"step": 10, "changes": {"optim.lr": [1e-6, 5e-7]}}))
    assert "| `optim.lr` | 5e-07 |" in card_of(checkpoint)


@pytest.mark.parametrize("head", ["", "---\n- a\n---\n", "---\na: [\n---\n", "---\nlicense: \xff\n---\n"])
def test_a_base_whose_card_cannot_be_read_has_no_licence(base, tmp_path, head):
    (base / "README.md").write_bytes(head.encode("latin-1"))
    assert "The licence of Qwen2.5-3B is not known here" in exported_card(tmp_path, "r", base).text


def test_an_export_elsewhere_gets_the_card_of_its_checkpoint_and_a_folder_that_no_run_made_none(
    base, tmp_path, monkeypatch, capsys
):
    exported, out = export(tmp_path, "r", base), tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr("sys.argv", ["card", str(exported.parent), str(out)])
    main()
    assert (out / "README.md").read_text() == (exported / "README.md").read_text()
    monkeypatch.setattr("sys.argv", ["card", str(tmp_path / "checkpoints" / "step_000001")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and f"{tmp_path}" in capsys.readouterr().err


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
def test_a_path_that_is_not_here_is_no_name_of_the_hub(source, shown, base_model, tmp_path):
    (tmp_path / "secret.py").write_text("FORM = 1\n")
    flags = ["--data.train", "/secret/rows.jsonl", "--protocol.format", f"{tmp_path}/secret.py:FORM"]
    card = exported_card(tmp_path / "runs", "mine", source, *flags, root=SFTConfig)
    assert card.data.base_model == base_model and f"Trained from **{shown}** by" in card.text
    assert "alice" not in card.content and "secret/" not in card.content and str(tmp_path) not in card.content
    if base_model is None:
        assert "secret" not in card.content.replace("secret.py", "").replace(f"**{shown}**", "")


def test_a_folder_that_looks_like_a_name_of_the_hub_is_known_by_its_digest(tmp_path, monkeypatch):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "models" / "mine" / "model.safetensors").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    exported = export(tmp_path / "runs", "one", "models/mine", root=SFTConfig)
    cfg = load_config(SFTConfig, ["--model.path", "models/mine", "--data.train", "rows.jsonl"])
    save_config(cfg, tmp_path / "runs" / "one" / "config.yaml", contents_of(cfg))
    monkeypatch.chdir("/")
    card = card_of(exported.parent)
    assert "models/mine" not in card and "Trained from **mine** by" in card

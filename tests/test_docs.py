"""What README and docs say is true of the code."""

import re
from pathlib import Path

import pytest
from helpers.sample_groups import group

from arpo.config.keys import field_names
from arpo.metrics import rollout_metrics
from evaluate import EvalConfig
from extras.ablation.config import AblationConfig
from train_rl import RLConfig
from train_sft import SFTConfig

ROOT = Path(__file__).resolve().parent.parent


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def test_every_phase_of_a_step_is_in_the_table():
    table = page("metrics")
    script = "".join((ROOT / name).read_text() for name in ("train_rl.py", "arpo/sampling/rollouts.py"))
    phases = [*re.findall(r'timers\("(\w+)"\)', script), "step", "idle", "rank_wait"]
    assert len(phases) > 9
    for phase in phases:
        assert f"`time/{phase}`" in table, phase


def test_every_metric_of_the_tools_is_in_the_table():
    table, shortened = page("metrics"), {"seconds_p95": "_p95", "seconds_max": "_max"}
    names = [name for name in rollout_metrics([group()]).values() if name.startswith("tools/")]
    assert len(names) > 10
    for name in names:
        last = name.rsplit("/", 1)[1]
        assert shortened.get(last, last) in table, name


PAGES = [
    *ROOT.glob("*.md"),
    *sorted((ROOT / "docs").glob("*.md")),
    *ROOT.glob("benchmarks/*/*.md"),
    ROOT / "extras/README.md",
]


def prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.S | re.M)


def anchors(page: Path) -> set[str]:
    """The names under which GitHub's links find the places of a page."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M), re.M)
    named = {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-").lower() for heading in headings}
    return named | set(re.findall(r'<a id="([^"]+)">', page.read_text()))


INVENTED = {"tests/test_NAME.py", "arpo/NAME.py", "section.field"}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_options_that_a_page_names_are_there(path):
    text = path.read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if "://" not in link:
            name, _, anchor = link.partition("#")
            target = path.parent / name if name else path
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
    folders = "configs|scripts|benchmarks|tests|arpo|extras"
    for name in re.findall(rf"\b(?:{folders})/[\w./]+\.(?:yaml|py|sh|md|png)\b", text):
        assert (ROOT / name).exists() or name in INVENTED, name
    known = {name for root in (RLConfig, SFTConfig, EvalConfig, AblationConfig) for name in field_names(root)}
    sections = {name.partition(".")[0] for name in known if "." in name}
    flags = re.findall(r"--([a-z_]+(?:\.[a-z_]+)+)", text)
    if path.name != "training.md":  # whose last table has the released code's names
        named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:[ =][^`]*)?`", text)
        flags += [name for name in named if name.partition(".")[0] in sections]
    assert set(flags) <= known | INVENTED

"""A real browser without a window: what a page shows once its scripts have run."""

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"no browser here (looked for {', '.join(BROWSERS)})")


def dom(page: Path, profile: Path, address: str = "", keys: tuple[str, ...] = ()) -> str:
    """The document after the scripts have run and `keys` were pressed, as HTML."""
    if keys:
        presses = "".join(
            f"document.body.dispatchEvent(new KeyboardEvent('keydown', {{key: '{k}', bubbles: true}}));" for k in keys
        )
        page = page.rename(page.with_name("keys.html"))
        page.write_text(page.read_text().replace("</body>", f"<script>{presses}</script></body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--virtual-time-budget=2000"]
    command = [BROWSER, *flags, "--window-size=1400,900", "--dump-dom", page.as_uri() + address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return re.sub(r'<script type="application/json".*?</script>', "", done.stdout, flags=re.DOTALL)


def words(fragment: str) -> str:
    """Return the text of some HTML as a reader sees it, with spaces between the elements."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", fragment)).split())


def section(document: str, name: str) -> str:
    return re.search(rf'<(\w+)[^>]*\bid="{name}".*?</\1>', document, re.DOTALL)[0]

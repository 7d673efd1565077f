"""The browser of this machine, if there is one. helpers/devtools.py drives it."""

import shutil

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"no browser here (looked for {', '.join(BROWSERS)})")

"""Commands that see a mount which nobody else sees."""

import shlex
import subprocess

import pytest


def under_mount(*arguments: str) -> list[str]:
    """Return what a command begins with that is to see `mount *arguments`, in a user namespace of its own.

    Skips the test where there are none.
    """
    mounted = f'mount {shlex.join(arguments)} && exec "$@"'
    prefix = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mounted, "sh"]
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    return prefix

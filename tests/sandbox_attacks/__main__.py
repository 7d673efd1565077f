"""Runs the attacks side by side in one host, and prints what each came to."""

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from arpo.jail.client import Sandbox
from arpo.jail.host_process import SandboxUnavailable
from sandbox_attacks import ATTACKS
from sandbox_attacks.attack import LIMITS, Attack
from sandbox_attacks.world import World, survivors

HANG_S = 300.0
"""Longer than this is no end at all. They share the machine with each other, and perhaps with other work."""
CONCURRENCY = 8
UNAVAILABLE = 77


def judge(attack: Attack, sandbox: Sandbox, world: World) -> str | None:
    """None where the attack came to what it must, else what it came to."""
    started = time.monotonic()
    reply = sandbox.run(world.as_code() + attack.code)
    seconds = time.monotonic() - started
    shown = f"{reply.status} {reply.exit_code} {reply.stdout[:300]!r} {reply.stderr[-300:]!r}"
    if world.secret in reply.stdout + reply.stderr:
        return f"it saw the secret: {shown}"
    if seconds > HANG_S:
        return f"it took {seconds:.0f} s: {shown}"
    return None if attack.check(reply) else shown


def run_attacks(tier: str, only: str | None) -> dict[str, str | None]:
    """All attacks; then what they have left behind, as further entries."""
    world = World()
    sandbox = Sandbox(LIMITS, tier=tier)
    try:
        attacks = [attack for attack in ATTACKS if tier in attack.tiers and only in (None, attack.name)]
        with ThreadPoolExecutor(CONCURRENCY) as threads:
            verdicts = list(threads.map(lambda attack: judge(attack, sandbox, world), attacks))
        results = {attack.name: verdict for attack, verdict in zip(attacks, verdicts, strict=True)}
        results["harm"] = "; ".join(world.harm()) or None
        results["survivors"] = "; ".join(survivors()) or None
        results["host_lost"] = f"{sandbox.num_restarts} restarts" if sandbox.num_restarts else None
        sane = sandbox.run("6 * 7")
        results["sane_call_afterwards"] = None if sane.stdout == "42\n" else str(sane)
    finally:
        folder = sandbox.host.base
        sandbox.close()
        world.close()
    results["files_left"] = folder if folder and os.path.exists(folder) else None
    return results


parser = argparse.ArgumentParser()
parser.add_argument("--tier", required=True, choices=["namespaces", "landlock"])
parser.add_argument("--only", help="name of one attack")
arguments = parser.parse_args()
try:
    print(json.dumps(run_attacks(arguments.tier, arguments.only)))
except SandboxUnavailable as error:
    print(error, file=sys.stderr)
    sys.exit(UNAVAILABLE)

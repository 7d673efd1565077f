"""The attacks that test_sandbox_attacks.py judges: code as a model might write it, and what it must come to.

    cd tests; python -m sandbox_attacks --tier namespaces|landlock [--only NAME]   {attack: null or what went wrong}

Standard library only, so that it also runs as a user who cannot read the test environment.
"""

from sandbox_attacks.attack import Attack
from sandbox_attacks.excess import EXCESS
from sandbox_attacks.honest import HONEST
from sandbox_attacks.outside import OUTSIDE

ATTACKS: list[Attack] = [*EXCESS, *OUTSIDE, *HONEST]

from collections.abc import Callable

import pytest
from helpers import cut_rollout
from helpers.ranks import mesh_of_one, ranks_of

from arpo.sampling.sampler import Sampler


@pytest.fixture(scope="module")
def alone():
    with mesh_of_one() as mesh:
        yield ranks_of(mesh)


@pytest.fixture
def sampler_with(alone) -> Callable[..., Sampler]:
    """helpers.cut_rollout.sampler_with on one rank; the tools are closed behind the test."""
    made: list[Sampler] = []

    def make(*args, **options) -> Sampler:
        made.append(cut_rollout.sampler_with(alone, *args, **options))
        return made[-1]

    yield make
    for sampler in made:
        sampler.tools.close()


@pytest.fixture
def carrying(sampler_with) -> Callable[..., cut_rollout.CarryOver]:
    def make(*args, num_prompts: int, **options) -> cut_rollout.CarryOver:
        return cut_rollout.CarryOver(sampler_with(*args, **options), num_prompts)

    return make

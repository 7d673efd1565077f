import pytest
from helpers.ranks import mesh_of_one, ranks_of


@pytest.fixture(scope="module")
def alone():
    with mesh_of_one() as mesh:
        yield ranks_of(mesh)

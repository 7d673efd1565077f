import pytest
from helpers.ranks import mesh_of_one


@pytest.fixture(scope="module")
def mesh():
    """A CPU mesh of this process alone."""
    with mesh_of_one() as mesh:
        yield mesh

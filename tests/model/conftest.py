"""Everything about the model runs under strict numerics."""

import pytest


@pytest.fixture(autouse=True)
def _strict(strict_numerics):
    yield

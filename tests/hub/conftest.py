"""What the tests of exports share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def exported(tiny, tmp_path_factory):
    """The newest checkpoint of the tiny run in float32, in one file, verified. No test may write into it."""
    from equimoe.hub.exporting.export import export

    return export(tiny.run, tmp_path_factory.mktemp("exports") / "f32", dtype="f32").folder

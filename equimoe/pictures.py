"""Pictures as files, through matplotlib, which is an extra: nothing here is needed to compute anything."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from equimoe.errors import EquimoeError
from equimoe.files import write_file

__all__ = ["picture", "require_picture"]

_ENDINGS = (".svg", ".png", ".pdf")
_TIMES = {"svg": "Date", "pdf": "CreationDate"}  # what a format calls the time of drawing


def require_picture(path: Path) -> None:
    """EquimoeError if no picture can be written there: to be asked before anything is computed for it."""
    if path.suffix.lower() not in _ENDINGS:
        raise EquimoeError("picture", f"must end in one of {', '.join(_ENDINGS)}", "Name another file", value=str(path))
    if not path.absolute().parent.is_dir():
        raise EquimoeError("picture", "its folder must exist", "Make it, or name another file", value=str(path))
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise EquimoeError("picture", "needs matplotlib", "pip install 'equimoe[plot]'", value=str(path)) from None


@contextmanager
def picture(path: Path, *, columns: int = 1, rows: int = 1, width: float = 8.0, height: float = 5.0) -> Iterator[Any]:
    """The axes of a new figure (an array of them where there are several), written to `path` at the end.

    Sizes in inches, of the whole figure. No display is needed. The same drawing gives the same bytes: matplotlib
    otherwise writes the time and random ids, and a picture under version control would change each time it is made.
    """
    require_picture(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure.subplots(rows, columns)
    drawn = io.BytesIO()
    kind = path.suffix[1:].lower()
    with rc_context({"svg.hashsalt": "equimoe"}):
        figure.savefig(drawn, format=kind, dpi=150, metadata={_TIMES[kind]: None} if kind in _TIMES else None)
    write_file(path, [drawn.getvalue()])

"""`datasets` keeps what it makes of a file: not in the user's cache. It reads the variable when it is imported."""

from __future__ import annotations

import os

os.environ["HF_DATASETS_CACHE"] = os.path.join(os.environ["HF_MODULES_CACHE"], "datasets")  # removed at exit

"""`equimoe data cells`: documents to cells, domain x quality, such as `c07q3`, and new documents to the same cells.

    report = make_cells(["docs/*.jsonl"], "cells")        fit a model and write its folder (fitting.py, report.py)
    CellModel.load("cells").assign(["a text", "another"])      -> ["c07q3", "c00q1"] (model.py)

A cluster is a domain: k-means on what words a document has (features.py), or on embeddings that the user brings. A
level is its quality among the documents of its cluster (quality.py). Only fitting needs scikit-learn (`equimoe[prep]`).
"""

"""What says that a run leaves its path, from the lines of its metrics.jsonl. Plain Python, no JAX.

    for flag in flags_of(recipe, read_lines(run / "metrics.jsonl"), prediction):   # `board`
        print(flag.words)

A monitor sees one line after the other and keeps a small window of them. So the same code judges a run that goes, one
that is resumed (the lines that there are come first) and one that is finished. Cost: about 0.1 ms a line.
"""

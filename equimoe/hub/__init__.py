"""The interchange format: names on disk, reading released weights, loading from a folder, a run or the Hub."""

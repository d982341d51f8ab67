"""From a checkpoint of a run to a folder that others load, written whole and compared with the run."""

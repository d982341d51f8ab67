"""Text in, rows of tokens out: documents are found, split, tokenised and stored once, then read as rows.

`prepare` is the way in, `Rows` and `heldout_batches` are the way out. Nothing in this folder imports JAX, so that
a command that only looks at data starts quickly and a data job needs no accelerator.
"""

"""From raw documents to a store by cells: what `equimoe data prepare` does, stage by stage.

    scan      per unit: a row for every document (hash, bytes, cell, verdict of the filters), facts for deduplicators
    choose    once: duplicates, what is held out, the tokenizer
    encode    per unit: read again, the tokens of what stays, grouped by cell
    gather    once: which units hold what of which cell
    merge     per shard: the documents of a cell, shuffled by hash
    finish    once: the header, and the store gets its place

A unit is a file, a part of a large one, or many small ones. What is finished lies in `STORE/.work` and is never done
again: killed at any moment, the same command goes on, and the bytes of the store depend on sources and settings alone,
not on workers, kills or executor. Sources are read twice; a store needs its own size twice while it is made.
Memory does not grow with the data: some 110 MB a process, and several times the longest document.
`filters` decides which documents stay. Nothing in this folder imports JAX.
"""

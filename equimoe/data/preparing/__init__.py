"""From raw documents to a store by cells: what `equimoe data prepare` does.

`filters` decides which documents stay. Nothing in this folder imports JAX.
"""

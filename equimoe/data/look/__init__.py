"""What a run reads, for a person to judge: rows decoded, statistics, and a page to publish.

`stored` is `data show` of a store, `stats` is `data stats`, `page` is `data page`. All read what training reads, by
the same functions, and change nothing. `data show` of plain files is `equimoe.data.show`.
"""

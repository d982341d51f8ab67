"""Which documents stay: length, language, decontamination, exact and near duplicates.

A filter of single documents (`DocumentFilter`) says of one text why it goes. A deduplicator (`Deduplicator`) keeps a
few numbers of each document while a unit of the input is read (facts), finds the duplicates among the facts of all
units, on disk, and leaves a verdict per unit. All of it depends on texts, their order and settings only. Every filter
has a name, settings for the record, and a `Tally` of what it removed.

    filter           kept on disk per document     core MB/s
    length           nothing                       > 30
    language         nothing                       4, of at most 1,800 characters a document
    decontamination  nothing                       20
    exact            16 bytes, verdict 1           400
    minhash          112 bytes, verdict 1          10 to 20
"""

from equimoe.data.preparing.filters.decontamination import LEAST_WORDS, Decontamination, Hit, NgramIndex
from equimoe.data.preparing.filters.documents import DocumentFilter, Language, Length, first_reason
from equimoe.data.preparing.filters.duplicates import DuplicateExample, Duplicates
from equimoe.data.preparing.filters.exact import Exact
from equimoe.data.preparing.filters.facts import FactsWriter, facts_documents
from equimoe.data.preparing.filters.minhash import MinHash, probability
from equimoe.data.preparing.filters.options import Deduplicator, FilterOptions
from equimoe.data.preparing.filters.report import Example, Tally, total
from equimoe.data.preparing.filters.words import word_hashes

__all__ = [
    "LEAST_WORDS",
    "Decontamination",
    "Deduplicator",
    "DocumentFilter",
    "DuplicateExample",
    "Duplicates",
    "Example",
    "Exact",
    "FactsWriter",
    "FilterOptions",
    "Hit",
    "Language",
    "Length",
    "MinHash",
    "NgramIndex",
    "Tally",
    "facts_documents",
    "first_reason",
    "probability",
    "total",
    "word_hashes",
]

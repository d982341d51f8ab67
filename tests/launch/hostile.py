"""Texts that a user may give as a name, and that must come out of a job file as they went in."""

from __future__ import annotations

HOSTILE = [
    "two words",
    'it\'s "quoted"',
    "$(touch pwned)",
    "`touch pwned`",
    "$HOME ${RUN} $$ $$(RUN) $(RUN) $",
    "a; touch pwned; #",
    "a\nb: c\n#SBATCH --nodes=9\n---",
    "@NAME@ @RUN@",
    "-rf --help",
    "\\n \\' \x01\x7f\x85\u2028\ufeff",
    "é 😀 {a: [b]} & * ! | > % - ?",
]

"""Documents of known origin for the tests of cells."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from equimoe.data.source import pieces
from equimoe.data.speeches import speeches

TOPICS = {
    "sea": "harbour sail anchor tide captain mast deck whale storm island rope gull net hull wave".split(),
    "kitchen": "flour butter oven simmer garlic onion pepper sauce dough recipe spoon pan bake salt herb".split(),
    "court": "judge statute appeal verdict clause tenant plaintiff counsel ruling oath jury lease tort".split(),
    "orchard": "apple pear blossom graft prune harvest soil bee ladder cider frost rootstock orchard fruit".split(),
}
COMMON = "the of and to in that it was for on with as at by from this had were which one".split()


def topic_documents(each: int = 60, words: int = 40) -> list[tuple[str, str]]:
    """(topic, text): half of the words are of the topic, half are common to all."""
    rng, documents = random.Random(0), []
    for number in range(each):
        for topic, own in TOPICS.items():
            chosen = [rng.choice(own if rng.random() < 0.5 else COMMON) for _ in range(rng.randint(words // 4, words))]
            documents.append((topic, f"{' '.join(chosen)}{'.' if number % 2 else ''}\n\nNumber {number}"))
    return documents


def write_jsonl(path: Path, entries: Sequence[str | dict]) -> Path:
    lines = [json.dumps({"text": entry} if isinstance(entry, str) else entry) for entry in entries]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def speech_pieces(most: int | None = None, piece_bytes: int = 800) -> list[str]:
    """Pieces of the speeches, about as long as docstrings; `most` of them by chance."""
    found = [piece for speech in speeches() for piece in pieces(speech, piece_bytes)]
    return found if most is None else random.Random(0).sample(found, most)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}

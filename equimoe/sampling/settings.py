"""How to sample: one checked record, the same for Python and the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from equimoe.errors import Problems

__all__ = ["Sampling", "check"]


@dataclass(frozen=True)
class Sampling:
    """What is drawn and when it ends. None: no such limit. The limits are those of `drawing.kept_tokens`."""

    tokens: int  # to write at most
    temperature: float = 1.0  # 0 takes the likeliest token each time
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | Sequence[int] = 0  # of the first sequence, the next one has the next seed; or one each
    stop: int | Sequence[int] | None = None  # token ids that end a sequence and are not returned
    stop_strings: Sequence[str] = ()  # text that ends a sequence and is not returned

    @property
    def stop_ids(self) -> tuple[int, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, int) else tuple(self.stop)

    def seeds(self, sequences: int) -> list[int]:
        if isinstance(self.seed, int):
            return [(self.seed + i) % 2**32 for i in range(sequences)]
        return list(self.seed)


def check(sampling: Sampling, prompts: Sequence[Sequence[int]], vocabulary: int) -> None:
    """Raises EquimoeError that lists every setting out of range and every id that the model has no embedding for."""
    problems = Problems("sampling")
    problems.require(len(prompts) > 0, "prompt", prompts, "must be at least one", "give some text")
    for prompt in prompts:
        problems.require(len(prompt) > 0, "prompt", prompt, "must hold at least one token", "give some text")
        outside = next((i for i in prompt if not 0 <= i < vocabulary), None)
        rule = f"ids must be in 0 .. {vocabulary - 1}"
        problems.require(outside is None, "prompt", outside, rule, "use the model's own tokenizer")
    for name, rule, remedy, holds in _rules(sampling, len(prompts), vocabulary):
        problems.require(holds, name, getattr(sampling, name), rule, remedy)
    problems.raise_if_any()


def _rules(s: Sampling, sequences: int, vocabulary: int) -> list[tuple[str, str, str, bool]]:
    """(setting, rule, remedy, whether it holds)."""
    seeds = [s.seed] if isinstance(s.seed, int) else list(s.seed)
    many = "" if isinstance(s.seed, int) else f", and {sequences}, one for each prompt"
    return [
        ("tokens", "must be at least 1", "ask for more", s.tokens >= 1),
        ("temperature", "must be 0 or above", "0 is greedy, 1 samples", 0.0 <= s.temperature < float("inf")),
        (
            "top_k",
            f"must be in 1 .. {vocabulary}",
            "leave it out to sample from all",
            s.top_k is None or 1 <= s.top_k <= vocabulary,
        ),
        (
            "top_p",
            "must be above 0 and at most 1",
            "leave it out to sample from all",
            s.top_p is None or 0.0 < s.top_p <= 1.0,
        ),
        (
            "min_p",
            "must be from 0 to 1",
            "leave it out to sample from all",
            s.min_p is None or 0.0 <= s.min_p <= 1.0,
        ),
        (
            "seed",
            f"must be in 0 .. {2**32 - 1}{many}",
            "choose other numbers",
            all(0 <= seed < 2**32 for seed in seeds) and (isinstance(s.seed, int) or len(seeds) == sequences),
        ),
        ("stop_strings", "must not be empty texts", "leave them out", all(s.stop_strings)),
    ]

"""The asymptote Linf of each held-out set, as a command says it: 1.4, free, paloma=1.4,code=0.9, or free,paloma=1.4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from equimoe.errors import Problems

__all__ = ["Asymptotes"]

FREE = "free"


@dataclass(frozen=True)
class Asymptotes:
    """None: free. `by_eval` goes before `default`; without a default, sets that are not named are refused."""

    default: float | None = None
    by_eval: Mapping[str, float | None] = field(default_factory=dict)
    has_default: bool = True

    @classmethod
    def parse(cls, text: str) -> Asymptotes:
        problems, by_eval, defaults = Problems("--asymptote"), {}, []
        for word in text.split(","):
            name, equals, value = word.strip().rpartition("=")
            number = _number(value, problems)
            if not equals:
                defaults.append(number)
                continue
            problems.require(bool(name) and name not in by_eval, word, name, "must name a held-out set, once", "as a=1")
            by_eval[name] = number
        several = len(defaults) > 1
        problems.require(not several, "--asymptote", text, "has more than one value for all sets", "name sets: a=1.4")
        problems.raise_if_any("Write 1.4, free, paloma=1.4,code=0.9, or free,paloma=1.4")
        return cls(defaults[0] if defaults else None, by_eval, has_default=bool(defaults))

    def check(self, evals: Sequence[str]) -> None:
        """EquimoeError if a set has no asymptote, or one is named that is not there."""
        problems = Problems("--asymptote")
        for name in self.by_eval:
            problems.require(name in evals, name, name, f"is no held-out set of the points ({_list(evals)})", "drop it")
        if not self.has_default:
            for name in evals:
                remedy = f"add {name}=free or a number"
                problems.require(name in self.by_eval, name or "(no name)", name, "has no asymptote", remedy)
        problems.raise_if_any("Name each set, or begin with a value for all others (free,a=1.4), or choose by --eval")

    def of(self, eval: str) -> float | None:
        return self.by_eval.get(eval, self.default)


def _list(names: Sequence[str]) -> str:
    return ", ".join(name or "(no name)" for name in names)


def _number(text: str, problems: Problems) -> float | None:
    if text.strip() == FREE:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    problems.require(0 <= value < 1e6, "asymptote", text, "must be a loss of 0 or above, or free", "write 1.4")
    return value

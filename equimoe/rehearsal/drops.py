"""`equimoe drops`: how many assignments a mesh would drop, before there is one.

The routing model (`rehearsal.routing`) stands for the router, the transports' own code (`rehearsal.dispatch`) decides.
Its three numbers come from three public figures of Marin's runs, and four more came out of it that were not used:

    figure                                                            published   model
    per_cell 2.5, 128 experts, 2 documents of 8,192 tokens a shard         7 %    7.0 %, sets the skew
    per_cell 2.5, 128 experts, 16 documents of 4,096                    0.27 %    0.29 %, sets `TAIL`
    ragged 1.15, the hero's step 6,000, 16 rows of 4,096               0.018 %    0.017 %, sets the imbalance
    pooled_wave 1.15, the same                                          2.67 %    2.6 %
    per_cell 1.0, 128 experts, 2 documents of 8,192                     22.1 %    25 %
    4,096 to 65,536 tokens of context, a run at 7 %                       40 %    27 %
    pooled_wave 1.15, 262,144 tokens of context, 16 shards      18 %, rising      11 %

Sources: hero_spec section 3; of the settings marin's moe_hero_ep ablations (the first two are of a small and of a large
model, 4 experts a token, 64 shards), PR 7981, PR 8549 and issue 8754, in this order.

What one parameter does not give. With normal preferences (`tail` infinity) the skew that drops 7 % at 2 documents
drops 0.024 % at 16, a tenth of what was seen: a few experts that a document wants far more than all others must be
likelier than that. Student's t with 5 degrees of freedom has them, and the skew alone then fits both figures. Nor can
documents alone make the hero's ragged transport drop anything: its room is over the mean of 1,024 documents, which is
even. What is left must be common to all documents of a step: `imbalance` of 0.1.

The context of the 65,536-token figure is not published in full: it is taken as per_cell at a capacity of 1.15, where
the model drops 7 to 8 % at 4,096, with 65,536 tokens a shard. Nothing here says when in a run: early steps drop more,
and a skew that grows with training is not modelled.

Cost: about 4 s a trial and capacity of pooled wave with 64 shards x 8,192 tokens x 8 experts; 45 s and 1 GB for all
65,536 tokens of a shard.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from equimoe.pictures import picture, require_picture
from equimoe.recipe import Recipe
from equimoe.rehearsal.drops_options import Case, DropsOptions, Settings, settings
from equimoe.rehearsal.expected import Group, Rate, Rates, fit_skew, measure
from equimoe.rehearsal.routing import RoutingModel
from equimoe.rehearsal.rules import Rule

__all__ = [
    "DEFAULT_IMBALANCE",
    "DEFAULT_SKEW",
    "PUBLIC_GROUP",
    "PUBLIC_RATE",
    "PUBLIC_RULE",
    "DropsReport",
    "Row",
    "expected_drops",
    "rehearse_drops",
]

DEFAULT_SKEW = 0.64  # fitted to PUBLIC_RATE
DEFAULT_IMBALANCE = 0.1  # fitted to 0.018 % of the hero's ragged transport, at that skew
# A small model on 64 GPUs, 16,384 tokens and 2 documents on each, every cell with 2.5 times its mean.
PUBLIC_RATE = 0.07
PUBLIC_GROUP = Group(experts=128, per_token=4, shards=64, tokens=16_384, documents=2)
PUBLIC_RULE = Rule("per_cell", 2.5, 2.5)

Log = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    case: Case
    rule: Rule
    rates: Rates

    def to_dict(self) -> dict[str, Any]:
        return {
            "seq": self.case.seq,
            "documents_per_shard": self.case.documents,
            "shards": self.case.shards,
            "transport": self.rule.transport,
            "transport_factor": self.rule.transport_factor if self.rule.transport == "pooled_wave" else None,
            "receiver_factor": self.rule.receiver_factor,
            "waves": self.rule.waves if self.rule.transport == "pooled_wave" else None,
            "dropped_at_sender": asdict(self.rates.sender),
            "dropped_at_receiver": asdict(self.rates.receiver),
            "dropped": asdict(self.rates.total),
        }


@dataclass(frozen=True)
class DropsReport:
    """What was asked, how the routing was made, and the table."""

    recipe: str
    experts: int
    per_token: int
    tokens: int  # of a shard
    sampled_tokens: int  # drawn of them
    models: tuple[RoutingModel, ...]  # one a trial
    skew_source: str
    layers: tuple[RoutingModel, ...]  # of the model, with --load
    seed: int
    rows: tuple[Row, ...]

    @property
    def skew(self) -> float:
        """Mean over the trials."""
        return float(np.mean([model.skew for model in self.models]))

    @property
    def imbalance(self) -> float:
        """Mean over the trials."""
        return float(np.mean([model.imbalance for model in self.models]))

    def lines(self) -> Iterator[str]:
        yield (
            f"{self.recipe}: {self.experts} experts, {self.per_token} a token; {self.tokens:,} tokens a shard"
            + (f", of which {self.sampled_tokens:,} are drawn" if self.sampled_tokens < self.tokens else "")
        )
        yield (
            f"skew {self.skew:.3g} ({self.skew_source}), imbalance {self.imbalance:.3g}, tail "
            f"{self.models[0].tail:g}; {len(self.models)} trial{'s' * (len(self.models) > 1)}, seed {self.seed}; "
            "+- is the standard error of their mean"
        )
        if self.layers:
            yield "skew by layer: " + " ".join(f"{layer.skew:.2f}" for layer in self.layers)
            yield "imbalance by layer: " + " ".join(f"{layer.imbalance:.2f}" for layer in self.layers)
        yield (
            f"  {'seq':>9}  {'documents':>9}  {'shards':>6}  {'transport':<11}  {'capacity':>9}  {'at sender':>10}"
            f"  {'at receiver':>11}  {'dropped':>10}  {'+-':>9}"
        )
        for row in self.rows:
            yield (
                f"  {'-' if row.case.seq is None else f'{row.case.seq:,}':>9}  {row.case.documents:>9,}"
                f"  {row.case.shards:>6}  {row.rule.transport:<11}  {row.rule.capacity:>9}"
                f"  {_percent(row.rates.sender.mean):>10}  {_percent(row.rates.receiver.mean):>11}"
                f"  {_percent(row.rates.total.mean):>10}  {_percent(row.rates.total.error):>9}"
            )

    def to_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "experts": self.experts,
            "experts_per_token": self.per_token,
            "tokens_per_shard": self.tokens,
            "sampled_tokens_per_shard": self.sampled_tokens,
            "skew": self.skew,
            "skew_source": self.skew_source,
            "skew_of_trials": [model.skew for model in self.models],
            "skew_of_layers": [layer.skew for layer in self.layers],
            "imbalance": self.imbalance,
            "imbalance_of_trials": [model.imbalance for model in self.models],
            "imbalance_of_layers": [layer.imbalance for layer in self.layers],
            "tail": self.models[0].tail,
            "trials": len(self.models),
            "seed": self.seed,
            "rows": [row.to_dict() for row in self.rows],
        }

    def draw(self, path: Path) -> None:
        """One picture: drop rate against documents a shard. A colour for a rule, a dash for a number of shards."""
        rules = list(dict.fromkeys(row.rule for row in self.rows))
        sizes = list(dict.fromkeys(row.case.shards for row in self.rows))
        documents = sorted({row.case.documents for row in self.rows})
        with picture(path, width=9.0) as axes:
            for number, (rule, shards) in enumerate(itertools.product(rules, sizes)):
                rates = {
                    r.case.documents: r.rates.total for r in self.rows if (r.rule, r.case.shards) == (rule, shards)
                }
                shown = sorted(rates.items())
                axes.errorbar(
                    [each for each, _ in shown],
                    [100 * rate.mean for _, rate in shown],
                    yerr=[100 * (rate.error or 0) for _, rate in shown],
                    color=f"C{number // len(sizes) % 10}",
                    linestyle=("-", "--", ":", "-.")[number % len(sizes) % 4],
                    marker="o",
                    label=f"{rule.transport} {rule.capacity}, {shards} shards",
                )
            axes.set_xscale("log", base=2)
            axes.set_xticks(documents, [f"{each:,}" for each in documents])
            axes.set_yscale("symlog", linthresh=0.01)  # nothing dropped has its place too
            axes.set_ylim(0, max(1.0, 150 * max(row.rates.total.mean for row in self.rows)))
            axes.yaxis.set_major_formatter("{x:g} %")
            axes.set_xlabel(f"documents a shard of {self.tokens:,} tokens (longer context: fewer)")
            axes.set_ylabel("dropped assignments")
            axes.set_title(f"{self.recipe}: skew {self.skew:.3g} ({self.skew_source})")
            axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))


def rehearse_drops(recipe: Recipe, options: DropsOptions, log: Log = lambda line: None) -> DropsReport:
    """Everything that `options` asks for. What can be refused before anything is drawn is refused before it."""
    asked = settings(recipe, options)
    if options.plot is not None:
        require_picture(options.plot)
    models, source, layers = _models(recipe, options, asked, log)
    rows, sampled = [], 0
    for number, case in enumerate(asked.cases, start=1):
        log(f"{number} of {len(asked.cases)}: documents a shard {case.documents:,}, shards {case.shards}")
        group = _group(recipe, asked.tokens, case).sampled(options.sample_tokens)
        sampled = max(sampled, group.tokens)
        found = measure(models, group, _rules(recipe, asked), seed=options.seed)
        rows += [Row(case, rule, rates) for rule, rates in found.items()]
    sizes = (recipe.model.num_experts, recipe.model.num_experts_per_tok, asked.tokens, sampled)
    report = DropsReport(recipe.name, *sizes, models, source, layers, options.seed, tuple(rows))
    if options.plot is not None:
        report.draw(options.plot)
        log(f"wrote {options.plot}")
    return report


def expected_drops(recipe: Recipe, *, shards: int, seed: int = 0) -> Rates:
    """What the recipe's own transport drops over `shards` shards at the default skew, a document a row: in seconds.

    Three trials of 4,096 tokens a shard. The local transport drops nothing.
    """
    transport = recipe.transport
    if transport.kind == "local":
        return Rates(*[Rate(0.0, 0.0, 0.0, 0.0)] * 3)
    asked = settings(recipe, DropsOptions(shards=str(shards), transport=transport.kind))
    group = _group(recipe, asked.tokens, asked.cases[0]).sampled(4096)
    rules = _rules(recipe, asked)
    return measure([RoutingModel(DEFAULT_SKEW, DEFAULT_IMBALANCE)] * 3, group, rules, seed=seed)[rules[0]]


def _group(recipe: Recipe, tokens: int, case: Case) -> Group:
    return Group(recipe.model.num_experts, recipe.model.num_experts_per_tok, case.shards, tokens, case.documents)


def _rules(recipe: Recipe, asked: Settings) -> list[Rule]:
    transport = recipe.transport
    own = (transport.receiver_factor, transport.transport_factor)
    factors = [(each, each) for each in asked.capacities] or [own]
    return [Rule(name, *each, transport.waves) for name in asked.transports for each in factors]


def _models(
    recipe: Recipe, options: DropsOptions, asked: Settings, log: Log
) -> tuple[tuple[RoutingModel, ...], str, tuple[RoutingModel, ...]]:
    """A routing model for each trial, where its skew comes from, and that of each layer with --load."""
    imbalance = DEFAULT_IMBALANCE if options.imbalance is None else options.imbalance
    drawing = {"imbalance": imbalance, "seed": options.seed, "trials": options.trials}
    if options.load is not None:
        from equimoe.rehearsal.observed import routing_of_source

        reading = {name: getattr(options, name) for name in ("step", "revision", "force", "text_field", "max_bytes")}
        layers = routing_of_source(options.load, options.data, seed=options.seed, log=log, **reading)
        if options.imbalance is not None:
            layers = [replace(layer, imbalance=imbalance) for layer in layers]
        # A trial for each part of the layers, from the least to the most skewed: drops are not those of a mean skew.
        ordered = sorted(layers, key=lambda layer: layer.skew)
        models = tuple(ordered[(2 * n + 1) * len(layers) // (2 * options.trials)] for n in range(options.trials))
        return models, f"mean over trials, each a layer of {options.load}", tuple(layers)
    if asked.fit_public:
        log("fitting the skew to the public 7 %")
        model = fit_skew(PUBLIC_RATE, PUBLIC_GROUP.sampled(options.sample_tokens), PUBLIC_RULE, **drawing)
        return (model,) * options.trials, "fitted to 7 %, per_cell 2.5, 2 documents a shard", ()
    if asked.fit is not None:
        log(f"fitting the skew to {asked.fit:.3%}")
        group = _group(recipe, asked.tokens, asked.cases[0]).sampled(options.sample_tokens)
        model = fit_skew(asked.fit, group, _rules(recipe, asked)[0], **drawing)
        return (model,) * options.trials, f"fitted to {asked.fit:.3%} here", ()
    skew, source = (DEFAULT_SKEW, "the default") if options.skew is None else (options.skew, "given")
    return (RoutingModel(skew, imbalance),) * options.trials, source, ()


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.3%}"

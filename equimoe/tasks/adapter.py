"""A model of ours as lm-eval sees one: `LMEvalModel`, and what it takes for its scores to be those of the export.

lm-eval's own class for transformers, `HFLM`, is the measure: the same text before and after is encoded, cut and scored
as it does with an export of the model, so that both give the same numbers. In particular
- a context starts with the control tokens that tokenizer.json puts first; an empty one is the begin token alone;
- what is longer than a row (`max_position_embeddings`) loses its beginning, which is said;
- a rolling text is cut into windows of a row, and its own begin token is scored too, as the first of its tokens.
Different on purpose: a text that spells a control token is read as plain text, and settings of a generation that we do
not have are refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from equimoe.data.tokenizer import TextTokenizer
from equimoe.errors import EquimoeError
from equimoe.hub.load import load
from equimoe.model.transformer import Transformer
from equimoe.parallel.capabilities import capabilities
from equimoe.sampling.terminal import needed_tokenizer, note
from equimoe.tasks.likelihood import TOLD_EVERY_SECONDS, Asked, Likelihoods, Log
from equimoe.tasks.options import DEFAULT_BATCH_ROWS
from equimoe.tasks.text_ids import control_tokens
from equimoe.tasks.writing import continued, generation_settings

__all__ = ["MOST_NEW_TOKENS", "LMEvalModel"]

MOST_NEW_TOKENS = 256  # of a generation whose task names no limit; lm-eval's own default

Pair = tuple[tuple[str, str] | None, list[int], list[int]]  # texts (None: a window of a longer one), context, target


class LMEvalModel(TemplateLM):
    """Pass it as `model` to `lm_eval.simple_evaluate`. Progress and what was cut go to `say`, default stderr."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: TextTokenizer,
        *,
        batch_rows: int = DEFAULT_BATCH_ROWS,
        compute_dtype: Any = None,
        say: Log = note,
    ):
        super().__init__()
        if tokenizer.begin is None and tokenizer.end is None:
            raise EquimoeError(
                "tokenizer", "must have a begin or an end token, one of them precedes an empty context", "Add one to it"
            )
        self.model, self.text_tokenizer = model, tokenizer
        self.compute_dtype = jnp.dtype(compute_dtype or capabilities().compute_dtype)
        self.max_length = model.config.max_position_embeddings
        self.batch_rows = batch_rows
        self._likelihoods = Likelihoods(model, self.max_length, batch_rows, self.compute_dtype)
        self._before, self._after = control_tokens(tokenizer)
        self.say = say

    @classmethod
    def load(
        cls,
        src: str | Path,
        *,
        revision: str | None = None,
        step: int | None = None,
        force: bool = False,
        **settings: Any,
    ) -> LMEvalModel:
        """From a run, a folder or a Hub id, as `equimoe.load`."""
        model, tokenizer = load(src, revision=revision, step=step, force=force)
        return cls(model, needed_tokenizer(tokenizer, src), **settings)

    @property
    def eot_token_id(self) -> int:
        return self.prefix_token_id if self.text_tokenizer.end is None else self.text_tokenizer.end

    @property
    def prefix_token_id(self) -> int:
        """What stands before an empty context."""
        begin = self.text_tokenizer.begin
        return self.text_tokenizer.end if begin is None else begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        ids = self.text_tokenizer.encode(string)
        return ids if add_special_tokens is False else [*self._before, *ids, *self._after]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """(log-likelihood of the continuation, whether greedy decoding would write it) for each (context, it)."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Log-likelihood of whole texts: windows of a row, every token predicted once."""
        pairs: list[Pair] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, target in map(make_disjoint_window, windows):
                pairs.append((None, context, target))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (total, _) in zip(owners, self._loglikelihood_tokens(pairs), strict=True):
            totals[owner] += total
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **_: Any) -> list[tuple[float, bool]]:
        longest = max((len(context) + len(target) - 1 for _, context, target in requests), default=0)
        if longest > self.max_length:
            cut = sum(len(context) + len(target) - 1 > self.max_length for _, context, target in requests)
            self.say(
                f"{cut:,} of {len(requests):,} requests do not fit in a row of {self.max_length:,} tokens (the longest"
                f" has {longest:,}): their beginnings are left out"
            )
        answers = self._likelihoods([self._asked(*request) for request in requests], self.say)
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _asked(self, texts: tuple[str, str] | None, context: list[int], target: list[int]) -> Asked:
        """The last tokens that fit in a row. A continuation must fit itself."""
        if not 0 < len(target) <= self.max_length:
            raise EquimoeError(
                "continuation",
                f"must have 1 to {self.max_length:,} tokens, what a row of the model holds, it has {len(target):,}",
                "Leave the document out of the task, or cut it",
                value=(texts or ("", ""))[1][:80],
            )
        return Asked((context + target)[:-1][-self.max_length :], target)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Text that continues each context, up to the first of its stop strings. Request i draws with the seed i."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        written = [""] * len(requests)
        done, told = 0, time.monotonic()
        for numbers in groups.values():
            given = normalize_gen_kwargs(requests[numbers[0]].args[1], MOST_NEW_TOKENS)
            settings = generation_settings(given, self.max_length)
            prompts = self._prompts([requests[number].args[0] for number in numbers], settings["tokens"])
            settings |= {"compute_dtype": self.compute_dtype}
            texts = continued(self.model, self.text_tokenizer, prompts, numbers, self.batch_rows, **settings)
            for index, text in texts:
                written[numbers[index]], done = text, done + 1
                self.cache_hook.add_partial("generate_until", requests[numbers[index]].args, text)
                if time.monotonic() - told > TOLD_EVERY_SECONDS:
                    self.say(f"wrote {done:,} of {len(requests):,} answers so far")
                    told = time.monotonic()
        return written

    def _prompts(self, contexts: Sequence[str], tokens: int) -> list[list[int]]:
        """The ids of each context, its end where a row does not hold it and `tokens` more."""
        prompts = [self.tok_encode(context) or [self.prefix_token_id] for context in contexts]
        room = self.max_length - tokens
        longest = max(map(len, prompts))
        if longest > room:
            cut = sum(len(prompt) > room for prompt in prompts)
            self.say(
                f"{cut:,} of {len(prompts):,} prompts and {tokens:,} tokens to write do not fit in a row of"
                f" {self.max_length:,} tokens (the longest prompt has {longest:,}): their beginnings are left out"
            )
        return [prompt[-room:] for prompt in prompts]

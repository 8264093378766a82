"""vLLM's schedulers with `update_from_output` done in columns.

One kernel finds the rows that only grow; their lists grow in C, their outputs are made in C. Every other row (its first
output, a stop, a full block, a prompt's chunk, a stale or unusual request) goes to vLLM's own `update_from_output`, in
a scheduler output that holds nothing but those rows, so what changes a request's state is vLLM's own code. The two
results are put together in the order that vLLM has.

    LLM(..., scheduler_cls="asyncbook.integrations.vllm_scheduler.BookScheduler")

The plugin does that by itself where no other class is asked for.
"""

from __future__ import annotations

from collections import deque
from itertools import chain, compress, repeat
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # type: ignore[import-not-found]
from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found]
from vllm.v1.engine import EngineCoreOutput  # type: ignore[import-not-found]
from vllm.v1.spec_decode.metrics import SpecDecodingStats  # type: ignore[import-not-found]

from asyncbook.integrations.vllm_book import BookFeed, make_feed
from asyncbook.integrations.vllm_columns import RequestColumns
from asyncbook.integrations.vllm_ids import ListPool, OneIdEach
from asyncbook.integrations.vllm_kernels import compile_all, find_plain, list_fetcher
from asyncbook.integrations.vllm_merge import merge_outputs

Outputs = dict[int, Any]


class Rows:
    """The rows of a step in the scheduler's order, and what of them stays as it is while the batch does: their requests
    and these requests' lists, None where a row has no slot in the columns."""

    def __init__(self, names: list[str], columns: RequestColumns) -> None:
        self.names = names
        self.version = columns.version
        slots = list(map(columns.slots.get, names, repeat(-1)))
        self.slots = np.array(slots, np.int32)
        self.requests = list(map(columns.requests.__getitem__, slots))
        self.all_token_ids = list(map(columns.all_token_ids.__getitem__, slots))
        self.output_token_ids = list(map(columns.output_token_ids.__getitem__, slots))
        self.clients = list(map(columns.clients.__getitem__, slots))
        self.has_clients = any(self.clients)
        self._runner_names: list[str] = []
        self.index: list[int] = []
        self._ones = [1] * len(names)
        self._column_of_ones = np.ones(len(names), np.int32)

    def take(self, scheduler_output: Any, output: Any) -> None:
        """A step of these rows: their scheduled tokens, ids, drafts."""
        if output.req_ids != self._runner_names:
            self._runner_names = output.req_ids
            self.index = list(map(output.req_id_to_index.__getitem__, self.names))
            self._order = None if self.index == list(range(len(output.req_ids))) else np.array(self.index, np.intp)
        self.scheduled = list(scheduler_output.num_scheduled_tokens.values())
        self._take_ids(output.sampled_token_ids)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        self.num_drafts = list(map(len, map(drafts.get, self.names, repeat(())))) if drafts else None

    def _take_ids(self, sampled: Any) -> None:
        """`ids`: a list a row, or where each row has one, that. `flat`, `counts_column`: the same in columns, int32."""
        self.is_one_each = isinstance(sampled, OneIdEach)
        if self.is_one_each:
            self.flat = sampled.column() if self._order is None else sampled.column()[self._order]
            self.ids = sampled.ids if self._order is None else self.flat.tolist()
            self.counts, self.counts_column = self._ones, self._column_of_ones
        else:
            self.ids = list(map(sampled.__getitem__, self.index))
            self.counts = list(map(len, self.ids))
            self.flat = np.fromiter(chain.from_iterable(self.ids), np.int32, sum(self.counts))
            self.counts_column = np.array(self.counts, np.int32)

    def grow(self, choice: list[int] | None, pool: ListPool) -> list[list[int]]:
        """Appends the ids of those chosen to their requests' lists. Returns the ids, a list a row; `pool`: of those
        with one id."""
        ids = chosen(self.ids, choice)
        add = list.append if self.is_one_each else list.extend
        fetch = list_fetcher()
        for all_lists in (self.all_token_ids, self.output_token_ids):
            lists = chosen(all_lists, choice)
            fetch(lists)
            deque(map(add, lists, ids), maxlen=0)
        return pool.take(ids) if self.is_one_each else ids


class ColumnScheduling:
    """Mixed into a scheduler of vLLM's, in front of it."""

    book_feed: BookFeed | None
    is_async = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        compile_all()
        vllm: Any = self  # what vLLM's part has is not declared here
        self._columns = RequestColumns(vllm.max_model_len)
        self._pool = ListPool()
        self._rows: Rows | None = None  # of the last step, as long as they stay the same
        self._spec_stats: Any = None  # of the rows done here, until vLLM makes its statistics of the step
        # With any of these, a step has more to it than is done here.
        self._is_usual = (
            not any((vllm.connector, vllm.ec_connector, vllm.aux_output_connector, vllm.perf_metrics))
            and not (vllm.return_sampling_mask or vllm.is_encoder_decoder or vllm.is_mm_encoder_only)
            and vllm.num_sampled_tokens_per_step == 1
            and not (self.is_async and vllm.num_spec_tokens)
        )
        self.book_feed = make_feed(vllm)

    # What happens to requests between steps

    def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
        super()._preempt_request(request, timestamp, drop_stale_output)  # type: ignore[misc]
        self._columns.forget(request)
        if self.book_feed is not None:
            self.book_feed.preempt(request)

    def _free_request(self, request: Any, *arguments: Any, **named: Any) -> Any:
        self._columns.forget(request)
        freed = super()._free_request(request, *arguments, **named)  # type: ignore[misc]
        if self.book_feed is not None:
            self.book_feed.release(request)
        return freed

    def make_stats(self, spec_decoding_stats: Any = None, *arguments: Any, **named: Any) -> Any:
        """vLLM's, with the draft rounds of the rows that were done here."""
        mine, self._spec_stats = self._spec_stats, None
        return super().make_stats(_added(spec_decoding_stats, mine), *arguments, **named)  # type: ignore[misc]

    def shutdown(self) -> None:
        """Ends the book as well."""
        if self.book_feed is not None:
            self.book_feed.close()
        super().shutdown()  # type: ignore[misc]

    # A step

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Outputs:
        """Arguments, results and effects are those of vLLM's method of that name."""
        if self.book_feed is not None and model_runner_output.sampled_token_ids:
            self.book_feed.step(scheduler_output, model_runner_output)
        rows = self._take_rows(scheduler_output, model_runner_output)
        if rows is None:
            return self._update_all(scheduler_output, model_runner_output)
        columns, n = self._columns, len(rows.names)
        is_plain = np.empty(n, np.uint8)
        found = find_plain(
            rows.slots, rows.counts_column, rows.flat, self.hash_block_size,  # type: ignore[attr-defined]
            columns.num_tokens, columns.limits, columns.eos_token_ids, columns.stop_token_ids, is_plain,
        )  # fmt: skip
        if found == 0:
            return self._update_all(scheduler_output, model_runner_output)
        choice = None if found == n else is_plain.tolist()
        plain = self._grow(rows, choice, model_runner_output)
        others = [] if choice is None else [i for i, is_one in enumerate(choice) if not is_one]
        outputs = self._update_others(
            {rows.names[i]: rows.scheduled[i] for i in others}, scheduler_output, model_runner_output
        )
        clients = chosen(rows.clients, choice) if rows.has_clients else None
        return merge_outputs(outputs, plain, others, rows.names, clients)

    def _take_rows(self, scheduler_output: Any, output: Any) -> Rows | None:
        """The step's rows, where it is one that can be done here."""
        is_usual = (
            self._is_usual
            and self._columns.slots
            and output.sampled_token_ids
            and not output.pooler_output
            and not output.num_nans_in_logits
            and output.kv_connector_output is None
            and not scheduler_output.num_invalid_spec_tokens
            and self._columns.slots.keys().isdisjoint(output.prompt_logprobs_dict)
        )
        if not is_usual:
            return None
        names = list(scheduler_output.num_scheduled_tokens)
        if self._rows is None or self._rows.version != self._columns.version or names != self._rows.names:
            self._rows = Rows(names, self._columns)
        self._rows.take(scheduler_output, output)
        return self._rows

    def _update_all(self, scheduler_output: Any, model_runner_output: Any) -> Outputs:
        """All rows of a scheduler's output by vLLM's own function; the columns learn from what it left."""
        outputs: Outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self._look_at(scheduler_output.num_scheduled_tokens)
        return outputs

    def _update_others(
        self, num_scheduled_tokens: dict[str, int], scheduler_output: Any, model_runner_output: Any
    ) -> Outputs:
        """Some rows of a step by vLLM's own function, which looks at those that it finds in the scheduler's output."""
        of_all = scheduler_output.num_scheduled_tokens
        scheduler_output.num_scheduled_tokens = num_scheduled_tokens
        try:
            return self._update_all(scheduler_output, model_runner_output)
        finally:
            scheduler_output.num_scheduled_tokens = of_all

    def _look_at(self, names: dict[str, int]) -> None:
        requests = self.requests  # type: ignore[attr-defined]
        for request in filter(None, map(requests.get, names)):
            self._columns.look_at(request)

    def _grow(self, rows: Rows, choice: list[int] | None, output: Any) -> list[Any]:
        """The effects of a step on the rows that only grow, and their outputs in order. `choice`: which; None: all."""
        requests = chosen(rows.requests, choice)
        for request, scheduled in zip(requests, chosen(rows.scheduled, choice), strict=True):
            request.num_in_flight_tokens -= scheduled
        if self.is_async:
            for request, count in zip(requests, chosen(rows.counts, choice), strict=True):
                request.num_output_placeholders -= count
        ids = rows.grow(choice, self._pool)
        if rows.num_drafts is not None:
            self._take_drafts(chosen(rows.num_drafts, choice), chosen(rows.counts, choice), requests)
        outputs = list(map(EngineCoreOutput, chosen(rows.names, choice), ids))
        if output.logprobs:
            for request, index, new in zip(requests, chosen(rows.index, choice), outputs, strict=True):
                if request.sampling_params.num_logprobs is not None:
                    new.new_logprobs = output.logprobs.slice_request(index, len(new.new_token_ids))
        return outputs

    def _take_drafts(self, drafts: list[int], counts: list[int], requests: list[Any]) -> None:
        """Rejected drafts are not computed after all; every round is counted."""
        for request, proposed, count in zip(requests, drafts, counts, strict=True):
            if count <= proposed and request.num_computed_tokens > 0:
                request.num_computed_tokens -= proposed + 1 - count
        if self.log_stats:  # type: ignore[attr-defined]
            num_spec_tokens = self.num_spec_tokens  # type: ignore[attr-defined]
            self._spec_stats = _spec_stats(np.array(drafts), np.array(counts) - 1, num_spec_tokens)


def chosen(items: list[Any], choice: list[int] | None) -> list[Any]:
    """Those of the items that `choice` has a 1 for; None: all."""
    return items if choice is None else list(compress(items, choice))


def _spec_stats(drafts: np.ndarray, accepted: np.ndarray, num_spec_tokens: int) -> Any:
    """The rounds of a step as vLLM counts them; None without one."""
    is_round = drafts > 0
    if not is_round.any():
        return None
    drafts, accepted = drafts[is_round], accepted[is_round]
    positions = np.arange(num_spec_tokens)
    stats = SpecDecodingStats.new(num_spec_tokens)
    stats.num_drafts = len(drafts)
    stats.num_draft_tokens = int(drafts.sum())
    stats.num_accepted_tokens = int(accepted.sum())
    stats.num_accepted_tokens_per_pos = (accepted[:, None] > positions).sum(axis=0).tolist()
    stats.num_draft_tokens_per_pos = (drafts[:, None] > positions).sum(axis=0).tolist()
    return stats


def _added(stats: Any, more: Any) -> Any:
    """The sum of two statistics, either of which may be missing."""
    if stats is None or more is None:
        return more if stats is None else stats
    stats.num_drafts += more.num_drafts
    stats.num_draft_tokens += more.num_draft_tokens
    stats.num_accepted_tokens += more.num_accepted_tokens
    for name in ("num_accepted_tokens_per_pos", "num_draft_tokens_per_pos"):
        setattr(stats, name, [a + b for a, b in zip(getattr(stats, name), getattr(more, name), strict=True)])
    return stats


class BookScheduler(ColumnScheduling, Scheduler):  # type: ignore[misc]
    """In the place of vLLM's `Scheduler`."""


class BookAsyncScheduler(ColumnScheduling, AsyncScheduler):  # type: ignore[misc]
    """In the place of vLLM's `AsyncScheduler`."""

    is_async = True


def scheduler_cls(is_async: bool) -> type[ColumnScheduling]:
    """The class that takes the place of the one that vLLM would take."""
    return BookAsyncScheduler if is_async else BookScheduler

"""Decoding that looks up: when it does, what it reads, what it leaves alone. Budgets are shrunk to a few groups."""

from __future__ import annotations

import numpy as np
import pytest
from contract import text
from harness import Context, HarnessError, kld
from tiny_models import NAN_TOKEN

#: All groups go through the sparse path, so that results can be compared with dense ones.
EVERYTHING = {"lookup": "0.9,0.999", "threshold": 0, "min_tokens": 65535}
SHRUNK = {"group": 4, "tail": 10, "sinks": 4, "layers": "full", "min_context": 40, "min_tokens": 16}
TOKENS = text(0, 400)

#: Divergence of two runs over the same rows. Sums are rounded in another order, and a rounding may flip a 4-bit code at
#: a later fold (see test_state.py); leaving one group of 50 out costs a hundred times as much in the tiny models.
SAME_ROWS = 1e-5


@pytest.fixture
def looking(open_context):
    """``looking(name=..., n_seq=..., **settings)``: a context that looks up."""

    def make(name: str = "llama-64-mha", n_seq: int = 1, n_threads: int = 2, n_ctx: int = 768, **settings) -> Context:
        settings = {**SHRUNK, **settings}
        return open_context("fp4_csa2", name, n_seq=n_seq, n_threads=n_threads, n_ctx=n_ctx, settings=settings)

    return make


def decode(context: Context) -> np.ndarray:
    context.feed(TOKENS[:300], chunk=30)
    return context.feed(TOKENS[300:340], chunk=1)


def shape_of(context: Context) -> tuple[int, int]:
    """Groups that one more token's look-up sees, and reads, in all layers and KV heads."""
    before = context.stats()
    context.feed(text(99, 1), chunk=1)
    after = context.stats()
    return after["lookup_visible"] - before["lookup_visible"], after["lookup_read"] - before["lookup_read"]


@pytest.mark.parametrize(
    "name", ["llama-64-mha", "llama-64-gqa3", "llama-64-gqa8", "qwen3-128-gqa4", "gemma3-256-iswa"]
)
def test_reading_everything_is_dense_attention(looking, open_context, name: str) -> None:
    # The tail holds all tokens that are decoded: folded, one flipped code of theirs is more than another order of sums.
    sparse = looking(name, tail=64, **EVERYTHING)
    dense = looking(name, tail=64, lookup="1")
    for context in (sparse, dense):
        context.feed(TOKENS[:250], chunk=32)
    results = [context.feed(TOKENS[250:300], chunk=1) for context in (sparse, dense)]
    assert kld(results[1], results[0]) <= SAME_ROWS
    stats = sparse.stats()
    assert stats["lookup_steps"] == 50 and stats["dense_fallbacks"] == 0
    assert stats["lookup_read"] == stats["lookup_visible"] > 0 and stats["lookup_share"] == 1.0
    assert dense.stats()["lookup_steps"] == 0 and dense.stats()["lookup_share"] == 1.0


def test_the_more_is_read_the_closer_to_dense(looking) -> None:
    """From nothing but exact rows over a tenth and a half to nearly all."""
    dense = decode(looking(lookup="1"))
    shares = [{"layers": "window"}, {"lookup": "0.1"}, {"lookup": "0.5"}, {"lookup": "0.9"}]
    away = [kld(dense, decode(looking(**settings))) for settings in shares]
    assert away == sorted(away, reverse=True) and away[-1] > 10 * SAME_ROWS
    assert away[1] < 0.8 * away[0] and away[3] < 0.1 * away[0]


def test_counters_are_what_the_rule_takes(looking) -> None:
    """Every layer and KV head sees the groups that the tail has left, and reads its share of them, rounded up."""
    context = looking(lookup="0.25")
    for length in (100, 133, 222):
        context.feed(TOKENS[context.pos_max() + 1 : length], chunk=16)
        # At position `length`, groups that end at or before `length - tail` are far; the first one holds the sinks.
        far = (length - 10) // 4 - 1
        visible, read = shape_of(context)
        lists = visible // far
        assert lists * far == visible and lists % 4 == 0, "four KV heads a layer"
        assert read == lists * max(-(-far // 4), 4)
        assert context.seq_rm(0, length)


def test_short_contexts_are_read_whole(looking) -> None:
    context = looking(lookup="0.2", min_context=150)
    context.feed(TOKENS[:150], chunk=32)
    context.feed(TOKENS[150:160], chunk=1)
    assert context.stats()["lookup_steps"] == 0, "fewer than 150 far tokens"
    context.feed(TOKENS[160:180], chunk=1)
    assert 10 <= context.stats()["lookup_steps"] <= 20
    assert context.stats()["dense_fallbacks"] == 0, "a short context is no fallback"


def test_default_smallest_context_of_the_cpu(open_context) -> None:
    assert open_context("fp4_csa2").stats()["min_context"] == 4096
    assert open_context("fp4_csa2", settings={"min_context": 0}).stats()["min_context"] == 0


def test_only_decoding_looks_up(looking) -> None:
    context = looking(lookup="0.2")
    context.feed(TOKENS[:204], chunk=17)
    assert context.stats()["lookup_steps"] == 0
    context.feed(TOKENS[204:268], chunk=16)
    assert context.stats()["lookup_steps"] == 4


@pytest.mark.parametrize("chunk", [2, 5, 16])
def test_batches_of_a_few_tokens(looking, chunk: int) -> None:
    """As speculative decoding makes them."""
    sparse, dense = looking(**EVERYTHING), looking(lookup="1")
    for context in (sparse, dense):
        context.feed(TOKENS[:200], chunk=40)
    results = [context.feed(TOKENS[200:280], chunk=chunk) for context in (sparse, dense)]
    assert kld(results[1], results[0]) <= SAME_ROWS
    assert sparse.stats()["lookup_steps"] == 80 // chunk


@pytest.mark.parametrize("name", ["llama-64-mha", "llama-64-gqa3"])
def test_sequences_choose_for_themselves(looking, name: str) -> None:
    """Two sequences decoded in the same batches get what each gets alone."""
    texts = [text(seed, 260) for seed in (5, 6)]
    alone, nothing = [], []
    for tokens in texts:
        contexts = looking(name, lookup="0.2"), looking(name, layers="window")
        for context in contexts:
            context.feed(tokens[:200], chunk=20)
        results = [context.feed(tokens[200:], chunk=1) for context in contexts]
        alone.append(results[0])
        nothing.append(kld(*results))
    both = looking(name, n_seq=2, lookup="0.2")
    for first in range(0, 200, 20):
        for seq in range(2):
            both.feed(texts[seq][first : first + 20], seq=seq, chunk=20)
    rows = [both.decode([(texts[s][i], i, (s,)) for s in range(2)]) for i in range(200, 260)]
    assert both.stats()["lookup_steps"] >= 60
    for seq in range(2):
        together = np.stack([row[seq] for row in rows])
        # Where a rounding has flipped a 4-bit code, a choice at the edge may fall to another group. Groups of the other
        # sequence would cost as much as reading nothing does.
        assert kld(alone[seq], together) <= 2e-3 < 0.1 * nothing[seq]


def test_state_restores_to_the_bit(looking) -> None:
    context, other = looking(lookup="0.2"), looking(lookup="0.2")
    context.feed(TOKENS[:250], chunk=25)
    state = context.seq_state()
    assert other.set_seq_state(state) == len(state)
    assert np.array_equal(context.feed(TOKENS[250:300], chunk=1), other.feed(TOKENS[250:300], chunk=1))


def test_clear_forgets_the_counts(looking) -> None:
    context = looking(lookup="0.2")
    context.feed(TOKENS[:100], chunk=1)
    assert context.stats()["lookup_visible"] > 0
    context.clear()
    assert context.stats()["lookup_visible"] == 0 and context.stats()["lookup_share"] == 1.0


# -- groups that are cut -----------------------------------------------------------------------------------------------


def test_groups_that_were_cut_are_always_read(looking) -> None:
    sparse, dense = looking(**EVERYTHING), looking(lookup="1")
    for context in (sparse, dense):
        context.feed(TOKENS[:250], chunk=25)
        for start in range(21, 200, 12):
            assert context.seq_rm(0, start, start + 2)
    results = [context.feed(TOKENS[250:290], chunk=1) for context in (sparse, dense)]
    assert kld(results[1], results[0]) <= SAME_ROWS
    visible, read = shape_of(sparse)
    assert visible == read and sparse.stats()["lookup_steps"] == 41


def test_too_many_cut_groups_are_read_densely_and_counted(looking) -> None:
    """Lists have room for 64 of them and 8 for each sequence."""
    sparse, dense = looking(lookup="0.2"), looking(lookup="1")
    for context in (sparse, dense):
        context.feed(TOKENS[:360], chunk=24)
        for group in range(2, 80):
            assert context.seq_rm(0, 4 * group + 1, 4 * group + 2)
    results = [context.feed(TOKENS[360:380], chunk=1) for context in (sparse, dense)]
    assert kld(results[1], results[0]) <= SAME_ROWS
    assert sparse.stats()["dense_fallbacks"] == 20 and sparse.stats()["lookup_steps"] == 0


# -- layer modes -------------------------------------------------------------------------------------------------------


def test_dense_layers_do_not_look_up(looking) -> None:
    dense = decode(looking(lookup="1"))
    context = looking(lookup="0.2", layers="dense")
    assert np.array_equal(decode(context), dense)
    assert context.stats()["lookup_steps"] == 0


def test_window_layers_read_no_folded_rows(looking) -> None:
    context = looking(layers="window", min_tokens=0)
    decode(context)
    stats = context.stats()
    assert stats["lookup_visible"] > 0 and stats["lookup_read"] == 0


def test_reuse_counts_what_it_reads_once(looking) -> None:
    """A layer that reuses does not score; it reads the list of the layer before."""
    full, reuse = looking(lookup="0.2"), looking(lookup="0.2", layers="full,reuse")
    results = [decode(full), decode(reuse)]
    assert kld(results[0], results[1]) > 10 * SAME_ROWS
    assert full.stats()["lookup_visible"] > reuse.stats()["lookup_visible"] > 0


def test_reindex_within_a_pool_of_everything_is_full(looking) -> None:
    """The pool has room for 16384 tokens, more than there are here."""
    full, reindex = looking(lookup="0.2"), looking(lookup="0.2", layers="full,reindex")
    assert np.array_equal(decode(full), decode(reindex))
    assert full.stats()["lookup_read"] == reindex.stats()["lookup_read"]


def test_more_modes_than_layers_are_refused(looking) -> None:
    with pytest.raises(HarnessError, match=r"kv_layers 'full\*50' lists 50 layers; the model has"):
        looking(layers="full*50")


def test_auto_keeps_the_first_layers_of_the_model_dense(looking) -> None:
    """The tiny models have two whole-context layers, so nothing is left to look up."""
    context = looking(lookup="0.2", layers="auto")
    decode(context)
    assert context.stats()["layers"] == "auto" and context.stats()["lookup_steps"] == 0


# -- alignment ---------------------------------------------------------------------------------------------------------


def test_alignment_is_measured_where_it_is_asked_for(looking) -> None:
    """Tokens that looked up are counted for every head of every layer; results and look-ups stay what they are."""
    plain, measured = looking("llama-64-gqa3", lookup="0.2"), looking("llama-64-gqa3", lookup="0.2", alignment="true")
    assert np.array_equal(decode(plain), decode(measured))
    assert plain.alignment() == []
    rows = measured.alignment()
    assert [row[:3] for row in rows] == [(layer, head, 40) for layer in range(2) for head in range(9)]
    for _, _, _, recalled, divergence, largest, read in rows:
        assert 0 < recalled < 1 and -np.log(recalled) <= divergence <= largest
        assert read == pytest.approx(0.2, abs=0.02)
    measured.clear()
    assert {row[2] for row in measured.alignment()} == {0}


def test_the_more_is_read_the_better_aligned(looking) -> None:
    found = []
    for settings in ({"layers": "window"}, {"lookup": "0.1"}, {"lookup": "0.5"}, EVERYTHING):
        context = looking(**settings, alignment="true")
        decode(context)
        found.append(np.mean([row[3] for row in context.alignment()]))
    assert found == sorted(found) and found[0] < 0.9 and found[-1] == 1.0


def test_alignment_of_layers_that_do_not_look_up(looking) -> None:
    context = looking(layers="full,dense", alignment="true")
    decode(context)
    assert [row[2] for row in context.alignment()] == [40] * 4 + [0] * 4


# -- two levels --------------------------------------------------------------------------------------------------------

#: Spans have 32 groups. The first one holds the sinks, so it is never complete and always looked at.
SPANS = {**EVERYTHING, "hierarchical": "on", "span_pool": 32}
LONG = text(7, 760)


def read_by_list(context: Context, token: int) -> int:
    """Groups that every list of one more token's look-up has; all lists are as long."""
    before = context.stats()
    context.feed([token], chunk=1)
    after = context.stats()
    visible = after["lookup_visible"] - before["lookup_visible"]
    far = (context.pos_max() - 10) // 4 - 1
    lists, rest = divmod(visible, far)
    assert rest == 0 and lists > 0
    read, rest = divmod(after["lookup_read"] - before["lookup_read"], lists)
    assert rest == 0
    return read


def expected_read(length: int, pool: int, ready_before: int | None = None) -> int:
    """Groups in the pool of a token at position ``length`` of one sequence.

    A span that was complete when the token before was computed is ready (or at ``ready_before``, if that is given).
    """
    far = (length - 10) // 4
    ready = ((length - 1 if ready_before is None else ready_before) - 10) // 4 // 32 - 1
    return min(pool, ready) * 32 + 31 + far - (1 + ready) * 32


@pytest.mark.parametrize("pool", [32, 64, 70, 96])
def test_pool_of_spans(looking, pool: int) -> None:
    """Lists have the groups of so many spans, the first span, and what is behind the last one that is ready."""
    context = looking(**{**SPANS, "span_pool": pool})
    context.feed(LONG[:690], chunk=32)
    context.feed(LONG[690:700], chunk=1)
    assert read_by_list(context, LONG[700]) == expected_read(700, pool // 32) == pool // 32 * 32 + 43


def test_spans_are_ready_a_token_after_they_are_complete(looking) -> None:
    context = looking(**SPANS)
    context.feed(LONG[:389], chunk=30)
    reads = [read_by_list(context, LONG[i]) for i in range(389, 400)]
    assert reads == [expected_read(i, 1) for i in range(389, 400)]
    # At 394 the group that completes the third span is far, one token later the span is one of two to choose from.
    assert reads[5] - reads[4] == 1 and reads[6] - reads[5] == -32


def test_groups_that_fit_the_pool_are_searched_in_one_level(looking) -> None:
    """Groups are counted with the padding of the cells in use: 256 cells are 64 groups, 768 are 192."""
    context, flat = looking(**{**SPANS, "span_pool": 64}), looking(**EVERYTHING)
    results = [c.feed(LONG[:250], chunk=10) for c in (context, flat)]
    assert np.array_equal(*results)
    for c in (context, flat):
        c.feed(LONG[250:600], chunk=10)
    assert read_by_list(context, LONG[600]) == expected_read(600, 2) < read_by_list(flat, LONG[600])


@pytest.mark.parametrize("settings", [{"hierarchical": "off"}, {"hierarchical": "auto"}, {"span_pool": 193}])
def test_spans_only_where_they_can_be_used(looking, settings: dict[str, object]) -> None:
    """Not below 65536 tokens unless asked for, and not if the pool has room for all groups of the context."""
    flat, context, two_levels = looking(**EVERYTHING), looking(**{**SPANS, **settings}), looking(**SPANS)
    assert context.stats()["side_bytes"] == flat.stats()["side_bytes"]
    # Two layers, four heads: a summary and a spread for each of the 6 spans. Exact rows begin at multiples of 64.
    more = two_levels.stats()["side_bytes"] - flat.stats()["side_bytes"]
    assert abs(more - 2 * 6 * 4 * (36 + 2)) < 2 * (64 + 16)
    assert np.array_equal(decode(flat), decode(context))


def test_choosing_spans_costs_less_than_leaving_them_out(looking) -> None:
    """With all but one of the spans left, and with one, the results are closer to dense ones the more is left."""
    results = []
    for settings in ({"lookup": "1"}, SPANS, {**SPANS, "span_pool": 96}, {"layers": "window"}):
        context = looking(**settings)
        context.feed(LONG[:690], chunk=30)
        results.append(context.feed(LONG[690:730], chunk=1))
    away = [kld(results[0], other) for other in results[1:]]
    assert 10 * SAME_ROWS < away[1] < away[0] < away[2]


@pytest.mark.parametrize("chunk", [1, 5, 16])
@pytest.mark.parametrize("first", [17, 128])
def test_two_levels_with_batches_of_a_few_tokens(looking, first: int, chunk: int) -> None:
    """However the text came in, the same spans are ready when it goes on.

    Its rows differ as its micro-batches do (what is near is read exactly), so a choice at the edge may be another one.
    That costs a small part of what it costs to leave spans out.
    """
    context, other, dense = looking(**SPANS), looking(**SPANS), looking(lookup="1")
    context.feed(LONG[:640], chunk=first)
    for c in (other, dense):
        c.feed(LONG[:640], chunk=32)
    for c in (context, other, dense):
        c.feed(LONG[640:688], chunk=8)
    result, *others = (c.feed(LONG[688:736], chunk=n) for c, n in ((context, chunk), (other, 16), (dense, 16)))
    assert kld(others[0], result) <= 0.1 * kld(others[1], result)
    assert read_by_list(context, LONG[736]) == expected_read(736, 1)


def test_a_span_that_loses_a_cell_is_made_again(looking) -> None:
    """Of a text that is cut and goes on otherwise nothing is left: as if it had been so from the beginning."""
    context, fresh, dense = looking(**SPANS), looking(**SPANS), looking(lookup="1")
    context.feed(text(8, 700), chunk=35)
    assert context.seq_rm(0, 300)
    for c in (fresh, dense):
        c.feed(text(8, 300), chunk=35)
    for c in (context, fresh, dense):
        c.feed(LONG[300:690], chunk=30)
    results = [c.feed(LONG[690:730], chunk=1) for c in (context, fresh, dense)]
    assert kld(results[1], results[0]) <= 0.1 * kld(results[2], results[0])
    assert read_by_list(context, LONG[730]) == read_by_list(fresh, LONG[730]) == expected_read(730, 1)


def test_a_span_with_a_hole_is_looked_at(looking) -> None:
    context = looking(**SPANS)
    context.feed(LONG[:690], chunk=30)
    context.feed(LONG[690:700], chunk=1)
    assert context.seq_rm(0, 200, 204)
    before = context.stats()
    context.feed([LONG[700]], chunk=1)
    after = context.stats()
    visible, read = (after[key] - before[key] for key in ("lookup_visible", "lookup_read"))
    # The second span has 31 groups left, which join the pool; one of the three others is taken.
    assert read * (171 - 1) == visible * (32 + 43 + 31)


def test_sequences_have_spans_of_their_own(looking) -> None:
    """The second of two sequences begins with a span, so each has the spans that it has alone."""
    texts = [text(seed, 680) for seed in (5, 6)]
    settings = {**SPANS, "span_pool": 64, "n_ctx": 1536}
    alone, flat = [], []
    for tokens in texts:
        contexts = looking(**settings), looking(**{**settings, "hierarchical": "off"})
        for context in contexts:
            context.feed(tokens[:640], chunk=20)
        results = [context.feed(tokens[640:], chunk=1) for context in contexts]
        alone.append(results[0])
        flat.append(kld(*results))
    assert min(flat) > 1e-2, "to leave spans out is seen"
    apart, together = looking(n_seq=2, **settings), looking(n_seq=2, **settings)
    for context in (apart, together):
        for seq in range(2):
            context.feed(texts[seq][:640], seq=seq, chunk=20)
    before = together.stats()
    rows = [together.decode([(texts[s][i], i, (s,)) for s in range(2)]) for i in range(640, 680)]
    after = together.stats()
    assert after["lookup_read"] - before["lookup_read"] < 0.85 * (after["lookup_visible"] - before["lookup_visible"])
    for seq in range(2):
        assert kld(alone[seq], apart.feed(texts[seq][640:], seq=seq, chunk=1)) <= 2e-3
        assert kld(alone[seq], np.stack([row[seq] for row in rows])) <= 2e-3


def test_interleaved_sequences_are_searched_in_one_level(looking) -> None:
    """Their groups alternate, so a span belongs to nobody; everything is found nevertheless."""
    texts = [text(seed, 360) for seed in (5, 6)]
    contexts = looking(n_seq=2, **SPANS), looking(n_seq=2, **EVERYTHING)
    results = []
    for context in contexts:
        for i in range(0, 320, 4):
            context.decode([(texts[s][j], j, (s,)) for j in range(i, i + 4) for s in range(2)])
        rows = [context.decode([(texts[s][i], i, (s,)) for s in range(2)]) for i in range(320, 360)]
        results.append(np.concatenate(rows))
    assert np.array_equal(*results)


def test_after_a_restore_spans_are_made_again(looking) -> None:
    """At first everything is looked at, then the pool; the state itself is that of a cache without spans."""
    context, other, flat = looking(**SPANS), looking(**SPANS), looking(**EVERYTHING)
    for c in (context, flat):
        c.feed(LONG[:690], chunk=30)
    state = context.seq_state()
    assert len(state) == len(flat.seq_state())
    for target, data in ((other, state), (flat, state)):
        assert target.set_seq_state(data) == len(data)
    assert read_by_list(other, LONG[690]) == read_by_list(flat, LONG[690]) == (690 - 10) // 4 - 1
    assert read_by_list(other, LONG[691]) == expected_read(691, 1)
    context.feed(LONG[690:692], chunk=1)
    assert kld(*(c.feed(LONG[692:740], chunk=1) for c in (context, other))) <= 2e-3


@pytest.mark.parametrize("calls", [3, 12, 25])
def test_spans_of_an_aborted_graph_are_made_again(looking, calls: int) -> None:
    context, calm = looking(**SPANS), looking(**SPANS)
    for c in (context, calm):
        c.feed(LONG[:650], chunk=50)
    assert (650 - 10) // 4 >= 5 * 32 > (600 - 10) // 4, "the next graph is to make one"
    context.abort_after(calls)
    assert context.try_decode([(LONG[650], 650, (0,))])[0] == 2
    context.abort_after(None)
    assert read_by_list(context, LONG[650]) == expected_read(650, 1, ready_before=600)
    calm.feed([LONG[650]], chunk=1)
    assert kld(*(c.feed(LONG[651:700], chunk=1) for c in (calm, context))) <= 2e-3
    assert read_by_list(context, LONG[700]) == expected_read(700, 1)


def test_poison_leaves_no_trace_in_spans(looking) -> None:
    """A cache that was full of NaN, emptied; and a sequence of NaN beside."""
    words = np.random.default_rng(3).integers(0, NAN_TOKEN, 700).tolist()
    expected = looking("llama-64-nan", **SPANS)
    context = looking("llama-64-nan", **SPANS)
    context.feed([NAN_TOKEN] * 700, chunk=50)
    assert context.seq_rm(0)
    for c in (expected, context):
        c.feed(words[:640], chunk=40)
    results = [c.feed(words[640:], chunk=1) for c in (expected, context)]
    assert np.isfinite(results[1]).all() and kld(*results) <= 2e-3


def test_pools_of_spans_and_of_reindex_layers(looking) -> None:
    """A full layer makes its pool of tokens from the best spans, and reindex layers choose from that."""
    context = looking(**{**SPANS, "layers": "full,reindex"})
    context.feed(LONG[:690], chunk=30)
    context.feed(LONG[690:700], chunk=1)
    assert read_by_list(context, LONG[700]) == expected_read(700, 1)


def test_bound_on_tokens(looking) -> None:
    context = looking(lookup="0.5", max_tokens=40)
    context.feed(LONG[:300], chunk=30)
    assert read_by_list(context, LONG[300]) == 10
    with pytest.raises(ValueError, match="kv_max_tokens 12 is less than kv_min_tokens 16"):
        looking(max_tokens=12)

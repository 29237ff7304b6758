import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflash import BlockMask, masks
from sparseflash.analysis import lint, reach
from sparseflash.analysis.connectivity import causal_gap, gap
from sparseflash.analysis.layers import elements
from sparseflash.analysis.order import live_tiles_in_order
from sparseflash.analysis.tokens import blind_queries, future_scores, see_previous, unseen_keys
from sparseflash.blockmask.walks import walks
from tests.drawn.masks import block_masks, blocks, dense_masks, lengths

MASKS = st.tuples(st.integers(1, 2), st.integers(1, 2)).flatmap(lambda sizes: block_masks(160, (16, 32, 64), *sizes))


def codes(*arguments, **keywords):
    return [finding.code for finding in lint(*arguments, **keywords)]


def stops_of(mask, b):
    return (mask.q_len, mask.k_len) if mask.lengths is None else tuple(mask.lengths[:, b].tolist())


# ---------------------------------------------------------------------- no false alarms


@pytest.mark.parametrize("block", [16, 64, 128])
@pytest.mark.parametrize("length", [1, 100, 1024, 1500])
def test_ordinary_masks_raise_no_alarm(length, block):
    assert lint(BlockMask.dense(length, block=block), layers=1) == []
    assert lint(masks.causal(length, block=block), causal=True, layers=1) == []
    assert lint(masks.causal(length, block=block)) == []
    assert lint(masks.butterfly(length, block=block), layers=7) == []
    assert lint(masks.butterfly(length, block=block, causal=True), causal=True, layers=7) == []
    assert lint(masks.local(length, window=2 * block + 1, block=block)) == []
    assert lint(masks.local(length, window=2 * block, causal=True, block=block), causal=True) == []


def test_cross_attention_raises_no_alarm():
    assert lint(BlockMask.dense(100, 300)) == []
    assert lint(masks.causal(100, 300, block=64), causal=True) == []
    assert lint(BlockMask.dense(100).with_lengths(q_lengths=[100, 30], k_lengths=[50, 100])) == []


def test_padding_raises_no_alarm():
    mask = masks.butterfly(500, block=16).with_lengths(torch.tensor([500, 3, 100, 0]))
    assert lint(mask, layers=5) == []


# ---------------------------------------------------------------------- each mistake


def test_lengths_that_cut_as_many_queries_as_keys_of_another_number_are_pointed_out():
    finding = next(f for f in lint(masks.causal(4, 10).with_lengths([10, 3])) if f.code == "one-length-for-two")
    assert finding.severity == "warning"
    assert finding.message.startswith(
        "a length of 3 cuts both the 4 queries and the 10 keys, and does not move the diagonal."
    )
    assert "mask.with_lengths(q_lengths=..., k_lengths=...)" in finding.message
    assert "masks.causal(4, 10, offset=length - 4)" in finding.message


def test_keys_that_are_cut_beside_a_diagonal_that_stays_are_noted():
    finding = next(f for f in lint(masks.causal(4, 10).with_lengths([10, 7])) if f.code == "one-length-for-two")
    assert finding.severity == "note"
    assert finding.message.startswith(
        "the 10 keys are cut at 7, which does not move the diagonal: right for cross-attention;"
    )
    assert "masks.causal(4, 10, offset=length - 4)" in finding.message


def test_lengths_that_cut_nothing_or_a_square_are_not_pointed_out():
    assert "one-length-for-two" not in codes(BlockMask.dense(100, 300).with_lengths([300, 300]))
    assert "one-length-for-two" not in codes(BlockMask.dense(100).with_lengths([100, 30]))


def test_a_leak_is_counted_exactly():
    dense = torch.ones(200, 200, dtype=torch.bool).tril()
    dense[70, 150] = dense[70, 90] = dense[3, 199] = True
    mask = BlockMask.from_dense(dense, block=64)
    finding = lint(mask, causal=True)[0]
    assert (finding.code, finding.severity, finding.where) == ("future-leak", "error", "")
    assert finding.message.startswith("3 live scores lie in the future, the first at query 3, key 199.")
    assert "future-leak" not in codes(mask)


def test_tokens_left_out_are_named():
    dense = torch.ones(100, 100, dtype=torch.bool)
    dense[[0, 1, 2, 7]] = False
    dense[:, 50:53] = False
    queries, keys = lint(BlockMask.from_dense(torch.stack([torch.ones_like(dense), dense]), block=32))
    assert (queries.code, keys.code, queries.where) == ("empty-queries", "empty-keys", "head 1")
    assert "4 of 100 queries see no key, so their output is 0: 0..2, 7." in queries.message
    assert "3 of 100 keys are seen by no query: 50..52." in keys.message
    assert str(queries).startswith("warning [empty-queries] head 1: 4 of 100 queries")


def test_many_runs_are_cut_short():
    dense = torch.ones(64, 64, dtype=torch.bool)
    dense[::8] = False
    finding = next(f for f in lint(BlockMask.from_dense(dense, block=16)) if f.code == "empty-queries")
    assert "0, 8, 16 and 5 more runs." in finding.message


def test_global_tokens_make_uneven_rows():
    i, j = torch.arange(64)[:, None], torch.arange(64)
    layout = ((i - j).abs() <= 1) | (i == 0)
    (finding,) = lint(BlockMask.from_layout(layout, block=16))
    assert (finding.code, finding.severity) == ("uneven-rows", "note")
    assert "holds 64 live tiles, 16.3 times the mean of 3.94" in finding.message
    assert codes(BlockMask.from_layout(layout.T.clone(), block=16)) == ["uneven-columns"]


def test_sparse_tiles_come_with_the_block_that_does_better():
    (finding,) = lint(masks.local(2048, window=5, block=128))
    assert finding.code == "sparse-tiles"
    assert (
        "46 of 46 live tiles hold under 10 % live scores; 73.6 scores are computed for each live one" in finding.message
    )
    assert finding.message.endswith("Blocks of 16 would compute 9.56.")


def test_sparse_tiles_that_no_block_mends_say_so():
    mask = BlockMask.from_function(lambda q, k: (q - k) % 16 == 0, 512, block=64)
    sparse = next(finding for finding in lint(mask) if finding.code == "sparse-tiles")
    assert "No smaller block does much better; another token order might" in sparse.message


def test_the_better_token_order_is_named():
    step = 16
    mask = BlockMask.from_function(lambda q, k: (q - k) % step == 0, 512, block=32)
    by_residue = torch.arange(512).view(-1, step).T.reshape(-1)
    found = lint(mask, orders={"as it is": torch.arange(512), "by residue": by_residue})
    finding = next(finding for finding in found if finding.code == "token-order")
    assert "in the order 'by residue' the mask has 16 live tiles instead of 256" in finding.message
    assert "token-order" not in codes(mask, orders={"as it is": torch.arange(512)})


def test_layers_that_never_connect_are_told():
    i, j = torch.arange(32)[:, None], torch.arange(32)
    xor = ((i ^ j) & ((i ^ j) - 1)) == 0
    subsets = BlockMask.from_dense(BlockMask.from_layout(xor, block=16).to_dense()[0, 0].tril(), block=16)
    (finding,) = lint(subsets, causal=True)
    assert finding.code == "never-connects"
    assert "query 32 is never influenced by key 31, however many layers there are" in finding.message
    stages = [BlockMask.from_layout((i == j) | ((i ^ j) == 1 << k), block=16) for k in range(5)]
    assert lint(stages) == []
    (finding,) = lint(stages[:4])
    assert "the tokens fall into 2 groups that exchange nothing" in finding.message
    assert codes(stages, layers=5) == []
    (finding,) = lint(stages, layers=4)
    assert (finding.code, finding.severity) == ("too-few-layers", "warning")
    assert "it takes 5 layers until every query is influenced by every key; the model has 4" in finding.message


def test_documents_never_connect():
    document = torch.tensor([0] * 30 + [1] * 40 + [2] * 30)
    mask = BlockMask.from_function(lambda q, k: document[q] == document[k], 100, block=16)
    assert codes(mask) == ["never-connects"]


def test_a_one_way_street_names_the_pair():
    i, j = torch.arange(8)[:, None], torch.arange(8)
    (finding,) = lint(BlockMask.from_layout((i == j) | (i + 1 == j), block=16))
    assert "query 16 is never influenced by key 0" in finding.message


def test_findings_say_in_which_layer():
    good, bad = masks.butterfly(256, block=32), BlockMask.from_layout(torch.eye(8).bool().roll(1, 0), block=32)
    found = lint([bad, good, bad], causal=True)
    assert {finding.where for finding in found if finding.code == "future-leak"} == {"layer 0, 2", "layer 1"}


def test_findings_say_of_which_batch_elements_and_heads():
    good, bad = masks.causal(64, block=16), masks.local(64, window=3, block=16)
    mask = masks.per_batch([bad, good, *[bad] * 4])
    (where,) = {finding.where for finding in lint(mask, causal=True) if finding.code == "future-leak"}
    assert where == "batch element 0, 2, 3, 4 and 1 more"
    mask = masks.per_batch([masks.per_head([good, bad]), masks.per_head([bad] * 2)])
    (where,) = {finding.where for finding in lint(mask, causal=True) if finding.code == "future-leak"}
    assert where == "batch element 0, 1, head 0, 1"


def test_errors_come_before_warnings_and_notes():
    i, j = torch.arange(64)[:, None], torch.arange(64)
    mask = BlockMask.from_layout(((i - j).abs() <= 1) & (i > 3) | (i == 5), block=16)
    rank = {"error": 0, "warning": 1, "note": 2}
    ranks = [rank[finding.severity] for finding in lint(mask, causal=True)]
    assert ranks == sorted(ranks)
    assert set(ranks) == {0, 1, 2}


def test_what_is_too_large_to_answer_is_said(monkeypatch):
    monkeypatch.setattr("sparseflash.analysis.layers.MOST_BLOCKS", 4)
    assert lint(masks.butterfly(64, block=16), layers=2) == []
    (finding,) = lint(masks.butterfly(80, block=16))
    assert (finding.code, finding.severity) == ("not-checked", "note")
    assert "all tokens connect: masks must have at most 4 block rows; got 5 of 16 tokens" in finding.message
    assert lint(masks.causal(80, block=16)) == []  # needs no graph
    assert codes(masks.causal(80, block=16), layers=1) == ["not-checked"]


def test_bits_that_are_too_many_to_multiply_are_told(monkeypatch):
    monkeypatch.setattr("sparseflash.analysis.connectivity._MOST_EDGES", 0)
    parity = BlockMask.from_function(lambda q, k: (q - k) % 2 == 0, 64, block=16)
    assert codes(parity) == ["never-connects"]
    window = masks.local(64, window=17, block=16)
    assert lint(window, layers=8) == []
    monkeypatch.setattr("sparseflash.analysis.composition.MOST_PARTIAL", 15)
    (finding,) = lint(parity)
    assert (finding.code, finding.severity) == ("not-checked", "note")
    assert "must be at most 15; got 16 of 16 x 16. Pass masks with larger blocks." in finding.message
    monkeypatch.setattr("sparseflash.analysis.composition.MOST_PARTIAL", 5)
    assert codes(window, layers=8) == ["not-checked"]


def test_what_lint_cannot_take():
    with pytest.raises(ValueError, match="layers must be at least 1; got 0"):
        lint(masks.causal(64), layers=0)
    with pytest.raises(TypeError, match="masks must be a BlockMask or a sequence of one or more"):
        lint(["causal"])
    with pytest.raises(ValueError, match="one length; got 64 and 128 tokens"):
        lint([masks.causal(64), masks.causal(128)])
    mask = masks.causal(64, block=16)
    with pytest.raises(ValueError, match=r"must list each of the 64 tokens once; got a tensor of shape \[63\]\."):
        lint(mask, orders={"short": torch.arange(63)})
    with pytest.raises(ValueError, match=r"each of the 64 tokens once; got a tensor of shape \[64\] that does not"):
        lint(mask, orders={"twice": torch.zeros(64, dtype=torch.int64)})
    with pytest.raises(TypeError, match="an order must be an integer tensor; got 'near'"):
        lint(masks.causal(40), orders={"x": "near"})
    with pytest.raises(TypeError, match=r"an order must be an integer tensor; got torch\.float32"):
        lint(mask, orders={"float": torch.arange(64.0)})
    with pytest.raises(ValueError, match="masks must have as many queries as keys to be reordered; got 64 x 32"):
        lint(BlockMask.dense(64, 32), orders={"any": torch.arange(64)})


def test_orders_of_masks_with_too_many_tiles_are_refused(monkeypatch):
    monkeypatch.setattr("sparseflash.analysis.order._MOST_TILES", 15)
    with pytest.raises(ValueError, match="masks must have at most 15 tiles, live or not, to compare orders; got 4 x 4"):
        live_tiles_in_order(masks.causal(64, block=16), torch.arange(64))


# ---------------------------------------------------------------------- its parts, against dense matrices


@given(MASKS, st.integers(-80, 80))
def test_single_tokens_are_told_as_in_the_dense_matrix(mask, shift):
    dense = mask.to_dense()
    future = torch.arange(mask.k_len) > torch.arange(mask.q_len)[:, None] + shift
    for walk in walks(mask):
        for b, h in walk.users:
            here, (q_stop, k_stop) = dense[b, h], stops_of(mask, b)
            assert blind_queries(walk).tolist() == (~here.any(1)[:q_stop]).nonzero().squeeze(1).tolist()
            assert unseen_keys(walk).tolist() == (~here.any(0)[:k_stop]).nonzero().squeeze(1).tolist()
            leaks = (here & future).nonzero().tolist()
            assert future_scores(walk, shift) == (len(leaks), tuple(leaks[0]) if leaks else None)
            previous = [0 < q <= mask.k_len and bool(here[q, q - 1]) for q in range(q_stop)]
            assert see_previous(walk).tolist() == previous


@st.composite
def square_masks(draw):
    length, block, heads = draw(lengths(100)), draw(blocks()), draw(st.integers(1, 2))
    dense = draw(dense_masks(length, length, 1, heads, block))
    if draw(st.booleans()):  # near the diagonal, which may connect
        dense = dense & (torch.arange(length)[:, None] - torch.arange(length)).abs().lt(draw(st.integers(1, 40)))
    if draw(st.booleans()):
        dense = dense.tril()
    return BlockMask.from_dense(dense, block=block)


@given(st.lists(square_masks(), min_size=1, max_size=2), st.sampled_from([0, 1 << 25]))
def test_gaps_are_pairs_that_reach_leaves_out_for_ever(every, most_edges):
    every = [mask for mask in every if mask.q_len == every[0].q_len]
    closure = reach(every, 200 * len(every)).to_dense()[0, 0]
    (element,) = elements(every)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparseflash.analysis.connectivity._MOST_EDGES", most_edges)
        found = gap(element)
    assert (found is None) == bool(closure.all())
    assert found is None or not closure[found.query, found.key]
    if not any(mask.to_dense().triu(1).any() for mask in every):
        found = causal_gap(element)
        assert (found is None) == bool(closure[torch.ones_like(closure).tril()].all())
        assert found is None or not closure[found.query, found.key]


@given(square_masks(), st.integers(0, 2**31 - 1))
def test_live_tiles_in_an_order_are_those_of_the_permuted_matrix(mask, seed):
    order = torch.randperm(mask.q_len, generator=torch.Generator().manual_seed(seed))
    permuted = BlockMask.from_dense(mask.to_dense()[:, :, order][..., order], block=(mask.block_q, mask.block_k))
    heads = permuted.pattern.expand(1, mask.shape[1]).reshape(-1)
    counts = permuted.indptr.diff().view(-1, mask.blocks[0]).sum(1)
    assert live_tiles_in_order(mask, order) == int(counts[heads.long()].sum())

import re
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.experimental._paged_attention import PagedAttention

from sparseflash import attention, masks, scores
from sparseflash.interop import flex_attention as module
from sparseflash.interop import from_flex
from sparseflash.interop.flex_attention import and_masks, create_block_mask, flex_attention, or_masks

B, H, N = 2, 4, 40
generator = torch.Generator().manual_seed(0)
DOCUMENT = torch.randint(0, 3, (N,), generator=generator).sort().values
DOCUMENTS = torch.randint(0, 3, (B, N), generator=generator).sort(-1).values
OFFSETS = torch.tensor([0, 9, 10, 31, N])
GLOBAL, LENGTHS, SHIFT = torch.arange(N) % 7 == 0, torch.tensor([N, 23]), torch.tensor(3)
BY_HEAD, TABLE = torch.rand(H, N, generator=generator) < 0.7, torch.randn(H, 2 * N, generator=generator)
SLOPES, BIAS = torch.rand(H, generator=generator), torch.randn(B, H, N, N, generator=generator)
DISTANCES = torch.randint(0, 5, (B, N, N), generator=generator, dtype=torch.int32)
Q, K, V = torch.randn(3, B, H, N, 16, generator=generator, dtype=torch.float64)


pytestmark = pytest.mark.filterwarnings("ignore:return_lse is deprecated")


@pytest.fixture(autouse=True)
def _without_compiling(monkeypatch):
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def causal(b, h, q, k):
    return q >= k


def in_documents(mask_mod, offsets):
    number = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())

    def live(b, h, q, k):
        own, other = number[q], number[k]
        return (own == other) & mask_mod(b, h, q - offsets[own], k - offsets[other])

    return live


def batchified(mask_mod, size):
    return lambda b, h, q, k: (q // size == k // size) & mask_mod(b, h, q % size, k % size)


class Decoder:
    """Reads what it needs from an object, as gpt-fast does."""

    def __init__(self, before, start):
        self.before, self.start = before, start

    def live(self, b, h, q, k):
        return self.before(b, h, q + self.start, k)

    def rule(self):
        return lambda b, h, q, k: self.live(b, h, q, k)


RULES = {
    "causal": (causal, ""),
    "window": (lambda b, h, q, k: (q - k).abs() < 9, ""),
    "dilated": (lambda b, h, q, k: ((q - k) % 3 == 0) & ((q - k).abs() < 20), ""),
    "prefix": (lambda b, h, q, k: k < 6, ""),
    "a prefix of each sequence": (lambda b, h, q, k: k < LENGTHS[b] // 2, "b"),
    "padding": (lambda b, h, q, k: (k < LENGTHS[b]) & (q < LENGTHS[b]), "b"),
    "documents": (lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[k], ""),
    "documents of the batch": (lambda b, h, q, k: DOCUMENTS[b, q] == DOCUMENTS[b][k], "b"),
    "documents by offsets": (in_documents(causal, OFFSETS), ""),
    "the nested rule reads a head": (in_documents(lambda b, h, q, k: q - k < 3 + 4 * h, OFFSETS), "h"),
    "batchified": (batchified(causal, 8), ""),
    "global tokens": (lambda b, h, q, k: GLOBAL[q] | GLOBAL[k], ""),
    "window of the head": (lambda b, h, q, k: (q - k).abs() < 3 + 4 * h, "h"),
    "keys of the head": (lambda b, h, q, k: BY_HEAD[h, k], "h"),
    "only some heads": (lambda b, h, q, k: torch.where(h < 2, q >= k, k >= q), "h"),
    "a tensor as offset": (lambda b, h, q, k: q + SHIFT >= k, ""),
    "an object's attributes": (Decoder(causal, 5).rule(), ""),
    "partial": (partial(lambda w, b, h, q, k: q - k <= w, 7), ""),
    "all": (theirs.noop_mask, ""),
    "none": (lambda b, h, q, k: q < 0, ""),
    "by a hash": (lambda b, h, q, k: torch.sin(q * 12.9898 + k * 78.233 + h).abs() < 0.7, "h"),
    "natten": (lambda b, h, q, k: (q // 8 - k // 8).abs() + (q % 8 - k % 8).abs() <= 3, ""),
    "block diffusion": (
        lambda b, h, q, k: ((q % 20 // 4 == k % 20 // 4) & ((q < 20) == (k < 20))) | ((k >= 20) & (q % 20 > k % 20)), ""
    ),
}  # fmt: skip


@st.composite
def rules(draw):
    names = draw(st.lists(st.sampled_from(sorted(RULES)), min_size=1, max_size=3))
    parts, read = zip(*(RULES[name] for name in names))
    if len(parts) == 1:
        return parts[0], read[0]
    return draw(st.sampled_from((and_masks, or_masks, lambda *each: or_masks(causal, and_masks(*each)))))(
        *parts
    ), "".join(read)


def eager(mask_mod, score_mod=None, **options):
    block_mask = theirs.create_block_mask(mask_mod, B, H, N, N, device="cpu", BLOCK_SIZE=16)
    return theirs.flex_attention(Q, K, V, score_mod, block_mask, **options)


def alike(got, want):
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), atol=1e-5, rtol=1e-5)


@given(rules(), st.data())
def test_any_mask_mod_gives_the_same_mask(rule, data):
    mod, read = rule
    numbers = [n if name in read else data.draw(st.sampled_from((None, 1, n))) for name, n in (("b", B), ("h", H))]
    block = data.draw(st.sampled_from((16, 128, (16, 32), (64, 16))))
    live = theirs.create_mask(mod, B, H, N, N, device="cpu")
    ours = create_block_mask(mod, *numbers, N, N, "cpu", block, _compile=data.draw(st.booleans()))
    assert torch.equal(ours.to_dense().expand_as(live), live)
    # FlexAttention's lists may be shared by heads that its mask_mod distinguishes in partial blocks only.
    converted = from_flex(theirs.create_block_mask(mod, B, H, N, N, "cpu", 16), batch=B, heads=H)
    assert torch.equal(converted.to_dense().expand_as(live), live)


@given(rules())
def test_what_depends_on_a_head_or_batch_element_must_know_their_number(rule):
    mod, read = rule
    live = theirs.create_mask(mod, B, H, N, N, device="cpu")
    for name, number, at in (("batch element", "B", 0), ("head", "H", 1)):
        numbers = [B, H]
        for n in (None, 1):
            numbers[at] = n
            differs = bool((live != live.narrow(at, 0, 1)).any())
            try:
                mask = create_block_mask(mod, *numbers, N, N, device="cpu", BLOCK_SIZE=16)
                got = flex_attention(Q, K, V, block_mask=mask)
            except ValueError as error:
                assert f"because {'mask_mod' if n is None else 'its mask_mod'} depends on the {name}" in str(error)
                assert number in str(error) and number.lower() in read
            else:
                assert not differs
                alike([got], [eager(mod)])


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((None, 4), "B must be the attention's number of batch elements, because mask_mod depends on the batch "
         "element; got None."),
        ((2, None), "H must be the attention's number of heads, because mask_mod depends on the head; got None."),
        ((1, 4), "block_mask must be made by create_block_mask with B=2, the attention's number of batch elements, "
         "because its mask_mod depends on the batch element; it was made with 1."),
    ],
)  # fmt: skip
def test_missing_numbers_are_refused_in_a_sentence(numbers, words):
    mod = and_masks(RULES["padding"][0], RULES["window of the head"][0])
    with pytest.raises(ValueError, match=re.escape(words)):
        flex_attention(Q, K, V, block_mask=create_block_mask(mod, *numbers, N, N, device="cpu"))


def test_one_sequence_needs_no_more_than_its_number():
    mod = RULES["documents of the batch"][0]
    got = flex_attention(Q[:1], K[:1], V[:1], block_mask=create_block_mask(mod, 1, None, N, N, device="cpu"))
    alike([got], [eager(mod)[:1]])


SCORE_MODS = {
    "alibi": lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / H)),
    "alibi of a table": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(),
    "offsets": lambda s, b, h, q, k: s + TABLE[h, k - q + N - 1],
    "offsets that wrap around": lambda s, b, h, q, k: s + TABLE[h, k - q],
    "a bias": lambda s, b, h, q, k: s + BIAS[b, h, q, k],
    "distances of a graph": lambda s, b, h, q, k: s + TABLE[h, DISTANCES[b, q, k]],
    "softcap": lambda s, b, h, q, k: 20 * torch.tanh(s / 20),
    "checkerboard": lambda s, b, h, q, k: torch.where((k - q) % 2 == 0, s * 0.5, s),
    "floor of negatives": lambda s, b, h, q, k: s + 0.1 * ((k - q) // 4) + 0.1 * ((k - q) % 5),
    "log of an activation": lambda s, b, h, q, k: torch.log(torch.nn.functional.gelu(s) + 1.0),
    "a shared rotary part": lambda s, b, h, q, k: s + 0.1 * torch.dot(Q[b, h, q].float(), K[b, h // H, k].float()),
    "gates of heads": lambda s, b, h, q, k: s * (h + 1) + b,
    "causal by -inf": lambda s, b, h, q, k: torch.where(k <= q, s, -float("inf")),
    "queries without keys": lambda s, b, h, q, k: torch.where((k <= q) & (q > 5), s, float("-inf")),
    "documents by -inf": lambda s, b, h, q, k: torch.where(DOCUMENTS[b, q] == DOCUMENTS[b, k], s, -torch.inf),
}


@st.composite
def score_mods(draw):
    names = draw(st.lists(st.sampled_from(list(SCORE_MODS)), min_size=1, max_size=2))
    names.sort(key=list(SCORE_MODS).index)  # what makes scores dead comes last: others make NaN of -inf
    first, *others = (SCORE_MODS[name] for name in names)
    if not others:
        return first
    return lambda s, b, h, q, k: others[0](first(s, b, h, q, k), b, h, q, k)


@given(rules(), score_mods(), st.booleans())
def test_any_score_mod_gives_the_same_result(rule, score_mod, is_theirs):
    mod, _ = rule
    made = theirs.create_block_mask if is_theirs else create_block_mask
    mask = made(mod, B, H, N, N, device="cpu", BLOCK_SIZE=16)
    alike(flex_attention(Q, K, V, score_mod, mask, return_lse=True), eager(mod, score_mod, return_lse=True))


def dense(score_mod, live):
    places = torch.meshgrid(*(torch.arange(n) for n in (B, H, N, N)), indexing="ij")
    found = score_mod(Q @ K.mT / 4, *places).masked_fill(~live, -torch.inf)
    return found.softmax(-1) @ V


class Learned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(H, 5, dtype=torch.float64))

    def graph(self, s, b, h, q, k):
        return s * (1 + self.table[h, 0]) + self.table[h, DISTANCES[b, q, k]]

    def activation(self, s, b, h, q, k):
        return torch.nn.functional.gelu(s) * self.table[h, 0]

    def of_views(self):
        gains = [self.table[:, number] for number in range(5)]
        return lambda s, b, h, q, k: (
            s + sum(torch.where(DISTANCES[b, q, k] > n, x[h], 0.0) for n, x in enumerate(gains))
        )


@pytest.mark.parametrize("name", ["graph", "activation", "of_views"])
def test_learned_tensors_that_any_score_mod_captures_receive_gradients(name):
    layer = Learned()
    mod = layer.of_views() if name == "of_views" else getattr(layer, name)
    live = theirs.create_mask(causal, 1, 1, N, N, device="cpu")
    out, want = (
        flex_attention(Q, K, V, mod, create_block_mask(causal, None, None, N, N, device="cpu")),
        dense(mod, live),
    )
    torch.testing.assert_close(out, want)
    (a,), (b,) = (torch.autograd.grad(x.square().sum(), layer.table) for x in (out, want))
    torch.testing.assert_close(a, b)


def test_kernels_give_learned_tensors_gradients_too():
    q, k, v = (x.float()[:1, :, :32] for x in (Q, K, V))
    layer = Learned().float()
    found = [
        torch.autograd.grad(flex_attention(q, k, v, layer.graph, backend=backend).square().sum(), layer.table)[0]
        for backend in ("triton", "reference")
    ]
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def test_a_function_of_scores_refuses_learned_tensors_that_it_finds_by_any_name():
    layer = Learned()
    with pytest.raises(ValueError, match="a function must not capture tensors that require gradients, because they"):
        attention(Q, K.clone().requires_grad_(), V, scores=scores.function(layer.graph)).sum().backward()


@pytest.mark.parametrize("made", [create_block_mask, theirs.create_block_mask])
def test_what_a_mask_of_flexattention_reads_may_change(made):
    """A converted mask follows it; a mask of this library keeps its rule's values at the time when it was made."""
    document, start = DOCUMENTS.clone(), [0]
    layer = Decoder(causal, 2)

    def rule(b, h, q, k):
        return (document[b, q] == document[b, k]) & layer.live(b, h, q, k) & (q >= start[0])

    mask = made(rule, B, H, N, N, device="cpu", BLOCK_SIZE=64)
    first = flex_attention(Q, K, V, block_mask=mask)
    for change in (
        lambda: document.copy_(DOCUMENTS.flip(-1)),
        lambda: setattr(layer, "start", 7),
        lambda: start.__setitem__(0, 5),
        lambda: setattr(layer, "before", lambda b, h, q, k: q - k < 9),
    ):
        change()
        got = flex_attention(Q, K, V, block_mask=mask)
        if made is create_block_mask:
            assert torch.equal(got, first)
        else:
            torch.testing.assert_close(got, theirs.flex_attention(Q, K, V, block_mask=mask))


def test_a_mask_mod_may_be_replaced():
    mask = theirs.create_block_mask(causal, None, None, N, N, device="cpu", BLOCK_SIZE=64)
    flex_attention(Q, K, V, block_mask=mask)
    mask.mask_mod = RULES["window of the head"][0]
    torch.testing.assert_close(
        flex_attention(Q, K, V, block_mask=mask), theirs.flex_attention(Q, K, V, block_mask=mask)
    )


@pytest.mark.parametrize("is_inference", [False, True])
def test_one_static_position_for_decoding(is_inference):
    """As gpt-fast decodes: one row of blocks, and a position that every step writes into the same tensor."""
    with torch.inference_mode(is_inference):
        x, position = torch.randn(3, 1, H, 64, 16), torch.tensor([48])
        whole = theirs.create_block_mask(causal, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
        row = whole[:, :, 3]
        row.mask_mod, row.seq_lengths = lambda b, h, q, k: causal(b, h, q + position[0], k), (1, 64)
        for step in range(48, 64):
            position.fill_(step)
            q, k, v = x[0][:, :, step : step + 1], x[1], x[2]
            torch.testing.assert_close(
                flex_attention(q, k, v, block_mask=row), flex_attention(*x, block_mask=whole)[:, :, step : step + 1]
            )


def test_masks_that_were_sliced_cut_or_made_of_lists():
    mod = RULES["documents of the batch"][0]
    whole = theirs.create_block_mask(mod, B, None, N, N, device="cpu", BLOCK_SIZE=16)
    second = whole[1:2]
    second.mask_mod = lambda b, h, q, k: mod(b + 1, h, q, k)
    alike([flex_attention(Q[1:], K[1:], V[1:], block_mask=second)], [eager(mod)[1:]])
    short, few = whole._adjust(30, 30), [x[:, :, :30] for x in (Q, K, V)]
    alike([flex_attention(*few, block_mask=short)], [theirs.flex_attention(*few, block_mask=short)])
    counts, listed = torch.tensor([[[1, 2, 1]]]), torch.tensor([[[[0, 1, 2], [1, 0, 2], [2, 0, 1]]]])
    rule = lambda b, h, q, k: (q >= k) & ((q // 16 == k // 16) | (q // 16 == 1))  # noqa: E731
    made = theirs.BlockMask.from_kv_blocks(counts.int(), listed.int(), BLOCK_SIZE=16, mask_mod=rule, seq_lengths=(N, N))
    alike([flex_attention(Q, K, V, block_mask=made)], [eager(rule)])


@pytest.mark.parametrize("lengths", [None, [N, 25]])
def test_pages_of_flexattention(lengths):
    cache, pages = torch.zeros(2, 1, H, 192, 16, dtype=torch.float64), PagedAttention(12, 16, B, device="cpu")
    lengths = None if lengths is None else torch.tensor(lengths)
    for b in torch.arange(B):
        pages.reserve(b[None], torch.tensor([48]))
    pages.assign(torch.arange(B), torch.arange(N).expand(B, -1), K, V, *cache)
    logical = theirs.create_block_mask(causal, B, None, N, 48, device="cpu", BLOCK_SIZE=16)
    mask, mod = (
        pages.convert_logical_block_mask(logical, kv_len=lengths),
        pages.get_score_mod(SCORE_MODS["alibi"], kv_len=lengths),
    )
    alike(
        flex_attention(Q, *cache, mod, mask, return_lse=True),
        theirs.flex_attention(Q, *cache, mod, mask, return_lse=True),
    )


@pytest.mark.parametrize("reads", [False, True])
def test_create_block_mask_and_flex_attention_may_be_compiled(reads):
    mod = RULES["documents"][0] if reads else causal
    create, attend = (torch.compile(f, backend="eager") for f in (create_block_mask, flex_attention))
    mask = create(mod, None, None, N, N, device="cpu")
    alike([attend(Q, K, V, SCORE_MODS["alibi"], mask)], [eager(mod, SCORE_MODS["alibi"])])
    alike([attend(Q, K, V, None, theirs.create_block_mask(mod, None, None, N, N, device="cpu"))], [eager(mod)])


def test_rules_of_a_loop_are_those_of_their_time():
    made = []
    for w in (2, 9):
        made.append(create_block_mask(lambda b, h, q, k: (q - k).abs() < w, None, None, N, N, device="cpu"))  # noqa: B023
    for mask, w in zip(made, (2, 9)):
        assert mask == masks.local(N, window=2 * w - 1)


def test_queries_without_keys_are_as_in_flexattention():
    """out 0, lse -inf, no gradient, whether a mask, a score_mod or both leave no key."""
    mod, dead = lambda b, h, q, k: (q > 4) & (k <= q), SCORE_MODS["queries without keys"]
    mask = create_block_mask(mod, None, None, N, N, device="cpu", BLOCK_SIZE=16)
    for block_mask, score_mod, first in ((mask, None, 5), (None, dead, 6), (mask, dead, 6)):
        q, k, v = (x.clone().requires_grad_() for x in (Q, K, V))
        out, lse = flex_attention(q, k, v, score_mod, block_mask, return_lse=True)
        rule = mod if block_mask is mask else theirs.noop_mask
        alike((out.detach(), lse.detach()), eager(rule, score_mod, return_lse=True))
        assert bool((out[:, :, :first] == 0).all()) and bool((lse[:, :, :first] == -torch.inf).all())
        grads = torch.autograd.grad(out.sum() + lse[:, :, first:].sum(), (q, k, v))
        assert all(bool(x.isfinite().all()) for x in grads) and bool((grads[0][:, :, :first] == 0).all())
    far = flex_attention(Q, K, V, lambda s, b, h, q, k: torch.where(q > 4, s, -1e9), return_lse=True)
    assert bool((far[0][:, :, :5] != 0).all())


def test_other_names_are_those_of_pytorch():
    assert module.noop_mask is theirs.noop_mask and module.AuxRequest is theirs.AuxRequest
    with pytest.raises(AttributeError, match="has no attribute 'flex'"):
        module.flex  # noqa: B018

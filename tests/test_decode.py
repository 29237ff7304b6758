from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparseflash import BlockMask, clear_caches, masks, scores, testing
from sparseflash.backends.triton.decode import api
from sparseflash.decode import attention_to_pages, attention_with_cache, choose_pages
from sparseflash.scores.change import Scores
from tests.compiling.uninterpreted import python
from tests.drawn.masks import SEEDS
from tests.watched.waiting import NoWaiting, assert_replays_as_called

BACKENDS = ("triton", "reference")


def generator(seed):
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class Case:
    """A cache with room for `room` tokens, and which keys the last queries see."""

    lengths: tuple
    heads: tuple
    q_len: int
    room: int
    starts: tuple | None
    window: tuple | None  # window, sinks
    chosen: int
    page: int
    paged: bool
    mask: str | None
    splits: int | None
    dtype: torch.dtype
    v_dim: int
    seed: int
    block_k: int = 32

    def pages(self):
        shape = (len(self.lengths), self.heads[1], self.chosen)
        return torch.randint(-1, -(-self.room // self.page) + 1, shape, generator=generator(self.seed + 1))

    def block_mask(self):
        room = self.room + 7  # masks may have more tokens than the cache has room for
        causal = masks.causal(room, block=(16, self.block_k))
        if self.mask == "one":
            return masks.local(room, window=30, causal=True, block=(32, self.block_k))
        drawn = [torch.rand(room, room, generator=generator(self.seed + n)) < 0.3 for n in range(3)]
        others = [causal & BlockMask.from_dense(live, block=(16, self.block_k)) for live in drawn]
        heads = self.heads[1] if self.mask == "of key heads" else self.heads[0]
        return masks.per_head([causal, *others, *others][:heads])

    def options(self):
        found = {}
        if self.starts is not None:
            found["starts"] = torch.tensor(self.starts)
        if self.window is not None:
            found["window"], found["sinks"] = self.window
        if self.mask is not None:
            found["mask"] = self.block_mask()
        elif self.chosen:
            found["pages"] = self.pages()
        if self.chosen and self.mask is None and not self.paged:
            found["page"] = self.page
        return found

    def live(self):
        q_heads, kv_heads = self.heads
        live = torch.zeros(len(self.lengths), q_heads, self.q_len, self.room, dtype=torch.bool)
        t = torch.arange(self.room)
        pages = self.pages() if self.chosen and self.mask is None else None
        dense = self.block_mask().to_dense()[0] if self.mask is not None else None
        for b, n in enumerate(self.lengths):
            start = 0 if self.starts is None else self.starts[b]
            for h in range(q_heads):
                for i in range(self.q_len):
                    p = min(n, self.room) - self.q_len + i
                    row = (t >= start) & (t <= p)
                    if self.window is not None:
                        row &= (t > p - self.window[0]) | (t < start + self.window[1])
                    if pages is not None:
                        row &= torch.isin(t // self.page, pages[b, h * kv_heads // q_heads])
                    if dense is not None and p >= 0:
                        row &= dense[h * len(dense) // q_heads, p, : self.room]
                    live[b, h, i] = row
        return live

    def call(self, backend, q, k, v, **more):
        dead = ~self.live().any(2).any(1)[:, None, :, None] & (torch.arange(self.room) >= max(self.lengths))[:, None]
        k, v = (x.masked_fill(dead, torch.nan) for x in (k, v))
        table = None
        if self.paged:
            (k, v), table = self.in_pages(k, v)
        return attention_with_cache(
            q, k, v, torch.tensor(self.lengths), block_table=table, return_lse=True, splits=self.splits,
            backend=backend, **self.options(), **more,
        )  # fmt: skip

    def in_pages(self, *caches):
        """The caches in shuffled pages, `[P, page, H, D]`."""
        n = -(-self.room // self.page)
        table = torch.randperm(len(self.lengths) * n + 3, generator=generator(self.seed))[: len(self.lengths) * n]
        table = table.view(len(self.lengths), n).int()
        made = []
        for x in caches:
            x = torch.nn.functional.pad(x, (0, 0, 0, n * self.page - self.room), value=torch.nan)
            pool = torch.full((len(self.lengths) * n + 3, self.page, x.shape[1], x.shape[3]), torch.nan, dtype=x.dtype)
            pool[table.long()] = x.unflatten(2, (n, self.page)).permute(0, 2, 3, 1, 4)
            made.append(pool.transpose(1, 2))
        return made, table


@st.composite
def cases(draw):
    page, paged = draw(st.sampled_from([16, 32, 12, 8, 64, 128])), draw(st.booleans())
    room = draw(st.integers(1, 150))
    if paged:
        room = -(-room // page) * page
    batch = draw(st.integers(1, 3))
    lengths = tuple(draw(st.integers(0, room)) for _ in range(batch))
    return Case(
        lengths,
        draw(st.sampled_from([(4, 2), (2, 2), (4, 1)])),
        draw(st.sampled_from([1, 1, 3, 16])),
        room,
        draw(st.none() | st.just(tuple(n // 3 for n in lengths))),
        draw(st.none() | st.tuples(st.integers(1, 80), st.integers(0, 20))),
        draw(st.sampled_from([0, 0, 3])),
        page,
        paged,
        draw(st.sampled_from([None, None, "one", "of key heads", "of query heads"])),
        draw(st.sampled_from([None, 1, 3])),
        draw(st.sampled_from([torch.float32, torch.float16])),
        draw(st.sampled_from([16, 24])),
        draw(SEEDS),
        draw(st.sampled_from([16, 32, 64, 128])),
    )


PLAIN = Case((40, 7), (4, 2), 1, 64, None, None, 0, 16, False, None, None, torch.float32, 16, 0)


@pytest.mark.parametrize("backend", BACKENDS)
@given(cases())
@example(PLAIN)
@example(replace(PLAIN, mask="one", block_k=16))
@example(replace(PLAIN, heads=(9, 1), q_len=16))
def test_few_queries_are_exact_over_the_live_keys_of_a_cache(backend, case):
    (q_heads, kv_heads), batch = case.heads, len(case.lengths)
    shapes = [(batch, q_heads, case.q_len, 16), (batch, kv_heads, case.room, 16)]
    g = generator(case.seed)
    q, k, v = (torch.randn(s, generator=g).to(case.dtype) for s in (*shapes, (*shapes[1][:3], case.v_dim)))
    mask = BlockMask.from_dense(case.live(), block=16)
    with torch.no_grad():
        testing.assert_exact(
            lambda q, k, v: case.call(backend, q.detach(), k.detach(), v.detach()), q, k, v, mask, gradients=False
        )


BUCKETS = scores.t5_buckets(8, 30)


def changes_of(kinds, case, dtype):
    g, heads, found = generator(case.seed + 2), case.heads[0], {}
    room = -(-case.room // case.page) * case.page if case.paged else case.room
    shapes = {
        "temperature": (heads,), "temperatures": (len(case.lengths), 1, case.q_len), "alibi": (heads,),
        "log_decay": (heads,), "relative": (heads, 8), "key_bias": (1, heads, room), "sink": (heads,),
        "bias": (len(case.lengths), 1, 1, room),
    }  # fmt: skip
    for kind in sorted(shapes):
        found[kind] = torch.randn(shapes[kind], generator=g, dtype=torch.float64).to(case.dtype).to(dtype)
        if kind.startswith("temperature"):
            found[kind] = found[kind].abs() + 0.5
    made = {
        "temperature": lambda: scores.temperature(found["temperature"]),
        "temperatures": lambda: scores.temperature(found["temperatures"]),
        "softcap": lambda: scores.softcap(1.5),
        "alibi": lambda: scores.alibi(found["alibi"]),
        "log_decay": lambda: scores.log_decay(found["log_decay"]),
        "relative": lambda: scores.relative(found["relative"], BUCKETS),
        "key_bias": lambda: scores.key_bias(found["key_bias"]),
        "bias": lambda: scores.bias(found["bias"]),
        "sink": lambda: scores.sink(found["sink"]),
    }
    joined = Scores(())
    for kind in kinds:
        joined = joined + made[kind]()
    return joined, found


def by_formula(kinds, case, q, k, v):
    _, given_ = changes_of(kinds, case, q.dtype)
    group = case.heads[0] // case.heads[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    t = torch.arange(case.room)
    position = torch.tensor(case.lengths).clamp(max=case.room).view(-1, 1, 1, 1) - case.q_len
    position = position + torch.arange(case.q_len).view(-1, 1)
    distance = (position - t).clamp(min=0)
    s = (q @ k.mT) * 16**-0.5
    for kind in ("temperature", "temperatures", "softcap", "alibi", "log_decay", "relative", "key_bias", "bias"):
        x = given_.get(kind)
        if kind not in kinds:
            continue
        if kind == "softcap":
            s = 1.5 * torch.tanh(s / 1.5)
        elif kind.startswith("temperature"):
            s = s / (x.view(-1, 1, 1) if x.ndim == 1 else x.unsqueeze(-1))
        elif kind == "relative":
            s = s + x[torch.arange(case.heads[0]).view(-1, 1, 1), BUCKETS(-distance)]
        elif kind == "key_bias":
            s = s + x[:, :, None, : case.room]
        elif kind == "bias":
            s = s + x[..., : case.room]
        else:
            far = distance.to(s.dtype)
            s = s - x.view(-1, 1, 1) * (far.log1p() if kind == "log_decay" else far)
    s = s.masked_fill(~case.live(), -torch.inf)
    if "sink" in kinds:
        s = torch.cat([s, given_["sink"].view(-1, 1, 1).expand(*s.shape[:3], 1)], -1)
        v = torch.nn.functional.pad(v, (0, 0, 0, 1))
    return {"out": s.softmax(-1).nan_to_num(0.0) @ v, "lse": s.logsumexp(-1)}


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    cases(),
    st.lists(
        st.sampled_from(["temperature", "softcap", "alibi", "log_decay", "relative", "key_bias", "sink"]),
        min_size=1, max_size=4, unique=True,
    ),
)  # fmt: skip
@example(PLAIN, ["alibi"])
@example(PLAIN, ["bias", "sink"])
@example(replace(PLAIN, q_len=3, lengths=(2, 40)), ["temperatures", "relative", "sink"])
@example(replace(PLAIN, lengths=(0, 5), dtype=torch.float16), ["softcap", "sink"])
@example(replace(PLAIN, heads=(9, 1), q_len=16, paged=True), ["alibi", "key_bias"])
@example(replace(PLAIN, mask="one", block_k=16, q_len=3), ["log_decay", "relative"])
@example(replace(PLAIN, lengths=(1,), dtype=torch.float16, seed=2), ["temperature"])
@np.errstate(over="ignore", invalid="ignore")
def test_score_modifications_take_the_queries_at_the_end_of_the_cache(backend, case, kinds):
    if "alibi" in kinds and "log_decay" in kinds:
        kinds.remove("log_decay")
    (q_heads, kv_heads), batch, g = case.heads, len(case.lengths), generator(case.seed)
    shapes = [(batch, q_heads, case.q_len, 16), (batch, kv_heads, case.room, 16)]
    draws = [
        [torch.randn(s, generator=g).to(case.dtype) for s in (*shapes, (*shapes[1][:3], case.v_dim))] for _ in range(4)
    ]
    changes, _ = changes_of(kinds, case, case.dtype)
    out, lse = case.call(backend, *draws[0], scores=changes)
    truths = [by_formula(kinds, case, *(x.double() for x in inputs)) for inputs in draws]
    plains = [by_formula(kinds, case, *inputs) for inputs in draws]
    dead = truths[0]["lse"].isneginf()
    assert torch.equal(lse.isneginf(), dead)
    got = {"out": out, "lse": lse}
    for each in (got, *truths, *plains):
        each["lse"] = each["lse"].masked_fill(dead, 0.0)
    # A single key's score can round to the truth by chance: the largest error of four draws is the measure.
    allowed = {
        name: max(float((p[name] - t[name]).abs().max()) for p, t in zip(plains, truths, strict=True)) for name in got
    }
    assert testing.compare_results(got, truths[0], allowed, magnitudes={"lse": 16.0}).exact


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_of_minus_inf_is_dead(backend):
    case = replace(PLAIN, lengths=(40, 7), heads=(2, 2))
    q, k = torch.randn(2, 2, 1, 16), torch.randn(2, 2, 64, 16)
    dead = torch.rand(2, 1, 64, generator=generator(0)) < 0.5
    dead[1] = True
    bias = torch.zeros(2, 1, 64).masked_fill(dead, -torch.inf)
    out, lse = case.call(backend, q, k, k, scores=scores.key_bias(bias))
    s = (q.double() @ k.double().mT / 4 + bias[:, :, None]).masked_fill(~case.live(), -torch.inf)
    torch.testing.assert_close(out.double(), s.softmax(-1).nan_to_num(0.0) @ k.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), s.logsumexp(-1), rtol=1e-5, atol=1e-5)
    assert not out[1].any() and lse[1].isneginf().all()


def test_calls_with_scores_are_prepared_once_and_read_what_each_is_given(monkeypatch):
    q, k, lengths = torch.randn(1, 4, 1, 16).half(), torch.randn(1, 2, 64, 16).half(), torch.tensor([50])

    def decoded(slope, **others):
        return attention_with_cache(
            q, k, k, lengths, backend="triton", scores=scores.alibi(torch.full((4,), slope)), **others
        )

    expected = []
    for slope in (0.1, 0.5):
        clear_caches()
        expected.append(decoded(slope))
    clear_caches()
    plain = attention_with_cache(q, k, k, lengths, backend="triton")
    prepared, prepare = [], api.Call.__init__
    monkeypatch.setattr(api.Call, "__init__", lambda self, *given: (prepared.append(self), prepare(self, *given))[1])
    assert torch.equal(decoded(0.1), expected[0]) and torch.equal(decoded(0.5), expected[1])
    assert len(prepared) == 1 and not torch.equal(expected[0], expected[1])
    assert torch.equal(attention_with_cache(q, k, k, lengths, backend="triton"), plain)
    assert torch.equal(
        attention_with_cache(q, k, k, lengths, backend="triton", scores=scores.log_decay(torch.zeros(4))), plain
    )


@pytest.mark.parametrize("q_len", [1, 3])
def test_windows_and_sinks_may_end_anywhere_in_a_tile(q_len):
    """The tiles of the sinks and of the window may overlap."""
    g = generator(0)
    q, (k, v) = torch.randn(4, 1, q_len, 16, generator=g), torch.randn(2, 4, 1, 96, 16, generator=g)
    lengths, starts = torch.tensor([96, 95, 64, 67]), torch.tensor([0, 5, 31, 32])
    for window in (1, 31, 32, 33, 64, 65, 96):
        for sinks in (0, 1, 32, 33, 64):
            options = {"starts": starts, "window": window, "sinks": sinks, "scale": 1.0, "return_lse": True}
            found, wanted = (attention_with_cache(q, k, v, lengths, backend=each, **options) for each in BACKENDS)
            for each, expected in zip(found, wanted, strict=True):
                torch.testing.assert_close(each, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", [2**31, 2**32, 2**32 + 1, 2**63 - 1, 1 - 2**32, -(2**63)])
def test_numbers_of_64_bits_are_what_they_are(backend, number):
    """No number is cut to 32 bits."""
    q, k = torch.randn(1, 4, 3, 16, generator=generator(0)), torch.randn(1, 2, 64, 16, generator=generator(1))
    given, room, end = torch.tensor([number]), torch.tensor([64]), torch.tensor([64 if number > 0 else 0])

    def call(lengths, **options):
        return attention_with_cache(q, k, k, lengths, backend=backend, **options)

    assert torch.equal(call(given), call(end))
    assert torch.equal(call(room, starts=given), call(room, starts=end))
    assert (call(room, pages=given.expand(1, 2, 1), page=16) == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("paged", [False, True])
def test_a_page_that_is_chosen_twice_counts_once(backend, dtype, paged):
    q, (k, v) = torch.randn(2, 4, 1, 16, generator=generator(0)), torch.randn(2, 2, 2, 64, 16, generator=generator(1))
    table, options = None, {"page": 16}
    if paged:
        (k, v), table = PLAIN.in_pages(k, v)
        options = {}

    def call(*pages):
        chosen = torch.tensor(pages, dtype=dtype).expand(2, 2, -1)
        return attention_with_cache(
            q, k, v, torch.tensor([64, 50]), block_table=table, pages=chosen, backend=backend, **options
        )

    once = call(2, 0)
    for pages in ((0, 2, 0), (0, 2, 0, 2, 2), (2, 2, 2, 0, 0)):
        torch.testing.assert_close(call(*pages), once)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", [2**31 - 1, 2**31, 2**63, 2**70])
def test_a_window_sinks_or_a_page_of_any_size_are_as_good_as_the_room(backend, number):
    """A kernel compiled for a small number is started with a large one, too."""
    q, k = torch.randn(1, 4, 3, 16, generator=generator(0)), torch.randn(1, 2, 64, 16, generator=generator(1))

    def call(**options):
        starts = torch.tensor([5])
        return attention_with_cache(q, k, k, torch.tensor([40]), starts=starts, backend=backend, **options)

    assert torch.equal(call(window=number), call())
    assert torch.equal(call(window=2, sinks=number), call(window=2, sinks=64))
    first = torch.zeros(1, 2, 1, dtype=torch.int32)
    assert torch.equal(call(pages=first, page=number), call(pages=first, page=64))


def test_a_sequence_has_the_same_bits_alone_as_in_a_batch():
    q = torch.randn(3, 4, 1, 16, generator=generator(0))
    k, v = torch.randn(2, 3, 2, 2000, 16, generator=generator(1))
    lengths = torch.tensor([2000, 1, 900])
    together = attention_with_cache(q, k, v, lengths, backend="triton")
    for b in range(3):
        one = slice(b, b + 1)
        assert torch.equal(attention_with_cache(q[one], k[one], v[one], lengths[one], backend="triton"), together[one])


def test_keys_are_split_by_the_capacity_or_what_is_walked_of_it():
    lengths = torch.tensor([1])
    of = api.Cached(lengths)
    assert [api.splits_of(of, n, 1) for n in (100, 1024, 8192, 1 << 16, 1 << 20)] == [1, 8, 16, 64, 128]
    assert api.splits_of(api.Cached(lengths, window=1024, sinks=64), 1 << 20, 1) == 8
    assert api.splits_of(api.Cached(lengths, page=64, pages=torch.zeros(1, 1, 32)), 1 << 20, 1) == 16


def test_more_splits_than_keys_are_as_many_as_keys():
    q, k = torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 24, 16)
    assert api.Call(q, k, k, api.Cached(torch.tensor([24])), 1.0, 10**9).programs[0] == 2 * 24


def test_the_number_of_a_page_is_loaded_once_for_all_its_keys():
    source = """
from unittest import mock
import torch
from experiments.benchmarks.compile.without_gpu import compiling_for
from sparseflash.backends.cached import Cached
from sparseflash.backends.triton.decode import api
q, lengths = torch.zeros(1, 8, 1, 128, dtype=torch.bfloat16), torch.tensor([1024])
with mock.patch.object(api, "check_runs"), compiling_for(90) as compiled:
    for page in (0, 16, 64):
        of, cache = Cached(lengths), q.new_zeros(1, 2, 1024, 128)
        if page:
            table = torch.zeros(1, 1024 // page, dtype=torch.int32)
            of, cache = Cached(lengths, page=page, block_table=table), q.new_zeros(1024 // page, 2, page, 128)
        api.Call(q, cache, cache, of, 1.0)(q, cache, cache, lengths, None, of.block_table, None)
print(*(kernel.asm["ptx"].count("ld.global") for name, kernel in compiled if name == "decode_kernel"))
"""
    done = python("-c", source)
    assert done.returncode == 0, done.stderr
    contiguous, *paged = map(int, done.stdout.split())
    assert [count - contiguous for count in paged] == [3 * api.BLOCK_N // 16, 3]


def test_every_tile_fits_into_the_shared_memory_of_small_gpus():
    source = """
from unittest import mock
import torch
from experiments.benchmarks.compile.without_gpu import compiling_for
from sparseflash import scores
from sparseflash.backends.cached import Cached
from sparseflash.backends.triton.decode import api
from sparseflash.decode import _prepared
lengths = torch.tensor([1024])
with mock.patch.object(api, "check_runs"), compiling_for(86) as compiled:
    for dtype, dim, heads in ((torch.bfloat16, 128, 64), (torch.bfloat16, 256, 64), (torch.float32, 128, 64),
                              (torch.float32, 256, 1), (torch.float32, 256, 64)):
        q, cache = torch.zeros(1, heads, 1, dim, dtype=dtype), torch.zeros(1, 1, 1024, dim, dtype=dtype)
        api.Call(q, cache, cache, Cached(lengths), 1.0)(q, cache, cache, lengths, None, None, None)
        if (dtype, dim) != (torch.float32, 256):
            continue
        made = scores.softcap(30.0) + scores.log_decay(torch.zeros(heads)) + scores.sink(torch.zeros(heads))
        made += scores.relative(torch.zeros(heads, 32), scores.t5_buckets())
        made += scores.key_bias(torch.zeros(1, heads, 1024))
        of = Cached(lengths, changes=_prepared(made, q, 1024))
        api.Call(q, cache, cache, of, 1.0)(q, cache, cache, lengths, None, None, None, of.changes)
print(*(kernel.metadata.shared for name, kernel in compiled if name == "decode_kernel"))
"""
    done = python("-c", source)
    assert done.returncode == 0, done.stderr
    shared = list(map(int, done.stdout.split()))
    assert len(shared) == 7 and max(shared) <= api.SHARED_MEMORY


@pytest.mark.parametrize("paged", [False, True])
def test_a_step_waits_for_nothing_and_starts_few_kernels(paged):
    q = torch.randn(2, 4, 1, 16)
    k, v = torch.randn(2, 2, 2, 64, 16)
    table = None
    if paged:
        (k, v), table = PLAIN.in_pages(k, v)
    lengths, pages = torch.tensor([40, 7]), torch.tensor([2, 0, 0]).expand(2, 2, 3)

    def step():
        attention_with_cache(q, k, v, lengths, block_table=table, window=20, sinks=2, backend="triton")
        return attention_with_cache(
            q, k, v, lengths, block_table=table, pages=pages, page=None if paged else 16, backend="triton"
        )

    step()
    launches = []
    with NoWaiting() as seen, pytest.MonkeyPatch.context() as patch:
        patch.setattr(api.Launch, "start", lambda self, programs, *given: launches.append(programs))
        step()
    assert len(launches) == 4 and seen.started <= 8


@pytest.mark.parametrize(("options", "made"), [({}, 1), ({"window": 20, "sinks": 2}, 1), ({"scale": -0.3}, 3)])
@pytest.mark.parametrize("paged", [False, True])
def test_calls_of_one_layout_are_prepared_once_and_read_what_each_is_given(monkeypatch, paged, options, made):
    def decoded(seed):
        g = generator(seed)
        q, (k, v) = torch.randn(2, 4, 1, 16, generator=g).half(), torch.randn(2, 2, 2, 64, 16, generator=g).half()
        lengths, starts = (torch.randint(low, high, (2,), generator=g) for low, high in ((30, 65), (0, 20)))
        table = None
        if paged:
            (k, v), table = replace(PLAIN, seed=seed).in_pages(k, v)
        return attention_with_cache(q, k, v, lengths, starts=starts, block_table=table, backend="triton", **options)

    expected = []
    for seed in range(3):
        clear_caches()
        expected.append(decoded(seed))
    clear_caches()
    prepared, prepare = [], api.Call.__init__
    monkeypatch.setattr(api.Call, "__init__", lambda self, *given: (prepared.append(self), prepare(self, *given))[1])
    assert all(torch.equal(decoded(seed), expected[seed]) for seed in range(3))
    assert len(prepared) == made


def test_calls_with_chosen_pages_are_prepared_once_and_read_what_each_is_given(monkeypatch):
    def decoded(seed, pages, **how):
        g = generator(seed)
        q, (k, v) = torch.randn(2, 4, 1, 16, generator=g).half(), torch.randn(2, 2, 2, 64, 16, generator=g).half()
        given = torch.tensor(pages, dtype=torch.int32).expand(2, 2, -1).contiguous()
        return attention_with_cache(q, k, v, torch.tensor([64, 50]), pages=given, page=16, backend="triton", **how)

    choices = [(0, (3, 1, 0)), (1, (2, 2, 0)), (2, (0, -1, 3)), (2, (0, 0, 0))]
    expected = []
    for seed, pages in choices:
        clear_caches()
        expected.append(decoded(seed, pages))
    clear_caches()
    prepared, prepare = [], api.Call.__init__
    monkeypatch.setattr(api.Call, "__init__", lambda self, *given: (prepared.append(self), prepare(self, *given))[1])
    for (seed, pages), wanted in zip(choices, expected, strict=True):
        assert torch.equal(decoded(seed, pages), wanted)
    assert len(prepared) == 1
    decoded(0, (3, 1))  # another number of pages
    assert len(prepared) == 2
    with pytest.raises(ValueError, match="page must be given with pages"):
        attention_with_cache(Q.half(), K.half(), K.half(), L, pages=P, backend="triton")


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_that_are_listed_once_are_not_looked_through(backend):
    g = generator(0)
    q, (k, v) = torch.randn(2, 4, 1, 16, generator=g), torch.randn(2, 2, 2, 64, 16, generator=g)
    lengths, pages = torch.tensor([64, 50]), torch.tensor([[3, 1, -1], [2, 0, -1]], dtype=torch.int32)
    pages = pages.expand(2, 2, 3).contiguous()  # in the order in which repetitions are looked for
    want = attention_with_cache(q, k, v, lengths, pages=pages, page=16, backend=backend)
    got = attention_to_pages(q, k, v, lengths, pages, page=16, scale=None, backend=backend)
    assert torch.equal(got, want)
    other = attention_to_pages(q, k, v, lengths, pages.flip(2), page=16, scale=None, backend=backend)
    torch.testing.assert_close(other, want)


def beside_alignment(x):
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def test_calls_that_differ_in_anything_are_prepared_each(monkeypatch):
    g = generator(0)
    q, (k, v) = torch.randn(2, 4, 1, 16, generator=g).half(), torch.randn(2, 2, 2, 64, 16, generator=g).half()
    common = {
        "q": q, "k_cache": k, "v_cache": v, "lengths": torch.tensor([40, 64]), "starts": torch.tensor([3, 5]),
        "window": 20, "sinks": 2, "scale": 0.25, "splits": 2, "backend": "triton", "return_lse": True,
    }  # fmt: skip
    table = torch.tensor([[1], [0]])
    variants = [
        {}, {"scale": 0.5}, {"scale": None}, {"window": 10}, {"window": None, "sinks": 0}, {"sinks": 9},
        {"splits": 1}, {"splits": None}, {"starts": None}, {"starts": torch.tensor([3, 5], dtype=torch.int32)},
        {"starts": torch.tensor([[3, 0], [5, 0]])[:, 0]}, {"lengths": torch.tensor([40, 64], dtype=torch.int32)},
        {"lengths": torch.tensor([[40, 0], [64, 0]])[:, 0]}, {"q": q[:, :2]}, {"q": q.expand(2, 4, 3, 16)},
        {"q": beside_alignment(q)}, {"k_cache": beside_alignment(k)}, {"v_cache": beside_alignment(v)},
        {"k_cache": k.transpose(1, 2).contiguous().transpose(1, 2)},
        {"v_cache": v.transpose(1, 2).contiguous().transpose(1, 2)}, {"v_cache": v[..., :8].contiguous()},
        {"k_cache": k[:, :, :32], "v_cache": v[:, :, :32]}, {"block_table": table}, {"block_table": table.int()},
    ]  # fmt: skip
    expected = []
    for variant in variants:
        clear_caches()
        expected.append(attention_with_cache(**common | variant))
    clear_caches()
    prepared, prepare = [], api.Call.__init__
    monkeypatch.setattr(api.Call, "__init__", lambda self, *given: (prepared.append(self), prepare(self, *given))[1])
    for number, (variant, wanted) in enumerate(zip(variants, expected, strict=True), 1):
        for _ in range(2):
            assert all(map(torch.equal, attention_with_cache(**common | variant), wanted)), variant
        assert len(prepared) == number, variant
    gaps = torch.tensor([[1, 7], [0, 7]])[:, :1]
    clear_caches()
    for _ in range(2):
        found = attention_with_cache(**common | {"block_table": gaps})
        assert all(map(torch.equal, found, attention_with_cache(**common | {"block_table": table})))
    # A call with wrong arguments is not taken for one with the same tensors as other arguments.
    attention_with_cache(**common | {"starts": None, "block_table": table})
    with pytest.raises(ValueError, match=r"starts must have 1 dimensions; got \[2, 1\]"):
        attention_with_cache(**common | {"starts": table})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_negative_scale_is_that_of_negative_queries(backend, dtype):
    g = generator(0)
    q, k = torch.randn(1, 4, 3, 16, generator=g).to(dtype), 8 * torch.randn(1, 2, 64, 16, generator=g).to(dtype)
    lengths = torch.tensor([50])
    found, found_lse = attention_with_cache(q, k, k, lengths, scale=-1.0, backend=backend, return_lse=True)
    out, lse = attention_with_cache(-q, k, k, lengths, scale=1.0, backend=backend, return_lse=True)
    assert out.isfinite().all() and torch.equal(found, out) and torch.equal(found_lse, lse)


Q, K = torch.zeros(2, 4, 1, 16), torch.zeros(2, 2, 64, 16)
L, T = torch.tensor([3, 4]), torch.zeros(2, 4, dtype=torch.int32)
P = torch.zeros(2, 2, 3, dtype=torch.int32)
H = {"q": Q.half(), "k_cache": K.half(), "v_cache": K.half(), "lengths": L, "window": 1}


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"lengths": L.float()}, TypeError, "lengths must be an integer tensor"),
        ({"lengths": L[:1]}, ValueError, r"lengths must have shape \[2\]"),
        ({"window": True}, TypeError, "window"),
        ({"window": 1.0}, TypeError, "window must be an integer"),
        ({"sinks": 0.0}, TypeError, "sinks must be an integer"),
        ({"window": None, "sinks": 4}, ValueError, "sinks must be at least 0 and go with a window"),
        ({"q": H["q"].clone().requires_grad_()}, ValueError, "must not require gradients"),
        ({"k_cache": H["k_cache"].to_sparse()}, TypeError, "k"),
    ],
)
def test_what_is_refused_is_refused_where_a_call_like_it_is_prepared(given, error, message):
    attention_with_cache(**H, backend="triton")
    with pytest.raises(error, match=message):
        attention_with_cache(**H | given, backend="triton")


def test_queries_and_tables_that_are_copied_first_are_right_when_repeated():
    q = torch.randn(16, 1, 4, 2).half().permute(3, 2, 1, 0)
    k, v = torch.randn(2, 2, 2, 64, 16).half()
    (k_pages, v_pages), table = PLAIN.in_pages(k, v)
    strided = torch.stack([table, -table], dim=-1)[..., 0]
    expected = attention_with_cache(q.contiguous(), k, v, L, backend="triton")
    for _ in range(2):
        assert torch.equal(attention_with_cache(q, k, v, L, backend="triton"), expected)
        found = attention_with_cache(q, k_pages, v_pages, L, block_table=strided, backend="triton")
        assert torch.equal(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_queries_or_sequences_the_result_is_empty(backend):
    mask = masks.causal(64, block=16)
    for q, k, arguments in (
        (Q[:, :, :0], K, {"lengths": L, "mask": mask}),
        (Q[:0], K[:0], {"lengths": L[:0], "mask": mask}),
        (Q[:0], K, {"lengths": L[:0], "block_table": T[:0]}),
    ):
        assert attention_with_cache(q, k, k, **arguments, backend=backend).shape == q.shape


@given(SEEDS, st.integers(1, 12), st.integers(1, 128))
@example(0, 9, 128)
@example(0, 1, 400)
def test_the_chosen_pages_have_the_highest_bounds_and_the_newest_is_one(seed, k, length):
    g = generator(seed)
    q, cache = torch.randn(1, 4, 1, 8, generator=g), torch.randn(1, 2, 128, 8, generator=g)
    of_pages = cache.unflatten(2, (-1, 16))
    low, high = of_pages.amin(3), of_pages.amax(3)
    pages = choose_pages(q, low, high, torch.tensor([length]), k=k, page=16)
    newest = min((length - 1) // 16, 7)
    assert pages.shape == (1, 2, k) and pages.dtype == torch.int32
    for head in range(2):
        bounds = torch.maximum(
            q[0, 2 * head : 2 * head + 2] * low[0, head], q[0, 2 * head : 2 * head + 2] * high[0, head]
        )
        bounds = bounds.sum(-1).amax(0)[:newest].tolist()
        want = [newest, *sorted(range(newest), key=lambda j: -bounds[j])][:k]
        got = pages[0, head]
        assert sorted(got[got >= 0].tolist()) == sorted(want)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q": Q[0]}, ValueError, r"q must have shape \[batch, heads, tokens, head dim\]"),
        ({"q": Q.half()}, TypeError, r"q, k_cache and v_cache must have one dtype; got torch\.float16"),
        ({"q": Q.clone().requires_grad_()}, ValueError, r"must not require gradients: .* no backward"),
        ({"k_cache": K.mT.contiguous().mT}, ValueError, r"k_cache must be contiguous in its last dimension"),
        ({"lengths": [3, 4]}, TypeError, r"lengths must be an integer tensor; got list\. Keep one number for each"),
        ({"lengths": 3}, TypeError, r"got int\. .* torch\.tensor\(\[700, \.\.\.\], device=q\.device\)"),
        ({"lengths": L.float()}, TypeError, r"lengths must be an integer tensor; got torch\.float32"),
        ({"k_cache": K.transpose(1, 2), "v_cache": K.transpose(1, 2)}, ValueError,
         r"got 4 and 64\. If a tensor is \[batch, tokens, heads, head dim\], pass its transpose\(1, 2\)"),
        ({"sink": 4}, TypeError, r"sink must not be given to .*: pass sinks=, .* scores=scores\.sink\(logits\)"),
        ({"page_table": T}, TypeError, r"page_table must not be given to attention_with_cache: it is called block_"),
        ({"k": K, "v": K}, TypeError, r"k must not be given to .*: write the new keys into k_cache before the call"),
        ({"lengths": L[:1]}, ValueError, r"lengths must have shape \[2\]; got \[1\]"),
        ({"lengths": L[None]}, ValueError, r"lengths must have 1 dimensions; got \[1, 2\]"),
        ({"lengths": L.to("meta")}, ValueError, r"lengths must be on q's device cpu; got meta"),
        ({"starts": L[:1]}, ValueError, r"starts must have shape \[2\]; got \[1\]"),
        ({"block_table": T[:1]}, ValueError, r"block_table must have shape \[2, 4\]; got \[1, 4\]"),
        ({"block_table": T, "v_cache": K[:1]}, ValueError, r"must have equally many pages; got 2 and 1"),
        ({"block_table": T, "k_cache": K[:0], "v_cache": K[:0]}, ValueError, r"must have at least 1 page; got 0"),
        ({"lengths": L.to_sparse()}, TypeError, r"lengths must be a dense tensor; .* layout torch\.sparse_coo"),
        ({"window": 0}, ValueError, r"window must be at least 1 key; got 0"),
        ({"sinks": 4}, ValueError, r"sinks must be at least 0 and go with a window; got 4 and window None"),
        ({"block_table": T, "page": 32}, ValueError, r"page must be the page size of the cache, 64 tokens; got 32"),
        ({"pages": P}, ValueError, r"page must be given with pages of a contiguous cache.*; got None"),
        ({"page": 16}, ValueError, r"page must be given with pages of a contiguous cache.*; got 16"),
        ({"pages": P, "page": 0}, ValueError, r"page must be at least 1 token; got 0"),
        ({"pages": P[:, :1], "page": 16}, ValueError, r"pages must have shape \[2, 2, 3\]; got \[2, 1, 3\]"),
        ({"pages": P, "page": 16, "mask": masks.causal(64)}, ValueError, r"pages must not be given with a mask"),
        ({"mask": K}, TypeError, r"mask must be a sparseflash BlockMask; got torch\.Tensor"),
        ({"mask": masks.causal(63)}, ValueError, r"queries and keys as the cache has room for, 64; it has 63"),
        ({"mask": masks.causal(1, 64)}, ValueError, r"has 1 and 64\. Its row p is .* p, as in masks\.causal\(64\)"),
        ({"mask": masks.causal(64).with_lengths([3, 4])}, ValueError, r"mask must have no lengths of its own"),
        ({"mask": masks.per_head([masks.causal(64)] * 3)}, ValueError, r"and 1, 2 or 4 heads; it is for \[1, 3\]"),
        ({"q": Q.expand(2, 4, 17, 16), "mask": masks.causal(64, block=16)}, ValueError, r"at most 16 tokens.*got 17"),
        ({"scores": scores.bias(torch.zeros(1, 4, 2, 64)), "q": Q.expand(2, 4, 2, 16)}, ValueError,
         r"scores with a cache must be of temperature, .* key_bias and sink; got bias\. Use attention with the keys"),
        ({"scores": scores.function(lambda score, b, h, q, k: score)}, ValueError, r"a cache must be .*; got function"),
        ({"scores": scores.relative_2d(torch.zeros(4, 15, 15), 8, 8)}, ValueError, r"; got relative_2d or relative_3d"),
        ({"scores": scores.key_bias(torch.zeros(1, 1, 63))}, ValueError, r"key_bias must have shape .*\[2, 4, 64\]"),
        ({"scores": scores.alibi(torch.zeros(4, requires_grad=True))}, ValueError,
         r"the tensors of scores must not require gradients: attention_with_cache has no backward"),
        ({"splits": 0}, ValueError, r"splits must be at least 1; got 0"),
        ({"backend": "blockwise"}, ValueError, r"backend must be one of 'triton', 'reference', or None; got 'block"),
    ],
)  # fmt: skip
def test_what_is_refused_and_why(arguments, error, message):
    with pytest.raises(error, match=message):
        attention_with_cache(**({"q": Q, "k_cache": K, "v_cache": K, "lengths": L} | arguments))


def test_double_precision_is_for_the_reference():
    with pytest.raises(TypeError, match=r"q must be fp16, bf16 or fp32 for the triton backend; got fp64"):
        attention_with_cache(Q.double(), K.double(), K.double(), L, backend="triton")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q": Q[0]}, ValueError, r"q must have shape \[batch, heads, tokens, head dim\]; got \[4, 1, 16\]"),
        ({"q": Q[:, :, :0]}, ValueError, r"q must have at least 1 token; got shape \[2, 4, 0, 16\]"),
        ({"q": Q[:, :0]}, ValueError, r"q must have at least 1 head; got shape \[2, 0, 1, 16\]"),
        ({"q": [1.0]}, TypeError, r"q must be a tensor; got list"),
        ({"q": Q.int()}, TypeError, r"q must have a floating dtype .*; got torch\.int32"),
        ({"k_min": 3}, TypeError, r"k_min must be a tensor; got int"),
        ({"k_max": K.to_sparse()}, TypeError, r"k_max must be a dense tensor; .* layout torch\.sparse_coo"),
        ({"k_max": K.int()}, TypeError, r"k_max must have a floating dtype .*; got torch\.int32"),
        ({"k_max": K[..., :8]}, ValueError, r"k_min and k_max must have shape \[2, Hkv, pages, 16\]; got \[2, 2, 64"),
        ({"k_min": K.to("meta"), "k_max": K.to("meta")}, ValueError, r"k_min must be on q's device cpu; got meta"),
        ({"q": Q[:, :3]}, ValueError, r"query heads must be a multiple of the number of key heads; got 3 and 2"),
        ({"lengths": [3, 4]}, TypeError, r"lengths must be an integer tensor; got list"),
        ({"lengths": L.float()}, TypeError, r"lengths must be an integer tensor; got torch\.float32"),
        ({"lengths": L[:1]}, ValueError, r"lengths must have shape \[2\]; got \[1\]"),
        ({"lengths": L[:, None]}, ValueError, r"lengths must have 1 dimensions; got \[2, 1\]"),
        ({"lengths": L.to("meta")}, ValueError, r"lengths must be on q's device cpu; got meta"),
        ({"k": 0}, ValueError, r"k must be at least 1 page; got 0"),
        ({"k": 1.5}, TypeError, r"k must be an integer number of pages; got 1\.5"),
        ({"page": 0}, ValueError, r"page must be at least 1 token; got 0"),
        ({"page": 16.0}, TypeError, r"page must be an integer number of tokens; got 16\.0"),
    ],
)  # fmt: skip
def test_pages_are_chosen_by_what_fits_alone(arguments, error, message):
    with pytest.raises(error, match=message):
        choose_pages(**({"q": Q, "k_min": K, "k_max": K, "lengths": L, "k": 1, "page": 16} | arguments))


# ---------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_the_gpu_is_exact(dtype, dim):
    g = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(2, 16, 2, dim, generator=g, device="cuda").to(dtype)
    k, v = (torch.randn(2, 2, 3000, dim, generator=g, device="cuda").to(dtype) for _ in range(2))
    case = Case((3000, 1111), (16, 2), 2, 3000, None, (500, 7), 0, 16, False, None, None, dtype, dim, 0)
    mask = BlockMask.from_dense(case.live(), block=16).to("cuda")
    lengths = torch.tensor(case.lengths, device="cuda")

    def decoded(q, k, v):
        return attention_with_cache(q.detach(), k.detach(), v.detach(), lengths, return_lse=True, window=500, sinks=7)

    testing.assert_exact(decoded, q, k, v, mask, gradients=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "kinds",
    [["alibi"], ["softcap"], ["sink"], ["temperature"], ["relative"], ["key_bias"], ["softcap", "log_decay", "relative",
     "key_bias", "sink"]],
    ids=" ".join,
)  # fmt: skip
def test_the_gpu_is_exact_with_score_modifications(dtype, kinds):
    case = Case((3000, 1111), (16, 2), 2, 3000, None, (500, 7), 0, 16, False, None, None, dtype, 16, 0)
    q, k = (torch.randn(2, heads, n, 16, generator=generator(0)).to(dtype) for heads, n in ((16, 2), (2, 3000)))
    changes, _ = changes_of(kinds, case, dtype)
    changes = changes.with_tensors([x.cuda() for x in changes.tensors()])
    lengths = torch.tensor(case.lengths, device="cuda")
    out, lse = attention_with_cache(
        q.cuda(), k.cuda(), k.cuda(), lengths, window=500, sinks=7, scores=changes, return_lse=True
    )
    truth, plain = by_formula(kinds, case, q.double(), k.double(), k.double()), by_formula(kinds, case, q, k, k)
    assert testing.compare_results({"out": out.cpu(), "lse": lse.cpu()}, truth, plain, magnitudes={"lse": 16.0}).exact


@pytest.mark.gpu
@pytest.mark.parametrize("block_k", [16, 32, 128])
def test_the_gpu_reads_the_bits_of_a_mask(block_k):
    g = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(2, 8, 2, 64, generator=g, device="cuda").half()
    k, v = (torch.randn(2, 2, 1000, 64, generator=g, device="cuda").half() for _ in range(2))
    case = Case((1000, 333), (8, 2), 2, 1000, None, (100, 0), 0, 16, False, None, None, torch.float16, 64, 0)
    mask = BlockMask.from_dense(case.live(), block=16).to("cuda")
    own = masks.local(1000, window=100, causal=True, block=(16, block_k)).to("cuda")
    lengths = torch.tensor(case.lengths, device="cuda")

    def decoded(q, k, v):
        return attention_with_cache(q.detach(), k.detach(), v.detach(), lengths, return_lse=True, mask=own)

    testing.assert_exact(decoded, q, k, v, mask, gradients=False)


@pytest.mark.gpu
def test_a_graph_is_replayed_while_the_cache_grows():
    g = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(2, 8, 1, 128, generator=g, device="cuda").half()
    k, v = (torch.randn(2, 2, 4096, 128, generator=g, device="cuda").half() for _ in range(2))
    (k_pages, v_pages) = (x.unflatten(2, (64, 64)).transpose(1, 2).flatten(0, 1).contiguous() for x in (k, v))
    table = torch.arange(128, device="cuda", dtype=torch.int32).view(2, 64)
    lengths, pages = torch.tensor([1, 5], device="cuda"), torch.zeros(2, 2, 8, dtype=torch.int32, device="cuda")
    changes = scores.softcap(30.0) + scores.alibi(torch.rand(8, device="cuda"))
    changes = changes + scores.sink(torch.zeros(8, device="cuda"))
    changes = changes + scores.relative(torch.randn(8, 32, device="cuda"), scores.t5_buckets())

    def step():
        return (
            attention_with_cache(q, k, v, lengths),
            attention_with_cache(q, k_pages, v_pages, lengths, block_table=table, window=256, sinks=4),
            attention_with_cache(q, k_pages, v_pages, lengths, block_table=table, pages=pages),
            attention_with_cache(q, k_pages, v_pages, lengths, block_table=table, scores=changes),
        )

    def grow(to):
        lengths.copy_(torch.tensor(to))
        pages.copy_(torch.randint(-1, 64, pages.shape, generator=generator(to[1])))

    assert_replays_as_called(step, grow, [(70, 64), (4096, 3000), (4096, 1)])

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from hypothesis import strategies as st

from sparseflash import BlockMask, attention, scores, testing
from sparseflash.backends.triton.alignment import with_aligned_rows
from sparseflash.scores.change import Scores
from sparseflash.testing.comparison import compare_with_draws
from tests.compared.exactness import plain, score_magnitude
from tests.drawn.masks import Recipe
from tests.drawn.problems import Problem, problems

KINDS = (
    "alibi", "log_decay", "t5", "clipped", "grid", "bias", "pair bias", "key_bias", "softcap", "sink", "temperature",
    "query temperature", "tile bias",
)  # fmt: skip
FUNCTIONS = ("function of places", "function of tables", "function of scores")
SHARDED = tuple(kind for kind in KINDS if kind != "tile bias")
SAME_KIND = ({*FUNCTIONS}, {"alibi", "log_decay"}, {"t5", "clipped", "grid"}, {"bias", "pair bias"},
             {"temperature", "query temperature"})  # fmt: skip


def of_places(score, b, h, q, k, gain, shift, slope):
    return torch.where(q % 3 == 1, score * gain[h], score) + shift[q, b] * score.sigmoid() + slope[h, k]


def of_tables(score, b, h, q, k, table, pairs, kinds):
    return score + table[h, (k - q).clamp(-3, 3) + 3] * score.sin() + pairs[0, k, q] + table[h // 2, kinds[k]]


def of_scores(score, b, h, q, k):
    return 3 * torch.tanh(score / 3) - 0.1 * (q - k).abs() + torch.where(k > q, 0.5 * score, -score.square() / 8)


@dataclass(frozen=True)
class Scored:
    problem: Problem
    kinds: tuple[str, ...]
    shared: bool = False
    half: bool = False  # the tensors have the problem's dtype, not fp32
    fixed: tuple[str, ...] = ()
    own: tuple[str, ...] = ()

    @property
    def dtype(self):
        return torch.float32 if not self.half and self.problem.dtype != torch.float64 else self.problem.dtype

    @cached_property
    def mask(self):
        if self.problem.mask is None and "tile bias" in self.kinds:
            return BlockMask.dense(self.problem.q_len, self.problem.k_len, block=16)
        return self.problem.mask

    def tiles(self, drawn, device):
        p, mask = self.problem, self.mask.to(device)
        shape = [(1, p.heads), (p.batch, 1), (1, 1), (p.batch, p.heads)][3 if "tile bias" in self.own else p.seed % 4]
        return scores.tile_bias(drawn(*shape, len(mask.indices), mask.block_q, mask.block_k), mask)

    def changes(self, device, dtype):
        p, made, learned = self.problem, [], []
        generator = torch.Generator().manual_seed(p.seed + 1)

        def drawn(*shape, low=None, aligned=False):
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            x = x if low is None else x.abs() + low
            if self.half:
                x = x.to(p.dtype)
            x = x.to(device, dtype)
            x = with_aligned_rows(x).copy_(x) if aligned else x
            if kind not in self.fixed:
                learned.append(x.requires_grad_())
            return x

        batch, heads = (1, p.heads) if self.shared else (p.batch, 1)
        for kind in self.kinds:
            made.append(
                {
                    "alibi": lambda: scores.alibi(drawn(p.heads)),
                    "log_decay": lambda: scores.log_decay(drawn(p.heads)),
                    "t5": lambda: scores.relative(drawn(p.heads, 8), scores.t5_buckets(8, 20)),
                    "clipped": lambda: scores.relative(drawn(p.heads, 11), scores.clipped(5)),
                    "grid": lambda: (
                        scores.relative_2d(
                            drawn(p.heads, 5, 7),
                            3,
                            4,
                            cells=torch.arange(p.q_len) * 5 % 12 if p.q_len == p.k_len else None,
                        )
                        if p.q_len == p.k_len
                        else scores.relative(drawn(p.heads, 3), scores.clipped(1))
                    ),
                    "bias": lambda: scores.bias(drawn(batch, heads, p.q_len, 1 if p.seed % 3 == 0 else p.k_len)),
                    "pair bias": lambda: scores.bias(drawn(p.batch, p.heads, p.q_len, p.k_len)),
                    "aligned bias": lambda: scores.bias(
                        drawn(*((batch, heads) if self.shared else (p.batch, p.heads)), p.q_len, p.k_len, aligned=True)
                    ),
                    "key_bias": lambda: scores.key_bias(drawn(batch, heads, p.k_len)),
                    "tile bias": lambda: self.tiles(drawn, device),
                    "softcap": lambda: scores.softcap(1.5),
                    "sink": lambda: scores.sink(drawn(p.heads)),
                    "function of places": lambda: scores.function(
                        of_places, drawn(p.heads), drawn(p.q_len, p.batch), drawn(p.heads, p.k_len)
                    ),
                    "function of tables": lambda: scores.function(
                        of_tables,
                        drawn(p.heads, 7),
                        drawn(1, p.k_len, p.q_len),
                        torch.arange(p.k_len, device=device) % 3,
                    ),
                    "function of scores": lambda: scores.function(of_scores),
                    "temperature": lambda: scores.temperature(drawn(p.heads, low=0.5)),
                    "query temperature": lambda: scores.temperature(drawn(batch, heads, p.q_len, low=0.5)),
                }[kind]()
            )
        return sum(made[1:], start=Scores((made[0],))), learned


# One key has 0.994 of the weight of a query. Its gradient is a small difference of large numbers.
ALMOST_ALL_WEIGHT_ON_ONE_KEY = Scored(
    Problem(
        Recipe(
            "from_dense",
            {"q_len": 63, "k_len": 63, "block": (16, 16), "patterns": [["full"]], "heads": [[0]], "holes": "none",
             "seed": 0},
        ),
        batch=1, heads=4, kv_heads=2, q_len=63, k_len=63, dim=16, v_dim=16, dtype=torch.float32, scale=1.0,
        layout="contiguous", seed=1, dropout_p=0.3,
    ),
    ("function of scores", "query temperature", "t5"),
)  # fmt: skip


@st.composite
def scored(draw, *, kinds=(*KINDS, *FUNCTIONS), always=None, **arguments):
    if always is None:
        chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3, unique=True))
    else:
        others = [kind for kind in kinds if kind != always]
        chosen = [always, *draw(st.lists(st.sampled_from(others), max_size=2, unique=True))]
    for group in SAME_KIND:
        first = next((kind for kind in chosen if kind in group), None)
        chosen = [kind for kind in chosen if kind == first or kind not in group]
    return Scored(draw(problems(**arguments)), tuple(chosen), draw(st.booleans()), draw(st.booleans()))


def results(case, backend, device="cpu", dtype=None):
    problem = case.problem
    q, k, v, dout, dlse = problem.tensors(device)
    if dtype is not None:
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
        dout, dlse = dout.to(dtype), dlse.to(torch.promote_types(dtype, torch.float32))
    changes, learned = case.changes(device, dtype or case.dtype)
    mask = case.mask if case.mask is None else case.mask.to(device)
    out, lse = attention(
        q, k, v, mask, scale=problem.scale, return_lse=True, dropout_p=problem.dropout_p, seed=problem.seed,
        scores=changes, backend=backend,
    )  # fmt: skip
    found = torch.autograd.grad((out, lse), (q, k, v, *learned), (dout, dlse))
    names = ("dq", "dk", "dv", *(f"d{number}" for number in range(len(learned))))
    return {"out": out, "lse": lse, **dict(zip(names, found, strict=True))}


def plain_draws(case, device, truth):
    problem = case.problem
    dtype, factor = testing.plain_dtype(problem.dtype)
    seeds = range(problem.seed, problem.seed + testing.draws_for(1, 1, learned=True))
    draws = [replace(case, problem=replace(problem, seed=seed, dtype=dtype)) for seed in seeds]

    def true(draw):
        return truth if draw == case else results(draw, "reference", device, torch.float64)

    def rounded(draw):
        with plain():
            return results(draw, "reference", device)

    return ((rounded(draw), true(draw)) for draw in draws), factor


def check(case, backend, device="cpu"):
    with np.errstate(over="ignore", invalid="ignore"):
        got = results(case, backend, device)
    check_results(case, got, device)


def check_results(case, got, device="cpu", magnitudes=None):
    truth = results(case, "reference", device, torch.float64)
    # Added numbers may be larger than the products.
    magnitudes = {"lse": 4.0 + score_magnitude(case.problem), **(magnitudes or {})}
    draws, factor = plain_draws(case, device, truth)
    found = compare_with_draws(got, truth, draws, factor, magnitudes=magnitudes, enough=1.0)
    assert found.exact, f"every error must be at most what is allowed; got\n{found}"

"""Rules of batch element and head as people write them, for single numbers; and their meaning."""

import functools
import itertools
import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import and_masks, or_masks

BATCH, HEADS = 3, 4


@dataclass(frozen=True)
class Data:
    seed: int
    length: int

    def __getattr__(self, name):
        """By name, so that a drawn case shows its contents."""
        generator, n = torch.Generator().manual_seed(self.seed), self.length
        made = {
            "docs": lambda: torch.randint(3, (BATCH, n), generator=generator),
            "table": lambda: torch.rand(HEADS, n, n, generator=generator) < 0.5,
            "both": lambda: torch.rand(BATCH, HEADS, n, n, generator=generator) < 0.5,
            "lens": lambda: torch.randint(n + 1, (BATCH, 2), generator=generator),
            "widths": lambda: torch.randint(1, n + 1, (HEADS,), generator=generator),
            "some": lambda: torch.randperm(HEADS, generator=generator)[:2],
            "labels": lambda: torch.rand(n, 4, generator=generator) < 0.4,
            "points": lambda: torch.randint(4, (n, 2), generator=generator),
            "starts": lambda: torch.randint(n, (BATCH, 4), generator=generator).sort(1).values,
        }.get(name)
        if made is None:
            raise AttributeError(name)
        return made()


def data_rules(data):
    """Rules by name, each of `(b, h, q, k)`, that torch.vmap can call for many b, h, q and k at once."""
    docs, table, both, lens, widths = data.docs, data.table, data.both, data.lens, data.widths
    some, labels, points, starts = data.some, data.labels, data.points, data.starts
    tables = list(table)

    def unpacked(b, h, q, k):
        start, end = lens[b]
        return (k >= start) & (q >= end)

    def coordinates(b, h, q, k):
        (x, y), (u, v) = points[q], points[k]
        return (x - u).abs() + (y - v).abs() <= h

    def by_default(b, h, q, k, own=widths):
        return (q - k).abs() < own[h]

    class Rule:
        def __call__(self, b, h, q, k):
            return (q - k < widths[h]) | (k == b)

    return {
        "docs[b][q]": lambda b, h, q, k: docs[b][q] == docs[b][k],
        "docs[b, q]": lambda b, h, q, k: docs[b, q] == docs[b, k],
        "docs[b].take(q)": lambda b, h, q, k: docs[b].take(q) == docs[b].take(k),
        "docs.T[q, b]": lambda b, h, q, k: docs.T[q, b] == docs.mT[k][b],
        "docs[:, q][b]": lambda b, h, q, k: docs[:, q][b] == docs[..., k][b],
        "docs[b, :][q]": lambda b, h, q, k: docs[b, :][q] <= docs[b][None, k][0],
        "table[h][q, k]": lambda b, h, q, k: table[h][q, k],
        "table[h, q, k]": lambda b, h, q, k: table[h, q, k],
        "table[h][q][k]": lambda b, h, q, k: table[h][q][k],
        "table[h, q][k]": lambda b, h, q, k: table[h, q][k],
        "table[h, :, k][q]": lambda b, h, q, k: table[h, :, k][q],
        "both[b, h][q, k]": lambda b, h, q, k: both[b, h][q, k],
        "both[b][h][q][k]": lambda b, h, q, k: both[b][h][q][k],
        "both[b, 0, q, k]": lambda b, h, q, k: both[b, 0, q, k] | both[0, h, -1, k],
        "stack(list)[h][q, k]": lambda b, h, q, k: torch.stack(tables)[h][q, k],
        "lens[b][0]": lambda b, h, q, k: k < lens[b][0],
        "lens[b].max()": lambda b, h, q, k: (k < lens[b].max()) & (q >= lens[b, 1]),
        "start, end = lens[b]": unpacked,
        "(h == some).any()": lambda b, h, q, k: (h == some).any() | (k <= q),
        "h in some": lambda b, h, q, k: (h == some[0]) | (h == some[1]) & (b > 0),
        "where(h == 1)": lambda b, h, q, k: torch.where(h == 1, k <= q, (k + b) % 2 == 0),
        "widths[h]": lambda b, h, q, k: q - k < widths[h],
        "widths[h % 2]": lambda b, h, q, k: (q - k).abs() < widths[h % 2] + b,
        "1 << h": lambda b, h, q, k: (q - k).abs() < 1 << h,
        "(labels[q] & labels[k]).any()": lambda b, h, q, k: (labels[q] & labels[k]).any() | (k == h),
        "labels[q] @ labels[k]": lambda b, h, q, k: labels[q].double() @ labels[k].double() > b,
        "x, y = points[q]": coordinates,
        "bucketize": lambda b, h, q, k: torch.bucketize(q, starts[b]) == torch.bucketize(k, starts[b]),
        "searchsorted": lambda b, h, q, k: torch.searchsorted(starts[b], q, right=True) >= h,
        "(starts[b] <= q).sum()": lambda b, h, q, k: (starts[b] <= q).sum() == (starts[b] <= k).sum(),
        "default": by_default,
        "partial": functools.partial(lambda own, b, h, q, k: own[h][q, k], table),
        "object": Rule(),
        "and_masks": and_masks(lambda b, h, q, k: k <= q, lambda b, h, q, k: docs[b][q] == docs[b][k]),
        "or_masks": or_masks(lambda b, h, q, k: table[h][q, k], lambda b, h, q, k: q == k),
        "of neither": lambda b, h, q, k: k <= q,
        "of no number": lambda b, h, q, k: torch.tensor(True),
    }


def python_rules(data):
    """Rules that read b and h, or answer, in Python; and operations that torch.vmap cannot call."""
    docs, table, widths, some = data.docs, data.table, data.widths, data.some
    tables, numbers = list(table), widths.tolist()

    def branches(b, h, q, k):
        if h == 1:
            return k <= q
        return q - k < widths[h] if b > 0 else docs[b, k] == 0

    def caught(b, h, q, k):
        try:
            return (q - k).abs() < [3, 1][h]
        except IndexError:
            return k <= q

    return {
        "list[h]": lambda b, h, q, k: tables[h][q, k],
        "numbers[int(h)]": lambda b, h, q, k: q - k < numbers[int(h)],
        "h.item()": lambda b, h, q, k: (q - k).abs() < h.item() + 1,
        "h.tolist()": lambda b, h, q, k: (q - k).abs() <= h.tolist(),
        'f"{h}"': lambda b, h, q, k: (q - k) % 3 < {"0": 1, "1": 2}.get(f"{h}", 3),
        "if h == 1": branches,
        "h in (0, 2)": lambda b, h, q, k: (k <= q) if h in (0, 2) else (k >= q),
        "max(b, h)": lambda b, h, q, k: (q - k).abs() <= max(b, h),
        "math.sqrt(h)": lambda b, h, q, k: (q - k).abs() <= math.sqrt(h),
        "range(h)": lambda b, h, q, k: sum((q - k == n for n in range(h)), q == k),
        "docs.numpy()[b]": lambda b, h, q, k: torch.from_numpy(docs.numpy()[b])[q] == 0,
        "docs[b:]": lambda b, h, q, k: docs[b:][0][q] == docs[b:][0, k],
        "try": caught,
        "True": lambda b, h, q, k: True,
        "bool(b)": lambda b, h, q, k: bool(b),
        "isin": lambda b, h, q, k: torch.isin(h, some) | (k <= q),
        "isin(q)": lambda b, h, q, k: torch.isin(q, docs[b]) | (k < h),
        "index_select": lambda b, h, q, k: docs.index_select(0, b.view(1))[0][q] == h,
        "select": lambda b, h, q, k: table.select(0, h)[q, k],
    }  # fmt: skip


@st.composite
def spelled(draw, length, python=True):
    data = Data(draw(st.integers(0, 999)), length)
    mapped = data_rules(data)
    rules = mapped | (python_rules(data) if python else {})
    name = draw(st.sampled_from(sorted(rules)))
    rule, others = rules[name], draw(st.sampled_from([None, None, *sorted(rules)]))
    how = draw(st.sampled_from(["and", "or", "by head"] if python else ["and", "or"]))
    if others is not None:
        other = rules[others]
        joined = {
            "and": lambda b, h, q, k: rule(b, h, q, k) & other(b, h, q, k),
            "or": lambda b, h, q, k: rule(b, h, q, k) | other(b, h, q, k),
            "by head": lambda b, h, q, k: rule(b, h, q, k) if h % 2 == 0 else other(b, h, q, k),
        }
        is_mapped = name in mapped and others in mapped and how != "by head"
        return Spelled(f"{name} {how} {others} of {data}", joined[how], is_mapped)
    return Spelled(f"{name} of {data}", rule, name in mapped)


class Spelled:
    def __init__(self, name, rule, is_mapped):
        self.name, self.rule, self.is_mapped = name, rule, is_mapped

    def __call__(self, b, h, q, k):
        return self.rule(b, h, q, k)

    def __repr__(self):
        return self.name


def by_numbers(rule, *sizes):
    places = itertools.product(*(torch.arange(n) for n in sizes))
    return torch.stack([torch.as_tensor(rule(*place)) for place in places]).view(sizes)

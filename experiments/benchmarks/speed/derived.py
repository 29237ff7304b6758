"""Numbers derived from the times: efficiency relative to the ideal, the cost of small blocks, the best peer, memory per
token.

Every function takes the rows of any number of runs and compares only within a run. If several runs measured the same,
the newest is kept.
"""

from __future__ import annotations

import pandas as pd

from experiments.benchmarks.speed.cases import MEMORY, WAYS
from experiments.benchmarks.speed.frame import CASE, SETUP, timed
from experiments.benchmarks.speed.memory import floor_mib
from experiments.benchmarks.speed.rows import OK, OURS

# The least speed per live score, relative to blocks of 128.
BLOCK_TARGETS = {64: 0.85, 32: 0.6, 16: 0.4}
FIRST_CALL_TARGET_S = 3.0
# Memory counts as linear if, per token, it grows by at most this factor from the shortest length to the longest.
LINEAR = 1.1
# Not a peer, but what peers are tested against.
NO_RIVAL = ("reference",)


def _newest(rows: pd.DataFrame, key: list[str]) -> pd.DataFrame:
    return rows.sort_values("run", kind="stable").drop_duplicates(key, keep="last").sort_index()


def efficiency(rows: pd.DataFrame) -> pd.DataFrame:
    """time(mask) / (density x time(dense)) in the column `efficiency`, 1 is ideal, for every sparse mask that was timed
    beside a dense one of the same setup. Causal does not count as a sparse mask here.
    """
    key = ["run", "group", *SETUP, "peer", "direction"]
    found = timed(rows)
    found = found[found["direction"].isin(WAYS)]
    dense = found.loc[found["mask"] == "dense", [*key, "ms"]].drop_duplicates(key).rename(columns={"ms": "dense_ms"})
    pairs = found[found["mask"] != "dense"].merge(dense, on=key)
    pairs["efficiency"] = pairs["ms"] / (pairs["density"] * pairs["dense_ms"])
    return _newest(pairs, [*CASE, "peer", "direction"])


def per_live_score(rows: pd.DataFrame) -> pd.DataFrame:
    """The speed per live score over that under blocks of 128 in the column `speed`, with its `target`."""
    key = ["run", "group", "mask", *(name for name in SETUP if name != "block"), "peer", "direction"]
    found = timed(rows)
    found = found[(found["group"] == "blocks") & found["direction"].isin(WAYS)]
    whole = found.loc[found["block"] == 128, [*key, "tflops"]].rename(columns={"tflops": "tflops_128"})
    pairs = found[found["block"] != 128].merge(whole, on=key)
    pairs["speed"] = pairs["tflops"] / pairs["tflops_128"]
    pairs["target"] = pairs["block"].map(BLOCK_TARGETS)
    return _newest(pairs, [*CASE, "peer", "direction"])


def best_peers(rows: pd.DataFrame) -> pd.DataFrame:
    """Our rows with the fastest peer of the same case, pass and run: `best_peer`; `best_ratio`, its time over ours."""
    key = ["run", *CASE, "direction"]
    found = timed(rows)
    ours = found[found["peer"] == OURS]
    peers = found[(found["peer"] != OURS) & ~found["peer"].isin(NO_RIVAL)]
    fastest = peers.loc[peers.groupby(key)["ms"].idxmin(), [*key, "peer", "ms"]]
    fastest = fastest.rename(columns={"peer": "best_peer", "ms": "best_ms"})
    pairs = ours.merge(fastest, on=key)
    pairs["best_ratio"] = pairs["best_ms"] / pairs["ms"]
    return _newest(pairs, [*CASE, "direction"])


def memory(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the pass MEMORY with `floor`: the memory over that of q, k, v, the output and their gradients alone,
    and `growth`: the memory per token over that at the shortest length with the same mask, peer and run.
    """
    found = rows[(rows["direction"] == MEMORY) & (rows["status"] == OK) & rows["memory_mib"].notna()]
    found = _newest(found, [*CASE, "peer"]).copy()
    sizes = found[["batch", "heads", "kv_heads", "length", "head_dim", "dtype"]].itertuples(index=False)
    found["floor"] = found["memory_mib"] / [floor_mib(*size) for size in sizes]
    token = found["memory_mib"] / found["length"]
    series = ["run", "mask", *(name for name in SETUP if name != "length"), "peer"]
    shortest = found.assign(token=token).sort_values("length").groupby(series)["token"].transform("first")
    found["growth"] = token / shortest.reindex(found.index)
    return found

"""The tables of a report, as lists of lines of cells; the first line is the header. None if a table would be empty."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from experiments.benchmarks.speed import derived
from experiments.benchmarks.speed.cases import CALL, FIRST, FIRST_BACKWARD, FIRST_FORWARD, WAYS
from experiments.benchmarks.speed.frame import CASE
from experiments.benchmarks.speed.rows import OK, OURS, SKIPPED

Table = list[list[str]]

SHORT = {"forward": "f", "backward": "b", "both": "f+b"}
EFFICIENCY_MASKS = ("butterfly", "random12", "bigbird")
EFFICIENCY_LENGTH = 16384


def tokens(count: int) -> str:
    """16k for 16384, 1M for 1048576."""
    for unit, letter in ((2**20, "M"), (2**10, "k")):
        if count % unit == 0:
            return f"{count // unit}{letter}"
    return str(count)


def _setup(row: pd.Series) -> str:
    """Shape and dtype, abbreviated."""
    heads = f"{row['heads']}" if row["heads"] == row["kv_heads"] else f"{row['heads']}/{row['kv_heads']}"
    dtype = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(row["dtype"], row["dtype"])
    return f"{row['batch']}x{heads}x{tokens(row['length'])}x{row['head_dim']} {dtype}"


def _peers(rows: pd.DataFrame) -> list[str]:
    """The implementations that did more than refuse, ours first, in the order of the file."""
    shown = rows.loc[rows["status"] != SKIPPED, "peer"]
    return sorted(dict.fromkeys(shown), key=lambda peer: peer != OURS)


def _found(rows: pd.DataFrame) -> dict[tuple[str, str, str], pd.Series]:
    return {(row["case"], row["peer"], row["direction"]): row for _, row in rows.iterrows()}


def _cases(rows: pd.DataFrame) -> list[tuple[str, pd.Series]]:
    return [(str(row["case"]), row) for _, row in rows.drop_duplicates(CASE).iterrows()]


def _time(row: pd.Series | None) -> str:
    if row is None or row["status"] == SKIPPED:
        return "-"
    if row["status"] != OK or pd.isna(row["ms"]):
        return str(row["status"])
    return f"{row['ms']:.3f} ({row['tflops']:.0f})"


def _ratio(row: pd.Series | None) -> str:
    if row is None or row["status"] == SKIPPED:
        return "-"
    return f"{row['ratio']:.2f}" if row["status"] == OK and pd.notna(row["ratio"]) else str(row["status"])


def best(rows: pd.DataFrame) -> Table | None:
    """One line for each case: our milliseconds (TFLOP/s) and the fastest peer's time over ours."""
    rows = rows[rows["direction"].isin(WAYS)]
    if rows.empty:
        return None
    ways = [way for way in WAYS if way in set(rows["direction"])]
    found = _found(rows)
    rivals = {(row["case"], row["direction"]): row for _, row in derived.best_peers(rows).iterrows()}
    table = [["case", "shape", "density", "error", *(f"ours {SHORT[way]}" for way in ways)]]
    table[0] += [f"best peer {SHORT[way]}" for way in ways]
    for case, row in _cases(rows):
        ours = [found.get((case, OURS, way)) for way in ways]
        errors = [one["error"] for one in ours if one is not None and pd.notna(one["error"])]
        cells = [rivals.get((case, way)) for way in ways]
        table.append([
            case, _setup(row), "-" if pd.isna(row["density"]) else f"{row['density']:.2%}",
            f"{max(errors):.2f}" if errors else "-", *map(_time, ours),
            *("-" if cell is None else f"{cell['best_ratio']:.2f} {cell['best_peer']}" for cell in cells),
        ])  # fmt: skip
    return table


def ratios(rows: pd.DataFrame) -> Table | None:
    """One line for each case: the time of every peer over ours."""
    rows = rows[rows["direction"].isin(WAYS)]
    peers = [peer for peer in _peers(rows) if peer != OURS]
    if not peers:
        return None
    ways = [way for way in WAYS if way in set(rows["direction"])]
    found = _found(rows)
    table = [["case", *(f"{peer} {SHORT[way]}" for peer in peers for way in ways)]]
    for case, _ in _cases(rows):
        table.append([case, *(_ratio(found.get((case, peer, way))) for peer in peers for way in ways)])
    return table


def _by_peer(rows: pd.DataFrame, line: list[str], column: str, digits: int) -> tuple[list[str], Table]:
    """One line for each distinct `line`, one column for each peer. Returns the peers and the lines without a header."""
    peers = _peers(rows)
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for _, row in rows.iterrows():
        lines.setdefault(tuple(str(row[name]) for name in line), {})[row["peer"]] = f"{row[column]:.{digits}f}"
    return peers, [[*key, *(cells.get(peer, "-") for peer in peers)] for key, cells in lines.items()]


def efficiency(rows: pd.DataFrame) -> Table | None:
    """time(mask) / (density x time(dense)), 1 is ideal, at 16384 tokens."""
    found = derived.efficiency(rows)
    found = found[found["mask"].isin(EFFICIENCY_MASKS) & (found["length"] == EFFICIENCY_LENGTH) & (found["batch"] == 1)]
    if found.empty:
        return None
    peers, ways = _peers(found), [way for way in WAYS if way in set(found["direction"])]
    table = [["time / (density x dense)", "shape", *(f"{peer} {SHORT[way]}" for peer in peers for way in ways)]]
    for _, of_setup in found.groupby([*CASE], sort=False):
        values = of_setup.set_index(["peer", "direction"])["efficiency"]
        cells = [f"{values[peer, way]:.2f}" if (peer, way) in values else "-" for peer in peers for way in ways]
        table.append([of_setup["case"].iloc[0], _setup(of_setup.iloc[0]), *cells])
    return table


def blocks(rows: pd.DataFrame) -> Table | None:
    """The speed per live score with small mask blocks, over that with blocks of 128, beside the target."""
    found = derived.per_live_score(rows)
    if found.empty:
        return None
    ways = [way for way in WAYS if way in set(found["direction"])]
    table = [["speed per live score (1: blocks of 128)", "shape", "block", *(SHORT[way] for way in ways), "target", ""]]
    for (_, _, _, peer), of_setup in found.groupby(["head_dim", "mask", "block", "peer"], sort=False):
        first, values = of_setup.iloc[0], of_setup.set_index("direction")["speed"]
        name = first["mask"] if peer == OURS else f"{first['mask']}, {peer}"
        cells = [f"{values[way]:.2f}" if way in values else "-" for way in ways]
        target, verdict = "-", ""
        if pd.notna(first["target"]):
            target, verdict = f"{first['target']:.2f}", "met" if (values >= first["target"]).all() else "missed"
        table.append([name, _setup(first), str(first["block"]), *cells, target, verdict])
    return table


def memory(rows: pd.DataFrame) -> Table | None:
    """MiB at the peak of a forward and a backward, the ratio to what the tensors alone take, and whether memory per
    token grows with the length.
    """
    found = derived.memory(rows)
    if found.empty:
        return None
    peers = _peers(found)
    table = [["MiB (times q, k, v, output, gradients)", "shape", *peers]]
    for _, of_setup in found.groupby([*CASE], sort=False):
        cells = {row["peer"]: f"{row['memory_mib']:.0f} ({row['floor']:.2f})" for _, row in of_setup.iterrows()}
        table.append([of_setup["mask"].iloc[0], _setup(of_setup.iloc[0]), *(cells.get(peer, "-") for peer in peers)])
    for mask, of_mask in found.groupby("mask", sort=False):
        longest = of_mask.sort_values("length").groupby("peer").last()
        says = {
            peer: f"{'linear' if row['growth'] <= derived.LINEAR else 'not linear'} (x{row['growth']:.2f} a token)"
            for peer, row in longest.iterrows()
        }
        table.append([f"{mask}, shortest to longest", "", *(says.get(peer, "-") for peer in peers)])
    return table


def calls(rows: pd.DataFrame) -> Table | None:
    """Host microseconds of one inference call."""
    found = rows[(rows["direction"] == CALL) & (rows["status"] == OK)]
    if found.empty:
        return None
    found = found.assign(us=found["ms"] * 1e3)
    peers, lines = _by_peer(found, ["case", "length"], "us", 1)
    return [["microseconds a call", "tokens", *peers], *lines]


def first_calls(rows: pd.DataFrame) -> Table | None:
    """Seconds of the first calls of a new process with empty caches, beside the target."""
    found = rows[rows["direction"].isin(FIRST) & (rows["status"] == OK)]
    if found.empty:
        return None
    says = {FIRST_FORWARD: "inference", FIRST_BACKWARD: "then forward + backward"}
    peers, lines = _by_peer(found.assign(call=found["direction"].map(says)), ["case", "call"], "first_call_s", 2)
    target = derived.FIRST_CALL_TARGET_S
    for line in lines:
        if peers[0] == OURS and line[2] != "-":
            line[2] += " met" if float(line[2]) <= target else " missed"
    return [[f"first call, seconds (target {target:g})", "call", *peers], *lines]


def reasons(rows: pd.DataFrame) -> list[str]:
    """Why times are missing: one line for every implementation, status and reason, with the cases."""
    found = rows[rows["status"] != OK]
    lines = []
    for (peer, status, reason), group in found.groupby(["peer", "status", "reason"], sort=False):
        cases = list(dict.fromkeys(group["case"]))
        named = ", ".join(cases) if len(cases) <= 4 else f"{len(cases)} cases from {cases[0]} to {cases[-1]}"
        ways = list(dict.fromkeys(group["direction"]))
        lines.append(f"{peer} ({named}; {', '.join(ways)}): {status}: {reason}")
    return lines


def checks(rows: pd.DataFrame) -> list[str]:
    """What was compared with fp64, and in how many cases."""
    ours = rows[(rows["peer"] == OURS) & (rows["checked"] != "")].drop_duplicates(CASE)
    return [f"{checked} ({len(group)} cases)" for checked, group in ours.groupby("checked", sort=False)]


def plain(table: Sequence[Sequence[str]]) -> str:
    """Columns aligned with spaces."""
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines = []
    for line in table:
        cells = [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown(table: Sequence[Sequence[str]]) -> str:
    """A Markdown table with right-aligned numbers."""
    rule = ["---", *("---:" for _ in table[0][1:])]
    lines = [table[0], rule, *table[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)

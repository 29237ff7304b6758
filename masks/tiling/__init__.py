"""Helpers for building patterns: they list tiles and make their bits, never an `N x N` matrix.

A family checks its arguments, then passes its rule to the first of these helpers that can express it:

- **full tiles only, from a graph of blocks** (butterfly, BigBird, random): `listing.of_blocks`, edges in any order,
  one list a head, whole or cut to the causal triangle.
- **one interval of distances q - k** (causal, windows): `band.band`.
- **any set of distances** (dilated, strided, powers of two): `diagonals.diagonals`.
- **one run of keys for each query, and marked rows and columns** (documents, chunks, prefixes, sinks, global tokens):
  `spans.spans`.
- **on every axis of a grid a range of coordinates for each query** (neighbourhoods, Swin, sliding tiles), in any order
  of tokens: `ranges.within_ranges`.
- **anything else whose tiles are of few kinds**, if the pattern can list the tiles and name the kinds: `kinds.by_kind`
  evaluates one tile of each kind.
- **chosen at every step, on the device, without waiting for it**: `chosen.frame` and `chosen.dynamic_mask`.

If the tiles can be listed but all differ, `BlockMask.from_function(candidates=(rows, cols))` evaluates each one.
`sparseflash.masks.per_head` combines heads of different patterns.

These and the families share:

- `signatures.pattern`: decorates every family, so that lengths are given by position and everything else by name, and a
  mask that is built inside a function compiled by torch.compile is a constant.
- `arguments`: checks of numbers, lists, positions, square blocks; each raises "X must ...; got ...".
- `grid`: shapes, coordinates and orders of the tokens of images and video; blocks that are translates of one another.
- `listing.between`: the tiles of each block row from a first to a last column.
- `draws`: random choices that are the same on every machine.
- `sparseflash.blockmask`: `unique` numbers equal keys; `bitmask` packs and deduplicates bits.
"""

"""What the patterns are built with: helpers that list tiles and make their bits, never an `N x N` matrix.

A family checks its arguments, then hands the rule to the first of these that can say it:

- **full tiles only, from a graph of blocks** (butterfly, BigBird, random): `listing.of_blocks`, edges in any order,
  one list a head, whole or cut to the causal triangle.
- **one interval of distances q - k** (causal, windows): `band.band`.
- **any set of distances** (dilated, strided, powers of two): `diagonals.diagonals`.
- **one run of keys for each query, and marked rows and columns** (documents, chunks, prefixes, sinks, global tokens):
  `spans.spans`.
- **on every axis of a grid a range of coordinates for each query** (neighbourhoods, Swin, sliding tiles), in any order
  of tokens: `ranges.within_ranges`.
- **anything else whose tiles are of few kinds**, if the pattern can list the tiles and name the kinds: `kinds.by_kind`
  asks about one tile of each kind.
- **chosen at every step, on the device, without waiting for it**: `chosen.frame` and `chosen.dynamic_mask`.

Where tiles are listed but all differ, `BlockMask.from_function(candidates=(rows, cols))` asks about each one.
Heads of different patterns are put together by `sparseflash.masks.per_head`.

What these and the families share:

- `signatures.pattern`: decorates every family: lengths by position, everything else by name; a constant in what
  torch.compile compiles.
- `arguments`: checks of numbers, lists, positions, square blocks; each raises "X must ...; got ...".
- `grid`: shapes, coordinates and orders of the tokens of images and video; blocks of them that are translates.
- `listing.between`: the tiles from a first to a last column of each block row.
- `draws`: random choices that are the same on every machine.
- `sparseflash.blockmask`: `unique`, numbers for equal keys; `bitmask`, packing and deduplicating of bits.

May import `sparseflash.blockmask`. For the families and for `fused`.
"""

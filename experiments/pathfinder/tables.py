from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import grey_dilation

from experiments.pathfinder.geometry import SEED_ANGLES, circle, disc, move, reverse, turning_weight
from experiments.pathfinder.parameters import Parameters
from experiments.pathfinder.stamps import dash, markers, quantise

WEIGHT_UNIT = 2**20  # sums are exact in any order
SEEDS = len(SEED_ANGLES)


class Tables(NamedTuple):
    """The tables of snakes.py. A heading h is the direction of a dash: of 360 for the first of a snake, then of K.

    step       float64 [360 + K, 2]     from where the gap before a dash begins to where the next gap begins
    seed_head  float64 [360, 2]         from the tail of a first dash to its head
    seed_start float64 [360, 2]         from that head back to where the gap before the dash would begin
    turns      int64   [K, 2]           from where a gap begins to the head of the dash after it
    weights    int64   [360 + K, K]     of each turn after each heading, in units of 1 / WEIGHT_UNIT
    masks      int16   [360 + K, n, n]  surroundings of a dash, in units of 1 / UNIT, around its tail (first dashes)
                                        or its head (others)
    near_masks int16   [360 + K, n', n'] the largest value of a mask within the margin of each pixel; n' = n + 2 margin
    disc       int64   [m, 2]           pixels within the margin
    usable     bool    [360]            whether a snake can begin in this direction (see `seed_kernels`)
    room       int64   [360, 4]         first and last y, first and last x of the tails for a target's first dash
    kernel_of  int64   [361]            the pixels that must be free around the tail of a distractor's first dash are
    kernels    int64   [total, 2]       kernels[kernel_of[h]:kernel_of[h + 1]]
    """

    step: NDArray[np.float64]
    seed_head: NDArray[np.float64]
    seed_start: NDArray[np.float64]
    turns: NDArray[np.int64]
    weights: NDArray[np.int64]
    masks: NDArray[np.int16]
    near_masks: NDArray[np.int16]
    disc: NDArray[np.int64]
    usable: NDArray[np.bool_]
    room: NDArray[np.int64]
    kernel_of: NDArray[np.int64]
    kernels: NDArray[np.int64]


@lru_cache(maxsize=16)
def tables(parameters: Parameters, margin: int) -> Tables:
    turns = circle(parameters.dash_length + margin)
    headings = all_headings(turns)
    _, drawn = dashes(parameters, margin)
    kernels = seed_kernels(drawn[:SEEDS], parameters, margin)
    room = np.array([seed_room(kernel, parameters) for kernel in kernels])
    usable = np.array([seen_from_every_corner(kernel) for kernel in kernels])
    if not (usable & (room[:, 1] >= room[:, 0]) & (room[:, 3] >= room[:, 2])).any():
        raise ValueError(f"no target snake can begin within an image with {parameters} and margin {margin}")
    # The original counts a pixel above 1.3 as free again.
    if drawn.max() > 1.3:
        raise ValueError(f"the surroundings of a dash overshoot 1.3 with {parameters} and margin {margin}")
    weights = turning_weight(headings[:, None], headings[None, SEEDS:], parameters.continuity)
    near, masks = disc(margin), quantise(drawn)
    room_beside = np.pad(masks, [(0, 0), (margin, margin), (margin, margin)])
    return Tables(
        step=move(headings, parameters.dash_length + 2 * margin),
        seed_head=move(SEED_ANGLES, parameters.dash_length),
        seed_start=move(reverse(SEED_ANGLES), parameters.dash_length + margin),
        turns=turns,
        weights=np.rint(weights * WEIGHT_UNIT).astype(np.int64),
        masks=masks,
        near_masks=grey_dilation(room_beside, footprint=near[None]),
        disc=np.argwhere(near) - margin,
        usable=usable,
        room=room,
        kernel_of=np.cumsum([0, *map(len, kernels)]),
        kernels=np.concatenate(kernels),
    )


def all_headings(turns: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.concatenate([SEED_ANGLES, np.arctan2(turns[:, 0], turns[:, 1])])


def drawn_angles(turns: NDArray[np.int64]) -> NDArray[np.float64]:
    """A first dash from its tail, others back from their head."""
    headings = all_headings(turns)
    return np.concatenate([headings[:SEEDS], reverse(headings[SEEDS:])])


def dashes(parameters: Parameters, margin: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    angles = drawn_angles(circle(parameters.dash_length + margin)).tolist()
    drawn = [dash(angle, parameters.dash_length, parameters.thickness, margin) for angle in angles]
    return np.stack([line for line, _ in drawn]), np.stack([area for _, area in drawn])


def seed_kernels(areas: NDArray[np.float64], parameters: Parameters, margin: int) -> list[NDArray[np.int64]]:
    """Pixels around the tail of a first dash that must be free. int64 [k, 2] each

    Values are truncated, and the original puts the dash one pixel right of and below the middle of a window that cuts
    it.
    """
    reach = parameters.dash_length + margin
    offsets = [np.argwhere(area >= 1) - area.shape[0] // 2 + 1 for area in areas]
    return [offset[(np.abs(offset) <= reach).all(axis=1)] for offset in offsets]


def seen_from_every_corner(kernel: NDArray[np.int64]) -> bool:
    """Whether, from every corner of an image, some pixel of a kernel lies inside the image.

    If not, OpenCV's dilation returns the smallest number, the original treats the image as occupied, and the snake
    fails: 83 % of the directions at 32 pixels, 72 % at 64, none at 128 and 256.
    """
    return all(((y * kernel[:, 0] <= 0) & (x * kernel[:, 1] <= 0)).any() for y in (-1, 1) for x in (-1, 1))


def seed_room(kernel: NDArray[np.int64], parameters: Parameters) -> tuple[int, int, int, int]:
    if not len(kernel):
        return 0, -1, 0, -1
    first = max(2 * parameters.seed_distance, parameters.padding)
    last = parameters.size - 1 - first
    (least_y, least_x), (most_y, most_x) = kernel.min(axis=0), kernel.max(axis=0)
    return first - least_y, last - most_y, first - least_x, last - most_x


@lru_cache(maxsize=16)
def lines(parameters: Parameters, margin: int) -> NDArray[np.int16]:
    """In units of 1 / UNIT. int16 [2, 360 + K, n, n]"""
    drawn, _ = dashes(parameters, margin)
    return np.stack([quantise(parameters.target_contrast * drawn), quantise(parameters.distractor_contrast * drawn)])


@lru_cache(maxsize=16)
def digest(parameters: Parameters) -> str:
    found = blake2b(digest_size=8)
    for margin in parameters.margins:
        found.update(tables(parameters, margin).masks.tobytes())
        found.update(lines(parameters, margin).tobytes())
    found.update(markers(parameters.size, parameters.marker_radius).tobytes())
    return found.hexdigest()

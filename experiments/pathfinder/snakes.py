"""Draws the snakes of one image as in the original, in integers.

The mask holds the surroundings of all dashes, in units of 1 / UNIT, composed by maximum. A snake is int64 [5]: y and x
of the beginning of the gap before its last dash, y and x of that dash's picture, and its heading. Its last dash enters
the mask only when the next dash is found, so that a snake does not collide with itself; as in the original, it cannot
see the other's last dash either.

A second mask, `near`, holds the maxima within the margin of a pixel.
"""

from __future__ import annotations

from math import ceil

import numpy as np

from experiments.pathfinder.bits import gather, ones, pack, place_of, scratch_for
from experiments.pathfinder.compiled import compiled
from experiments.pathfinder.rng import ONE, below, uniform
from experiments.pathfinder.stamps import UNIT
from experiments.pathfinder.tables import SEEDS, WEIGHT_UNIT

TRIES = 3  # for a dash: "max_paddle_retrial" 2
SNAKE_TRIES = 5  # for a distractor: "max_distractor_contour_retrial" 4
TOUCHING = ceil(1.8 * UNIT)  # two dashes are too close
DEAD_END = 1e-4 * UNIT * WEIGHT_UNIT  # a snake cannot continue
LEAST_FREE = 0.01  # no distractor begins
PHASES = np.stack([np.sin(np.arange(360) * np.pi / 180), np.cos(np.arange(360) * np.pi / 180)], axis=1)


@compiled
def merge(mask, y, x, stamp):
    size, radius = mask.shape[0], stamp.shape[0] // 2
    left, right = max(0, x - radius), min(size, x + radius + 1)
    for row in range(max(0, y - radius), min(size, y + radius + 1)):
        # With separate rows the compiler processes 16 pixels at a time.
        here, there = mask[row, left:right], stamp[row - y + radius, left - x + radius : right - x + radius]
        for column in range(len(here)):
            here[column] = max(here[column], there[column])


@compiled
def touches(mask, y, x, stamp):
    size, radius = mask.shape[0], stamp.shape[0] // 2
    left, right = max(0, x - radius), min(size, x + radius + 1)
    greatest = np.int16(0)
    for row in range(max(0, y - radius), min(size, y + radius + 1)):
        here, there = mask[row, left:right], stamp[row - y + radius, left - x + radius : right - x + radius]
        for column in range(len(here)):
            greatest = max(greatest, np.int16(here[column] + there[column]))
    return greatest >= TOUCHING


@compiled
def margin_of(t):
    return (t.near_masks.shape[1] - t.masks.shape[1]) // 2


@compiled
def greatest_near(mask, y, x, disc):
    size = mask.shape[0]
    greatest = mask[y, x]
    for pixel in range(len(disc)):
        row, column = y + disc[pixel, 0], x + disc[pixel, 1]
        if 0 <= row < size and 0 <= column < size:
            greatest = max(greatest, mask[row, column])
    return greatest


@compiled
def set_snake(snake, start_y, start_x, y, x, heading):
    snake[0], snake[1], snake[2], snake[3], snake[4] = start_y, start_x, y, x, heading


@compiled
def note(dashes, number, snake):
    dashes[number, 0], dashes[number, 1], dashes[number, 2] = snake[2], snake[3], snake[4]


@compiled
def overwrite(mask, other):
    for y in range(mask.shape[0]):
        for x in range(mask.shape[1]):
            mask[y, x] = other[y, x]


@compiled
def framed(size, padding):
    mask = np.zeros((size, size), np.int16)
    for y in range(size):
        for x in range(size):
            if min(y, x) < padding or max(y, x) >= size - padding:
                mask[y, x] = UNIT
    return mask


@compiled
def seed_from(tail_y, tail_x, heading, size, t, snake):
    head_y = ceil(tail_y + t.seed_head[heading, 0])
    head_x = ceil(tail_x + t.seed_head[heading, 1])
    start_y = ceil(head_y + t.seed_start[heading, 0])
    start_x = ceil(head_x + t.seed_start[heading, 1])
    set_snake(snake, start_y, start_x, tail_y, tail_x, heading)
    return min(head_y, head_x, start_y, start_x) >= 0 and max(head_y, head_x, start_y, start_x) < size


@compiled
def extend(rng, snake, mask, near, t, cumulative):
    """Returns whether it fits. cumulative: scratch, int64 [K]"""
    size, margin = mask.shape[0], margin_of(t)
    last_y, last_x, heading = snake[2], snake[3], snake[4]
    y, x = ceil(snake[0] + t.step[heading, 0]), ceil(snake[1] + t.step[heading, 1])
    total = np.int64(0)
    for turn in range(len(t.turns)):
        weight = t.weights[heading, turn]
        head_y, head_x = y + t.turns[turn, 0], x + t.turns[turn, 1]
        if weight and 0 <= head_y < size and 0 <= head_x < size:
            if margin <= min(head_y, head_x) and max(head_y, head_x) < size - margin:
                taken = near[head_y, head_x]
            else:
                taken = greatest_near(mask, head_y, head_x, t.disc)
            # Negative if the mask overshoots 1, as in the original's sums.
            total += (UNIT - taken) * weight
        cumulative[turn] = total
    if total < DEAD_END:
        return False
    for _ in range(TRIES):
        drawn = uniform(rng) * total
        turn = 0
        while cumulative[turn] <= drawn:
            turn += 1
        head_y, head_x = y + t.turns[turn, 0], x + t.turns[turn, 1]
        if not touches(mask, head_y, head_x, t.masks[SEEDS + turn]):
            merge(mask, last_y, last_x, t.masks[heading])
            merge(near, last_y, last_x, t.near_masks[heading])
            set_snake(snake, y, x, head_y, head_x, SEEDS + turn)
            return True
    return False


@compiled
def seed_targets(rng, size, seed_distance, t, snakes):
    for _ in range(TRIES):
        heading = below(rng, SEEDS)
        first_y, last_y = t.room[heading, 0], t.room[heading, 1]
        first_x, last_x = t.room[heading, 2], t.room[heading, 3]
        if not t.usable[heading] or last_y < first_y or last_x < first_x:
            return False
        tail_y = first_y + below(rng, last_y - first_y + 1)
        tail_x = first_x + below(rng, last_x - first_x + 1)
        if seed_from(tail_y, tail_x, heading, size, t, snakes[0]):
            break
    else:
        return False
    for _ in range(TRIES):
        heading = below(rng, SEEDS)
        phase = below(rng, 360)
        y = round(tail_y + seed_distance * PHASES[phase, 0])
        x = round(tail_x + seed_distance * PHASES[phase, 1])
        if seed_from(y, x, heading, size, t, snakes[1]):
            return True
    return False


@compiled
def draw_targets(rng, padding, seed_distance, length, t, most_attempts, mask, near, dashes):
    """Until a pair succeeds; a failed pair leaves no trace.

    mask, near: int16 [size, size], overwritten. dashes: int64 [2 * length, 3], y, x and heading.
    """
    size = mask.shape[0]
    empty, empty_near = framed(size, padding), framed(size, padding + margin_of(t))
    snakes = np.empty((2, 5), np.int64)
    cumulative = np.empty(len(t.turns), np.int64)
    reach = t.near_masks.shape[1] // 2
    first, last = 0, size
    for attempt in range(1, most_attempts + 1):
        if not seed_targets(rng, size, seed_distance, t, snakes):
            continue
        overwrite(mask[first:last], empty[first:last])
        overwrite(near[first:last], empty_near[first:last])
        first, last = size, 0
        note(dashes, 0, snakes[0])
        note(dashes, length, snakes[1])
        placed = 1
        while placed < length:
            first = max(0, min(first, snakes[0, 2] - reach, snakes[1, 2] - reach))
            last = max(last, snakes[0, 2] + reach + 1, snakes[1, 2] + reach + 1)
            if not extend(rng, snakes[0], mask, near, t, cumulative):
                break
            if not extend(rng, snakes[1], mask, near, t, cumulative):
                break
            note(dashes, placed, snakes[0])
            note(dashes, length + placed, snakes[1])
            placed += 1
        if placed == length:
            merge(mask, snakes[1, 2], snakes[1, 3], t.masks[snakes[1, 4]])
            merge(near, snakes[1, 2], snakes[1, 3], t.near_masks[snakes[1, 4]])
            return attempt
    return 0


@compiled
def choose_free(rng, mask, kernel, scratch):
    """Uniformly from the pixels whose kernel covers no occupied pixel, or (-1, -1), 64 positions at a time."""
    occupied, taken, whole = scratch.occupied, scratch.taken, scratch.whole
    words, size = occupied.shape
    if pack(mask, scratch.row, occupied) < LEAST_FREE * size * size:
        return -1, -1
    for y in range(size):
        occupied[0, y] |= ONE
        occupied[words - 1, y] |= ONE << np.uint64((size - 1) % 64)
    for word in range(words):
        occupied[word, 0] = occupied[word, size - 1] = whole[word]
        for y in range(size):
            taken[word, y] = 0
    gather(occupied, kernel, taken)
    free = 0
    for word in range(words):
        for y in range(size):
            taken[word, y] = ~taken[word, y] & whole[word]
            free += ones(taken[word, y])
    if free == 0:
        return -1, -1
    left = below(rng, free)
    for y in range(size):
        for word in range(words):
            here = ones(taken[word, y])
            if left < here:
                return y, 64 * word + place_of(taken[word, y], left)
            left -= here
    return -1, -1


@compiled
def draw_distractor(rng, mask, near, t, snake, cumulative, scratch, dashes):
    size = mask.shape[0]
    for _ in range(TRIES):
        heading = below(rng, SEEDS)
        if not t.usable[heading]:
            return False
        y, x = choose_free(rng, mask, t.kernels[t.kernel_of[heading] : t.kernel_of[heading + 1]], scratch)
        if y < 0:
            return False
        if seed_from(y, x, heading, size, t, snake):
            break
    else:
        return False
    note(dashes, 0, snake)
    for placed in range(1, len(dashes)):
        if not extend(rng, snake, mask, near, t, cumulative):
            return False
        note(dashes, placed, snake)
    merge(mask, snake[2], snake[3], t.masks[snake[4]])
    merge(near, snake[2], snake[3], t.near_masks[snake[4]])
    return True


@compiled
def draw_distractors(rng, wanted, length, t, mask, near, dashes):
    snake = np.empty(5, np.int64)
    cumulative = np.empty(len(t.turns), np.int64)
    before, near_before = np.empty_like(mask), np.empty_like(near)
    scratch = scratch_for(len(mask))
    placed = 0
    for _ in range(wanted):
        overwrite(before, mask)
        overwrite(near_before, near)
        for _ in range(SNAKE_TRIES):
            mine = dashes[placed * length : (placed + 1) * length]
            if draw_distractor(rng, mask, near, t, snake, cumulative, scratch, mine):
                placed += 1
                break
            overwrite(mask, before)
            overwrite(near, near_before)
    return placed

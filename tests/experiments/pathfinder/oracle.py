"""The Pathfinder generator in plain NumPy and floating point: slow, and easy to check.

It draws the same random numbers as experiments/pathfinder. Only the pictures of single dashes are shared
(`stamps.dash`).
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image
from scipy.ndimage import maximum_filter

from experiments.pathfinder.draw import image_stream
from experiments.pathfinder.rng import below, uniform
from experiments.pathfinder.stamps import dash


@dataclass
class Snake:
    pivot: tuple[int, int]
    angle: float
    stamp: np.ndarray
    line: np.ndarray
    places: list[tuple[int, int]]


def moved(place, angle, distance):
    return int(np.ceil(place[0] + distance * np.sin(angle))), int(np.ceil(place[1] + distance * np.cos(angle)))


def opposite(angle):
    return angle + np.pi if angle < 0 else angle - np.pi


def inside(place, size):
    return 0 <= place[0] < size and 0 <= place[1] < size


def dilated(picture, footprint):
    return maximum_filter(picture, footprint=footprint, mode="constant", cval=-np.inf)


def disc(radius):
    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    return y * y + x * x <= radius * radius


class Oracle:
    def __init__(self, parameters, seed, index):
        self.p = parameters
        self.rng = image_stream(parameters, seed, index)
        self.label = below(self.rng, 2)
        self.margin = parameters.margins[below(self.rng, len(parameters.margins))]
        self.attempts = 1
        while (targets := self.targets()) is None:
            self.attempts += 1
        (first, second), mask = targets
        self.image = np.maximum(first.line, second.line)
        self.places = first.places + second.places
        for _ in range(parameters.distractors):
            for _ in range(5):
                found = self.distractor(mask)
                if found is not None:
                    snake, mask = found
                    self.image = np.maximum(self.image, snake.line)
                    self.places += snake.places
                    break
        self.marked = below(self.rng, 2)

    def pasted(self, stamp, place):
        radius, size = len(stamp) // 2, self.p.size
        large = np.zeros((size + 2 * radius, size + 2 * radius))
        large[place[0] : place[0] + len(stamp), place[1] : place[1] + len(stamp)] = stamp
        return large[radius : radius + size, radius : radius + size]

    def dash(self, angle):
        return dash(float(angle), self.p.dash_length, self.p.thickness, self.margin)

    def drawn(self, angle, place, contrast):
        line, area = self.dash(angle)
        return contrast * self.pasted(line, place), self.pasted(area, place)

    def free_around(self, angle, occupied):
        """Coordinates where a first dash may begin; a pixel does not count if its dash lies wholly outside."""
        reach = self.p.dash_length + self.margin
        _, area = self.dash(angle)
        window = np.zeros((2 * reach + 1, 2 * reach + 1))
        for y, x in np.argwhere(area >= 1) - len(area) // 2 + reach + 1:
            if 0 <= y <= 2 * reach and 0 <= x <= 2 * reach:
                window[y, x] = 1
        found = dilated(occupied, window > 0)
        return np.argwhere(found <= 0.3) if np.isfinite(found).all() else np.empty((0, 2), int)

    def begun(self, angle, tail, contrast):
        head = moved(tail, angle, self.p.dash_length)
        pivot = moved(head, opposite(angle), self.p.dash_length + self.margin)
        if not (inside(head, self.p.size) and inside(pivot, self.p.size)):
            return None
        line, stamp = self.drawn(angle, tail, contrast)
        return Snake(pivot, angle, stamp, line, [tail])

    def degrees(self):
        return (below(self.rng, 360) - 180) * np.pi / 180

    def framed(self, mask, width):
        framed = np.ones_like(mask)
        framed[width:-width, width:-width] = mask[width:-width, width:-width]
        return framed

    def extended(self, snake, mask, contrast):
        size, reach = self.p.size, self.p.dash_length + self.margin
        pivot = moved(snake.pivot, snake.angle, self.p.dash_length + 2 * self.margin)
        near = dilated(mask, disc(self.margin))
        around = np.arange(0, 360, 360 / (2 * reach * np.pi)) * np.pi / 180
        points = np.stack([pivot[0] + reach * np.sin(around), pivot[1] + reach * np.cos(around)], axis=1)
        points = points[((points >= 0) & (points < size)).all(axis=1)].astype(int)
        if not len(points):
            return None
        points = np.unique(points, axis=0)
        angles = np.arctan2(points[:, 0] - pivot[0], points[:, 1] - pivot[1])
        turn = np.abs(angles - snake.angle)
        turn = np.minimum(turn, 2 * np.pi - turn) * self.p.continuity
        weights = np.where(turn < np.pi / 2, np.cos(turn) ** 2, 0) * (1 - near[points[:, 0], points[:, 1]])
        if weights.sum() < 1e-4:
            return None
        chances = np.cumsum(weights / weights.sum())
        for _ in range(3):
            chosen = np.argmax(chances > uniform(self.rng))
            head = int(points[chosen, 0]), int(points[chosen, 1])
            line, stamp = self.drawn(opposite(angles[chosen]), head, contrast)
            if (mask + stamp).max() < 1.8:
                mask = np.maximum(mask, snake.stamp)
                snake.pivot, snake.angle, snake.stamp = pivot, angles[chosen], stamp
                snake.line = np.maximum(snake.line, line)
                snake.places.append(head)
                return mask
        return None

    def targets(self):
        p = self.p
        mask = self.framed(np.zeros((p.size, p.size)), p.padding)
        for _ in range(3):
            angle = self.degrees()
            free = self.free_around(angle, self.framed(mask, 2 * p.seed_distance))
            if not len(free):
                return None
            (first_y, first_x), (last_y, last_x) = free[0], free[-1]
            assert len(free) == (last_y - first_y + 1) * (last_x - first_x + 1)
            tail = first_y + below(self.rng, last_y - first_y + 1), first_x + below(self.rng, last_x - first_x + 1)
            first = self.begun(angle, tail, p.target_contrast)
            if first is not None:
                break
        else:
            return None
        for _ in range(3):
            angle = self.degrees()
            phase = below(self.rng, 360) * np.pi / 180
            y, x = tail[0] + p.seed_distance * np.sin(phase), tail[1] + p.seed_distance * np.cos(phase)
            second = self.begun(angle, (int(np.round(y)), int(np.round(x))), p.target_contrast)
            if second is not None:
                break
        else:
            return None
        for _ in range(p.contour_length - 1):
            for snake in (first, second):
                mask = self.extended(snake, mask, p.target_contrast)
                if mask is None:
                    return None
        return (first, second), np.maximum(mask, second.stamp)

    def distractor(self, mask):
        p = self.p
        for _ in range(3):
            angle = self.degrees()
            free = self.free_around(angle, self.framed(mask, 1))
            if (mask <= 0.3).mean() < 0.01 or not len(free):
                return None
            tail = tuple(map(int, free[below(self.rng, len(free))]))
            snake = self.begun(angle, tail, p.distractor_contrast)
            if snake is not None:
                break
        else:
            return None
        for _ in range(p.distractor_length - 1):
            mask = self.extended(snake, mask, p.distractor_contrast)
            if mask is None:
                return None
        return snake, np.maximum(mask, snake.stamp)

    def marked_image(self):
        length = self.p.contour_length
        last = self.marked if self.label else 1 - self.marked
        image = self.image / self.image.max()
        for place in (self.places[self.marked * length], self.places[(last + 1) * length - 1]):
            image = np.maximum(image, self.marker(place))
        return 255 * image / image.max()

    def marker(self, place):
        y, x = np.mgrid[: 2 * self.p.size, : 2 * self.p.size]
        inside = (y - 2 * place[0]) ** 2 + (x - 2 * place[1]) ** 2 <= (2 * self.p.marker_radius) ** 2
        drawing = Image.fromarray(inside.astype(np.float32))
        return np.asarray(drawing.resize((self.p.size, self.p.size), Image.Resampling.LANCZOS))

"""Score modifications, applied between the product of q and k and the softmax: `attention(..., scores=...)`.

| name | changes a score by |
|---|---|
| `alibi`, `log_decay` | a penalty that grows with the distance, or with its logarithm |
| `relative`, with `clipped` or `t5_buckets` | a learned table by distance |
| `relative_2d`, `relative_3d` | a learned table by the offset in an image, in a video |
| `bias`, `key_bias` | a tensor with a number for each pair of query and key, or for each key |
| `tile_bias`, `tile_values` | the same for pairs in live tiles only |
| `softcap`, `temperature` | a cap by tanh; a division |
| `sink` | a further score in each softmax, without a value |
| `function` | your own function, as FlexAttention's `score_mod` |

They combine by `+` into `Scores`, which has the order in which they apply. The mask says which scores are live, and
only its dead tiles save work: a score that becomes -inf is dead, too, but is computed.
"""

from sparseflash.scores.bias import bias
from sparseflash.scores.change import Scores
from sparseflash.scores.distance import alibi, log_decay
from sparseflash.scores.function import function
from sparseflash.scores.grids import relative_2d, relative_3d
from sparseflash.scores.key_bias import key_bias
from sparseflash.scores.relative import clipped, relative, t5_buckets
from sparseflash.scores.sink import sink
from sparseflash.scores.softcap import softcap
from sparseflash.scores.temperature import temperature
from sparseflash.scores.tile_bias import tile_bias, tile_values

__all__ = [
    "Scores", "alibi", "bias", "clipped", "function", "key_bias", "log_decay", "relative", "relative_2d",
    "relative_3d", "sink", "softcap", "t5_buckets", "temperature", "tile_bias", "tile_values",
]  # fmt: skip

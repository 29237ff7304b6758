"""The attention of an image's markers, layer by layer, drawn over the image."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.pathx.data.device_batch import Batch
from experiments.pathx.data.packing import LEVELS
from experiments.pathx.masks.orders import BASE
from experiments.pathx.model.classifier import PathModel


@torch.no_grad()
def attention_from(model: PathModel, batch: Batch, queries: list[int]) -> Tensor:
    """Averaged over heads: fp32 [layers, queries, N].

    queries: tokens in stored order. In fp32, from the model's q and k and these rows of the layer's mask.
    """
    model.eval()
    found: list[Tensor] = []
    chosen = torch.tensor(queries, device=batch.ids.device)

    def compute(layer: int, q: Tensor, k: Tensor) -> None:
        mask, order = batch.masks[layer].canonical(), batch.layer_orders[layer]
        rows = chosen if order == BASE else batch.orders[order].inverse[chosen]
        live = torch.stack([mask.crop(q=(row, row + 1)).to_dense()[0, 0, 0] for row in rows.tolist()])  # [queries, N]
        scores = q[0, :, rows].float() @ k[0].float().mT / math.sqrt(q.shape[-1])  # [H, queries, N]
        weights = scores.masked_fill(~live, -math.inf).softmax(-1).mean(0)
        found.append(weights if order == BASE else weights[:, batch.orders[order].inverse])

    model.encoded(batch, compute)
    return torch.stack(found).cpu()


def marker_tokens(batch: Batch, centres: NDArray[np.int64]) -> list[int]:
    y, x = batch.y[0].cpu().long(), batch.x[0].cpu().long()
    is_pixel = ((batch.ids[0] >= 0) & (batch.ids[0] < LEVELS)).cpu()
    apart = [(y - int(row)) ** 2 + (x - int(column)) ** 2 for row, column in centres]
    return [int(each.masked_fill(~is_pixel, 1 << 30).argmin()) for each in apart]


def draw(image: NDArray[np.uint8], batch: Batch, weights: Tensor, names: list[str], title: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers, markers, _ = weights.shape
    figure = Figure(figsize=(1.6 * (layers + 1), 1.8 * markers + 0.3), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    y, x = batch.y[0].cpu().numpy(), batch.x[0].cpu().numpy()
    is_pixel = ((batch.ids[0] >= 0) & (batch.ids[0] < LEVELS)).cpu().numpy()
    axes = figure.subplots(markers, layers + 1, squeeze=False)
    for marker in range(markers):
        axes[marker][0].imshow(image, cmap="gray")
        axes[marker][0].set_title(f"marker {marker + 1}", fontsize=8)
        for layer in range(layers):
            shown = np.zeros(image.shape)
            shown[y[is_pixel], x[is_pixel]] = weights[layer, marker].numpy()[is_pixel]
            axis = axes[marker][layer + 1]
            axis.imshow(0.4 * image, cmap="gray", vmin=0, vmax=255)
            axis.imshow(np.ma.masked_less(shown / max(shown.max(), 1e-12), 0.02), cmap="autumn", vmin=0, vmax=1)
            if marker == 0:
                axis.set_title(names[layer], fontsize=8)
    for axis in np.ravel(axes):
        axis.set_axis_off()
    figure.suptitle(title, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)

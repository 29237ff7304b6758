"""A run's log for TensorBoard, in <run>/tensorboard: the same numbers as in log.jsonl."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from experiments.training.run_log import Record

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"


def writer_class() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "--tensorboard needs the package tensorboard: pip install tensorboard, or sparseflash[tensorboard]"
        ) from None
    return SummaryWriter


class TensorBoardLog:
    """resumed_at: TensorBoard ignores later steps written before. None: older files are removed."""

    def __init__(self, run: Path, resumed_at: int | None) -> None:
        if resumed_at is None:
            shutil.rmtree(run / FOLDER, ignore_errors=True)
        purge = None if resumed_at is None else resumed_at + 1
        self._writer = writer_class()(str(run / FOLDER), purge_step=purge)

    def __enter__(self) -> TensorBoardLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()

    def show(self, record: Record) -> None:
        for name, value in record.items():
            if name not in ("kind", "step"):
                self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])

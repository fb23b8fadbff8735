"""`make_loggers`: loggers by their names, as the command line gives them."""

from collections.abc import Callable
from pathlib import Path

from recycle.core.errors import UserError
from recycle.loggers.csv_logger import CsvLogger
from recycle.loggers.mlflow_logger import MlflowLogger
from recycle.loggers.tensorboard_logger import TensorBoardLogger
from recycle.loggers.wandb_logger import WandbLogger
from recycle.runtime.callbacks.protocol import Logger

LOGGER_NAMES = (CsvLogger.NAME, MlflowLogger.NAME, TensorBoardLogger.NAME, WandbLogger.NAME)
# Those that write into the run folder and nowhere else.
_IN_RUN_FOLDER = (CsvLogger.NAME, TensorBoardLogger.NAME)


def make_loggers(names: list[str], folder: Path | None) -> list[Logger]:
    """The loggers of these names, each once, for a run in `folder`.

    Raises:
        UserError: There is no such logger, its library is not installed, or it needs a run folder and there is none.
    """
    makers: dict[str, Callable[[], Logger]] = {
        CsvLogger.NAME: CsvLogger,
        MlflowLogger.NAME: MlflowLogger,
        TensorBoardLogger.NAME: TensorBoardLogger,
        WandbLogger.NAME: WandbLogger,
    }
    made = []
    for name in dict.fromkeys(names):
        if name not in makers:
            raise UserError(f"there is no logger {name!r}: choose from {', '.join(LOGGER_NAMES)}")
        if folder is None and name in _IN_RUN_FOLDER:
            raise UserError(f"the {name} log is written beside the results: name a folder with --out")
        made.append(makers[name]())
    return made

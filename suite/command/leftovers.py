"""What a command that comes to nothing takes away again: what it made, as far as nothing else lies in it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hydra.core.hydra_config import HydraConfig


@contextmanager
def no_empty_folder(folder: Path) -> Iterator[None]:
    """An error inside leaves none of what is made of this path and was not there before."""
    take_away = to_take_away(folder)
    try:
        yield
    except BaseException:
        take_away()
        raise


def to_take_away(folder: Path, file: str = "") -> Callable[[], None]:
    """Deletes ``file`` in ``folder``, and every empty folder of its path, but what is there now."""
    before = {f for f in (folder / file, folder, *folder.parents) if f.exists()}

    def take_away() -> None:
        if file and folder / file not in before:
            (folder / file).unlink(missing_ok=True)
        for made in (folder, *folder.parents):
            if made in before:
                return
            with suppress(FileNotFoundError, NotADirectoryError):
                if any(made.iterdir()):
                    return
                made.rmdir()

    return take_away


def take_away_hydras() -> None:
    """What Hydra wrote for this job before it began, where somebody asked for that."""
    if not HydraConfig.initialized():
        return
    hydra = HydraConfig.get()
    made = Path(hydra.runtime.output_dir)
    for name in ("config", "hydra", "overrides") if hydra.output_subdir else ():
        (made / hydra.output_subdir / f"{name}.yaml").unlink(missing_ok=True)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            log = Path(handler.baseFilename)
            if log.is_relative_to(made) and log.exists() and not log.stat().st_size:
                log.unlink()
    for folder in (made / (hydra.output_subdir or ""), made):
        if folder == Path.cwd():
            return
        with suppress(OSError):  # something lies in it
            folder.rmdir()

"""Hydra's own sweep, then one verdict and one report an experiment: ``hydra/sweeper=seeds``, the default."""

from __future__ import annotations

from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.plugins.search_path_plugin import SearchPathPlugin

CONF = Path(__file__).resolve().parent.parent.parent / "conf"


class SeedSweeper(BasicSweeper):
    """As ``BasicSweeper``, on any launcher; what the jobs finished is judged and shown at the end."""

    def sweep(self, arguments: list[str]) -> list:
        returns = super().sweep(arguments)
        # here, so that Hydra finds its plugins without waiting for ours
        from experiments.sweep_end import end_sweep

        end_sweep([job.return_value for batch in returns for job in batch])
        return returns


class LauncherSettings(SearchPathPlugin):
    """The settings of the launchers are those in ``conf/hydra/launcher/``, checked by their plugins' own.

    Those move from ``joblib`` to ``joblib_schema``, which our file names in its defaults: where both have one
    name Hydra warns in every process that it starts. Other applications of Hydra see no change.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if str(CONF) not in [element.path.removeprefix("file://") for element in search_path.get_path()]:
            return
        store = ConfigStore.instance()
        stored = store.repo.get("hydra", {}).get("launcher", {})
        for file in (CONF / "hydra" / "launcher").glob("*.yaml"):
            if schema := stored.pop(file.name, None):
                store.store(f"{file.stem}_schema", schema.node, "hydra/launcher", provider=schema.provider)

"""For mkdocs: pages stay where they are in the repository, so that their links hold there and on the site."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

# Of the repository, what the pages are made of, and the files outside of docs/ that they link to.
PATTERNS = ("README.md", "docs/**/*", "results/published/**/*", "conf/hydra/launcher/*.yaml")
LEFT_OUT = {".py", ".pyc"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files of the theme, and those of the repository by their paths in it."""
    root = Path(config.config_file_path).parent
    chosen = [file for file in files if file.src_dir != config.docs_dir]
    for path in sorted(p for pattern in PATTERNS for p in root.glob(pattern)):
        if path.is_file() and path.suffix not in LEFT_OUT:
            name = path.relative_to(root).as_posix()
            chosen.append(File(name, str(root), config.site_dir, config.use_directory_urls))
    return Files(chosen)

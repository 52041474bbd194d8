"""MkDocs hook: one page of API reference for every module that docs/reference/python.md names."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add reference/api/MODULE.md to the site; the sources on a code host have the docstrings themselves."""
    index = (Path(config.docs_dir) / "reference" / "python.md").read_text()
    for module in dict.fromkeys(re.findall(r"`(selfcal_lightning\.[a-z_.]+)`", index)):
        page = f"# {module}\n\n::: {module}\n    options:\n      show_root_heading: false\n"
        files.append(
            File.generated(config, f"reference/api/{module.removeprefix('selfcal_lightning.')}.md", content=page)
        )
    return files

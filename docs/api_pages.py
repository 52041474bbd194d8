"""MkDocs hook: a page of API reference for every module in docs/reference/python.md, and the tutorial notebook."""

import json
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add reference/api/MODULE.md and the tutorial to the site; a code host shows both as they are."""
    docs = Path(config.docs_dir)
    index = (docs / "reference" / "python.md").read_text()
    for module in dict.fromkeys(re.findall(r"`(selfcal_lightning\.[a-z_.]+)`", index)):
        page = f"# {module}\n\n::: {module}\n    options:\n      show_root_heading: false\n"
        files.append(
            File.generated(config, f"reference/api/{module.removeprefix('selfcal_lightning.')}.md", content=page)
        )
    notebook = json.loads((docs.parent / "examples" / "tutorial.ipynb").read_text())
    page = "\n\n".join(part for cell in notebook["cells"] for part in _parts(cell))
    files.append(File.generated(config, "getting_started/tutorial.md", content=page))
    return files


def _parts(cell: dict) -> list[str]:
    """Return a notebook's cell and its outputs as Markdown."""
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [text]
    parts = [f"```python\n{text}\n```"]
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            width = output["metadata"]["image/png"]["width"]
            parts.append(f'<img alt="" width="{width}" src="data:image/png;base64,{data["image/png"].strip()}">')
        else:
            parts.append(f"```text\n{''.join(output.get('text') or data['text/plain']).rstrip()}\n```")
    return parts

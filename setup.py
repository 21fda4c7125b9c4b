"""Makes the links of README work on a package index; everything else about the package is in pyproject.toml.

An index shows README without the files beside it. So links and pictures lead to the repository that pyproject.toml
names, at the tag of the version. While it names none, README is taken as it is.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_RELATIVE = re.compile(r"\]\((?!\w+:|#)([^)\s]+)\)")
_PICTURES = (".svg", ".png")


def long_description() -> str:
    """Return README for an index."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project.get("urls", {}).get("Repository")
    return with_absolute_links(readme, repository, f"v{project['version']}") if repository else readme


def with_absolute_links(text: str, repository: str, tag: str) -> str:
    """Return Markdown whose links lead to a repository's files at a tag, pictures to their contents."""

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1].endswith(_PICTURES) else "blob"
        return f"]({repository.rstrip('/')}/{kind}/{tag}/{link[1]})"

    # Code is left alone: layers[0](x) looks like a link.
    parts = _FENCED.split(text)
    return "".join(part if part.startswith("```") else _RELATIVE.sub(absolute, part) for part in parts)


setup(long_description=long_description(), long_description_content_type="text/markdown")

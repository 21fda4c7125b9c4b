"""The old name of result_pages.markdown, for what still imports it."""

from result_pages import markdown as markdown

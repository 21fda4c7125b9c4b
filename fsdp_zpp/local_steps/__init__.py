"""Local steps (DiLoCo): nodes train by themselves for some steps, and then exchange the changes of their weights."""

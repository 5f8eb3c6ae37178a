"""Built-in problems, generated: `task:NAME` as a source."""

"""Rows → prompts as token ids, and the order in which they are used."""

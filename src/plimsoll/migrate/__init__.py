"""Coming from another framework: its launch script, read without running it, as a recipe and as a memory plan."""

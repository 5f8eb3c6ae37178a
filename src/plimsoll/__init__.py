"""plimsoll: reinforcement learning for language models with planned memory."""

__version__ = "0.1.0"

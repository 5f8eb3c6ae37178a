"""plimsoll: reinforcement learning for language models with planned memory."""

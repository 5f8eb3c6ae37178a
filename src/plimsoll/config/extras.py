"""Optional libraries: is one there, asked without importing it."""

import importlib.util


def installed(module: str) -> bool:
    """Whether `import module` would find something."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # sys.modules holds None for it: its import is blocked
        return False


def how_to_install(extra: str) -> str:
    """The command, for messages."""
    return f"pip install 'plimsoll-rl[{extra}]'"

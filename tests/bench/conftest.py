"""The commands' fixtures, here too."""

from tests.commands.conftest import cache, command

__all__ = ["cache", "command"]

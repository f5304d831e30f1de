"""The commands of `pkv`, one file each, and what they share.

A command is a module with `add_arguments(parser)` and `execute(args) -> exit code`. It prints a table for people, or
with --json exactly one JSON object on stdout. What it cannot do, it says as a CommandError.
"""


class CommandError(Exception):
    """One line for the user: which argument is wrong, and what to do. Ends the command with exit code 2."""

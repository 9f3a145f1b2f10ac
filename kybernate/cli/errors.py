"""What a command says when it cannot do what was asked."""


class CliError(Exception):
    """One text for the person (what was wrong, what to do), and the exit code."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code

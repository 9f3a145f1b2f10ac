"""``python -m kybernate`` is ``kyb``."""

from kybernate.cli import main

if __name__ == "__main__":
    main()

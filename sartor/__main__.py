"""``python -m sartor`` is the same as ``sartor``."""

from sartor.cli import entry

if __name__ == "__main__":
    entry()

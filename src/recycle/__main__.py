"""`python -m recycle` is the `recycle` command."""

from recycle.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())

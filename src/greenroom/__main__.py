"""``python -m greenroom``: the command line."""

from greenroom.cli.main import main

if __name__ == "__main__":
    main()

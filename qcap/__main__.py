"""``python -m qcap``: the command line, where its script is not on the path."""

from qcap.cli import main

if __name__ == "__main__":
    main()

"""`python -m flexgen`, and what the command `flexgen` runs."""

import sys


def main() -> None:
    """Run the command line; an interrupt while it loads ends as one while it works does."""
    try:
        from flexgen.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()

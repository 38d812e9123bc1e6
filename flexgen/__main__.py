"""`python -m flexgen`."""

from flexgen.cli import main

main()

"""`python -m holdfast`: runs the command line of cli/main.py."""

from holdfast.cli.main import main

main()

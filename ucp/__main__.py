"""`python -m ucp` is `ucp`."""

from ucp.cli.main import main

main()

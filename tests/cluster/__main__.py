"""`python3 tests/cluster COMMAND`: see README.md."""

from testcluster.cli import main

main()

"""`python -m tenantry.cli`."""

from . import main

main()

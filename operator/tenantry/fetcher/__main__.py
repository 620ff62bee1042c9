"""`python -m tenantry.fetcher`."""

from .main import main

main()

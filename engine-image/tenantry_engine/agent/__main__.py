"""`python -m tenantry_engine.agent`."""

from tenantry_engine.agent.main import main

main()

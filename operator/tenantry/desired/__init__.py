"""Pure functions from specs and facts to objects, routes and conditions: no client, no clock, no I/O."""

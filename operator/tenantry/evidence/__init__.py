"""What was seen of each guarantee, how long it counts, and how it is reported. Pure: no client, no clock, no I/O."""

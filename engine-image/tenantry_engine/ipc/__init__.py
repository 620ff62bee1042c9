"""What the HTTP process and the engine process say to each other, over one socket pair."""

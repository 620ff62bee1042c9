"""What several rooms' tests share beyond fixtures."""

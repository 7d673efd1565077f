"""What is beside the mission: it knows the package, and the package does not know it."""

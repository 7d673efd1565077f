"""What the package does not know: tools and imports that no config of the papers uses. See README.md."""

"""What a script does before a model is loaded (inputs, memory, ranks), and how it ends where it cannot go on."""

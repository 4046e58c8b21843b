"""The command line. `main` holds the app; each group of commands has a file of its own."""
